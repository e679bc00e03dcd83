"""Accelerators by name, from hardware.yaml."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from rlctl.errors import RlctlError


def names() -> list[str]:
    """All accelerators."""
    return list(yaml.safe_load((Path(__file__).parent / "hardware.yaml").read_text()))


def gpu_memory_bytes(kind: str) -> int:
    """Memory of an accelerator, e.g. 80,000,000,000 for `h100`; case does not matter.

    Raises:
        RlctlError: no such name.
    """
    table = yaml.safe_load((Path(__file__).parent / "hardware.yaml").read_text())
    if kind.lower() not in table:
        near = difflib.get_close_matches(kind.lower(), table, n=1)
        raise RlctlError(
            f"unknown GPU `{kind}`", (f"did you mean `{near[0]}`? " if near else "") + f"known: {', '.join(table)}"
        )
    return int(table[kind.lower()]["memory_bytes"])
