"""The DTensor backend's weights, gathered whole under their Hugging Face names; see WeightSource in policy/base.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlctl.policy import dtensor_model


class Weights:
    """A view of the model: each call gathers what the weights are then.

    Args:
        model: sharded.
        dtype: of the tensors given out.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype

    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, in the order of `whole`."""
        return {name: (tuple(p.shape), self._dtype) for name, p in dtensor_model.named_parameters(self._model)}

    @torch.no_grad()
    def whole(
        self, bucket_bytes: int = 1 << 28, to: Literal["all"] | int = "all"
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of at most `bucket_bytes` (or one tensor). Collective; ranks other than `to` get empty ones."""
        kept = to == "all" or to == dist.get_rank()
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, shard in dtensor_model.named_parameters(self._model):
            tensor = self._gather(shard)
            if size and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            size += tensor.nbytes
            if kept:
                bucket.append((name, tensor))
        if size:
            yield bucket

    def _gather(self, shard: DTensor) -> torch.Tensor:
        """The whole tensor; cast before it travels."""
        cast = shard.detach().to(self._dtype)
        assert isinstance(cast, DTensor)
        return cast.full_tensor()
