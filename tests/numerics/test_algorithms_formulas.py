"""Every algorithm against its paper's formula, worked out by loops (algorithm_cases.py), and what must hold for all."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl import plugins
from rlctl.algorithms import ops
from rlctl.algorithms.base import source
from rlctl.types import TokenOutputs
from tests.numerics import algorithm_cases as cases
from tests.numerics.algorithm_cases import ALGORITHMS


def loss_and_gradient(rule, made, logprobs):
    logprobs = logprobs.clone().requires_grad_()
    token_loss, _ = rule.loss(made, TokenOutputs(logprobs=logprobs))
    loss = (made.loss_weights * token_loss).sum()
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def test_every_algorithm_is_in_these_tests():
    """But those that learn from data, which are in test_supervised.py."""
    assert tuple(n for n in plugins.names("algorithm") if source(n) == "rollouts") == ALGORITHMS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_the_papers(name, seed):
    made, logprobs = cases.mixed(seed=seed)
    rule = cases.algorithm(name)
    got, gradient = loss_and_gradient(rule, cases.prepared(rule, made), logprobs)
    current = logprobs.double().requires_grad_()
    want = getattr(cases, name)(cases.sequences(made, current))
    (exact,) = torch.autograd.grad(want, current)
    assert got.item() == pytest.approx(want.item(), rel=2e-5)
    assert torch.allclose(gradient.double(), exact, rtol=1e-4, atol=1e-6 * exact.abs().max())
    assert exact.abs().max() > 1e-3  # there is something to compare


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_split_of_the_sequences_changes_loss_or_gradient(name):
    made, logprobs = cases.mixed()
    rule = cases.algorithm(name)
    whole = cases.prepared(rule, made)
    loss, gradient = loss_and_gradient(rule, whole, logprobs)
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(1))
    total, pieces = torch.zeros(()), torch.zeros_like(gradient)
    for part in order.split(3):
        rows = torch.cat([torch.arange(int(made.offsets[i]), int(made.offsets[i + 1])) for i in part])
        one, pieces[rows] = loss_and_gradient(rule, whole.select(part), logprobs[rows])
        total += one
    assert total.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert torch.allclose(pieces, gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("preset", ["observe", "token_tis", "seq_tis", "icepop", "seq_mask", "geo_mask"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_gaps_leave_loss_gradient_and_metrics_finite(name, preset):
    made, logprobs = cases.mixed(gap=60.0)
    rule = cases.algorithm(name, cases.options(name, correction=preset))
    ready = cases.prepared(rule, made)
    loss, gradient = loss_and_gradient(rule, ready, logprobs)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert all(m.values.isfinite().all() for m in rule.loss(ready, TokenOutputs(logprobs=logprobs))[1].values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_invalid_rollout_changes_nothing(name):
    made, logprobs = cases.mixed()
    rule = cases.algorithm(name)
    loss, gradient = loss_and_gradient(rule, cases.prepared(rule, made), logprobs)
    other = made.replace(rewards=torch.where(made.valid, made.rewards, float("nan")))
    again, same = loss_and_gradient(rule, cases.prepared(rule, other), logprobs)
    assert torch.equal(again, loss)
    assert torch.equal(same, gradient)
    assert not gradient[~made.mask].any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_give_exactly_no_gradient(name):
    """0.35 in fp32 leaves a residue in E[x^2] - E[x]^2."""
    made, logprobs = cases.mixed()
    made = made.replace(rewards=torch.full_like(made.rewards, 0.35))
    config = cases.options(name, beta=0.0)
    if name == "dapo":
        config.grpo.reward_shaping.overlong_buffer_length = 0
    rule = cases.algorithm(name, config)
    _, gradient = loss_and_gradient(rule, cases.prepared(rule, made), logprobs)
    assert not gradient.any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_token_in_the_mask_gives_zero(name):
    made, logprobs = cases.mixed()
    made = made.replace(mask=torch.zeros_like(made.mask))
    rule = cases.algorithm(name)
    loss, gradient = loss_and_gradient(rule, cases.prepared(rule, made), logprobs)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_one_update_a_step_the_gradient_is_that_of_reinforce(name):
    """d loss / d logprob = -weight * advantage when old is the current policy (a sequence's mean for gspo alike)."""
    made, logprobs = cases.mixed()
    rule = cases.algorithm(name, cases.options(name, beta=0.0))
    ready = cases.prepared(rule, made.replace(old_logprobs=None, ref_logprobs=None))
    _, gradient = loss_and_gradient(rule, ready, logprobs)
    assert torch.allclose(gradient, -ready.loss_weights * ready.advantages, rtol=1e-5, atol=1e-9)
    assert gradient.any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_the_kl_needs_is_asked_for_only_with_a_penalty(name):
    in_reward = {"rloo", "reinforce_pp"}
    in_loss = {"grpo", "gspo", "reinforce_pp_baseline"}
    assert cases.algorithm(name, cases.options(name, beta=0.0)).needs == frozenset()
    want = {"old", "ref"} if name in in_reward else {"ref"} if name in in_loss else set()
    assert cases.algorithm(name).needs == want


@pytest.mark.parametrize("n", range(2, 33))
def test_one_outlier_stays_within_the_analytic_bound(n):
    """Of n values no standard score is beyond (n-1)/sqrt(n) (sample) or sqrt(n-1) (population deviation)."""
    rewards = torch.tensor([1.0] + [1e-3] * (n - 1))
    ones = torch.ones(n, dtype=torch.bool)
    group = torch.zeros(n, dtype=torch.int64)
    plain = ops.group_advantages(rewards, group, ones, leave_one_out=False, normalize=True)
    assert plain.abs().max().item() == pytest.approx((n - 1) / math.sqrt(n), rel=1e-6)
    made = cases.batch(lengths=(3,) * n, first=2)
    white = ops.whiten(made, ops.to_tokens(made, rewards))
    assert white.abs().max().item() == pytest.approx(math.sqrt(n - 1), rel=1e-6)
    assert not white[~made.mask].any()


def test_reinforce_pp_can_do_with_one_sample_a_prompt():
    made, _ = cases.mixed()
    made = made.replace(group=torch.arange(len(made)))
    assert cases.algorithm("reinforce_pp").advantages(made).any()
    assert not cases.algorithm("grpo").advantages(made).any()


@pytest.mark.parametrize(("length", "want"), [(2, 0.0), (3, 0.0), (4, -2 / 3), (5, -4 / 3), (6, -2.0), (9, -2.0)])
def test_dapo_lowers_rewards_near_the_limit_and_never_by_more_than_the_penalty(length, want):
    config = cases.options("dapo")
    config.grpo.reward_shaping.overlong_buffer_penalty = 2.0
    made = cases.batch(lengths=(2 + length,))
    assert cases.algorithm("dapo", config)._penalty(made).item() == pytest.approx(want)


def test_dapo_filtering_leaves_cut_responses_out_of_loss_and_statistics():
    """As if they were not there at all."""
    made, logprobs = cases.mixed()
    config = cases.options("dapo")
    config.grpo.overlong_filtering = True
    rule = cases.algorithm("dapo", config)
    loss, gradient = loss_and_gradient(rule, cases.prepared(rule, made), logprobs)
    kept = (~made.truncated).nonzero().flatten()
    rows = torch.isin(made.sequence, kept)
    alone, part = loss_and_gradient(rule, cases.prepared(rule, made.select(kept)), logprobs[rows])
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
    assert torch.allclose(gradient[rows], part)
    assert not gradient[~rows].any()


def test_cispo_keeps_the_gradient_of_tokens_that_grpo_clips():
    made = cases.batch(advantages=torch.ones(13), old_logprobs=torch.full((13,), -4.0))
    logprobs = torch.full((13,), -1.0)  # ratio e^3 = 20
    ready = made.replace(loss_weights=torch.ones(13))
    _, clipped = loss_and_gradient(cases.algorithm("grpo", cases.options("grpo", beta=0.0)), ready, logprobs)
    _, kept = loss_and_gradient(cases.algorithm("cispo"), ready, logprobs)
    assert not clipped.any()
    assert torch.allclose(kept[made.mask], torch.tensor(-5.0))


def test_gspo_clips_whole_sequences():
    """One far token is averaged away; a small shift of all tokens is not."""
    made = cases.batch(lengths=(6, 6), old_logprobs=torch.full((12,), -2.0), advantages=torch.ones(12))
    logprobs = torch.full((12,), -2.0)
    logprobs[2], logprobs[3] = -1.0, -3.0  # mean 0: kept
    logprobs[8:] += 0.01  # mean 0.01 > 4e-4: clipped
    rule = cases.algorithm("gspo", cases.options("gspo", beta=0.0))
    _, gradient = loss_and_gradient(rule, made.replace(loss_weights=torch.ones(12)), logprobs)
    assert gradient[2:6].tolist() == pytest.approx([-1.0] * 4)
    assert not gradient[6:].any()


def test_advantage_clips_bound_both_sides():
    made, _ = cases.mixed()
    for name in ("grpo", "reinforce_pp", "reinforce_pp_baseline"):
        config = cases.options(name)
        free = cases.algorithm(name).advantages(made)
        config.grpo.advantage_clip_low, config.grpo.advantage_clip_high = -0.25, 0.5
        assert free.min() < -0.25
        assert free.max() > 0.5
        assert torch.equal(cases.algorithm(name, config).advantages(made), free.clamp(-0.25, 0.5))
