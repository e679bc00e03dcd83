"""What a training backend is.

Every rank calls each method with the same batch; the backend alone knows ranks, padding and microbatches.

A backend's file defines `Policy`, built as `Policy(recipe, model_dir)` inside an initialised process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.parallel import Layout
from rlctl.types import Batch, Declared, TokenOutputs

METRICS = {
    "train/grad_norm": Declared(
        meaning="length of the gradient before clipping; of several updates the mean",
        formula="square root of the sum of squares over all parameters",
        reduce=None,
        healthy="steady within a factor of 3; 0: the step teaches nothing; spikes come before trouble",
    ),
}
Offloadable = Literal["optimizer", "weights", "all"]


class WeightSource(Protocol):
    """The policy's current weights under their Hugging Face names; whole tensors, whatever the layout."""

    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, in the order `whole` gives them. No communication."""
        ...

    def whole(
        self, bucket_bytes: int = 1 << 28, to: Literal["all"] | int = "all"
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of whole tensors. Collective: every rank exhausts it; those that do not receive get empty lists."""
        ...


class PolicyProtocol(Protocol):
    """A model that is trained."""

    layout: Layout
    packing: Mapping[str, float]
    """How the last pass filled its microbatches (packing.py `filling`); the same on every rank."""

    def forward(
        self, batch: Batch, weights: Literal["policy", "reference"] = "policy", outputs: tuple[str, ...] = ("logprobs",)
    ) -> TokenOutputs:
        """Logprobs (and entropy) [N] of the batch's masked tokens, without gradient; the same on every rank."""
        ...

    def train_step(self, batch: Batch, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """One optimizer update on a minibatch whose `advantages` and `loss_weights` are set.

        Returns:
            The same on every rank: loss, grad_norm, and each of the algorithm's metrics, reduced as declared.
        """
        ...

    def backward(self, batch: Batch, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """The first half of `train_step`: gradients, left for `update` or `gradients`; nothing is updated."""
        ...

    def update(self, metrics: dict[str, float]) -> dict[str, float]:
        """The second half of `train_step`, by what `backward` left and returned."""
        ...

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole gradient, fp32) after `backward`. Collective; every rank exhausts it."""
        ...

    def set_lr(self, lr: float) -> None:
        """Learning rate of the updates to come."""
        ...

    def weights(self) -> WeightSource:
        """The current weights."""
        ...

    def state(self) -> TrainState:
        """What a checkpoint must hold."""
        ...

    def load_state(self, state: TrainState) -> None:
        """Set what `state` gave, in the same layout."""
        ...

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far. Collective."""
        ...

    def whole_state(self, bucket_bytes: int) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
        """All that an update changes, free of the layout: chunks of (quantity, [(Hugging Face name, whole tensor)]).

        Collective; each chunk is on one rank, in turn, and empty on the others. See policy/resharding.py.
        """
        ...

    def load_whole_state(self, read: Callable[[Any, str], torch.Tensor], *, updates: int) -> None:
        """Set what `whole_state` gave, in this layout.

        Args:
            read: (quantity, Hugging Face name) -> whole tensor, on the host.
            updates: `num_updates` when it was saved.
        """
        ...

    def offload(self, what: Offloadable) -> None:
        """Move off the accelerator; idempotent. A no-op on a host."""
        ...

    def onload(self, what: Offloadable) -> None:
        """The reverse of `offload`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """This rank's part of the training state: tensors and scalars by name, in this layout."""

    local: Mapping[str, Any]
