"""What `--resume` accepts and refuses, judged before any process starts."""

from __future__ import annotations

import fcntl
import json
import shlex
from pathlib import Path

import pytest
import xxhash
import yaml

from rlctl import device
from rlctl.checkpoint.identity import is_free
from rlctl.cli.app import run
from rlctl.device import Hardware
from rlctl.launch import local, run_directory, task_check

HERE = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
JOB = "train grpo --recipe smoke-tiny --run-dir out grpo.max_num_steps=9"


@pytest.fixture(autouse=True)
def started(tmp_path, monkeypatch):
    """Jobs that were started, by run directory; none really runs."""
    jobs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(device, "probe", lambda: HERE)
    monkeypatch.setattr(local, "run", lambda run_dir, **others: jobs.append(run_dir) or 0)
    monkeypatch.setattr(task_check, "check_task", lambda recipe: None)
    return jobs


def told(line, capsys):
    status = run(shlex.split(line))
    out, err = capsys.readouterr()
    return status, out + err


def checkpoint(step, *, layout="dp2 tp1", epoch_steps=128, reshardable=False):
    """A checkpoint as far as the launcher looks at it."""
    folder = Path("out") / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    text = json.dumps({"step": step, "backend": "megatron", "layout": layout, "epoch_steps": epoch_steps})
    (folder / "trainer.json").write_text(text)
    entry = {"bytes": len(text), "xxh3_128": xxhash.xxh3_128(text.encode()).hexdigest()}
    entries = {"trainer.json": entry} | ({"policy/whole/main-00000.safetensors": {}} if reshardable else {})
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": entries}))


def test_a_directory_with_a_run_is_taken_unless_resume_is_said(started, capsys):
    assert run(shlex.split(JOB)) == 0
    status, text = told(JOB, capsys)
    assert status == 2 and "is not empty" in text and "--resume auto" in text
    assert run(shlex.split(f"{JOB} --resume auto")) == 0
    assert len(started) == 2


@pytest.mark.parametrize("line", [JOB, f"{JOB} --run-dir none"])
def test_must_refuses_what_has_no_checkpoint(line, started, capsys):
    run(shlex.split(JOB))
    status, text = told(f"{line} --resume must", capsys)
    assert status == 2 and ("no complete checkpoint" in text or "no run directory" in text)
    assert len(started) == 1


def test_auto_starts_where_nothing_is(started):
    assert run(shlex.split(f"{JOB} --resume auto")) == 0
    assert started == [Path("out")]


def test_auto_takes_what_a_start_that_was_killed_left(started):
    (Path("out") / "logs").mkdir(parents=True)
    (Path("out") / "command.txt").write_text("rlctl\n")
    assert run(shlex.split(f"{JOB} --resume auto")) == 0
    assert started


def test_auto_refuses_a_directory_of_other_things(started, capsys):
    Path("out").mkdir()
    (Path("out") / "thesis.tex").touch()
    status, text = told(f"{JOB} --resume auto", capsys)
    assert status == 2 and "is not empty" in text
    assert not started


def test_resume_without_a_directory_is_refused(capsys):
    status, text = told("train grpo --recipe smoke-tiny --resume auto", capsys)
    assert status == 2 and "needs `--run-dir`" in text


def test_another_setting_is_refused_by_key_with_both_values(started, capsys):
    run(shlex.split(JOB))
    checkpoint(3)
    status, text = told(f"{JOB} --resume auto grpo.seed=7 policy.optimizer.lr=1e-4", capsys)
    assert status == 2
    assert "`grpo.seed` was 42, is 7; `policy.optimizer.lr` was 0.003, is 0.0001" in text
    assert len(started) == 1
    assert yaml.safe_load((Path("out") / "recipe.yaml").read_text())["grpo"]["seed"] == 42


def test_what_may_change_is_taken_and_recorded(started):
    run(shlex.split(JOB))
    checkpoint(3)
    free = "grpo.max_num_steps=12 logger.tensorboard=false checkpointing.save_period=5 grpo.val_period=4"
    line = f"{JOB} --resume must".replace("grpo.max_num_steps=9", free)
    assert run(shlex.split(line)) == 0
    assert len(started) == 2
    assert yaml.safe_load((Path("out") / "recipe.yaml").read_text())["grpo"]["max_num_steps"] == 12
    assert len((Path("out") / "command.txt").read_text().splitlines()) == 2


def test_keys_that_make_the_numbers_are_not_free():
    assert not [k for k in ("grpo.seed", "policy.optimizer.lr", "data.shuffle", "grpo.max_num_epochs") if is_free(k)]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("--procs 1", "was saved as dp2 tp1, this job is dp1 tp1"),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", "was saved as dp2 tp1, this job is dp1 tp2+sp"),
        ("--backend dtensor", "was saved as megatron dp2 tp1, this job is dtensor dp2 tp1"),
    ],
)
def test_another_layout_or_backend_is_refused_unless_the_checkpoint_is_reshardable(change, differs, started, capsys):
    run(shlex.split(JOB))
    checkpoint(3)
    status, text = told(f"{JOB} --resume auto {change}", capsys)
    assert status == 3 and differs in text and "checkpointing.optimizer_format=reshardable" in text
    assert len(started) == 1
    checkpoint(4, reshardable=True)
    assert run(shlex.split(f"{JOB} --resume auto {change}")) == 0
    assert len(started) == 2


@pytest.mark.parametrize(("step", "epoch_steps"), [(9, 128), (4, 4)])
def test_a_finished_run_says_so(step, epoch_steps, started, capsys):
    run(shlex.split(JOB))
    checkpoint(step, epoch_steps=epoch_steps)
    (Path("out") / "hf").mkdir()
    status, text = told(f"{JOB} --resume auto", capsys)
    assert status == 0 and f"is finished: {step} steps" in text
    assert len(started) == 1


def test_a_run_without_its_export_is_not_finished(started):
    run(shlex.split(JOB))
    checkpoint(9)
    assert run(shlex.split(f"{JOB} --resume auto")) == 0
    assert len(started) == 2


def test_a_directory_in_use_is_refused(monkeypatch, capsys):
    run(shlex.split(JOB))
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0.0)
    with (Path("out") / run_directory.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, text = told(f"{JOB} --resume auto", capsys)
    assert status == 1 and "is in use" in text


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("checkpointing.checkpoint_must_save_by=3h", "is no DD:HH:MM:SS"),
        ("checkpointing.keep_top_k=0", "must be at least 1"),
    ],
)
def test_settings_of_checkpoints_are_judged(setting, complaint, capsys):
    status, text = told(f"{JOB} {setting}", capsys)
    assert status == 2
    assert complaint in text


def test_a_damaged_counter_file_is_refused_by_name(capsys):
    run(shlex.split(JOB))
    checkpoint(3)
    (Path("out") / "checkpoints" / "step_000003" / "trainer.json").write_text("{}")
    status, text = told(f"{JOB} --resume auto", capsys)
    assert status == 4 and "trainer.json` is not what its manifest says" in text
