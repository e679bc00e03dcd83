"""A recipe's schema: the dataclasses of config.py and of plugins as one tree of keys, and values judged against it.

1. `tree(dataclass)` lists the keys that users may write, with their types.
2. `check(tree, values)` refuses unknown keys and wrong types, naming the key, the value and where it was written.
3. `make(dataclass, values)` builds the dataclass; what is not written keeps the dataclass's default.

It does not know hydra, files or algorithms.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from rlctl.errors import RlctlError

Tree = dict[str, Any]  # key -> type hint, or another Tree
Where = Callable[[str], str]  # dotted key -> where the user wrote it

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def tree(section: type) -> Tree:
    """The keys of a dataclass; nested dataclasses become subtrees."""
    hints = typing.get_type_hints(section)
    fields = [f.name for f in dataclasses.fields(section)]
    return {name: tree(hints[name]) if dataclasses.is_dataclass(hints[name]) else hints[name] for name in fields}


def keys(schema: Tree, prefix: str = "") -> Iterator[str]:
    """All dotted keys, sections included."""
    for name, node in schema.items():
        yield prefix + name
        if isinstance(node, dict):
            yield from keys(node, f"{prefix}{name}.")


def is_free_form(hint: Any) -> bool:
    """Whether a key's value is a map whose keys are not ours to judge."""
    return typing.get_origin(hint) is dict


def lookup(schema: Tree, key: str, *, where: str) -> None:
    """Refuse a dotted key that the schema does not have.

    Args:
        schema: the recipe's tree.
        key: e.g. `policy.optimizer.lr`; a key inside a free-form map is accepted.
        where: what the message says about its place.

    Raises:
        RlctlError: the nearest known key is in the hint.
    """
    node: Any = schema
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if is_free_form(node):
            return
        if not isinstance(node, dict):
            parent = ".".join(parts[:depth])
            raise RlctlError(f"`{parent}` is a single value, it has no `{part}` ({where})", f"write `{parent}=...`")
        if part not in node:
            raise RlctlError(f"unknown key `{key}` ({where})", _suggest(schema, node, parts[:depth], key))
        node = node[part]


def _suggest(schema: Tree, section: Tree, path: list[str], key: str) -> str:
    """The hint for an unknown key: a like one here, the same name elsewhere, a like one, else all keys here."""
    known, parts = list(keys(schema)), key.split(".")
    here = difflib.get_close_matches(parts[len(path)], list(section), n=1, cutoff=0.7)
    mended = ".".join([*path, *here, *parts[len(path) + 1 :]])
    elsewhere = [k for k in known if k.rsplit(".", 1)[-1] == parts[-1]]
    if here:
        near = [mended if mended in known else ".".join([*path, *here])]
    else:
        near = elsewhere or difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"keys of {'`' + '.'.join(path) + '`' if path else 'a recipe'}: {', '.join(section)}"


def check(schema: Tree, values: Any, *, where: Where, path: str = "") -> dict[str, Any]:
    """The values in the schema's types.

    Args:
        schema: what may be written.
        values: nested maps as read from YAML.
        where: says where a dotted key was written.
        path: the section's own dotted name.

    Raises:
        RlctlError: an unknown key or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise RlctlError(
            f"`{path}` is a section, got `{values}` ({where(path)})", f"set one of its keys: {', '.join(schema)}"
        )
    checked = {}
    for name, value in values.items():
        key = f"{path}.{name}" if path else str(name)
        if name not in schema:
            raise RlctlError(
                f"unknown key `{key}` ({where(key)})", _suggest(schema, schema, path.split(".") if path else [], key)
            )
        node = schema[name]
        if isinstance(node, dict):
            checked[name] = check(node, {} if value is None else value, where=where, path=key)
        else:
            checked[name] = _convert(node, value, key, where)
    return checked


def _convert(hint: Any, value: Any, key: str, where: Where) -> Any:
    converted = _as_type(hint, value)
    if converted is not _WRONG:
        return converted
    shown = "null" if value is None else "true" if value is True else "false" if value is False else value
    near = difflib.get_close_matches(str(value), _choices(hint), n=1)
    hint_text = f"did you mean `{near[0]}`?" if near else f"write {describe(hint)}"
    raise RlctlError(f"`{key}` must be {describe(hint)}, got `{shown}` ({where(key)})", hint_text)


_WRONG = object()


def _as_type(hint: Any, value: Any) -> Any:  # noqa: C901, PLR0912  one branch a kind of type
    """The value in the hint's type, or _WRONG."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        options = (_as_type(a, value) for a in arguments)
        return next((o for o in options if o is not _WRONG), _WRONG)
    if hint is type(None):
        return None if value is None else _WRONG
    if origin is Literal:
        return value if value in arguments and type(value) in {type(a) for a in arguments} else _WRONG
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return _WRONG
        inner = arguments if origin is tuple and arguments[-1] is not Ellipsis else [arguments[0]] * len(value)
        if len(inner) != len(value):
            return _WRONG
        items = [_as_type(a, v) for a, v in zip(inner, value, strict=True)]
        return _WRONG if any(i is _WRONG for i in items) else origin(items)
    if origin is dict:
        if not isinstance(value, Mapping):
            return _WRONG
        items = [_as_type(arguments[1], v) for v in value.values()]
        return _WRONG if any(i is _WRONG for i in items) else dict(zip(map(str, value), items, strict=True))
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _WRONG


def _choices(hint: Any) -> list[str]:
    """The words that a Literal, or an optional one, allows."""
    if typing.get_origin(hint) is Literal:
        return [str(a) for a in typing.get_args(hint)]
    return [c for a in typing.get_args(hint) for c in _choices(a)] if typing.get_origin(hint) is not dict else []


def describe(hint: Any) -> str:
    """A type in a user's words, e.g. `a number or null`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(a) for a in arguments)
    if origin is Literal:
        return " or ".join(f"`{a}`" for a in arguments)
    if origin is list:
        return f"a list, each {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    if origin is dict:
        return "a map" if arguments[1] is Any else f"a map of names to {describe(arguments[1])}"
    return _WORDS.get(hint, str(hint))


def make[T](section: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass of checked values."""
    hints = typing.get_type_hints(section)
    fields = {
        name: make(hints[name], value)
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }
    return section(**fields)
