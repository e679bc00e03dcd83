"""One rank of a run: `python -m rlctl.launch.worker RUN_DIR`, under torchrun or whatever sets RANK and WORLD_SIZE.

1. Everything that libraries print goes to logs/rank_N.log; progress lines go to the console descriptor, from rank 0.
2. An error is left in logs/error_rank_N.json, with the phase it happened in, for the launcher to tell.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from rlctl.errors import INTERRUPTED, RlctlError

CONSOLE = "RLCTL_CONSOLE_FD"
COLLECTIVE_TIMEOUT_SECONDS = 1800.0  # one rank's generation may end long after another's


def main(run_dir: Path) -> int:
    """Run this rank to the end; returns its exit status."""
    rank = int(os.environ["RANK"])
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    console = _take_output(logs / f"rank_{rank}.log")
    signal.signal(signal.SIGTERM, _stop)
    phase = "start"
    log: Any = None
    try:
        # heavy imports, after the output is taken: what they print belongs in the log
        from rlctl import device
        from rlctl.log import RunLog
        from rlctl.recipe.compose import load_resolved

        recipe = load_resolved(run_dir / "recipe.yaml")
        device.prepare_process()
        log = RunLog(run_dir, writes=rank == 0, tensorboard=recipe.logger.tensorboard, console=console)
        from rlctl.eval import SETTINGS_FILE, evaluate
        from rlctl.trainer import train

        device.init_process_group(COLLECTIVE_TIMEOUT_SECONDS)
        work = evaluate if (run_dir / SETTINGS_FILE).is_file() else train
        work(recipe, run_dir, log)
        log.close()
        device.destroy_process_group()
    except BaseException as error:
        phase = phase if log is None else log.phase_name
        return _report(error, logs / f"error_rank_{rank}.json", phase)
    return 0


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _take_output(path: Path) -> TextIO:
    """Point descriptors 1 and 2 at the log; return the console."""
    console = os.fdopen(os.dup(int(os.environ[CONSOLE]) if CONSOLE in os.environ else 2), "w")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return console


def _report(error: BaseException, path: Path, phase: str) -> int:
    """Leave the error for the launcher; returns the exit status."""
    traceback.print_exception(error)
    sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, RlctlError):
        message, hint, status = error.message, error.hint, error.exit_status
    else:
        rank = os.environ["RANK"]
        message = f"rank {rank} failed in phase `{phase}`: {type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        hint, status = "", 1
    report = {"error": message, "hint": hint, "exit_status": status, "phase": phase, "traceback": _text(error)}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(path)
    return status


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)  # a rank that failed must not wait for the others in an exit handler
