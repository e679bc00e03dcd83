"""What a sink is, and how a run is kept safe from it.

1. Every sink works in a thread of its own, fed by a queue: a slow network or a full disk takes no time from a step.
2. Its first error is told once, and it gets nothing more; the run goes on, and metrics.jsonl has everything.
3. The end of a run waits for it, for a bounded time.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

QUEUE_LINES = 1000  # steps that a sink may lag behind before some are left out
CLOSE_SECONDS = 30.0


class SinkProtocol(Protocol):
    """A place that metrics are written to."""

    name: str
    """As in messages, e.g. "W&B"."""

    def open(self, done: int) -> None:
        """Start, or go on where an earlier start of the run ended.

        Args:
            done: steps that the run goes on after; 0 for a new one.
        """
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics after `step` steps, by full name."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


class Background:
    """A sink that can neither stop a run nor hold it up.

    Args:
        sink: not opened yet.
        done: as in `SinkProtocol.open`.
        warn: told of the first failure.
        close_seconds: the longest that `close` waits.
    """

    def __init__(
        self, sink: SinkProtocol, *, done: int, warn: Callable[[str], None], close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self._sink, self._warn, self._close_seconds = sink, warn, close_seconds
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUE_LINES)
        self._failed = False
        self._thread = threading.Thread(target=self._work, args=(done,), daemon=True, name=f"sink {sink.name}")
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step's metrics; returns at once."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._fail(f"it is {QUEUE_LINES} steps behind")

    def close(self) -> bool:
        """Let it write what is queued, for a bounded time; returns whether it ended."""
        deadline = time.monotonic() + (0.0 if self._failed else self._close_seconds)
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it did not end within {self._close_seconds:g} s")
        return not self._thread.is_alive()

    def _work(self, done: int) -> None:
        try:
            self._sink.open(done)
            while not self._failed and (line := self._queue.get()) is not None:
                self._sink.write(*line)
            self._sink.close()
        except Exception as error:  # a sink's failure is told, by design, and not the run's
            traceback.print_exc()
            self._fail(f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._warn(f"{self._sink.name} gets nothing more: {why}; metrics.jsonl has all steps")


class Sent:
    """What a remote run already has, so that a resumed one goes on in it and sends no step twice.

    Args:
        file: JSON, made at the first `save`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"id": None, "step": -1}
        self.id: str | None = known["id"]
        self.step: int = known["step"]

    def save(self, *, run_id: str, step: int) -> None:
        """Remember the remote run's id and its last step."""
        self.id, self.step = run_id, step
        unfinished = self._file.with_name(f".{self._file.name}.unfinished")
        unfinished.write_text(json.dumps({"id": run_id, "step": step}))
        unfinished.replace(self._file)
