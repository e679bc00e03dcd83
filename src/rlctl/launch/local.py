"""One node: torchrun with a worker for each process, and one message when any of them fails.

1. torchrun's own output goes to logs/launcher.log; workers write to logs/rank_N.log.
2. Progress lines reach the console through a file descriptor that workers inherit as number 0: torchrun closes all
   others above 2, and its own 1 and 2 are the log.
3. The first SIGINT, SIGTERM or SIGHUP (a closed terminal) reaches each worker as one SIGINT, so that they can stop in
   order; the second one kills.
4. A worker that shows no sign of life ends the run (heartbeat.py).
5. Whatever happens, no process is left: torchrun dies with this process, workers with torchrun.

It does not know what workers do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.console import Screen
from rlctl.errors import INTERRUPTED, RlctlError
from rlctl.launch import failure
from rlctl.launch.heartbeat import BEAT_SECONDS, STALL_SECONDS, Watch, phase_of

CONSOLE = "RLCTL_CONSOLE_FD"
EVENTS = "RLCTL_CONSOLE_EVENTS"
SHUTDOWN_SECONDS = 1800  # from the first signal until torchrun kills: a step may end and save
_PR_SET_PDEATHSIG = 1


def run(
    run_dir: Path,
    *,
    processes: int,
    has_gpus: bool,
    worker: str = "rlctl.launch.worker",
    stall_seconds: float = STALL_SECONDS,
    live: bool = False,
) -> int:
    """Train in `processes` worker processes on this node.

    Args:
        run_dir: made by run_directory.create.
        processes: workers.
        has_gpus: whether workers compute on GPUs; else each has one thread, for they share the cores.
        worker: the module that each process runs.
        stall_seconds: a worker without a sign of life for so long ends the run.
        live: whether to draw a live display on standard error, a terminal.

    Returns:
        0, or 130 when interrupted, or when the workers ended early in order.

    Raises:
        RlctlError: a worker failed; its own message and exit status, with its log in the hint.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(processes), "--shutdown-timeout", str(SHUTDOWN_SECONDS),
        "-m", worker, str(run_dir),
    ]  # fmt: skip
    kernel_kills = _kernel_kills()
    environment = os.environ | {CONSOLE: "0"} | ({} if has_gpus else {"OMP_NUM_THREADS": "1"})
    environment |= {EVENTS: "1"} if live else {}
    screen = Screen(sys.stderr) if live else None
    with (run_dir / "logs" / "launcher.log").open("wb") as log, console(screen) as progress:
        process = subprocess.Popen(
            command, env=environment, stdin=progress, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  this process has one thread
        )  # fmt: skip
        watch = Watch(run_dir / "logs", processes=processes, stall_seconds=stall_seconds)
        signals = _wait(process, watch, screen)
    if process.returncode == 0:
        return 0
    if signals > 1 or (signals and not failure.reports(run_dir)):
        return INTERRUPTED
    if process.returncode:
        if _ended_early(run_dir):
            return INTERRUPTED
        raise _failure(run_dir, process.returncode, kernel_kills)
    return 0


@contextlib.contextmanager
def console(screen: Screen | None = None) -> Iterator[int]:
    """The screen's descriptor, else standard error's; a captured one (in a test) may have none."""
    if screen is not None:
        try:
            yield screen.descriptor
        finally:
            screen.close()
        return
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def die_with_parent() -> None:
    """For a child before it starts: it gets SIGTERM when this process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job started with `&` inherits it ignored
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[Any], watch: Watch, screen: Screen | None) -> int:
    """Wait for torchrun; the number of signals that this process got meanwhile.

    Raises:
        RlctlError: a worker shows no sign of life.
    """
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) == 1:
            with contextlib.suppress(OSError):  # the terminal that was closed
                _say("stopping the workers; once more kills them", screen)
            process.send_signal(signal.SIGINT)  # SIGTERM is what torchrun sends when a worker failed
        else:
            _kill(process.pid)

    if screen is not None:
        screen.start()
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(BEAT_SECONDS)
            if process.poll() is None and (stalled := watch.look()):
                raise stalled
    finally:
        if process.poll() is None:
            _kill(process.pid)
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return len(received)


def _say(text: str, screen: Screen | None) -> None:
    if screen is None:
        print(text, file=sys.stderr, flush=True)
    else:
        screen.say(text)


def _kill(launcher: int) -> None:
    """SIGKILL to torchrun and what it started."""
    for pid in [launcher, *_descendants(launcher)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (mine := children.get(todo[0], []))
        found += mine
        todo.pop(0)
    return found


def _failure(run_dir: Path, returncode: int, kernel_kills: int) -> RlctlError:
    """The cause: a worker that was killed, else the first worker's own error, else what torchrun saw first."""
    logs = run_dir / "logs"
    ends = _ends((logs / "launcher.log").read_text(errors="replace"))
    killed = [(rank, code) for rank, code in ends if code < 0 and code != -signal.SIGTERM]  # SIGTERM is torchrun's own
    reports = failure.reports(run_dir)
    if reports and not killed:
        return failure.told(reports[0])
    if not ends:
        return RlctlError(f"torchrun ended with status {returncode}", f"see {logs / 'launcher.log'}", exit_status=1)
    rank, code = (killed or ends)[0]
    phase = phase_of(logs, rank)
    if code == -signal.SIGKILL and _kernel_kills() > kernel_kills:
        return failure.out_of_memory(
            run_dir, f"rank {rank} was killed in phase `{phase}`: this machine has no memory left"
        )
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return RlctlError(
        f"rank {rank} {how} in phase `{phase}`",
        f"see {logs / f'rank_{rank}.log'}",
        exit_status=1,
        details=failure.details(logs, {rank: phase}),
    )


def _kernel_kills() -> int:
    """Processes that the kernel killed for memory since this machine started."""
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _ended_early(run_dir: Path) -> bool:
    """Whether the workers left with the status of an orderly stop; SIGTERM is torchrun's, to the slower ones."""
    ends = {code for _, code in _ends((run_dir / "logs" / "launcher.log").read_text(errors="replace"))}
    return INTERRUPTED in ends and ends <= {INTERRUPTED, -signal.SIGTERM}


def _ends(launcher_log: str) -> list[tuple[int, int]]:
    """(rank, exit code) of the workers that torchrun saw fail, the first one observed first."""
    found = re.findall(r"^ *rank *: (\d+) .*\n *exitcode *: (-?\d+)", launcher_log, re.MULTILINE)
    return [(int(rank), int(code)) for rank, code in reversed(found)]
