"""Which sequences share a forward pass, and what that pass is fed.

1. `plan` deals sequences into microbatches: a hard budget of tokens or sequences, whole groups where asked, the same
   number of microbatches on every data-parallel rank, about equal work at each turn.
2. `build_microbatch` lays a microbatch out as one stream: each sequence padded to the unit that the layout divides by.
   Labels are made per sequence before packing, from the mask, so none crosses a boundary.

It does not know models or process groups. Every backend takes the stream; context parallelism cuts each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.config import PolicySection
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.lazy import torch
from rlctl.types import Batch, Declared

METRICS = {
    "packing/microbatches": Declared(
        meaning="forward and backward passes of the last update on each data-parallel rank",
        formula="count",
        reduce=None,
        healthy="few: raise train_mb_tokens while memory lasts",
    ),
    "packing/efficiency": Declared(
        meaning="how full they are; only with sequence packing",
        formula="tokens / (train_mb_tokens * microbatches of all ranks)",
        reduce=None,
        healthy="above 0.8; below: a larger budget, or one that the step's tokens divide into",
    ),
}
QUADRATIC_AT = 16_384  # tokens at which attention costs as much as all else: about 4 to 6 times the hidden size


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of a microbatch: tokens when sequences are packed, else sequences."""

    max_tokens: int | None = None
    max_sequences: int | None = None


def train_budget(policy: PolicySection) -> Budget:
    """Of a microbatch with gradients; a token budget that is not set holds `train_micro_batch_size` full sequences."""
    if not policy.sequence_packing.enabled:
        return Budget(max_sequences=policy.train_micro_batch_size)
    full = policy.max_total_sequence_length * policy.train_micro_batch_size
    return Budget(max_tokens=policy.sequence_packing.train_mb_tokens or full)


def logprob_budget(policy: PolicySection) -> Budget:
    """Of a microbatch without gradients; what is not set is as for training."""
    count, tokens = policy.logprob_batch_size, policy.sequence_packing.logprob_mb_tokens
    if not policy.sequence_packing.enabled:
        return Budget(max_sequences=count) if count else train_budget(policy)
    if tokens is None and count is not None:
        tokens = policy.max_total_sequence_length * count
    return Budget(max_tokens=tokens) if tokens else train_budget(policy)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Sequences that stay together."""

    sequences: tuple[int, ...]
    tokens: int
    """With padding."""
    cost: float


def plan(
    lengths: Sequence[int],
    groups: Sequence[int] | None,
    *,
    dp: int,
    max_tokens: int | None,
    max_sequences: int | None,
    pad_unit: int = 1,
) -> list[list[list[int]]]:
    """Deal sequences to ranks and microbatches; the same answer on every rank.

    Args:
        lengths: tokens of each sequence.
        groups: group id of each sequence, to keep groups whole; None when sequences are free.
        dp: data-parallel ranks.
        max_tokens: hard limit of a microbatch, padding included; None without packing.
        max_sequences: hard limit of a microbatch; None with packing.
        pad_unit: each sequence is padded to a multiple of this.

    Returns:
        For each rank its microbatches, each a sorted list of sequence indices. All ranks have the same number; some
        microbatches may be empty, and are run as a dummy.

    Raises:
        RlctlError: a sequence or a group is over the limit; exit status 3.
    """
    units = _units(lengths, groups, pad_unit)
    for unit in units:
        _check_fits(unit, max_tokens=max_tokens, max_sequences=max_sequences)
    units = sorted(units, key=lambda u: (-u.tokens, u.sequences))
    dense = _first_fit(units, max_tokens, max_sequences)
    turns = max(1, -(-len(dense) // dp))
    balanced = _least_cost(units, turns * dp, max_tokens, max_sequences)
    return _deal(balanced or dense, turns=turns, dp=dp)


def filling(
    dealt: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], *, max_tokens: int | None
) -> dict[str, float]:
    """How well a plan fills its microbatches, over all ranks; logged as `packing/...`.

    Args:
        dealt: what `plan` returned.
        lengths: tokens of each sequence.
        max_tokens: room of a microbatch; None without packing.

    Returns:
        microbatches: of each rank. efficiency, with packing: tokens over the room of all microbatches.
    """
    found = {"microbatches": float(len(dealt[0]))}
    if max_tokens is not None:
        tokens = sum(lengths[i] for rank in dealt for micro in rank for i in micro)
        found["efficiency"] = tokens / (max_tokens * sum(len(rank) for rank in dealt))
    return found


def _units(lengths: Sequence[int], groups: Sequence[int] | None, pad_unit: int) -> list[_Unit]:
    members: dict[int, list[int]] = {}
    for i in range(len(lengths)):
        members.setdefault(i if groups is None else groups[i], []).append(i)
    units = []
    for sequences in members.values():
        padded = [-(-lengths[i] // pad_unit) * pad_unit for i in sequences]
        units.append(
            _Unit(
                sequences=tuple(sequences),
                tokens=sum(padded),
                cost=sum(n + n * n / QUADRATIC_AT for n in padded),
            )
        )
    return units


def _check_fits(unit: _Unit, *, max_tokens: int | None, max_sequences: int | None) -> None:
    count = len(unit.sequences)
    name = f"sequence {unit.sequences[0]}" if count == 1 else f"the group of sequences {list(unit.sequences)}"
    if max_tokens is not None and unit.tokens > max_tokens:
        raise RlctlError(
            f"{name} has {unit.tokens} tokens with padding, above the microbatch budget of {max_tokens}",
            f"raise the microbatch's token budget to {unit.tokens}, or lower policy.max_total_sequence_length",
            exit_status=ENVIRONMENT,
        )
    if max_sequences is not None and count > max_sequences:
        raise RlctlError(
            f"{name} has {count} sequences that must stay together, above the microbatch size of {max_sequences}",
            f"raise the microbatch size to {count}",
            exit_status=ENVIRONMENT,
        )


class _Bin:
    """A microbatch being filled."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.tokens = 0
        self.cost = 0.0

    def takes(self, unit: _Unit, max_tokens: int | None, max_sequences: int | None) -> bool:
        return (max_tokens is None or self.tokens + unit.tokens <= max_tokens) and (
            max_sequences is None or len(self.sequences) + len(unit.sequences) <= max_sequences
        )

    def add(self, unit: _Unit) -> None:
        self.sequences += unit.sequences
        self.tokens += unit.tokens
        self.cost += unit.cost


