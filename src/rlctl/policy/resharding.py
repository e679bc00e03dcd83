"""A policy's state as whole tensors: what a checkpoint holds that any layout, and either backend, can go on from.

Quantities are `main` (the weights that the optimizer updates, fp32), `exp_avg` and `exp_avg_sq` (Adam's moments), each
by Hugging Face name; and the number of updates, which is Adam's step. Every move is a copy: no bit changes.

For Megatron, a quantity is put where the gradients lie, whose buffers know how ranks share a parameter, and from there
taken like weights (checkpoint/shards.py); loading is the same backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlctl import device

Quantity = Literal["main", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Quantity, ...] = ("exp_avg", "exp_avg_sq")
Read = Callable[[Quantity, str], torch.Tensor]
"""A quantity and a Hugging Face name -> its whole tensor, on the host."""
Chunk = tuple[Quantity, list[tuple[str, torch.Tensor]]]


def spread(quantity: Quantity, buckets: Iterable[Callable[[int], list[tuple[str, torch.Tensor]]]]) -> Iterator[Chunk]:
    """Buckets of a quantity, each on one rank, in turn; the others get an empty list. Collective.

    Args:
        quantity: its name.
        buckets: each gathers to the rank that it is given.
    """
    for i, gather in enumerate(buckets):
        yield quantity, [(name, t.cpu()) for name, t in gather(i % dist.get_world_size())]


def updates_of(states: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> int:
    """Optimizer updates so far, by any rank's Adam. Collective.

    Args:
        states: the optimizer's, of each parameter; torch's AdamW counts there.
        groups: its parameter groups; fused ones count there.
    """
    counts = [int(holder["step"]) for holder in (*states, *groups) if "step" in holder]
    found = torch.tensor(max(counts, default=0), device=device.current())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found.item())


# --- Megatron's distributed optimizer ---------------------------------------------------------------------------------


def own_parts(wrapper: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """(this rank's part of a parameter's gradient, the optimizer's parameter for that part)."""
    for parameter, (group, order) in wrapper.model_param_group_index_map.items():
        part = wrapper._get_model_param_range_map(parameter)["param"]
        main = wrapper.optimizer.param_groups[group]["params"][order]
        yield parameter.main_grad.view(-1)[part.start : part.end], main


@torch.no_grad()
def fill(wrappers: Iterable[Any], quantity: Quantity) -> None:
    """Put this rank's parts of a quantity where the gradients lie."""
    for wrapper in wrappers:
        for part, main in own_parts(wrapper):
            part.copy_(main if quantity == "main" else wrapper.optimizer.state[main][quantity])


@torch.no_grad()
def take(wrappers: Iterable[Any], quantity: Quantity) -> None:
    """The reverse of `fill`."""
    for wrapper in wrappers:
        for part, main in own_parts(wrapper):
            (main if quantity == "main" else wrapper.optimizer.state[main][quantity]).copy_(part.view(main.shape))


def begin_moments(wrappers: Iterable[Any], updates: int) -> None:
    """Give the optimizers moments to load into, and their count of updates."""
    for wrapper in wrappers:
        wrapper._init_optimizer_states_with_dummy_values()  # steps once; weights are loaded afterwards
        for state in wrapper.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], updates)
        for group in wrapper.optimizer.param_groups:
            if "step" in group:
                group["step"] = updates


# --- DTensor ----------------------------------------------------------------------------------------------------------


def local_part(shard: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, sharded as `shard` is."""
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
