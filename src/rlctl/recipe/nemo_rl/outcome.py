"""What becomes of a key of theirs, and the file as the rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WORDS = {"moe_router_load_balancing_type", "cuda_graph_impl"}  # where `none` is a word, not null


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What becomes of a key."""

    status: Literal["mapped", "ignored", "open", "refused"]
    ours: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Context:
    """The file as a whole."""

    flat: Mapping[str, Any]
    backend: Literal["megatron", "dtensor"]
    algorithm: str
    reason: str
    """The flag that chose it; empty for grpo."""
    conflict: str
    """A second flag that asks for another algorithm; empty without."""
    moe: bool

    def get(self, key: str) -> Any:
        """A value of theirs; None where it is not written."""
        return plain(key, self.flat[key]) if key in self.flat else None

    @property
    def length(self) -> Any:
        """policy.max_total_sequence_length."""
        return self.get("policy.max_total_sequence_length")


def mapped(ours: Mapping[str, Any], note: str = "") -> Outcome:
    """Kept under our names."""
    return Outcome(status="mapped", ours=ours, note=note)


def ignored(reason: str) -> Outcome:
    """Without effect, and why."""
    return Outcome(status="ignored", note=reason)


def left_open(reason: str) -> Outcome:
    """The user's to give."""
    return Outcome(status="open", note=reason)


def refused(key: str, value: Any, feature: str) -> Outcome:
    """A feature that rlctl lacks."""
    shown = f" is {short_value(value)}" if isinstance(value, (str, int, float, bool, list, type(None))) else ""
    return Outcome(
        status="refused",
        note=f"`{key}`{shown}: rlctl does not have {feature}",
        hint="change that key in a copy of the file, or train it where that feature is",
    )


def short_value(value: Any) -> str:
    """A value as YAML writes it, at most 60 characters."""
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else None
    return (text or str(value))[:60]


def plain(key: str, value: Any) -> Any:
    """`none` and `null` as null, numbers in quotation marks as numbers."""
    if not isinstance(value, str) or key.rpartition(".")[2] in WORDS:
        return value
    if value.lower() in ("none", "null", "~", ""):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def truth(value: Any) -> bool:
    """Their flags: absent and null are off."""
    return value is True
