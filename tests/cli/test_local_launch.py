"""launch/local.py against real torchrun processes; the workers are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
START = """
import sys
from pathlib import Path
from rlctl.errors import RlctlError
from rlctl.launch import local
try:
    sys.exit(local.run(Path(sys.argv[1]), processes=2, has_gpus=False, worker="tests.cli.worker", stall_seconds=6.0))
except RlctlError as error:
    print(error.message, "|", error.hint, "|", error.exit_status)
    sys.exit(error.exit_status)
"""


def start(run_dir: Path, behaviour: list[str]) -> subprocess.Popen[str]:
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "behaviour.json").write_text(json.dumps(behaviour))
    return subprocess.Popen(
        [sys.executable, "-c", START, str(run_dir)], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def started(run_dir: Path) -> list[int]:
    """Wait until both workers run; their process ids."""
    files = [run_dir / f"pid_{rank}" for rank in range(2)]
    end = time.monotonic() + 120
    while not all(f.is_file() and f.read_text() for f in files):
        assert time.monotonic() < end
        time.sleep(0.1)
    return [int(f.read_text()) for f in files]


def all_gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_progress_reaches_the_console_and_library_output_does_not(tmp_path: Path) -> None:
    process = start(tmp_path / "run", ["console", "console"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert sorted(err.splitlines()) == ["line of rank 0", "line of rank 1"]
    assert out == ""
    assert (tmp_path / "run" / "logs" / "launcher.log").read_text().count("noise of a library") == 2


def test_a_worker_error_ends_all_with_its_own_message_and_status(tmp_path: Path) -> None:
    process = start(tmp_path / "run", ["wait", "fail"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert out.startswith("the data ended | add rows (log: ") and "rank_1.log" in out
    assert "Traceback" not in out + err
    assert all_gone([int((tmp_path / "run" / "pid_0").read_text())])


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    process = start(tmp_path / "run", ["wait", "killed"])
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out.startswith("rank 1 was killed by SIGKILL in phase `start` | ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes_with_130(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path / "run", ["wait", "wait"])
    workers = started(tmp_path / "run")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert all_gone(workers)


def test_a_second_signal_kills_what_does_not_stop(tmp_path: Path) -> None:
    process = start(tmp_path / "run", ["stubborn", "stubborn"])
    workers = started(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert all_gone(workers)


def test_workers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    process = start(tmp_path / "run", ["wait", "wait"])
    workers = started(tmp_path / "run")
    process.kill()
    process.wait()
    assert all_gone(workers)


def test_a_stopped_worker_ends_the_run_and_is_named_with_its_phase(tmp_path: Path) -> None:
    process = start(tmp_path / "run", ["beat", "beat"])
    workers = started(tmp_path / "run")
    time.sleep(3)
    os.kill(workers[1], signal.SIGSTOP)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.startswith("rank 1 shows no sign of life since ") and "in phase `train` (rank 0 in `train`)" in out
    assert all_gone(workers)
    assert (
        "in main" in (tmp_path / "run" / "logs" / "launcher.log").read_text()
    )  # rank 0's stack, where its output goes
