"""A run that is stopped by a signal, a deadline, a full disk or a kill leaves what the next start goes on from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.recipes.test_resume import assert_same_run, command, metrics, run

pytestmark = pytest.mark.slow


def start(run_dir, *arguments):
    return subprocess.Popen(
        command(run_dir, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=run_dir.parent
    )


def wait_for_steps(run_dir: Path, steps: int) -> None:
    end = time.monotonic() + 300
    while (
        not (run_dir / "metrics.jsonl").is_file() or len((run_dir / "metrics.jsonl").read_text().splitlines()) < steps
    ):
        assert time.monotonic() < end, "the run did not get that far"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_it_and_says_how_to_go_on(number, tmp_path):
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    process = start(stopped, "grpo.max_num_steps=1000", "checkpointing.save_period=1000")
    wait_for_steps(stopped, 3)
    process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    steps = len(metrics(stopped))
    assert [p.name for p in (stopped / "checkpoints").iterdir()] == [f"step_{steps:06d}"]
    assert f"stopped after step {steps} of " in told
    assert f"--run-dir {stopped} --resume auto" in told
    last = f"grpo.max_num_steps={steps + 2}"
    assert run(stopped, last, "--resume", "auto")[0] == 0
    assert run(straight, last)[0] == 0
    assert_same_run(straight, stopped)


def test_a_run_saves_and_stops_before_the_time_it_must_save_by(tmp_path):
    began = time.monotonic()
    status, told = run(
        tmp_path / "run",
        "grpo.max_num_steps=100000",
        "grpo.max_num_epochs=10000",
        "checkpointing.checkpoint_must_save_by=0:00:00:30",
    )
    assert status == 130, told
    assert time.monotonic() - began < 120
    steps = len(metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{steps:06d}" / "manifest.json").is_file()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, on which two checkpoints have no room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here, which takes the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(small_disk):
    run_dir = small_disk / "run"
    job = ("checkpointing.save_period=2", "logger.tensorboard=false", "grpo.max_num_steps=6", "--resume", "auto")
    status, told = run(run_dir, *job)
    assert status == 3, told
    assert re.search(r"error: cannot write `\S*/rank_\d.pt`: No space left on device: it needs [\d,]+ bytes", told)
    assert told.count("hint:") == 1 and "Traceback" not in told
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_000002"]
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    status, told = run(run_dir, *job)
    assert status == 0, told
    assert "resuming after step 2" in told


def test_a_killed_launcher_leaves_no_process_and_a_second_start_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    process = start(run_dir, "grpo.max_num_steps=8", "checkpointing.save_period=2")
    wait_for_steps(run_dir, 5)
    process.kill()
    status, told = run(run_dir, "grpo.max_num_steps=8", "checkpointing.save_period=2", "--resume", "auto")
    assert status == 0, told
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 9))
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if os.fsencode(run_dir) in _text(p)]


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""
