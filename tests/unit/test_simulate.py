"""`rlctl bench --simulate` and the published steps that it shows."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.plan import interval, published
from rlctl.plan.steptime import constants

ROOT = Path(__file__).parents[2]
LINE = ["bench", "--simulate", "--compare", "dtensor,megatron"]
SCRIPTS = sorted({step.script for step in published.steps()})


def asked(capfd, *arguments: str) -> tuple[int, dict]:
    status = run([*LINE, *arguments, "--json"])
    return status, json.loads(capfd.readouterr().out)


def test_both_backends_are_predicted_and_the_published_rows_of_that_size_are_beside(capfd):
    status, found = asked(capfd, "--model", "llama-3.1-70b", "--gpus", "64", "--gpu", "h100")
    assert status == 0
    assert list(found["sides"]) == ["dtensor", "megatron"]
    steps = [side["seconds"]["total"] for side in found["sides"].values()]
    ratio = found["ratios"]["dtensor / megatron"]
    assert ratio["value"] == pytest.approx(steps[0] / steps[1])
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert [(row["backend"], row["seconds"]["step"]) for row in found["published"]] == [
        ("dtensor", 230), ("megatron", 147),
    ]  # fmt: skip
    assert "predicted" in found["what"] and found["measured"] is None


def test_the_text_marks_what_is_published_predicted_and_not_measured(capfd):
    assert run([*LINE, "--model", "llama-3.1-8b-instruct", "--gpus", "8", "--gpu", "h100"]) == 0
    shown = capfd.readouterr().out
    for word in ("predicted by rlctl plan, not measured", "published", "not like with like", "rlctl was not measured"):
        assert word in shown


def test_without_a_published_row_the_known_ones_are_named(capfd):
    assert run([*LINE, "--model", "llama-3.1-8b-instruct", "--gpus", "8", "--gpu", "b200"]) == 0
    assert "published: nothing for this model" in capfd.readouterr().out


def test_a_degree_of_the_command_line_is_kept_and_a_recipes_own_is_searched(capfd):
    key = "policy.megatron_cfg.tensor_model_parallel_size=8"
    _, found = asked(capfd, "--model", "llama-3.1-70b", "--gpus", "64", "--gpu", "h100", key)
    assert found["sides"]["megatron"]["layout"]["tp"] == 8
    _, free = asked(capfd, "--model", "llama-3.1-70b", "--gpus", "64", "--gpu", "h100")
    assert free["sides"]["megatron"]["layout"]["tp"] != 8


def test_what_does_not_fit_exits_3_and_says_why(capfd):
    status, found = asked(capfd, "--model", "llama-3.1-70b", "--gpus", "8", "--gpu", "h100")
    assert status == 3
    assert "GB" in found["none_fits"]["megatron"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--gpu", "h100", "--steps", "3"], "`--steps` has no meaning with `--simulate`"),
        (["--gpus", "8"], "`--gpu` is not given"),
    ],
)
def test_what_contradicts_a_simulation_is_refused(capfd, arguments, said):
    assert run([*LINE, "--model", "llama-3.1-8b", *arguments]) == 2
    assert said in capfd.readouterr().err


def test_gpus_to_simulate_are_refused_in_a_run(capfd):
    assert run(["bench", "--compare", "dtensor,megatron", "--recipe", "smoke-tiny", "--gpus", "8"]) == 2
    assert "`--gpus` is for `--simulate`" in capfd.readouterr().err


@pytest.mark.parametrize("step", published.steps(), ids=lambda s: f"{s.script}-{s.backend}")
def test_each_published_step_is_predicted_within_the_interval_that_is_printed_half_again(step):
    """No constant is fitted on these rows; docs/plan.md has the figures."""
    own = published.predicted(step, constants())
    low, high = interval.of("rl step")
    ratio = own.step.total / step.seconds["step"]  # of throughput, measured over predicted
    assert low / 1.5 < ratio < high * 1.5


def test_a_published_steps_phases_are_within_its_total():
    for step in published.steps():
        named = sum(seconds for name, seconds in step.seconds.items() if name != "step")
        assert 0.9 * step.seconds["step"] < named <= step.seconds["step"]
        assert tuple(step.seconds) == published.PHASES


def test_the_interval_of_a_ratio_of_equal_predictions_is_wider_by_the_root_of_two():
    low, high = interval.ratio((0.8, 1.25), (0.8, 1.25))
    assert high == pytest.approx(math.exp(math.sqrt(2) * math.log(1.25)))
    assert low * high == pytest.approx(1.0)


@pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "rlctl").exists(), reason="the scripts would install into .venv")
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_reproduce_script_plans_jobs_that_fit(script, tmp_path):
    """`--dry-run` composes, plans and prints; what does not fit h100 would be missing from the line."""
    data = tmp_path / "problems.jsonl"
    data.write_text('{"problem": "1 + 1?", "expected_answer": "2"}\n')
    done = subprocess.run(
        [ROOT / "scripts" / "reproduce" / f"{script}.sh", "--dry-run"],
        env={**os.environ, "DATA": str(data)}, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    backends = [s.backend for s in published.steps() if s.script == script]
    assert len(re.findall(r"fits: .*\bh100\b", done.stdout)) == len(backends)
    assert done.stdout.count("layout ") == len(backends)
