"""Each worker shows that it lives, and where; the local launcher ends a run of which a worker does not.

1. A thread of every worker touches logs/heartbeat_rank_N.json once a second; a phase is written there when it begins.
2. The launcher looks once a second. A file that did not change for `stall_seconds` is a worker that the kernel stopped,
   or that sits in a call which never lets other threads run.
3. All workers that can still answer write the stacks of their threads to their logs, on SIGUSR1.

A worker that waits for others in a collective shows that it lives; collectives have a timeout of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import FAILED, RlctlError
from rlctl.launch import failure

State = dict[str, Any]
"""What a worker writes: `pid` and `phase`."""

BEAT_SECONDS = 1.0
STALL_SECONDS = 120.0
DUMP_SECONDS = 0.5  # for the workers to write their stacks


def _file(logs: Path, rank: int) -> Path:
    return logs / f"heartbeat_rank_{rank}.json"


def _read(logs: Path, rank: int) -> State:
    return json.loads(_file(logs, rank).read_text())


def phase_of(logs: Path, rank: int) -> str:
    """What a rank said last that it was doing."""
    return str(_read(logs, rank)["phase"]) if _file(logs, rank).is_file() else "start"


def _runs(state: State) -> bool:
    """Whether the process has not ended; one that has is torchrun's to judge."""
    try:
        return Path(f"/proc/{state['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _dump(states: Sequence[State]) -> None:
    """Let each write its stacks, one that was stopped too, and then stop: all are killed next, and go on no further."""
    for numbers in ((signal.SIGUSR1, signal.SIGCONT), (signal.SIGSTOP,)):
        for state in states:
            with contextlib.suppress(ProcessLookupError):
                for number in numbers:
                    os.kill(state["pid"], number)
        time.sleep(DUMP_SECONDS)


class Beat:
    """A worker's signs of life, from a thread, until its process ends; stacks go to standard error on SIGUSR1."""

    def __init__(self, logs: Path, rank: int) -> None:
        self._path = _file(logs, rank)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self.says("start")
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def says(self, phase: str) -> None:
        """Tell the phase that begins, at once: a rank that is killed in it cannot."""
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk is told by what the run writes itself
            partial.write_text(json.dumps({"pid": os.getpid(), "phase": phase}))
            partial.replace(self._path)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with contextlib.suppress(OSError):
                os.utime(self._path)


class Watch:
    """The launcher's view of a run's workers.

    Args:
        logs: of the run.
        processes: workers.
        stall_seconds: what is too long without a sign of life.
        alive: whether the process behind what a worker wrote still exists; one that has ended is another's to judge.
        dump: asks the workers for their stacks.
    """

    def __init__(
        self,
        logs: Path,
        *,
        processes: int,
        stall_seconds: float = STALL_SECONDS,
        alive: Callable[[State], bool] = _runs,
        dump: Callable[[Sequence[State]], None] = _dump,
    ) -> None:
        self._logs, self._ranks, self._stall_seconds = logs, range(processes), stall_seconds
        self._alive, self._dump = alive, dump
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked = time.monotonic()
        for rank in self._ranks:  # of the start before
            _file(logs, rank).unlink(missing_ok=True)

    def look(self) -> RlctlError | None:
        """The first worker that shows no life, with its phase; None while all do. Called about once a second."""
        now = time.monotonic()
        slept, self._looked = now - self._looked > 5 * BEAT_SECONDS, now
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has not begun
                changed = _file(self._logs, rank).stat().st_mtime_ns
                before, since = self._seen.get(rank, (0, now))
                if changed != before or slept:  # this process was stopped itself, perhaps with all others
                    self._seen[rank] = (changed, now)
                elif now - since > self._stall_seconds and self._alive(_read(self._logs, rank)):
                    return self._stalled(rank, now - since)
        return None

    def _stalled(self, rank: int, seconds: float) -> RlctlError:
        shown = {r: _read(self._logs, r) for r in self._ranks if _file(self._logs, r).is_file()}
        self._dump(list(shown.values()))
        others = ", ".join(f"rank {r} in `{s['phase']}`" for r, s in shown.items() if r != rank)
        return RlctlError(
            f"rank {rank} shows no sign of life since {seconds:.0f} s, in phase `{shown[rank]['phase']}`"
            + (f" ({others})" if others else ""),
            f"its process is stopped or stuck; all stacks are at the end of {self._logs / 'rank_*.log'}",
            exit_status=FAILED,
            details=failure.details(self._logs, {r: shown[r]["phase"] for r in sorted(shown, key=lambda r: r != rank)}),
        )
