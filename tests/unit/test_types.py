"""Batch: select, split, concatenate and pack keep every token with its sequence."""

import pytest
import torch

from rlctl.types import INVALID_REWARD, Message, Prompt, Rollout, batch_from_rollouts, concatenate

PROMPT = Prompt(messages=(Message(role="user", content="q"),), row={}, index=0)


def rollout(group: int, sample: int, length: int, **fields) -> Rollout:
    """Tokens name their own place: 100 * group + 10 * sample + position."""
    tokens = tuple(100 * group + 10 * sample + t for t in range(length))
    made = dict(
        prompt=PROMPT, group=group, sample=sample, tokens=tokens, mask=(False,) + (True,) * (length - 1),
        logprobs=(0.0,) + tuple(-0.5 * t for t in range(1, length)), version=3, messages=PROMPT.messages,
        reward=float(group + sample), reward_parts={"a": float(group)}, valid=True, truncated=sample == 1,
    )  # fmt: skip
    return Rollout(**(made | fields))


def batch():
    """Three groups of two samples; lengths 2 3 4 5 6 7."""
    return batch_from_rollouts([rollout(i // 2, i % 2, 2 + i) for i in range(6)])


def test_rollouts_are_packed_in_the_order_given():
    packed = batch_from_rollouts([rollout(0, 0, 2), rollout(0, 1, 3)])
    assert packed.tokens.tolist() == [0, 1, 10, 11, 12]
    assert packed.offsets.tolist() == [0, 2, 5]
    assert packed.mask.tolist() == [False, True, False, True, True]
    assert packed.rollout_logprobs.tolist() == [0.0, -0.5, 0.0, -0.5, -1.0]
    assert packed.rewards.tolist() == [0.0, 1.0]
    assert packed.truncated.tolist() == [False, True]
    assert packed.version.tolist() == [3] * 5
    assert packed.sequence.tolist() == [0, 0, 1, 1, 1]


def test_an_invalid_rollout_stays_with_its_tokens_and_an_empty_mask():
    packed = batch_from_rollouts(
        [rollout(0, 0, 3), rollout(0, 1, 3, valid=False, reward=INVALID_REWARD, reward_parts={})]
    )
    assert len(packed) == 2
    assert packed.mask.tolist() == [False, True, True, False, False, False]
    assert packed.valid.tolist() == [True, False]
    assert packed.reward_parts["a"].tolist() == [0.0, 0.0]


def test_select_keeps_tokens_with_their_sequence_in_the_order_asked_for():
    chosen = batch().replace(extra={"per_token": batch().tokens * 2}).select(torch.tensor([4, 0]))
    assert chosen.offsets.tolist() == [0, 6, 8]
    assert chosen.tokens.tolist() == [200, 201, 202, 203, 204, 205, 0, 1]
    assert chosen.extra["per_token"].tolist() == [400, 402, 404, 406, 408, 410, 0, 2]
    assert chosen.rewards.tolist() == [2.0, 0.0]
    assert chosen.group.tolist() == [2, 0]
    assert chosen.reward_parts["a"].tolist() == [2.0, 0.0]
    assert chosen.old_logprobs is None


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_split_keeps_groups_whole_and_loses_nothing(parts):
    whole = batch()
    minis = list(whole.split(parts))
    assert len(minis) == parts
    for mini in minis:
        assert all(int((mini.group == g).sum()) == 2 for g in mini.group.unique())
    assert torch.cat([m.tokens for m in minis]).tolist() == whole.tokens.tolist()
    sizes = [len(m.group.unique()) for m in minis]
    assert max(sizes) - min(sizes) <= 1


def test_concatenate_is_the_batch_of_all_rollouts_even_with_an_empty_share():
    rollouts = [rollout(i // 2, i % 2, 2 + i) for i in range(6)]
    joined = concatenate([batch_from_rollouts(part) for part in (rollouts[:2], [], rollouts[2:])])
    expected = batch_from_rollouts(rollouts)
    for name in ("tokens", "offsets", "mask", "rewards", "group", "valid", "truncated", "rollout_logprobs", "version"):
        got, want = getattr(joined, name), getattr(expected, name)
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name
    assert torch.equal(joined.reward_parts["a"], expected.reward_parts["a"])


def test_sequence_sum_adds_the_tokens_of_each_sequence():
    assert batch().sequence_sum(torch.ones(27)).tolist() == [2, 3, 4, 5, 6, 7]


def test_messages_are_equal_whatever_tokens_stand_behind_them():
    assert Message(role="assistant", content="7", tokens=(55,)) == Message(role="assistant", content="7")
