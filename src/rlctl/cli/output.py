"""What a user sees: data on stdout, all else on stderr, an error as `error:` and `hint:`, or one JSON document."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from typing import Any

from rlctl.errors import FAILED, USAGE, RlctlError

_RED, _CYAN, _BOLD = "31", "36", "1"


def data(text: str) -> None:
    """To stdout."""
    print(text, flush=True)


def note(text: str) -> None:
    """To stderr."""
    print(text, file=sys.stderr, flush=True)


def document(value: Any) -> None:
    """The one JSON document of `--json`."""
    data(json.dumps(value, indent=2))


def error(problem: RlctlError, *, as_json: bool, debug: bool) -> int:
    """Report a mistake.

    Returns:
        Its exit status.
    """
    if debug:
        traceback.print_exception(problem)
    told = {"error": problem.message, "hint": problem.hint, "exit_status": problem.exit_status, **_details(problem)}
    if as_json and _writes(told):
        return problem.exit_status
    lines = [f"{_paint('error:', _RED)} {problem.message}"]
    lines += [f"  {line}" for line in problem.details.splitlines()]
    note("\n".join([*lines, f"{_paint('hint:', _CYAN)} {problem.hint}"]))
    return problem.exit_status


def _writes(value: dict[str, Any]) -> bool:
    """Print a document; False where stdout takes nothing, e.g. on a full disk."""
    try:
        document(value)
    except OSError:
        discard_stdout()
        return False
    return True


def discard_stdout() -> None:
    """Drop what stdout could not write, or Python would try again at its end and fail with a status of its own."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def unforeseen(failure: Exception) -> RlctlError:
    """A failure that no check foresaw, in a user's form: the machine's, or else a defect of ours."""
    text = " ".join(str(failure).split()) or "no message"
    problem = RlctlError(
        f"internal error: {type(failure).__name__}: {text}", "run again with --debug and report it", exit_status=FAILED
    )
    if isinstance(failure, OSError):
        problem = RlctlError(text, "see to the file or disk that it names; --debug shows where", exit_status=FAILED)
        if not _has_working_directory():
            problem = RlctlError("the working directory was removed", "change to one that exists", exit_status=USAGE)
        elif failure.filename is None and failure.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            problem = RlctlError(
                f"output cannot be written: {text}", "free space, or write elsewhere", exit_status=FAILED
            )
    problem.__cause__ = failure
    return problem


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _details(problem: RlctlError) -> dict[str, Any]:
    """What a command attached for its JSON reader, e.g. the plan of a job that does not fit."""
    said = {"details": problem.details} if problem.details else {}
    return said | ({"plan": problem.plan} if isinstance(problem, Refusal) else {})


class Refusal(RlctlError):
    """A job that cannot run here, with its plan."""

    def __init__(self, problem: RlctlError, plan: dict[str, Any]) -> None:
        super().__init__(problem.message, problem.hint, exit_status=problem.exit_status)
        self.plan = plan


def bold(text: str) -> str:
    """Emphasised on a terminal."""
    return _paint(text, _BOLD)


def _paint(text: str, code: str) -> str:
    plain = "NO_COLOR" in os.environ or not sys.stderr.isatty()
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"
