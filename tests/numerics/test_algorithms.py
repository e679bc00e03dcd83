"""GRPO's arithmetic against formulas written out by hand, exact enumeration and autograd."""

from __future__ import annotations

import pytest
import torch

from rlctl.algorithms import grpo, ops
from rlctl.types import TokenOutputs
from tests.numerics.algorithm_cases import batch


def advantages(rewards, group, valid=None, *, leave_one_out=True, normalize=True):
    rewards = torch.tensor(rewards)
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return ops.group_advantages(rewards, torch.tensor(group), valid, leave_one_out=leave_one_out, normalize=normalize)


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    got = advantages([1.0, 2.0, 6.0], [0, 0, 0], normalize=False)
    assert got.tolist() == pytest.approx([1 - 4.0, 2 - 3.5, 6 - 1.5])


def test_plain_baseline_is_the_group_mean_and_the_spread_its_sample_deviation():
    got = advantages([1.0, 2.0, 6.0], [0, 0, 0], leave_one_out=False)
    spread = torch.tensor([1.0, 2.0, 6.0]).std().item()
    assert got.tolist() == pytest.approx([-2.0 / spread, -1.0 / spread, 3.0 / spread])


def test_leave_one_out_divides_by_the_spread_of_the_whole_group():
    got = advantages([1.0, 2.0, 6.0, 4.0], [0, 0, 0, 0])
    assert float(got[0]) == pytest.approx((1 - 4.0) / torch.tensor([1.0, 2.0, 6.0, 4.0]).std().item())


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("noise", [0.0, 1e-8, 3e-8, 1e-7, 1e-4, 1e-2])
def test_one_sample_that_stands_out_is_bounded_however_alike_the_others_are(noise, leave_one_out):
    rewards = [0.3, 0.3 + noise, 0.3, 0.3, 0.3, 0.3, 0.3, 1.0]
    got = advantages(rewards, [0] * 8, leave_one_out=leave_one_out)
    assert float(got.abs().max()) <= 8**0.5 + 1e-6
    assert float(got[-1]) == pytest.approx(8**0.5, rel=0.15)


@pytest.mark.parametrize("ulps", [1, 3])
def test_rewards_that_differ_by_rounding_alone_are_equal(ulps):
    reward = torch.tensor(0.35)
    other = reward.clone()
    for _ in range(ulps):
        other = torch.nextafter(other, torch.tensor(1.0))
    assert advantages([float(reward)] * 7 + [float(other)], [0] * 8).tolist() == [0.0] * 8


@pytest.mark.parametrize("reward", [0.35, 0.1, 1e6, 1 / 3])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_give_exactly_zero_whatever_rounding_does(reward, leave_one_out):
    assert advantages([reward] * 16, [0] * 16, leave_one_out=leave_one_out).tolist() == [0.0] * 16


def test_one_right_answer_among_wrong_ones():
    """The spread of the others is 0; the whole group's is 0.5."""
    got = advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    assert got.tolist() == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3])


def test_groups_go_by_id_not_by_place():
    got = advantages([1.0, 10.0, 3.0, 30.0], [0, 1, 0, 1], normalize=False)
    assert got.tolist() == [-2.0, -20.0, 2.0, 20.0]


def test_an_invalid_rollout_has_no_vote_and_a_lone_one_no_advantage():
    got = advantages([1.0, 3.0, 99.0, 5.0], [0, 0, 0, 1], [True, True, False, True], normalize=False)
    assert got.tolist() == [-2.0, 2.0, 0.0, 0.0]


def test_token_weights_count_every_token_alike_and_sum_to_one():
    weights = ops.token_mean_weights(batch())
    assert weights[batch().mask].tolist() == pytest.approx([1 / 7] * 7)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_sequence_weights_count_every_sequence_alike_and_skip_empty_ones():
    made = batch(lengths=(4, 6, 2))  # responses of 2, 4 and 0 tokens
    sums = made.sequence_sum(ops.sequence_mean_weights(made))
    assert sums.tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_dr_grpo_weights_divide_by_a_constant():
    made = batch()
    sums = made.sequence_sum(ops.constant_weights(made, length=10))
    assert sums.tolist() == pytest.approx([2 / 30, 4 / 30, 1 / 30])


def test_no_token_in_the_mask_gives_no_weight_and_no_nan():
    made = batch(lengths=(2, 2))
    for weights in (ops.token_mean_weights(made), ops.sequence_mean_weights(made)):
        assert weights.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("ratio", "advantage", "want"),
    [
        (1.5, 1.0, -1.2),  # clipped from above: no more gain
        (0.5, 1.0, -0.5),
        (1.5, -1.0, 1.5),
        (0.5, -1.0, 0.8),  # clipped from below
        (9.0, -1.0, 3.0),  # dual clip
    ],
)
def test_clipping_in_each_region(ratio, advantage, want):
    got = ops.clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), low=0.2, high=0.2, dual=3.0)
    assert float(got) == pytest.approx(want)


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    """d loss / d logprob = -advantage, with old logprobs absent (one update a step) or equal."""
    made = batch()
    chosen = torch.linspace(-1, 1, len(made.tokens))
    logprobs = torch.full((len(made.tokens),), -2.0, requires_grad=True)
    algorithm = grpo.Algorithm(grpo.Config())
    for old in (None, logprobs.detach()):
        loss, metrics = algorithm.loss(
            made.replace(advantages=chosen, old_logprobs=old), TokenOutputs(logprobs=logprobs)
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.allclose(gradient, torch.where(made.mask, -chosen, 0.0))
        assert float(metrics["ratio"].values[made.mask].mean()) == 1.0


@pytest.mark.parametrize("on_policy", [True, False])
def test_expected_kl_gradient_is_exact(on_policy):
    """Enumerate a distribution over 5 tokens: E_sampler[d kl_loss] = d KL(pi || reference), for any sampler."""
    generator = torch.Generator().manual_seed(0)
    logits, reference, other = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    pi, reference = logits.log_softmax(0), reference.log_softmax(0)
    sampler = pi.detach() if on_policy else other.log_softmax(0)
    value = (sampler.exp() * ops.kl_loss(pi, reference, sampler)).sum()
    exact = (pi.exp() * (pi - reference)).sum()
    assert value.item() == pytest.approx(exact.item(), rel=1e-12)
    got, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (value, exact))
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-14)


def test_k3_alone_as_a_loss_has_another_gradient():
    """Why `kl_loss` exists: k3 differentiated on samples is the gradient of the reverse divergence."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    pi, reference = logits.log_softmax(0), reference.log_softmax(0)
    got = torch.autograd.grad((pi.detach().exp() * ops.kl_k3(pi, reference)).sum(), logits, retain_graph=True)[0]
    exact = torch.autograd.grad((pi.exp() * (pi - reference)).sum(), logits)[0]
    assert not torch.allclose(got, exact, rtol=1e-2)


def test_the_reference_is_asked_for_only_above_a_zero_penalty():
    config = grpo.Config()
    assert grpo.Algorithm(config).needs == frozenset()
    config.loss_fn.reference_policy_kl_penalty = 0.01
    assert grpo.Algorithm(config).needs == {"ref"}
