"""The run log: one JSON line a step, machine-dependent figures apart, and nothing lost to NaN."""

from __future__ import annotations

import io
import json
import math

import pytest

from rlctl.log import RunLog

STEP = {
    "rollout/reward": 0.5,
    "rollout/invalid_share": 0.25,
    "rollout/response_length": 9.0,
    "mismatch/token_mult_prob_error": 1.0,
    "train/loss": 0.1,
}


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_nan_is_null_with_a_warning_that_names_it(tmp_path):
    console = io.StringIO()
    log = RunLog(tmp_path, writes=True, tensorboard=False, console=console)
    log.step(1, STEP | {"train/loss": math.nan}, total=3)
    log.close()
    assert read(tmp_path)[0]["train/loss"] is None
    assert "warning: step 1: train/loss is not finite (nan)" in console.getvalue()


def test_phases_of_one_name_add_up_within_a_step_and_start_anew(tmp_path):
    log = RunLog(tmp_path, writes=True, tensorboard=False, console=None)
    for _ in range(2):
        with log.phase("train"):
            pass
    log.step(1, STEP, total=2)
    log.step(2, STEP, total=2)
    log.close()
    first, second = read(tmp_path)
    assert first["step"] == 1
    assert first["time/train_seconds"] >= 0
    assert first["time/step_seconds"] >= first["time/train_seconds"]
    assert "time/train_seconds" not in second


def test_an_error_leaves_the_phase_that_it_happened_in(tmp_path):
    log = RunLog(tmp_path, writes=False, tensorboard=False, console=None)
    with pytest.raises(ValueError, match="boom"), log.phase("reward"):
        raise ValueError("boom")
    assert log.phase_name == "reward"
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_shows_a_step_that_was_done_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, rewards in ((0, (0.1, 0.2, 0.3)), (1, (0.9, 0.8))):
        log = RunLog(tmp_path, writes=True, tensorboard=True, console=None)
        log.begin_steps(done=done)
        for step, reward in enumerate(rewards, start=done + 1):
            log.step(step, STEP | {"rollout/reward": reward}, total=3)
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, pytest.approx(event.value)) for event in events.Scalars("rollout/reward")]
    assert shown == [(1, 0.1), (2, 0.9), (3, 0.8)]


def test_tokens_per_second_are_of_the_step_and_of_each_rank(tmp_path):
    log = RunLog(tmp_path, writes=True, tensorboard=False, console=None, ranks=4)
    log.step(1, STEP | {"train/tokens": 1000.0}, total=1)
    log.close()
    (line,) = read(tmp_path)
    assert line["perf/tokens_per_second"] == pytest.approx(1000 / line["time/step_seconds"])
    assert line["perf/tokens_per_second_per_rank"] == pytest.approx(250 / line["time/step_seconds"])


def test_rollouts_without_a_vote_are_on_the_line_and_agreement_is_zero(tmp_path):
    console = io.StringIO()
    log = RunLog(tmp_path, writes=True, tensorboard=False, console=console)
    log.step(1, STEP, total=3)
    for _ in range(2):
        log.warn_once("invalid", "a rollout has no vote")
    log.close()
    assert "invalid 25%  mismatch 0.0000" in console.getvalue()
    assert console.getvalue().count("warning: a rollout has no vote") == 1
