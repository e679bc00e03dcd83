"""recipe/schema.py: which values a type takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rlctl.errors import RlctlError
from rlctl.recipe import schema


@dataclass(kw_only=True)
class Inner:
    word: Literal["a", "b"] | None = None
    pair: tuple[float, float] = (0.0, 0.0)


@dataclass(kw_only=True)
class Outer:
    count: int = 1
    rate: float = 1.0
    on: bool = False
    name: str | None = None
    ids: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def build(values: Any) -> Outer:
    return schema.make(Outer, schema.check(schema.tree(Outer), values, where=lambda key: f"at {key}"))


def test_values_take_the_types_of_the_dataclass() -> None:
    built = build(
        {"count": 2, "rate": 3, "on": True, "name": None, "ids": [1], "weights": {"x": 1}, "free": {"y": [1, {"z": 2}]},
         "inner": {"word": "b", "pair": [1, 0.5]}}
    )  # fmt: skip
    assert built == Outer(
        count=2, rate=3.0, on=True, ids=[1], weights={"x": 1.0}, free={"y": [1, {"z": 2}]},
        inner=Inner(word="b", pair=(1.0, 0.5)),
    )  # fmt: skip
    assert type(built.rate) is float and type(built.inner.pair[0]) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": True}, "`count` must be an integer, got `true` (at count)"),
        ({"count": 1.5}, "`count` must be an integer, got `1.5` (at count)"),
        ({"count": None}, "`count` must be an integer, got `null` (at count)"),
        ({"rate": "1"}, "`rate` must be a number, got `1` (at rate)"),
        ({"on": 1}, "`on` must be true or false, got `1` (at on)"),
        ({"name": 3}, "`name` must be text or null, got `3` (at name)"),
        ({"ids": [1, "2"]}, "`ids` must be a list, each an integer, got `[1, '2']` (at ids)"),
        ({"weights": {"x": "y"}}, "`weights` must be a map of names to a number, got `{'x': 'y'}` (at weights)"),
        ({"inner": {"pair": [1]}}, "`inner.pair` must be a list of 2, each a number, got `[1]` (at inner.pair)"),
        ({"inner": {"word": "c"}}, "`inner.word` must be `a` or `b` or null, got `c` (at inner.word)"),
        ({"inner": 3}, "`inner` is a section, got `3` (at inner)"),
        ({"cuont": 3}, "unknown key `cuont` (at cuont)"),
        ({"inner": {"free": 3}}, "unknown key `inner.free` (at inner.free)"),
    ],
)
def test_a_wrong_value_is_refused_by_key_and_place(values: dict, message: str) -> None:
    with pytest.raises(RlctlError) as caught:
        build(values)
    assert caught.value.message == message and caught.value.exit_status == 2


def test_an_empty_section_is_its_defaults() -> None:
    assert build({"inner": None}) == Outer()


@pytest.mark.parametrize("key", ["count", "inner.word", "free.any.thing", "weights.x", "inner"])
def test_known_keys_are_found(key: str) -> None:
    schema.lookup(schema.tree(Outer), key, where="here")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cont", "did you mean `count`?"),
        ("iner.word", "did you mean `inner.word`?"),
        ("inner.rate", "did you mean `rate`?"),
        ("inner.nothing_like_it", "keys of `inner`: word, pair"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(key: str, hint: str) -> None:
    with pytest.raises(RlctlError) as caught:
        schema.lookup(schema.tree(Outer), key, where="here")
    assert caught.value.hint == hint
