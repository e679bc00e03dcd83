"""One rank of a run: `python -m rlctl.launch.worker RUN_DIR`, under torchrun or whatever sets RANK and WORLD_SIZE.

1. Everything that libraries print goes to logs/rank_N.log; progress lines go to the console descriptor, from rank 0.
2. An error is left in logs/error_rank_N.json, with the phase it happened in, for the launcher to tell; without a
   launcher of ours, the first rank that fails tells it itself.
3. A stop that was asked for (stop.py) ends with status 130, after a save.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from rlctl.errors import INTERRUPTED, RlctlError
from rlctl.launch import failure, heartbeat, run_directory
from rlctl.launch.stop import Stop, deadline_seconds

CONSOLE = "RLCTL_CONSOLE_FD"
EVENTS = "RLCTL_CONSOLE_EVENTS"
_PR_SET_PDEATHSIG = 1


def main(run_dir: Path, *, supervised: bool = False) -> int:
    """Run this rank to the end; returns its exit status.

    Args:
        run_dir: made by run_directory.create.
        supervised: whether a launcher of ours, other than the local one, tells this rank's error.
    """
    rank, local = int(os.environ["RANK"]), CONSOLE in os.environ
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    console = _take_output(logs / f"rank_{rank}.log")
    if local:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # torchrun does not do it for its workers
    stop = Stop()
    stop.listen(local=local)
    phase = "start"
    log: Any = None
    beat = heartbeat.Beat(logs, rank)
    try:
        if rank == 0:
            run_directory.hold(run_dir)
        # heavy imports, after the output is taken: what they print belongs in the log
        from rlctl import device
        from rlctl.log import RunLog
        from rlctl.recipe.compose import as_values, load_resolved
        from rlctl.sinks.chosen import sinks

        device.prepare_process()
        recipe = load_resolved(run_dir / run_directory.RECIPE)
        device.init_process_group(recipe.cluster.collective_timeout_seconds)
        recipe = load_resolved(run_dir / run_directory.RECIPE)  # rank 0 is here: what it wrote for this start is there
        stop.must_save_by = deadline_seconds(recipe.checkpointing.checkpoint_must_save_by)
        log = RunLog(
            run_dir, writes=rank == 0, tensorboard=recipe.logger.tensorboard, console=console, on_phase=beat.says,
            sinks=sinks(recipe.logger, run_dir, recipe=as_values(recipe)), events=EVENTS in os.environ,
            ranks=int(os.environ["WORLD_SIZE"]),
        )  # fmt: skip
        finished = _job(recipe, run_dir, log, stop)
        sinks_ended = log.close()
        device.destroy_process_group()
        _leave_unless(sinks_ended, 0 if finished else INTERRUPTED)
    except BaseException as error:
        phase = phase if log is None else log.phase_name
        # after a request to stop, a rank that left breaks what others wait for; an error of the user's is still one
        stopped = isinstance(error, KeyboardInterrupt) or (stop.requested and not isinstance(error, RlctlError))
        tells = None if local or supervised else console
        return _failed(error, logs, rank=rank, phase=phase, stopped=stopped, tells=tells)
    return 0 if finished else INTERRUPTED


def _job(recipe: Any, run_dir: Path, log: Any, stop: Stop) -> bool:
    """Do what the directory asks for; returns whether it is done."""
    from rlctl.bench import measure  # heavy, see `main`
    from rlctl.bench.job import JOB_FILE
    from rlctl.eval import EXPORT_FILE, SETTINGS_FILE, evaluate
    from rlctl.export import of_checkpoint
    from rlctl.report import page as report
    from rlctl.report.run import Run
    from rlctl.trainer import train

    if (run_dir / SETTINGS_FILE).is_file():
        evaluate(recipe, run_dir, log)
    elif (run_dir / EXPORT_FILE).is_file():
        of_checkpoint(recipe, run_dir, log)
    elif (run_dir / JOB_FILE).is_file():
        measure.run(recipe, run_dir, log)
    else:
        finished = train(recipe, run_dir, log, stop=stop)
        if int(os.environ["RANK"]) == 0:
            report.write(Run(run_dir, ended=True))
        return finished
    return True


def _failed(error: BaseException, logs: Path, *, rank: int, phase: str, stopped: bool, tells: TextIO | None) -> int:
    """Leave what went wrong; returns the exit status.

    Args:
        error: what was raised.
        logs: of the run.
        rank: this one.
        phase: what it was doing.
        stopped: it is how a stop that was asked for ends.
        tells: where the first rank that fails tells it; None where a launcher does.
    """
    traceback.print_exception(error)
    sys.stderr.flush()
    if stopped:
        return INTERRUPTED
    first = failure.is_first(logs)  # what follows from a first error is noise
    status = failure.leave(error, logs, rank=rank, phase=phase)
    if tells is not None and first:
        problem = failure.told(logs / f"error_rank_{rank}.json")
        print(f"error: {problem.message}\nhint: {problem.hint}", file=tells, flush=True)
    return status


def _leave_unless(sinks_ended: bool, status: int) -> None:
    """End here when a sink hangs: it would hang an exit handler too."""
    if not sinks_ended:
        sys.stderr.flush()
        os._exit(status)


def _take_output(path: Path) -> TextIO:
    """Point descriptors 1 and 2 at the log; return the console."""
    console = os.fdopen(os.dup(int(os.environ[CONSOLE]) if CONSOLE in os.environ else 2), "w")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return console


def leave(status: int) -> None:
    """End this process; a rank that failed must not wait for the others in an exit handler."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
