"""`key=value` arguments. `k=v`, `+k=v` and `++k=v` mean the same; hydra's `~k`, sweeps and `hydra.*` are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlctl.errors import RlctlError


@dataclass(frozen=True, kw_only=True)
class Override:
    """One setting that beats the recipe, e.g. Override(key="grpo.seed", value=10, text="grpo.seed=10")."""

    key: str
    value: Any
    text: str
    """As the user wrote it: a `key=value` argument, or a flag such as `--procs 2`."""

    @property
    def argument(self) -> str:
        """For hydra's compose, which takes any key with `++`."""
        if self.text.startswith("--"):
            return f"++{self.key}={_quoted(self.value)}"
        return "++" + self.text.lstrip("+")


def _quoted(value: Any) -> str:
    """A flag's value in hydra's grammar."""
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower()


def parse(arguments: Sequence[str]) -> list[Override]:
    """The overrides of a command line.

    Raises:
        RlctlError: not `key=value`, not hydra's grammar, a sweep, a deletion, `hydra.*`, or one key set twice.
    """
    parsed: dict[str, Override] = {}
    for text in arguments:
        override = _parse(text)
        if override.key in parsed and parsed[override.key].value != override.value:
            raise RlctlError(
                f"`{override.key}` is set twice: `{parsed[override.key].text}` and `{text}`", "keep one of them"
            )
        parsed[override.key] = override
    return list(parsed.values())


def _parse(text: str) -> Override:
    if text.startswith("~"):
        raise RlctlError(f"`{text}`: a key cannot be deleted", f"set another value: `{text[1:].partition('=')[0]}=...`")
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key:
        raise RlctlError(f"`{text}` is not of the form key=value", "write e.g. `grpo.max_num_steps=10`")
    if key.split(".")[0] == "hydra":
        raise RlctlError(f"`{text}`: hydra's own settings are not part of a recipe", "leave it out")
    if "/" in key or "@" in key:
        raise RlctlError(f"`{text}`: config groups are chosen in a recipe's `defaults:` list", "set single keys here")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise RlctlError(
            f"`{text}` does not parse: {str(error).splitlines()[0]}",
            f"quote the value for the recipe and the shell: \"{key}='{value}'\"",
        ) from error
    if override.is_sweep_override():
        raise RlctlError(
            f"`{text}` is a sweep; one run takes one value",
            f"write a list as `{key}=[{value}]`, text with a comma as \"{key}='{value}'\"",
        )
    return Override(key=key, value=override.value(), text=text)
