"""What a user sees: data on stdout, all else on stderr, an error as `error:` and `hint:`, or one JSON document."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from rlctl.errors import RlctlError

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
    if as_json:
        document(
            {"error": problem.message, "hint": problem.hint, "exit_status": problem.exit_status, **_details(problem)}
        )
    else:
        note(f"{_paint('error:', _RED)} {problem.message}\n{_paint('hint:', _CYAN)} {problem.hint}")
    return problem.exit_status


def _details(problem: RlctlError) -> dict[str, Any]:
    """What a command attached for its JSON reader, e.g. the plan of a job that does not fit."""
    return {"plan": problem.plan} if isinstance(problem, Refusal) else {}


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
