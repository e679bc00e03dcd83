"""policy/context.py: how a microbatch is shared over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from rlctl.policy.context import part_of
from rlctl.policy.packing import build_microbatch
from tests.parity.dtensor_steps import batch

SEQUENCES = [0, 3, 5, 6]


@pytest.fixture
def made():
    return batch()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_scored_token_is_scored_once(made, size):
    micro = build_microbatch(made, SEQUENCES, pad_unit=2 * size)
    mine = torch.cat([part_of(micro, rank=r, size=size).mine for r in range(size)])
    assert torch.equal(mine.sort().values, torch.arange(len(micro.rows)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_target_is_scored_where_the_token_before_it_lies(made, size):
    micro = build_microbatch(made, SEQUENCES, pad_unit=2 * size)
    sub = micro.batch
    for rank in range(size):
        part = part_of(micro, rank=rank, size=size)
        place = micro.target_index[part.mine]
        start = sub.offsets[torch.searchsorted(sub.offsets, place, right=True) - 1]
        assert torch.equal(part.targets, sub.tokens[place])
        assert torch.equal(part.tokens[0, part.rows], sub.tokens[place - 1])
        assert torch.equal(part.position_ids[0, part.rows], place - 1 - start)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_equal_shares_with_equal_sums_of_positions(made, size):
    """Causal attention costs a token its position: zigzag makes that equal too."""
    micro = build_microbatch(made, SEQUENCES, pad_unit=2 * size)
    parts = [part_of(micro, rank=r, size=size) for r in range(size)]
    assert {p.tokens.shape for p in parts} == {(1, micro.tokens.shape[1] // size)}
    assert len({int(p.position_ids.sum()) for p in parts}) == 1


def test_a_dummy_is_shared_too(made):
    micro = build_microbatch(made, [], pad_unit=4)
    parts = [part_of(micro, rank=r, size=2) for r in range(2)]
    assert [p.tokens.shape for p in parts] == [(1, 2)] * 2
    assert all(len(p.rows) == 0 for p in parts)