def _first_fit(units: list[_Unit], max_tokens: int | None, max_sequences: int | None) -> list[_Bin]:
    """First fit, longest first: few bins, filled unevenly."""
    bins: list[_Bin] = []
    for unit in units:
        fitting = next((b for b in bins if b.takes(unit, max_tokens, max_sequences)), None)
        if fitting is None:
            fitting = _Bin()
            bins.append(fitting)
        fitting.add(unit)
    return bins


def _least_cost(units: list[_Unit], count: int, max_tokens: int | None, max_sequences: int | None) -> list[_Bin] | None:
    """Longest first into the cheapest bin with room: even bins; None where `count` bins do not hold all that way."""
    bins = [_Bin() for _ in range(count)]
    for unit in units:
        open_bins = [b for b in bins if b.takes(unit, max_tokens, max_sequences)]
        if not open_bins:
            return None
        min(open_bins, key=lambda b: b.cost).add(unit)
    return bins


def _deal(bins: list[_Bin], *, turns: int, dp: int) -> list[list[list[int]]]:
    """Bins of like cost share a turn, as ranks wait for each other; the rank with least work yet gets the dearest."""
    queue = sorted(bins, key=lambda b: (-b.cost, b.sequences))
    queue += [_Bin() for _ in range(turns * dp - len(queue))]
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    total = [0.0] * dp
    for turn in range(turns):
        order = sorted(range(dp), key=lambda rank: (total[rank], rank))
        for rank, taken in zip(order, queue[turn * dp : (turn + 1) * dp], strict=True):
            ranks[rank].append(sorted(taken.sequences))
            total[rank] += taken.cost
    return ranks


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One forward pass. T tokens of the stream, b sequences in it, n tokens that are scored, M the batch's own tokens.

    Example: sequences [7 8 9] and [5 6], mask [F F T] and [F T], unit 4: tokens [7 8 9 0 5 6 0 0],
    positions [0 1 2 3 0 1 2 3], cu_seqlens [0 4 8], rows [1 4], targets [9 6], target_index [2 4].
    """

    batch: Batch
    """Its sequences, without padding: what the loss sees. No sequence for a dummy."""
    source: torch.Tensor  # [M] int64: each of its tokens' index in the batch that it was taken from
    tokens: torch.Tensor  # [1, T] int64: padded stream
    position_ids: torch.Tensor  # [1, T] int64: restart at each sequence
    cu_seqlens: torch.Tensor  # [b+1] int32: boundaries in the stream, padding included
    rows: torch.Tensor  # [n] int64: stream indices whose hidden state predicts a scored token
    targets: torch.Tensor  # [n] int64: the scored tokens
    target_index: torch.Tensor  # [n] int64: their place in `batch`'s own stream [M]


def build_microbatch(batch: Batch, sequences: Sequence[int], *, pad_unit: int = 1) -> Microbatch:
    """Lay sequences out as one stream, in the order given.

    Args:
        batch: where they come from.
        sequences: indices; none gives a dummy of `pad_unit` tokens that scores nothing, so that a rank without work
            takes part in every collective.
        pad_unit: each sequence is padded to a multiple of this, with token 0 after its last.
    """
    chosen = torch.tensor(sequences, dtype=torch.int64)
    sub = batch.select(chosen)
    starts, ends = batch.offsets[:-1][chosen], batch.offsets[1:][chosen]
    padded = -(-sub.lengths // pad_unit) * pad_unit if len(sub) else torch.tensor([pad_unit])
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), padded.cumsum(0)])
    stream = _spread(boundaries[:-1][: len(sub)], sub.lengths)
    tokens = torch.zeros(int(boundaries[-1]), dtype=torch.int64).index_copy(0, stream, sub.tokens)
    target_index = sub.mask.nonzero().flatten()
    assert not sub.mask[sub.offsets[:-1][sub.lengths > 0]].any(), "the first token of a sequence is in the mask"
    return Microbatch(
        batch=sub,
        source=_spread(starts, ends - starts),
        tokens=tokens[None],
        position_ids=(torch.arange(len(tokens)) - torch.repeat_interleave(boundaries[:-1], padded))[None],
        cu_seqlens=boundaries.to(torch.int32),
        rows=stream[target_index] - 1,
        targets=sub.tokens[target_index],
        target_index=target_index,
    )


def _spread(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """start, start + 1, ... for each range in turn: [sum of lengths] int64."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)
