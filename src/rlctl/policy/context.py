"""Context parallelism of one microbatch: the tokens a rank holds, and the way back to whole sequences.

1. Each sequence is cut in zigzag (parallel.py); a rank scores the targets whose row it holds.
2. What it scored is put together over the group before the loss, so that a loss always sees whole sequences.

Legend: T tokens of the stream, C ranks of the group, n scored tokens, m of them scored here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlctl.parallel import zigzag
from rlctl.policy.packing import Microbatch


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank of the group holds of a microbatch.

    Example: one sequence [7 8 9 6], C = 2, targets [9 6] predicted by rows [1 2]: rank 0 holds tokens [7 6] at
    positions [0 3] and scores nothing; rank 1 holds [8 9] at [1 2], rows [0 1], targets [9 6], mine [0 1].
    """

    tokens: torch.Tensor  # [1, T/C] int64
    position_ids: torch.Tensor  # [1, T/C] int64
    rows: torch.Tensor  # [m] int64: held tokens whose hidden state predicts a scored token
    targets: torch.Tensor  # [m] int64
    mine: torch.Tensor  # [m] int64: their place among the microbatch's n scored tokens


def part_of(micro: Microbatch, *, rank: int, size: int) -> Part:
    """The part of rank `rank` of `size`; sequences are padded to a multiple of twice the size."""
    held = zigzag(micro.cu_seqlens.diff().tolist(), rank, size)
    place = torch.full_like(micro.tokens[0], -1)
    place[held] = torch.arange(len(held))
    local = place[micro.rows]
    mine = (local >= 0).nonzero().flatten()
    return Part(
        tokens=micro.tokens[:, held],
        position_ids=micro.position_ids[:, held],
        rows=local[mine],
        targets=micro.targets[mine],
        mine=mine,
    )


def whole(values: torch.Tensor, *, mine: torch.Tensor, count: int, group: Any) -> torch.Tensor:
    """All ranks' scored values, in the microbatch's order: [m] -> [n], differentiable.

    Backward takes this rank's entries: each rank computes the same loss, and the data-parallel reduction sums gradients
    over the group.

    Args:
        values: [m].
        mine: [m] int64, distinct over the group, all of 0 ... n-1 together.
        count: n.
        group: the context-parallel ranks.
    """
    return _Whole.apply(values, mine, count, group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mine: torch.Tensor, count: int, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(mine)
        out = values.new_zeros(count).index_copy(0, mine, values)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (mine,) = ctx.saved_tensors
        return grad[mine], None, None, None
