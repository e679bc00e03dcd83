"""Estimates against enumeration and definitions; an evaluation that is interrupted goes on and ends the same."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy
import pytest

from rlctl import config, estimates, trainer
from rlctl import eval as evaluation
from rlctl.errors import RlctlError
from rlctl.log import RunLog
from tests.unit import rollout_cases as cases


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(samples, k))
            exact = Fraction(sum(any(s) for s in subsets), len(subsets))
            assert estimates.pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its expectation over n draws of a coin equals the chance of a hit in k draws, by enumeration."""
    n, p = 6, 0.3
    for k in (1, 2, 4):
        expectation = sum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * estimates.pass_at_k(n, c, k) for c in range(n + 1)
        )
        assert expectation == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_k_goes_over_powers_of_two_and_ends_with_all_samples():
    assert [estimates.powers_of_two(k) for k in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(("share", "n"), [(0.0, 20), (0.25, 20), (0.5, 64), (1.0, 64)])
def test_wilsons_bounds_are_where_the_score_test_turns(share, n):
    """By definition: p with |share - p| = z * sqrt(p (1 - p) / n)."""
    for bound in estimates.wilson(share, n):
        assert (share - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / n, abs=1e-7)


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_values():
    values = numpy.random.default_rng(1).uniform(size=2000)
    low, high = estimates.bootstrap(list(values))
    half = 1.96 * values.std() / math.sqrt(2000)
    assert low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.05 * half)
    assert (low, high) == estimates.bootstrap(list(values))


def test_yes_and_no_have_wilsons_interval_and_shares_the_bootstrap():
    assert estimates.estimate([1.0, 0.0, 1.0]).method == "wilson"
    assert estimates.estimate([1.0, 0.5]).method == "bootstrap"
    assert estimates.estimate([1.0] * 10).low < 0.8


def row(index, reward, *, valid=True, tokens=5):
    return {
        "index": index, "reward": reward if valid else None, "reward_parts": {"a": reward} if valid else {},
        "valid": valid, "truncated": False, "response_tokens": tokens,
    }  # fmt: skip


def test_a_sample_without_a_vote_counts_for_nothing_but_its_number():
    rows = [row(0, 1.0), row(0, 0.0), row(1, 1.0), row(1, 9.0, valid=False)]
    found = evaluation.summarize(rows, samples=2, pass_reward=1.0)
    assert found["reward"]["value"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["pass_at_k"]["1"]["value"] == pytest.approx(0.75)
    assert (found["pass_at_k"]["2"]["value"], found["pass_at_k"]["2"]["prompts"]) == (1.0, 1)
    assert (found["invalid"], found["prompts"]) == (1, 2)


def test_the_reward_that_counts_as_correct_is_a_setting():
    rows = [row(0, 0.5), row(1, 0.4)]
    assert evaluation.summarize(rows, samples=1, pass_reward=0.5)["pass_at_k"]["1"]["value"] == 0.5
    assert evaluation.summarize(rows, samples=1, pass_reward=1.0)["pass_at_k"]["1"]["value"] == 0.0


def test_no_vote_at_all_is_an_error():
    with pytest.raises(RlctlError, match="none of 1 samples"):
        evaluation.summarize([row(0, 0.0, valid=False)], samples=1, pass_reward=1.0)


class FailsLater(cases.LateEngine):
    """Breaks down after some requests."""

    def __init__(self, after):
        super().__init__()
        self._after = after

    def submit(self, requests):
        if len(self.submitted) + len(requests) > self._after:
            raise RuntimeError("power cut")
        super().submit(requests)


@pytest.fixture
def play(monkeypatch):
    """Evaluate scripted samples, two prompts at a time, in a directory."""
    monkeypatch.setattr(evaluation, "PART_SAMPLES", 6)

    def run(folder, engine=None):
        folder.mkdir(exist_ok=True)
        settings = {"target": "m", "task": "t", "samples": 3, "pass_reward": 7.0}
        (folder / "eval.json").write_text(json.dumps(settings))
        rollouts = cases.collect(engine=engine)
        monkeypatch.setattr(evaluation, "_build", lambda *_: (rollouts, rollouts.renderer.tokenizer))
        evaluation.evaluate(rollouts.recipe, folder, RunLog(folder, writes=True, tensorboard=False, console=None))
        return (folder / "samples.jsonl").read_text()

    return run


def test_every_sample_is_in_the_file(play, tmp_path):
    rows = [json.loads(line) for line in play(tmp_path / "a").splitlines()]
    assert [(r["index"], r["sample"]) for r in rows] == [(i, s) for i in range(6) for s in range(3)]
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert results["reward"]["value"] == pytest.approx(sum(r["reward"] for r in rows) / 18)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_an_interrupted_evaluation_goes_on_and_ends_the_same(play, tmp_path):
    undisturbed = play(tmp_path / "a")
    with pytest.raises(RuntimeError, match="power cut"):
        play(tmp_path / "b", FailsLater(after=12))
    with (tmp_path / "b" / "samples.jsonl").open("a") as out:  # half of the next part, as a crash leaves it
        out.write(undisturbed.splitlines(keepends=True)[12] + '{"index": 4, "sam')
    engine = cases.LateEngine()
    assert play(tmp_path / "b", engine) == undisturbed
    assert len(engine.submitted) == 6


def test_the_number_of_samples_in_a_part_changes_nothing(play, tmp_path, monkeypatch):
    first = play(tmp_path / "a")
    monkeypatch.setattr(evaluation, "PART_SAMPLES", 1000)
    assert play(tmp_path / "b") == first


def test_validation_draws_what_an_evaluation_draws(play, tmp_path):
    play(tmp_path / "a")
    rollouts = cases.collect(cases.recipe(grpo__num_val_generations_per_prompt=3))
    measured = evaluation.validate(rollouts)
    assert measured["val/reward"] == json.loads((tmp_path / "a" / "results.json").read_text())["reward"]["value"]


def test_validation_takes_at_most_max_val_samples_and_leaves_the_engine_awake():
    engine = cases.LateEngine()
    rollouts = cases.collect(cases.recipe(grpo__max_val_samples=2), engine=engine)
    evaluation.validate(rollouts)
    assert len(engine.submitted) == 2
    assert not [c for c in engine.calls if c.startswith("sleep")]


def test_samples_of_another_model_are_not_mixed(tmp_path):
    evaluation.check_identity(tmp_path, {"model": "a", "tokenizer": "t", "recipe": "r"})
    evaluation.check_identity(tmp_path, {"model": "a", "tokenizer": "t", "recipe": "other"})
    with pytest.raises(RlctlError, match="samples of another model") as caught:
        evaluation.check_identity(tmp_path, {"model": "b", "tokenizer": "t", "recipe": "r"})
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, []),
        ({"val_period": 2}, [2, 4]),
        ({"val_period": 6}, []),
        ({"val_at_end": True}, [5]),
        ({"val_period": 2, "val_at_end": True}, [2, 4, 5]),
    ],
    ids=str,
)
def test_validation_is_due_when_its_keys_say_so(keys, steps):
    assert [step for step in range(1, 6) if trainer._validates(config.Steps(**keys), step, 5)] == steps
