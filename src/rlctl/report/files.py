"""What a run's files hold, as far as they are whole: a process that was killed, or a full disk, leaves half a line.

A line that cannot be used is left out and named, e.g. "rollouts/step_000010.jsonl:3: not JSON"; nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Check = Callable[[Any], str | None]
"""What is wrong with a line's value; None = nothing."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A file of JSON lines, e.g. Lines(rows=[{"step": 1}], damaged=["metrics.jsonl:2: no end of line"])."""

    rows: list[dict[str, Any]]
    damaged: list[str]
    """Lines that were left out, each with the reason."""


def json_lines(path: Path, *, name: str, check: Check) -> Lines:
    """The usable lines of a file; a file that is not there has none.

    Args:
        path: the file.
        name: it is called so in `damaged`.
        check: what else a line must be, besides JSON.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Lines(rows=[], damaged=[])
    except OSError as error:
        return Lines(rows=[], damaged=[f"{name}: {error.strerror}"])
    *whole, rest = content.split(b"\n")
    rows, damaged = [], []
    for number, line in enumerate(whole, start=1):
        value, wrong = _parsed(line)
        wrong = wrong or check(value)
        if wrong is None:
            rows.append(value)
        else:
            damaged.append(f"{name}:{number}: {wrong}")
    if rest:
        damaged.append(f"{name}:{len(whole) + 1}: no end of line")
    return Lines(rows=rows, damaged=damaged)


def document(path: Path, *, name: str, check: Check) -> tuple[Any, str | None]:
    """(value, what is wrong) of a JSON file; (None, None) where there is none."""
    try:
        value, wrong = _parsed(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{name}: {error.strerror}"
    wrong = wrong or check(value)
    return (value, None) if wrong is None else (None, f"{name}: {wrong}")


def _parsed(text: bytes) -> tuple[Any, str | None]:
    try:
        return json.loads(text), None
    except (ValueError, RecursionError):
        return None, "not JSON"


def number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def metrics_line(row: Any) -> str | None:
    """`step` and numbers; null stands for what was not finite."""
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return "no line of metrics"
    odd = next((name for name, value in row.items() if value is not None and not number(value)), None)
    return None if odd is None else f"`{odd}` is no number"


_SAMPLE: Mapping[str, Callable[[Any], bool]] = {
    "group": lambda v: isinstance(v, int),
    "sample": lambda v: isinstance(v, int),
    "prompt": lambda v: isinstance(v, list) and all(map(_is_message, v)),
    "response": lambda v: isinstance(v, str),
    "reward": lambda v: v is None or number(v),
    "reward_parts": lambda v: isinstance(v, dict) and all(map(number, v.values())),
    "valid": lambda v: isinstance(v, bool),
    "truncated": lambda v: isinstance(v, bool),
    "error": lambda v: v is None or isinstance(v, str),
    "response_tokens": lambda v: isinstance(v, int),
}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def sample_line(row: Any) -> str | None:
    """A rollout as phase.as_line writes it; one with a vote has a reward."""
    if not isinstance(row, dict):
        return "no sample"
    odd = next((key for key, fits in _SAMPLE.items() if key not in row or not fits(row[key])), None)
    if odd is None and row["valid"] and row["reward"] is None:
        odd = "reward"
    return None if odd is None else f"no sample: `{odd}` does not fit"


def check_list(value: Any) -> str | None:
    """checks.json: what the run tested before its first step."""
    keys = {"name", "ok", "expected", "found", "detail"}
    fits = isinstance(value, list) and all(isinstance(c, dict) and c.keys() >= keys for c in value)
    return None if fits else "no list of checks"


def mapping(*keys: str) -> Check:
    """A JSON object with these keys."""

    def check(value: Any) -> str | None:
        absent = [key for key in keys if not isinstance(value, dict) or key not in value]
        return f"lacks `{absent[0]}`" if absent else (None if isinstance(value, dict) else "no object")

    return check
