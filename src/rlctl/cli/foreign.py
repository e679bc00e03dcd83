"""What a NeMo RL file became, for people and as data: `recipes check`, `recipes import` and dry runs show it."""

from __future__ import annotations

from typing import Any

from rlctl.recipe.nemo_rl import Translation

MARKS = {"mapped": "kept   ", "ignored": "ignored", "open": "yours  ", "refused": "REFUSED"}


def rows(translation: Translation) -> list[dict[str, Any]]:
    """One row a key of theirs."""
    return [
        {
            "theirs": line.theirs, "value": line.value, "where": line.where, "status": line.outcome.status,
            "ours": dict(line.outcome.ours), "note": line.outcome.note,
        }
        for line in translation.lines
    ]  # fmt: skip


def mapping(translation: Translation) -> list[str]:
    """One line a key of theirs: what becomes of it, and why."""
    lines = []
    for line in translation.lines:
        ours = ", ".join(f"{key}={value!r}" for key, value in line.outcome.ours.items())
        becomes = " -> " + ours if ours else ""
        note = f"  ({line.outcome.note})" if line.outcome.note else ""
        lines.append(f"{MARKS[line.outcome.status]} {line.theirs}: {line.value!r}{becomes}{note}")
    return lines


def summary(translation: Translation) -> list[str]:
    """The algorithm that flags chose, and what is left to the user."""
    kept = sum(line.outcome.status == "mapped" for line in translation.lines)
    said = [f"a NeMo RL file: {kept} keys kept, each told by `rlctl recipes check {translation.path}`"]
    if translation.reason:
        said.append(f"algorithm `{translation.algorithm}`, which {translation.reason} asks for")
    return said + [f"left to you: {line.theirs}: {line.outcome.note}" for line in translation.open]
