"""What a rank that failed leaves in logs/error_rank_N.json, and how the launcher tells it."""

from __future__ import annotations

import errno
import json
import os
import traceback
from pathlib import Path

from rlctl.errors import ENVIRONMENT, RlctlError

_TOLD = "error_told"


def leave(error: BaseException, logs: Path, *, rank: int, phase: str) -> int:
    """Write a rank's error for the launcher; returns the exit status.

    Args:
        error: of the user, of the machine, or of ours.
        logs: of the run.
        rank: this one.
        phase: what it was doing.
    """
    node = os.environ.get("SLURMD_NODENAME", "")
    who = f"rank {rank}" + (f" on node {node}" if node else "")
    if isinstance(error, RlctlError):
        message, hint, status = error.message, error.hint, error.exit_status
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"cannot write `{error.filename or logs.parent}`: {error.strerror}"
        hint, status = "free space there, then go on with `--resume auto`", ENVIRONMENT
    else:
        message = f"{who} failed in phase `{phase}`: {type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        hint, status = "", 1
    text = "".join(traceback.format_exception(error))
    report = {"error": message, "hint": hint, "exit_status": status, "phase": phase, "traceback": text}
    path = logs / f"error_rank_{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(path)
    return status


def is_first(logs: Path) -> bool:
    """Whether no rank asked this before, in this start of the run; ranks that fail together ask at the same time."""
    try:
        (logs / _TOLD).touch(exist_ok=False)
    except OSError:
        return False
    return True


def clear(logs: Path) -> None:
    """Remove what the ranks of an earlier start left."""
    for report in [*logs.glob("error_rank_*.json"), logs / _TOLD]:
        report.unlink(missing_ok=True)


def reports(run_dir: Path) -> list[Path]:
    """The ranks' own errors, the first one first."""
    return sorted((run_dir / "logs").glob("error_rank_*.json"), key=lambda f: (f.stat().st_mtime_ns, f.name))


def told(report: Path) -> RlctlError:
    """A rank's error as the launcher tells it, with its log in the hint."""
    said = json.loads(report.read_text())
    log = report.parent / f"rank_{report.stem.removeprefix('error_rank_')}.log"
    hint = f"{said['hint']} (log: {log})" if said["hint"] else f"see {log}"
    return RlctlError(said["error"], hint, exit_status=int(said["exit_status"]))
