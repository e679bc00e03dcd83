"""This rank's slices of Megatron's global tensors, and whole tensors from and to them.

Megatron's `sharded_state_dict()` says which slice of which global tensor a rank holds; with that, weights move without
any parallelism code. In: a rule gives the whole tensor, which is sliced at the shard's offset. Out: each main replica
fills its slices of a zeroed buffer, and the buffers are summed *as bytes* (a float sum would turn -0.0 into +0.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from rlctl.models.base import Shape, WeightRule, padded_vocabulary

Named = tuple[str, torch.Tensor]
Identity = tuple[str, Shape]  # global name, position on prepended axes


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One slice of one global tensor. `data` is a view of the parameter: writing to it sets the weight."""

    identity: Identity
    global_shape: Shape
    offset: Shape
    data: torch.Tensor
    main: bool
    """One rank alone among those that hold this slice."""

    @property
    def region(self) -> tuple[slice, ...]:
        """Where the slice lies in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.data.shape, strict=True))


def shards(model: torch.nn.Module) -> list[Shard]:
    """The slices that this rank's unwrapped model holds."""
    state: Any = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})  # type: ignore[operator]
    apply_factories(state)  # gate and up become two slices of `linear_fc1`
    found = []
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor):
            continue
        axes = entry.prepend_axis_num
        found.append(
            Shard(
                identity=(entry.key, tuple(entry.global_offset[:axes])),
                global_shape=tuple(entry.global_shape[axes:]),
                offset=tuple(entry.global_offset[axes:]),
                data=entry.data.detach(),
                main=is_main_replica(entry.replica_id),
            )
        )
    return found


def load_whole(held: Iterable[Shard], rules: Iterable[WeightRule], read: Callable[[str], torch.Tensor]) -> None:
    """Set this rank's weights from whole Hugging Face tensors.

    Args:
        held: the rank's shards.
        rules: the model's table.
        read: a Hugging Face name -> its whole tensor, on the CPU; called for what this rank needs only.

    Raises:
        AssertionError: a shard without rule, or a shape that does not match: a fault of the table, not of the user.
    """
    table = {(rule.key, rule.index): rule for rule in rules}
    by_identity: dict[Identity, list[Shard]] = {}
    for shard in held:
        by_identity.setdefault(shard.identity, []).append(shard)
    with torch.no_grad():
        for identity, slices in by_identity.items():
            assert identity in table, f"no rule for {identity}"
            rule = table[identity]
            whole = rule.operation.merge([read(name) for name in rule.sources])
            assert tuple(whole.shape) == rule.shape, (identity, whole.shape, rule.shape)
            for shard in slices:
                padded = pad_rows(whole, shard.global_shape[0]) if rule.vocabulary else whole
                assert tuple(padded.shape) == shard.global_shape, (identity, padded.shape, shard.global_shape)
                shard.data.copy_(padded[shard.region])


def pad_rows(whole: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows appended up to `rows`."""
    if whole.shape[0] == rows:
        return whole
    return torch.cat([whole, whole.new_zeros(rows - whole.shape[0], *whole.shape[1:])])


@dataclass(frozen=True, kw_only=True)
class ShardedWeights:
    """A policy's weights as whole Hugging Face tensors; see policy/base.py `WeightSource`."""

    held: Sequence[Shard]
    rules: Sequence[WeightRule]
    dtype: torch.dtype
    vocabulary_multiple: int
    """What the vocabulary is padded to a multiple of."""

    def specs(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype by Hugging Face name."""
        pairs = ((n, s) for r in self.rules for n, s in zip(r.sources, r.source_shapes, strict=True))
        return {name: (shape, self.dtype) for name, shape in pairs}

    def whole(
        self, bucket_bytes: int = 1 << 28, to: Literal["all"] | int = "all"
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of whole tensors. Collective: one byte-wise sum over all ranks a bucket."""
        for gather in self.gatherers(bucket_bytes):
            yield gather(to)

    def gatherers(self, bucket_bytes: int) -> Iterator[Callable[[Literal["all"] | int], list[Named]]]:
        """For each bucket, what gathers it to a rank or to all. Collective: every rank calls each, in order."""
        by_identity: dict[Identity, list[Shard]] = {}
        for shard in self.held:
            if shard.main:
                by_identity.setdefault(shard.identity, []).append(shard)
        for bucket in self._buckets(bucket_bytes):
            yield functools.partial(self._gather, bucket, by_identity)

    def _shape(self, rule: WeightRule) -> Shape:
        if not rule.vocabulary:
            return rule.shape
        return (padded_vocabulary(rule.shape[0], multiple=self.vocabulary_multiple), *rule.shape[1:])

    def _buckets(self, limit: int) -> Iterator[list[WeightRule]]:
        bucket: list[WeightRule] = []
        size = 0
        for rule in self.rules:
            nbytes = torch.Size(self._shape(rule)).numel() * self.dtype.itemsize
            if bucket and size + nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(rule)
            size += nbytes
        if bucket:
            yield bucket

    def _gather(
        self, bucket: list[WeightRule], by_identity: dict[Identity, list[Shard]], to: Literal["all"] | int
    ) -> list[tuple[str, torch.Tensor]]:
        shapes = [torch.Size(self._shape(rule)) for rule in bucket]
        device = self.held[0].data.device
        flat = torch.zeros(sum(s.numel() for s in shapes), dtype=self.dtype, device=device)
        views = [v.view(s) for v, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        for rule, view in zip(bucket, views, strict=True):
            for shard in by_identity.get((rule.key, rule.index), ()):
                view[shard.region] = shard.data.detach()
        if dist.get_world_size() > 1:
            raw = flat.view(torch.uint8)
            if to == "all":
                dist.all_reduce(raw)
            else:
                dist.reduce(raw, to)
        if to not in ("all", dist.get_rank()):
            return []
        named = []
        for rule, view in zip(bucket, views, strict=True):
            parts = rule.operation.split(view[: rule.shape[0]])
            named += [(name, part.contiguous()) for name, part in zip(rule.sources, parts, strict=True)]
        return named
