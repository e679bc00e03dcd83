"""Every algorithm through both backends on two processes, against plain transformers autograd, in every split."""

from __future__ import annotations

import math

import pytest

from tests import distributed, tiny
from tests.parity import algorithm_steps, dtensor_steps, oracle
from tests.parity.algorithm_steps import ALGORITHMS, PLAIN, SPLITS

CASES = [(backend, split) for backend, splits in SPLITS.items() for split in splits]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("model"), vocab_size=dtensor_steps.VOCABULARY + 1)


@pytest.fixture(scope="module")
def results(folder):
    return {b: distributed.run("tests.parity.algorithm_steps:every", 2, folder, b)[0] for b in SPLITS}


@pytest.fixture(scope="module")
def wanted(folder):
    temperature = dtensor_steps.recipe().policy.generation.temperature
    return {
        name: oracle.evaluate(folder, algorithm_steps.batch(name), algorithm_steps.rule(name), temperature=temperature)
        for name in ALGORITHMS
    }


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("backend", "split"), CASES)
def test_loss_and_every_gradient_equal_autograd(results, wanted, backend, name, split):
    got, want = results[backend][name, split], wanted[name]
    assert oracle.loss_error(got["metrics"]["loss"], want) < 1e-5
    errors = {key: oracle.error(got["gradients"][key], want.gradients[key]) for key in want.gradients}
    assert max(errors.values()) < 2e-5, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_split_or_backend_changes_a_metric(results, name):
    first, *others = [results[b][name, s]["metrics"] for b, s in CASES]
    first.pop("grad_norm", None)
    for other in others:
        for key, value in first.items():
            assert other[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_the_effective_share_is_that_of_all_weights_together(results):
    made = algorithm_steps.batch("grpo")
    weights = (made.old_logprobs - made.rollout_logprobs)[made.mask].double().exp()
    want = float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
    for backend, split in CASES:
        got = results[backend]["grpo", split]["metrics"]["mismatch/effective_sample_share"]
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_is_finite_and_names_what_it_saw(results, name):
    for backend in SPLITS:
        update = results[backend][name, PLAIN]["update"]
        assert all(math.isfinite(v) for v in update.values()), update
        assert update["grad_norm"] > 0
        assert ("mismatch/ratio_max" in update) == (algorithm_steps.PRESETS.get(name, "off") != "off")
        assert {"mismatch/token_mult_prob_error", "entropy", "loss"} <= set(update)
