"""The worker's side of pool.py: build a function once, then answer calls until the pipe closes.

What the function prints goes to stderr. A worker ends with the process that started it, even while the function hangs.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from rlctl.envs.base import NoVoteError
from rlctl.envs.pool import read_frame, write_frame
from rlctl.errors import RlctlError


def main() -> None:
    """Serve one pool."""
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    calls, answers = _private_pipes()
    frame = read_frame(calls)
    if frame is None:
        return
    number, start = pickle.loads(frame)
    factory, arguments, timeout, path = pickle.loads(start)
    sys.path.extend(p for p in path if p not in sys.path)
    module, _, name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)(**arguments)
    except RlctlError as error:
        write_frame(answers, pickle.dumps((number, error, None)))
        return
    asynchronous = inspect.iscoroutinefunction(function)
    ready = {"asynchronous": asynchronous, "info": getattr(function, "info", None)}
    write_frame(answers, pickle.dumps((number, ready, None)))
    if asynchronous:
        asyncio.run(_serve_concurrently(function, calls, answers, timeout))
    else:
        _serve(function, calls, answers)


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take stdin and stdout for frames; the function sees an empty stdin, and stderr for stdout."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return calls, answers


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _serve(function: Callable[..., Any], calls: IO[bytes], answers: IO[bytes]) -> None:
    while (frame := read_frame(calls)) is not None:
        number, payload = pickle.loads(frame)
        answer: tuple[int, Any, str | None]
        try:
            answer = (number, function(*pickle.loads(payload)), None)
        except Exception as error:  # the function is the user's: its error is an answer
            answer = (number, None, describe(error))
        write_frame(answers, pickle.dumps(answer))


async def _serve_concurrently(
    function: Callable[..., Any], calls: IO[bytes], answers: IO[bytes], timeout: float
) -> None:
    async def answer(number: int, payload: bytes) -> None:
        value: tuple[int, Any, str | None]
        try:
            value = (number, await asyncio.wait_for(function(*pickle.loads(payload)), timeout), None)
        except TimeoutError:
            value = (number, None, f"took longer than {timeout:g} s and was cancelled")
        except Exception as error:  # the function is the user's: its error is an answer
            value = (number, None, describe(error))
        write_frame(answers, pickle.dumps(value))

    running = set()  # the event loop keeps only weak references to tasks
    while (frame := await asyncio.to_thread(read_frame, calls)) is not None:
        task = asyncio.create_task(answer(*pickle.loads(frame)))
        running.add(task)
        task.add_done_callback(running.discard)


def describe(error: BaseException) -> str:
    """One line: the type, the text, and the place in the user's code."""
    if isinstance(error, NoVoteError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {error}{place}"


if __name__ == "__main__":
    main()
