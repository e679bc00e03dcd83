"""Applies the table of keys.py to a file of theirs: one line a key, and the recipe that comes out.

1. `translate` reads the file, decides the algorithm and the backend, and judges every leaf.
2. What the table sends on by `via` is in rules.py; what could not be kept is refused, never dropped.
3. `require` raises what was refused. It does not know how recipes are composed or printed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import config, plugins
from rlctl.errors import RlctlError
from rlctl.models import resolve
from rlctl.parallel import num_experts
from rlctl.recipe import schema
from rlctl.recipe.nemo_rl import keys, read, rules
from rlctl.recipe.nemo_rl.outcome import Context, Outcome, ignored, left_open, plain, refused, truth
from rlctl.recipe.places import Places, short

MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Line:
    """What became of one key of theirs."""

    theirs: str
    value: Any
    where: str
    """file:line."""
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A file of theirs as a recipe of ours."""

    path: Path
    files: tuple[Path, ...]
    algorithm: str
    """The native one that its flags ask for."""
    reason: str
    """Which flag; empty for plain grpo."""
    values: dict[str, Any]
    """A native recipe as nested maps."""
    lines: tuple[Line, ...]

    @property
    def refused(self) -> list[Line]:
        """Keys that stand in the way."""
        return [line for line in self.lines if line.outcome.status == "refused"]

    @property
    def open(self) -> list[Line]:
        """What the user must give."""
        return [line for line in self.lines if line.outcome.status == "open"]

    def require(self) -> Translation:
        """Itself.

        Raises:
            RlctlError: exit status 2 for what was refused: the first by name, with the number of others.
        """
        if not self.refused:
            return self
        first, more = self.refused[0], len(self.refused) - 1
        rest = f"; {more} more in `rlctl recipes check {short(self.path)}`" if more else ""
        raise RlctlError(f"{first.outcome.note} ({first.where}){rest}", first.outcome.hint)


def translate(path: Path) -> Translation:
    """A file of theirs, key by key; nothing is raised for a key, see `Translation.require`.

    Raises:
        RlctlError: it cannot be read.
    """
    values, files = read.read(path)
    places = Places(overrides=(), files=[(file, "") for file in files])
    flat = dict(_leaves(values))
    context = _context(flat)
    lines = [
        Line(theirs=key, value=value, where=places.of(key), outcome=_judge(context, key, value))
        for key, value in flat.items()
    ]
    nested: dict[str, Any] = {read.NATIVE: 1, "algorithm": context.algorithm}
    for line in lines:
        for key, value in line.outcome.ours.items():
            _put(nested, key, value)
    for key, value in rules.always(context).items():
        _put(nested, key, value)
    return Translation(
        path=path, files=files, algorithm=context.algorithm, reason=context.reason, values=nested, lines=tuple(lines)
    )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a map whose keys are not judged, an empty one and a list are leaves."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        whole = key in keys.FREE or key == "policy.scheduler" or (prefix == "env." and name in keys.ENVIRONMENTS)
        if isinstance(value, Mapping) and value and not whole:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _context(flat: Mapping[str, Any]) -> Context:
    """What rules of several keys look at."""
    megatron = truth(flat.get("policy.megatron_cfg.enabled"))
    return Context(
        flat=flat, backend="megatron" if megatron else "dtensor", **rules.algorithm(flat), moe=_is_moe(flat)
    )  # fmt: skip


def _is_moe(flat: Mapping[str, Any]) -> bool:
    """Whether the model has experts; an unknown model is refused by name later."""
    try:
        return num_experts(resolve.resolve(str(flat.get("policy.model_name"))).config) > 0
    except RlctlError:
        return False


def _judge(context: Context, key: str, value: Any) -> Outcome:
    """What becomes of one key."""
    value = plain(key, value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return _quoted(key, value)
    unused = _inactive(context, key)
    entry = keys.KEYS.get(key)
    if entry is None:
        return _outside(key, value)
    if unused is not None:
        return ignored(unused)
    if isinstance(entry, keys.Ignore):
        return ignored(entry.reason)
    if isinstance(entry, keys.Open):
        return ignored("empty") if value is None else left_open(entry.reason)
    if isinstance(entry, keys.Only):
        accepted = any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in entry.values)
        empty = value in ({}, []) and None in entry.values
        return ignored("as here") if accepted or empty else refused(key, value, entry.feature)
    if entry.via is not None:
        outcome = rules.RULES[entry.via](context, key, value, entry)
    else:
        outcome = rules.plainly(context, key, value, entry)
    return _fits_algorithm(context, key, value, outcome)


def _quoted(key: str, value: str) -> Outcome:
    """A flag as text, which Python takes for true whatever it says."""
    return Outcome(
        status="refused",
        note=f"`{key}` is the text `{value}`, not a flag",
        hint=f"write {value.lower()} without quotation marks",
    )


def _inactive(context: Context, key: str) -> str | None:
    """Why a key of the other backend does not matter."""
    prefixes = {
        "megatron": ("policy.dtensor_cfg.", "policy.optimizer", "policy.scheduler"),
        "dtensor": ("policy.megatron_cfg.",),
    }[context.backend]
    if key.startswith(prefixes) and not key.endswith("_cfg.enabled"):
        return f"the backend is {context.backend}"
    return None


def _outside(key: str, value: Any) -> Outcome:
    """A key that the table does not have: an empty section, a feature by its section, or unknown."""
    section = key.split(".", maxsplit=1)[0]
    if value in (None, {}) and any(k.startswith(key + ".") for k in keys.KEYS):
        return ignored("empty")
    if section in keys.ALGORITHMS:
        return refused(key, value, keys.ALGORITHMS[section])
    name = key.split(".")[1] if key.startswith("env.") else ""
    if name in keys.ENVIRONMENTS:
        return refused(key, MISSING, keys.ENVIRONMENTS[name])
    return unknown(key)


def unknown(key: str) -> Outcome:
    """Refused, with the nearest key of the table: a like name in its own section first."""
    parent, _, name = key.rpartition(".")
    here = {k[len(parent) + 1 :].split(".")[0] for k in keys.KEYS if k.startswith(parent + ".") or not parent}
    near = [f"{parent}.{n}".lstrip(".") for n in difflib.get_close_matches(name, sorted(here), n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(key, keys.KEYS, n=1, cutoff=0.0)
    return Outcome(
        status="refused",
        note=f"unknown key `{key}`",
        hint=f"did you mean `{near[0]}`? If this is an rlctl recipe, add the line `{read.NATIVE}: 1`",
    )


def _fits_algorithm(context: Context, key: str, value: Any, outcome: Outcome) -> Outcome:
    """Refuse an option that the algorithm, chosen by another flag, does not have."""
    options = schema.tree(plugins.load("algorithm", context.algorithm).Config)
    steps = schema.tree(config.Steps)
    for ours in outcome.ours:
        section, _, name = ours.partition(".")
        known = {"grpo": options["grpo"] | steps, "loss_fn": options["loss_fn"]}.get(section)
        if known is not None and name.split(".")[0] not in known:
            return refused(key, value, f"this option in `{context.algorithm}`, which {context.reason} asks for")
    return outcome


def _put(nested: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        nested = nested.setdefault(section, {})
    nested[name] = value
