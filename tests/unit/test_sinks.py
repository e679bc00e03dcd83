"""W&B and MLflow, the real packages without network: what they stored equals what was logged, after a resume too."""

from __future__ import annotations

import json
import struct
import threading

import pytest

from rlctl import config
from rlctl.errors import RlctlError
from rlctl.log import RunLog
from rlctl.sinks import base, chosen, mlflow, wandb

RECIPE = {"grpo": {"max_num_steps": 3}, "policy": {"model_name": "m"}}


def run(folder, sink, *, done, rewards):
    """A start that goes on after `done` steps."""
    log = RunLog(folder, writes=True, tensorboard=False, console=None, sinks=(sink,))
    log.begin_steps(done=done)
    for step, reward in enumerate(rewards, start=done + 1):
        log.record(step, {"rollout/reward": reward, "train/loss": 0.5})
    assert log.close()


def records(file):
    """The records of a .wandb file: LevelDB's log format, with a header of 7 bytes (core/pkg/leveldb/record.go)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield Record.FromString(part)
            part = b""


@pytest.mark.slow
def test_wandb_has_every_step_once_in_one_run_with_the_recipe(tmp_path, monkeypatch):
    import wandb as package

    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "logs").mkdir()
    for done, rewards in ((0, (0.1, 0.2)), (1, (0.2, 0.3))):
        run(
            tmp_path, wandb.Sink(tmp_path, options=config.Wandb(project="p"), recipe=RECIPE), done=done, rewards=rewards
        )
    package.teardown()  # its service writes the files, and a little after `finish` returned
    found = [r for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")) for r in records(file)]
    runs = [r.run for r in found if r.HasField("run")]
    assert {(r.project, r.display_name) for r in runs} == {("p", tmp_path.name)}
    assert len({r.run_id for r in runs}) == 1
    settings = {c.key: json.loads(c.value_json) for c in runs[0].config.update}
    assert settings["grpo"] == {"max_num_steps": 3}
    history = [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
        for r in found
        if r.HasField("history")
    ]
    assert [(h["_step"], h["rollout/reward"]) for h in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_mlflow_has_every_step_once_in_one_run_with_the_recipe(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "logs").mkdir()
    options = config.Mlflow(experiment_name="e", run_name="r")
    for done, rewards in ((0, (0.1, 0.2)), (1, (0.2, 0.3))):
        run(tmp_path, mlflow.Sink(tmp_path, options=options, recipe=RECIPE), done=done, rewards=rewards)
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (found.info.run_name, found.info.status) == ("r", "FINISHED")
    assert found.data.params == {"grpo.max_num_steps": "3", "policy.model_name": "m"}
    history = client.get_metric_history(found.info.run_id, "rollout/reward")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.1), (2, 0.2), (3, 0.3)]


class Broken:
    """Fails at its second step, or hangs until it is let go."""

    name = "Broken"

    def __init__(self, hang=None):
        self.seen, self._hang = [], hang

    def open(self, done):
        self.seen.append(("open", done))

    def write(self, step, metrics):
        if self._hang is not None:
            self._hang.wait()
        if step == 2:
            raise OSError("no space left")
        self.seen.append(step)

    def close(self):
        self.seen.append("close")


def test_a_sink_that_fails_is_told_once_and_the_run_goes_on(tmp_path, capfd):
    sink, warnings = Broken(), []
    safe = base.Background(sink, done=4, warn=warnings.append)
    for step in range(1, 5):
        safe.write(step, {})
    assert safe.close()
    assert sink.seen == [("open", 4), 1]
    assert warnings == ["Broken gets nothing more: OSError: no space left; metrics.jsonl has all steps"]


def test_a_sink_that_hangs_holds_up_neither_the_steps_nor_the_end():
    let_go, warnings = threading.Event(), []
    safe = base.Background(Broken(let_go), done=0, warn=warnings.append, close_seconds=0.1)
    for step in range(base.QUEUE_LINES + 10):
        safe.write(step, {})
    assert not safe.close()
    let_go.set()
    assert len(warnings) == 1
    assert "steps behind" in warnings[0]


def test_options_of_a_sink_that_is_off_are_refused():
    with pytest.raises(RlctlError, match="logger.wandb_enabled. is false"):
        chosen.check(config.Logger(wandb=config.Wandb(project="mine")))
    chosen.check(config.Logger(wandb_enabled=True, wandb=config.Wandb(project="mine")))


def test_a_package_that_is_missing_is_told_before_the_run(monkeypatch):
    monkeypatch.setattr(chosen.importlib.util, "find_spec", lambda name: None)
    problem = chosen.missing_package(config.Logger(mlflow_enabled=True))
    assert problem is not None
    assert problem.exit_status == 3
    assert "pip install mlflow-skinny" in problem.hint
    assert chosen.missing_package(config.Logger()) is None
