"""Constants refined by bench reports; the reports are made here, with the seconds that changed constants predict."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlctl.bench import compare
from rlctl.cli.app import run
from rlctl.plan import calibrate, profile
from rlctl.plan.steptime import Constants, constants

TRUE = dataclasses.replace(constants(), matmul_16=0.7 * constants().matmul_16, tp_exposed=1.3 * constants().tp_exposed)


def side(layout: tuple[int, ...]) -> dict:
    return {
        "facts": {
            "model": "llama-3.1-8b", "model changes": {}, "precision": "bfloat16", "recompute": False, "processes": 8,
            "microbatch tokens": [8192, 8192], "microbatch sequences": None, "sequences of an update": 256,
            "layout (dp tp pp cp ep)": list(layout),
        },
        "timing": {"phases": {"old_logprobs": {"median": 1.0}, "forward_backward": {"median": 1.0}}},
    }  # fmt: skip


def report(truth: Constants = TRUE, **changed) -> dict:
    """A report of eight H100, whose phases take what `truth` predicts."""
    made = {
        "bench_schema": compare.SCHEMA, "machine": {"gpu_name": "NVIDIA H100 80GB HBM3"}, "where": "8 GPUs of one node",
        "rollouts_size": {"steps": 2, "sequences": 1024, "length_mean": 900.0, "length_max": 4000},
        "sides": {"dtensor": side((8, 1, 1, 1, 1)), "megatron": side((4, 2, 1, 1, 1))}, **changed,
    }  # fmt: skip
    if changed:
        return made
    seen = {o.what: o.predicted(truth) for o in calibrate.observations(made, "r")}
    for name, found in made["sides"].items():
        found["timing"]["phases"] = {
            "old_logprobs": {"median": seen[f"{name} old_logprobs"]},
            "forward_backward": {"median": 0.9 * seen[f"{name} training"]},
            "optimizer": {"median": 0.1 * seen[f"{name} training"]},
        }
    return made


def test_measurements_as_shipped_change_nothing():
    seen = calibrate.observations(report(constants()), "r")
    assert len(seen) == 4
    assert vars(calibrate.refine(seen, constants())) == pytest.approx(vars(constants()), rel=1e-6)


def test_refined_constants_explain_what_the_shipped_ones_do_not():
    seen = calibrate.observations(report(), "r")
    before = max(map(abs, calibrate.errors(seen, constants())))
    after = max(map(abs, calibrate.errors(seen, calibrate.refine(seen, constants()))))
    assert before > 0.2
    assert after < 0.35 * before


def test_one_report_moves_no_constant_further_than_the_prior_allows():
    refined = calibrate.refine(calibrate.observations(report(), "r"), constants())
    for name, value in vars(refined).items():
        ratio = value / getattr(constants(), name)
        assert 0.5 < ratio < 2.0
        assert name in calibrate.REFINED or ratio == 1.0


def test_a_profile_is_written_once_and_used_when_named(tmp_path, monkeypatch, capfd):
    file, out = tmp_path / "report.json", tmp_path / "h100.yaml"
    file.write_text(json.dumps(report()))
    line = ["plan", "--calibrate", str(file), "--write", str(out)]
    assert run(line) == 0
    assert "dtensor training" in capfd.readouterr().out
    assert run(line) == 2
    assert f"`{out}` exists" in capfd.readouterr().err
    assert profile.constants() == constants()
    job = ["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100", "--backend", "megatron", "--json"]
    run(job)
    shipped = json.loads(capfd.readouterr().out)
    monkeypatch.setenv("RLCTL_PLAN_PROFILE", str(out))
    assert profile.constants() != constants()
    run(job)
    own = json.loads(capfd.readouterr().out)
    assert own["profile"] == str(out) and shipped["profile"] is None
    assert own["best"][0]["seconds"]["training"] > 1.1 * shipped["best"][0]["seconds"]["training"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"where": "2 CPU processes with gloo, one thread each"}, "was measured by processes on a host"),
        ({"machine": {"gpu_name": "NVIDIA RTX 4090"}}, "was measured on `NVIDIA RTX 4090`"),
        ({"sides": {"dtensor": side((8, 1, 1, 1, 1)) | {"timing": None}}}, "has no timings"),
    ],
)
def test_a_report_that_says_nothing_of_known_gpus_is_refused(tmp_path, capfd, changed, said):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report(**changed)))
    assert run(["plan", "--calibrate", str(file), "--write", str(tmp_path / "p.yaml")]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.parametrize(
    "content", ["", "[", "rlctl_plan_profile: 2", "rlctl_plan_profile: 1\nconstants: {matmul_16: 0.5}"]
)
def test_what_is_no_profile_is_refused(tmp_path, monkeypatch, capfd, content):
    file = tmp_path / "p.yaml"
    file.write_text(content)
    monkeypatch.setenv("RLCTL_PLAN_PROFILE", str(file))
    assert run(["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100"]) == 2
    assert str(file) in capfd.readouterr().err
