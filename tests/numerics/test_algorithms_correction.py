"""Weights and measures of the train/rollout mismatch, against figures by hand and exact enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlctl.algorithms import correction, ops
from rlctl.errors import RlctlError
from rlctl.types import TokenOutputs
from tests.numerics import algorithm_cases as cases

RATIOS = [[3.0, 0.25, 1.0], [1.0005, 0.9996], [0.4, 0.5, 1.2, 6.0]]
"""Of the tokens of three responses: products 0.75, 1.00009998, 1.44; geometric means 0.909, 1.00005, 1.095."""


def weigh(preset, low=None, high=None, ratios=RATIOS):
    made = cases.batch(lengths=tuple(2 + len(r) for r in ratios))
    old = torch.zeros(len(made.tokens))
    old[made.mask] = torch.tensor([x for r in ratios for x in r]).log()
    old[~made.mask] = 5.0  # a prompt's numbers must not matter
    options = cases.options("grpo", correction=preset, correction_min=low, correction_max=high).loss_fn
    correction.complete(options)
    weight, metrics = correction.weigh(made, old, options)
    return weight[made.mask].tolist(), {name: mean_of(made, m) for name, m in metrics.items()}


def mean_of(made, metric):
    values = metric.values[made.mask] if len(metric.values) == len(made.mask) else metric.values
    if metric.reduce == "effective_share":
        return float(values.sum() ** 2 / (len(values) * values.square().sum()))
    return float(values.max() if metric.reduce == "max" else values.mean())


@pytest.mark.parametrize(
    ("preset", "low", "high", "want"),
    [
        ("off", None, None, [1.0] * 9),
        ("observe", None, None, [1.0] * 9),
        ("token_tis", None, None, [2.0, 0.25, 1.0, 1.0005, 0.9996, 0.4, 0.5, 1.2, 2.0]),
        ("token_tis", 0.45, 1.1, [1.1, 0.45, 1.0, 1.0005, 0.9996, 0.45, 0.5, 1.1, 1.1]),
        ("seq_tis", None, 1.2, [0.75] * 3 + [1.00009998] * 2 + [1.2] * 4),
        ("icepop", None, None, [3.0, 0.0, 1.0, 1.0005, 0.9996, 0.0, 0.5, 1.2, 0.0]),
        ("seq_mask", None, 1.2, [0.75] * 3 + [1.00009998] * 2 + [0.0] * 4),
        ("seq_mask", 0.8, None, [0.0] * 3 + [1.00009998] * 2 + [1.44] * 4),
        ("geo_mask", None, None, [0.0] * 3 + [1.0005, 0.9996] + [0.0] * 4),
    ],
)
def test_weights_by_hand(preset, low, high, want):
    assert weigh(preset, low, high)[0] == pytest.approx(want, rel=1e-5)


def test_measures_by_hand():
    _, seen = weigh("observe")
    flat = [x for r in RATIOS for x in r]
    assert seen["mismatch/ratio_mean"] == pytest.approx(sum(flat) / 9, rel=1e-5)
    assert seen["mismatch/ratio_max"] == pytest.approx(6.0, rel=1e-5)
    assert seen["mismatch/out_of_bounds_share"] == pytest.approx(4 / 9)  # of 0.5 ... 2: 3, 0.25, 0.4, 6
    assert seen["mismatch/effective_sample_share"] == pytest.approx(sum(flat) ** 2 / (9 * sum(x * x for x in flat)))
    assert seen["mismatch/kl_rollout_old"] == pytest.approx(sum(x - 1 - math.log(x) for x in flat) / 9, rel=1e-5)
    assert seen["mismatch/kl_old_rollout"] == pytest.approx(sum(x * math.log(x) - x + 1 for x in flat) / 9, rel=1e-5)
    _, of_sequences = weigh("seq_mask")
    assert of_sequences["mismatch/out_of_bounds_share"] == 0.0
    products = [0.75, 1.00009998, 1.44]
    share = sum(products) ** 2 / (3 * sum(x * x for x in products))
    assert of_sequences["mismatch/effective_sample_share"] == pytest.approx(share, rel=1e-5)
    assert weigh("off")[1] == {}


def test_equal_probabilities_are_seen_as_equal_and_weigh_one():
    for preset in correction.RULES:
        weights, seen = weigh(preset, ratios=[[1.0, 1.0], [1.0]])
        assert weights == [1.0] * 3
        assert seen["mismatch/effective_sample_share"] == 1.0
        assert seen["mismatch/out_of_bounds_share"] == seen["mismatch/kl_rollout_old"] == 0.0


def test_small_divergences_are_not_rounded_away():
    _, seen = weigh("observe", ratios=[[1.0001, 1.0001]])
    exact = 1.0001 - 1 - math.log(1.0001)  # 5e-9
    assert seen["mismatch/kl_rollout_old"] == pytest.approx(exact, rel=2e-3)  # old itself is in fp32


def distributions():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=generator).log_softmax(0) for _ in range(2)]


def test_both_divergences_are_those_of_the_distributions():
    """Enumerate a vocabulary of 5: the mean over the engine's samples is the exact KL, in either direction."""
    rollout, old = distributions()
    made = cases.batch(lengths=(7,), rollout_logprobs=torch.cat([torch.zeros(2), rollout]))
    _, metrics = correction.weigh(made, torch.cat([torch.zeros(2), old]), cases.options("grpo").loss_fn)
    for name, (p, q) in {"kl_rollout_old": (rollout, old), "kl_old_rollout": (old, rollout)}.items():
        got = (rollout.exp() * metrics[f"mismatch/{name}"].values[2:]).sum()
        assert got.item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-5)


