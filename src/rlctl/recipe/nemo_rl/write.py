"""A translated file as a native recipe: each value with the key it comes from, and what was left out, as comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlctl.recipe.nemo_rl.translate import Translation


def to_recipe(translation: Translation) -> str:
    """YAML that composes to the same recipe as the file itself.

    Raises:
        RlctlError: something in the file was refused.
    """
    translation.require()
    comments: dict[str, list[str]] = {}
    for line in translation.lines:
        for key in line.outcome.ours:
            note = f" ({line.outcome.note})" if line.outcome.note else ""
            comments.setdefault(key, []).append(line.theirs + note)
    said = [
        "# @package _global_",
        f"# Purpose: {translation.algorithm}, imported from the NeMo RL file {translation.path.name}.",
    ]
    for title, status in (("Yours to give", "open"), ("Left out", "ignored")):
        lines = [x for x in translation.lines if x.outcome.status == status]
        said += [f"# {title}:"] if lines else []
        said += [f"#   {x.theirs}: {x.outcome.note}" for x in lines]
    return "\n".join([*said, *_section(translation.values, comments, "", 0)]) + "\n"


def _section(values: Mapping[str, Any], comments: Mapping[str, list[str]], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in comments:
            yield f"{indent}{name}:"
            yield from _section(value, comments, key + ".", depth + 1)
            continue
        origin = "; ".join(dict.fromkeys(comments[key])) if key in comments else ""
        yield f"{indent}{name}: {_text(_plain(value))}" + (f"  # {origin}" if origin else "")


def _text(value: Any) -> str:
    """A value on one line; JSON's strings are YAML's, with their line breaks escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").rstrip()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
