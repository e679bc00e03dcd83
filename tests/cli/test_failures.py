"""One rank that raises, is killed or is stopped, in any phase, ends the run with one message and leaves no process.

scripts/benchmarks/failures.sh does all phases and actions with these functions; here is a cover of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STALL_SECONDS = 6.0
PHASES = ("start", "checks", "generate", "reward", "ref_logprobs", "train", "loss", "weight_sync", "validation", "save")
TOLD_AS = {"reward": "generate", "loss": "train"}  # the phase that they are part of
SAYS = {
    "raise": "failed in phase `{}`: RuntimeError: planted",
    "KILL": "was killed by SIGKILL in phase `{}`",
    "STOP": "shows no sign of life since 6 s, in phase `{}`",
}


def outcome(run_dir: Path, phase: str, action: str, rank: int = 1) -> dict:
    """Run into the failure; what was said, and the seconds from the rank's failure to the end of all."""
    command = [
        sys.executable, "-m", "tests.cli.failing_launch", "train", "grpo", "--recipe", "smoke-tiny", "--backend",
        "dtensor", "--run-dir", str(run_dir), "grpo.max_num_steps=4", "grpo.val_period=1", "grpo.max_val_samples=4",
        "checkpointing.save_period=2", "loss_fn.reference_policy_kl_penalty=0.1", "logger.tensorboard=false",
        f"cluster.stall_timeout_seconds={STALL_SECONDS}", *([] if phase == "checks" else ["--no-checks"]),
    ]  # fmt: skip
    environment = os.environ | {"RLCTL_TEST_FAILS": f"{rank} {phase} {action}"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=run_dir.parent)
    seconds = None
    failed = None
    while process.poll() is None:
        time.sleep(0.1)
        if failed is None and _has_failed(run_dir, rank, action):
            failed = time.monotonic()
        if failed is not None:
            seconds = time.monotonic() - failed
    return {
        "status": process.returncode,
        "said": process.stderr.read(),
        "seconds": seconds or 0.0,
        "left": [p for p in _workers(run_dir) if _state(p) not in ("Z", "")],
        "whole": [p.parent.name for p in run_dir.glob("checkpoints/step_*/manifest.json") if p.parent.suffix == ""],
    }


def _workers(run_dir: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(run_dir) in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _has_failed(run_dir: Path, rank: int, action: str) -> bool:
    if action == "raise":
        return (run_dir / "logs" / f"error_rank_{rank}.json").is_file()
    beat = run_dir / "logs" / f"heartbeat_rank_{rank}.json"
    return beat.is_file() and _state(json.loads(beat.read_text())["pid"]) in ("", "Z", "T")


def judge(found: dict, phase: str, action: str, rank: int = 1) -> list[str]:
    """What is wrong with an outcome; nothing if all is as it must be."""
    wrong = []
    told = [line for line in found["said"].splitlines() if line.startswith("error:")]
    if len(told) != 1:
        wrong.append(f"{len(told)} messages")
    elif f"rank {rank} {SAYS[action]}" not in told[0].replace(f"`{TOLD_AS.get(phase, phase)}`", "`{}`"):
        wrong.append(f"message is: {told[0]}")
    if "Traceback" in found["said"]:
        wrong.append("a traceback")
    if found["status"] != 1:
        wrong.append(f"status {found['status']}")
    if found["left"]:
        wrong.append(f"processes are left: {found['left']}")
    if found["seconds"] > 30 + (STALL_SECONDS if action == "STOP" else 0):
        wrong.append(f"it took {found['seconds']:.0f} s")
    if phase == "save" and action != "STOP" and found["whole"]:  # one that was only stopped may have been done
        wrong.append(f"a checkpoint of a save that failed: {found['whole']}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "action"),
    [("start", "raise"), ("reward", "KILL"), ("loss", "STOP"), ("save", "KILL")],
)
def test_a_failure_of_one_rank_is_told_once_and_ends_all(phase, action, tmp_path):
    found = outcome(tmp_path / "run", phase, action)
    assert judge(found, phase, action) == [], found["said"]
    if action == "STOP":
        assert f"in phase `{TOLD_AS[phase]}` (rank 0 in `" in found["said"]
        assert found["said"].count("innermost call first") == 2  # the stopped rank's own stack too
        assert "in weighted_loss" in found["said"] or "failing_worker.py" in found["said"]
