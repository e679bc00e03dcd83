"""Where a key was written: the override's text, or file:line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlctl.recipe.overrides import Override


@dataclass(frozen=True, kw_only=True)
class Places:
    """What a recipe was composed of, for messages."""

    overrides: Sequence[Override]
    files: Sequence[tuple[Path, str]]
    """Each file with the section that it fills (hydra's package, "" = all), the later one wins."""

    def of(self, key: str) -> str:
        """E.g. "my.yaml:12" or "from `grpo.max_num_steps=x`"."""
        for override in reversed(self.overrides):
            if key == override.key or override.key.startswith(key + ".") or key.startswith(override.key + "."):
                return f"from `{override.text}`"
        for path, package in reversed(self.files):
            inside = key.removeprefix(package + ".") if package else key
            if package and inside == key:
                continue
            line = _line(path, inside.split("."))
            if line is not None:
                return f"{short(path)}:{line}"
        return short(self.files[-1][0]) if self.files else "default"


def short(path: Path) -> str:
    """Relative to the working directory where it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _line(path: Path, parts: list[str]) -> int | None:
    """The line of a nested key, from 1; None when the file does not write it."""
    node = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    line = None
    for part in parts:
        if not isinstance(node, yaml.MappingNode):
            return None
        found = [(k, v) for k, v in node.value if k.value == part]
        if not found:
            return None
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line
