"""Calls to code that may hang, raise or crash: in worker processes, each call bounded by a timeout.

1. `Pool(factory, arguments)` starts one worker, which imports the factory's module and builds the function once.
2. `await pool.call(...)` queues a call. A synchronous function gets one call at a time per worker; an asynchronous one
   runs many calls in one worker's event loop.
3. A call that is late is killed with its worker (and what that started); the next call starts a new one.

It knows nothing of rewards. The worker's side is worker.py; frames are a length and a pickle.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import IO, Any

from rlctl.envs.base import NoVoteError
from rlctl.errors import RlctlError

START_TIMEOUT_SECONDS = 120.0  # importing what a reward file imports may take long on a loaded machine
GRACE_SECONDS = 2.0  # an asynchronous call cancels itself first; only a blocked event loop is killed
CONCURRENT_CALLS = 64  # of an asynchronous function, in one worker


class Pool:
    """A function in worker processes."""

    def __init__(self, factory: str, arguments: Mapping[str, Any], *, timeout_seconds: float, workers: int) -> None:
        """Start the first worker; the others start when they are needed.

        Args:
            factory: `package.module:name`; called in the worker with the arguments, it returns the function.
            arguments: picklable keyword arguments of the factory.
            timeout_seconds: of one call, not counting its wait for a worker.
            workers: processes at most, for a synchronous function.

        Raises:
            RlctlError: what the factory raised, or that the worker did not start.
        """
        self._start = pickle.dumps((factory, dict(arguments), timeout_seconds, list(sys.path)))
        self._timeout = timeout_seconds
        self._calls: queue.SimpleQueue[tuple[bytes, concurrent.futures.Future]] = queue.SimpleQueue()
        first = _Slot(self._start)
        ready = first.worker().ready
        self.info: Any = ready["info"]
        """The function's attribute `info`, or None."""
        self._slots = [first] if ready["asynchronous"] else [first, *(_Slot(self._start) for _ in range(workers - 1))]
        for slot in self._slots:
            for _ in range(CONCURRENT_CALLS if ready["asynchronous"] else 1):
                threading.Thread(target=self._serve, args=(slot,), daemon=True).start()

    async def call(self, *arguments: Any) -> Any:
        """The function's value.

        Raises:
            NoVoteError: the call raised, was late, or its worker died.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((pickle.dumps(arguments), future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the workers."""
        for slot in self._slots:
            slot.close()

    def _serve(self, slot: _Slot) -> None:
        while True:
            payload, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._bounded(slot, payload))
                except Exception as error:  # handed to who awaits the call
                    future.set_exception(error)

    def _bounded(self, slot: _Slot, payload: bytes) -> Any:
        worker = slot.worker()
        try:
            return worker.send(payload).result(self._timeout + (GRACE_SECONDS if worker.ready["asynchronous"] else 0))
        except concurrent.futures.TimeoutError:
            slot.close()
            raise NoVoteError(f"took longer than {self._timeout:g} s and was killed") from None


class _Slot:
    """A place for one worker, which is replaced after it died."""

    def __init__(self, start: bytes) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def worker(self) -> _Worker:
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self._worker = _Worker(self._start)
            return self._worker

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
                self._worker = None


class _Worker:
    """One process, and a thread that reads its answers."""

    def __init__(self, start: bytes) -> None:
        command = [sys.executable, "-P", "-m", "rlctl.envs.worker"]
        # A session of its own: Ctrl-C is the trainer's to handle, and a kill reaches what the function started.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._lock, self._ids = process.stdin, threading.Lock(), itertools.count()
        self._pending: dict[int, concurrent.futures.Future] = {}
        self.alive = True
        self.kill = weakref.finalize(self, _kill, process)
        threading.Thread(target=_read, args=(weakref.ref(self), process.stdout), daemon=True).start()
        try:
            self.ready = self.send(start).result(START_TIMEOUT_SECONDS)
        except (NoVoteError, concurrent.futures.TimeoutError) as error:
            self.kill()
            why = str(error) or f"no answer within {START_TIMEOUT_SECONDS:g} s"
            raise RlctlError(f"a reward worker did not start: {why}", "see the log for what it printed") from error
        if isinstance(self.ready, RlctlError):
            self.kill()
            raise self.ready

    def send(self, payload: bytes) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            number = next(self._ids)
            self._pending[number] = future
            try:
                write_frame(self._stdin, pickle.dumps((number, payload)))
            except OSError:
                self.alive = False
        if not self.alive:
            self.fail()
        return future

    def receive(self, frame: bytes) -> None:
        number, value, error = pickle.loads(frame)
        future = self._pending.pop(number)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(NoVoteError(error))

    def fail(self) -> None:
        """The process is gone: whoever waits learns it."""
        self.alive = False
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(NoVoteError("the worker process died during the call"))


def _read(reference: weakref.ref[_Worker], answers: IO[bytes]) -> None:
    while (frame := read_frame(answers)) is not None:
        worker = reference()
        if worker is None:
            return
        worker.receive(frame)
        del worker
    if (worker := reference()) is not None:
        worker.fail()


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_frame(pipe: IO[bytes], frame: bytes) -> None:
    """A length of 8 bytes, then the frame."""
    pipe.write(len(frame).to_bytes(8, "little") + frame)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    size = int.from_bytes(head, "little")
    frame = pipe.read(size)
    return frame if len(frame) == size else None