def tables(seed):
    """Logits of a policy over two tokens of three words each: [3] for the first, [3, 3] for the second given it."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3))]


def token_logprobs(logits, response):
    first, second = response
    return torch.stack([logits[0].log_softmax(0)[first], logits[1][first].log_softmax(0)[second]])


RESPONSES = list(itertools.product(range(3), repeat=2))


def exact_kl(logits, reference):
    pairs = [(token_logprobs(logits, r).sum(), token_logprobs(reference, r).sum()) for r in RESPONSES]
    return sum(p.exp() * (p - q) for p, q in pairs)


def gradient_of(value, logits):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, logits)])


def error_of_expected_gradient(preset):
    """Of responses drawn from another engine, against the exact gradient of the expected reward; relative."""
    logits, engine = tables(1), tables(2)
    for table in logits:
        table.requires_grad_()
    rewards = dict(zip(RESPONSES, torch.linspace(-1, 1, 9, dtype=torch.float64), strict=True))
    rule = cases.algorithm("rloo", cases.options("rloo", correction=preset, correction_max=1e6))
    zero, got = torch.zeros(1, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    for response, reward in rewards.items():
        drawn = token_logprobs(engine, response)
        made = cases.batch(lengths=(3,), first=1, rollout_logprobs=torch.cat([zero, drawn]))
        out = TokenOutputs(logprobs=torch.cat([zero, token_logprobs(logits, response)]))
        loss, _ = rule.loss(made.replace(advantages=reward.expand(3)), out)
        got -= drawn.sum().exp() * gradient_of(loss.sum(), logits)
    want = gradient_of(sum(token_logprobs(logits, r).sum().exp() * x for r, x in rewards.items()), logits)
    return ((got - want).norm() / want.norm()).item()


def test_sequence_weights_undo_the_mismatch_and_token_weights_a_part_of_it():
    """Token weights ignore how a token's prefix was drawn."""
    assert error_of_expected_gradient("seq_tis") < 1e-6
    assert error_of_expected_gradient("seq_mask") < 1e-6
    assert 0.05 < error_of_expected_gradient("token_tis") < 0.7 * error_of_expected_gradient("observe")


def pair(logits, reference, responses):
    """A batch of two responses to one prompt, drawn from the policy itself; with the logprobs that have a gradient."""
    zero = torch.zeros(1, dtype=torch.float64)
    current = torch.cat([torch.cat([zero, token_logprobs(logits, r)]) for r in responses])
    ref = torch.cat([torch.cat([zero, token_logprobs(reference, r)]) for r in responses])
    made = cases.batch(lengths=(3,) * len(responses), first=1)
    made = made.replace(old_logprobs=current.detach(), ref_logprobs=ref, rollout_logprobs=current.detach())
    return made, current


def test_rloo_kl_in_the_reward_has_the_exact_expected_gradient():
    """All 81 pairs of two-token responses: the loss's expected gradient is beta times that of KL(pi || ref)."""
    logits, reference = tables(3), tables(4)
    for table in logits:
        table.requires_grad_()
    rule = cases.algorithm("rloo")
    got = torch.zeros(12, dtype=torch.float64)
    for responses in itertools.product(RESPONSES, repeat=2):
        made, current = pair(logits, reference, responses)
        made = cases.prepared(rule, made)
        token_loss, _ = rule.loss(made, TokenOutputs(logprobs=current))
        probability = current.detach().sum().exp()
        got += probability * gradient_of((made.loss_weights * token_loss).sum(), logits)
    want = cases.BETA * gradient_of(exact_kl(logits, reference), logits)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    assert want.abs().max() > 0.01


def test_reinforce_pp_returns_have_the_exact_expected_kl_gradient():
    """Before whitening: sum over t of (KL estimates from t on) * d log pi_t, over all two-token responses."""
    logits, reference = tables(5), tables(6)
    for table in logits:
        table.requires_grad_()
    got = torch.zeros(12, dtype=torch.float64)
    for response in RESPONSES:
        made, current = pair(logits, reference, [response])
        from_here = ops.sum_from_here(made, ops.log_odds(made)).double()
        got += current.detach().sum().exp() * gradient_of((from_here * current).sum(), logits)
    assert torch.allclose(got, gradient_of(exact_kl(logits, reference), logits), rtol=1e-5, atol=1e-7)


def test_weights_have_no_gradient():
    made, logprobs = cases.mixed()
    logprobs.requires_grad_()
    for preset in correction.RULES:
        weight, _ = correction.weigh(made, logprobs, cases.options("grpo", correction=preset).loss_fn)
        assert not weight.requires_grad


@pytest.mark.parametrize(
    ("preset", "low", "high", "message"),
    [
        ("off", None, 2.0, "`loss_fn.correction_max` has no effect with loss_fn.correction `off`"),
        ("token_tis", 1.5, None, "correction_min 1.5 and correction_max 2.0 are not around 1"),
        ("icepop", None, 0.9, "correction_min 0.5 and correction_max 0.9 are not around 1"),
        ("seq_mask", -1.0, None, "correction_min -1.0 and correction_max 2.0 are not around 1"),
    ],
)
def test_bounds_that_cannot_be_are_refused(preset, low, high, message):
    options = cases.options("grpo", correction=preset, correction_min=low, correction_max=high).loss_fn
    with pytest.raises(RlctlError, match="correction") as caught:
        correction.complete(options)
    assert message in caught.value.message
