"""Planning and layout of microbatches: properties over random lengths, and exact small examples."""

from __future__ import annotations

import random

import pytest
import torch

from rlctl.config import PolicySection
from rlctl.errors import RlctlError
from rlctl.policy import packing
from rlctl.types import Batch


def make_batch(lengths: list[int], *, seed: int = 0, group: list[int] | None = None) -> Batch:
    """Random tokens; every token but a sequence's first may be in the mask."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n, b = int(offsets[-1]), len(lengths)
    mask = torch.rand(n, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    return Batch(
        tokens=torch.randint(1, 256, (n,), generator=generator),
        offsets=offsets,
        mask=mask,
        rewards=torch.zeros(b),
        group=torch.tensor(group if group is not None else list(range(b))),
        valid=torch.ones(b, dtype=torch.bool),
        truncated=torch.zeros(b, dtype=torch.bool),
        rollout_logprobs=torch.zeros(n),
        version=torch.zeros(n, dtype=torch.int32),
    )


def cases(count: int = 150):
    """Random lengths, degrees and budgets; groups for half of them."""
    for seed in range(count):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))]
        size = rng.randint(1, 3)
        groups = [i // size for i in range(len(lengths))] if seed % 2 else None
        unit = rng.choice([1, 1, 2, 8])
        packed = seed % 3 > 0
        limits = dict(
            max_tokens=rng.randint(200, 500) if packed else None, max_sequences=None if packed else rng.randint(3, 6)
        )
        yield lengths, groups, dict(dp=rng.randint(1, 5), pad_unit=unit, **limits)


def padded(length: int, unit: int) -> int:
    return (length + unit - 1) // unit * unit


def test_every_sequence_is_in_exactly_one_microbatch():
    for lengths, groups, options in cases():
        planned = packing.plan(lengths, groups, **options)
        assert sorted(i for rank in planned for mb in rank for i in mb) == list(range(len(lengths)))


def test_budgets_hold_with_padding_counted():
    for lengths, groups, options in cases():
        for microbatch in (mb for rank in packing.plan(lengths, groups, **options) for mb in rank):
            tokens = sum(padded(lengths[i], options["pad_unit"]) for i in microbatch)
            assert options["max_tokens"] is None or tokens <= options["max_tokens"]
            assert options["max_sequences"] is None or len(microbatch) <= options["max_sequences"]


def test_every_rank_has_the_same_number_of_microbatches():
    for lengths, groups, options in cases():
        planned = packing.plan(lengths, groups, **options)
        assert len(planned) == options["dp"]
        assert len({len(rank) for rank in planned}) == 1


def test_groups_stay_whole():
    for lengths, groups, options in cases():
        if groups is not None:
            for microbatch in (mb for rank in packing.plan(lengths, groups, **options) for mb in rank):
                for group in {groups[i] for i in microbatch}:
                    assert {i for i, g in enumerate(groups) if g == group} <= set(microbatch)


def test_ranks_differ_by_at_most_one_sequence_of_work_when_the_budget_leaves_room():
    for seed in range(100):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(8, 60))]
        planned = packing.plan(lengths, None, dp=rng.randint(2, 4), max_tokens=10_000, max_sequences=None)
        work = [sum(lengths[i] for mb in rank for i in mb) for rank in planned]
        assert max(work) - min(work) <= max(lengths) + 1


def test_no_rank_idles_when_there_are_enough_sequences():
    planned = packing.plan([5] * 8, None, dp=4, max_tokens=1000, max_sequences=None)
    assert [[len(mb) for mb in rank] for rank in planned] == [[2], [2], [2], [2]]


def test_more_ranks_than_sequences_gives_empty_microbatches():
    planned = packing.plan([5, 4], None, dp=3, max_tokens=16, max_sequences=None)
    assert sorted(planned) == [[[]], [[0]], [[1]]]


def test_eight_sequences_of_7_under_a_budget_of_8_are_never_paired():
    planned = packing.plan([7] * 8, None, dp=2, max_tokens=8, max_sequences=None)
    assert [len(rank) for rank in planned] == [4, 4]


def test_the_plan_does_not_depend_on_the_process():
    first = [packing.plan(lengths, groups, **options) for lengths, groups, options in cases(20)]
    assert first == [packing.plan(lengths, groups, **options) for lengths, groups, options in cases(20)]


def test_an_overlong_sequence_is_named():
    with pytest.raises(
        RlctlError, match=r"sequence 1 has 24 tokens with padding, above the microbatch budget of 20"
    ) as e:
        packing.plan([3, 21, 4], None, dp=1, max_tokens=20, max_sequences=None, pad_unit=4)
    assert e.value.exit_status == 3
    assert "24" in e.value.hint


def test_a_group_above_the_microbatch_size_is_named():
    with pytest.raises(RlctlError, match=r"group of sequences \[2, 3\] has 2 sequences"):
        packing.plan([3, 3, 3, 3], [0, 1, 2, 2], dp=1, max_tokens=None, max_sequences=1)


def test_the_documented_example():
    batch = make_batch([3, 2]).replace(
        tokens=torch.tensor([7, 8, 9, 5, 6]), mask=torch.tensor([False, False, True, False, True])
    )
    mb = packing.build_microbatch(batch, [0, 1], pad_unit=4)
    assert mb.tokens.tolist() == [[7, 8, 9, 0, 5, 6, 0, 0]]
    assert mb.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert mb.cu_seqlens.tolist() == [0, 4, 8]
    assert mb.rows.tolist() == [1, 4]
    assert mb.targets.tolist() == [9, 6]
    assert mb.target_index.tolist() == [2, 4]
    assert mb.source.tolist() == [0, 1, 2, 3, 4]


def test_a_row_predicts_its_target_within_one_sequence_and_never_from_a_last_token():
    for seed in range(60):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 9))]
        batch = make_batch(lengths, seed=seed)
        chosen = rng.sample(range(len(lengths)), rng.randint(1, len(lengths)))
        unit = rng.choice([1, 2, 4])
        mb = packing.build_microbatch(batch, chosen, pad_unit=unit)
        expected = []  # (stream row, target) token by token
        start = 0
        for i in chosen:
            low, high = int(batch.offsets[i]), int(batch.offsets[i + 1])
            stream = mb.tokens[0, start : start + high - low]
            assert torch.equal(stream, batch.tokens[low:high])
            expected += [(start + t - low - 1, int(batch.tokens[t])) for t in range(low, high) if batch.mask[t]]
            assert all(row != start + high - low - 1 for row in mb.rows.tolist())
            start += padded(high - low, unit)
        assert mb.tokens.shape == (1, start)
        assert list(zip(mb.rows.tolist(), mb.targets.tolist(), strict=True)) == expected
        assert torch.equal(batch.tokens[mb.source], mb.batch.tokens)
        assert torch.equal(mb.batch.tokens[mb.target_index], mb.targets)
        assert all(int(n) % unit == 0 for n in mb.cu_seqlens.diff())


def test_an_empty_microbatch_is_a_dummy_without_targets():
    mb = packing.build_microbatch(make_batch([3, 2]), [], pad_unit=4)
    assert mb.tokens.shape == mb.position_ids.shape == (1, 4)
    assert mb.cu_seqlens.tolist() == [0, 4]
    assert (len(mb.batch), len(mb.rows), len(mb.targets), len(mb.target_index), len(mb.source)) == (0, 0, 0, 0, 0)


def test_an_unset_token_budget_holds_the_microbatch_size_of_full_sequences():
    section = PolicySection(max_total_sequence_length=100, train_micro_batch_size=3)
    assert packing.train_budget(section) == packing.logprob_budget(section) == packing.Budget(max_tokens=300)
    section.logprob_batch_size = 5
    assert packing.logprob_budget(section) == packing.Budget(max_tokens=500)
    section.sequence_packing.train_mb_tokens, section.sequence_packing.logprob_mb_tokens = 120, 130
    assert packing.train_budget(section) == packing.Budget(max_tokens=120)
    assert packing.logprob_budget(section) == packing.Budget(max_tokens=130)


def test_without_packing_a_microbatch_is_counted_in_sequences():
    section = PolicySection(train_micro_batch_size=3)
    section.sequence_packing.enabled = False
    assert packing.train_budget(section) == packing.logprob_budget(section) == packing.Budget(max_sequences=3)
    section.logprob_batch_size = 5
    assert packing.logprob_budget(section) == packing.Budget(max_sequences=5)


def test_efficiency_is_tokens_over_the_room_of_all_ranks_microbatches():
    lengths = [60, 50, 40, 30, 10]
    dealt = packing.plan(lengths, None, dp=2, max_tokens=100, max_sequences=None)
    assert [len(rank) for rank in dealt] == [1, 1]
    assert packing.filling(dealt, lengths, max_tokens=100) == {"microbatches": 1.0, "efficiency": 0.95}
    alone = packing.plan(lengths, None, dp=1, max_tokens=None, max_sequences=2)
    assert packing.filling(alone, lengths, max_tokens=None) == {"microbatches": 3.0}
