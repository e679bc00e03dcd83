"""Accelerators by name, from hardware.yaml."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import RlctlError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data-sheet figures of one accelerator, in bytes, bytes/s (one way) and FLOP/s (dense)."""

    name: str
    memory_bytes: float
    bandwidth: float
    flops: Mapping[str, float]
    """By precision: bfloat16, and fp8 and fp4 where it has them."""
    nvlink: float
    domain: int
    nic: float
    source: str

    @property
    def generation(self) -> str:
        """`blackwell` computes in fp4, `hopper` in fp8, `ampere` in neither."""
        return "blackwell" if "fp4" in self.flops else "hopper" if "fp8" in self.flops else "ampere"


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "hardware.yaml").read_text())


@functools.cache
def _others() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "other_gpus.yaml").read_text())


def names() -> list[str]:
    """All accelerators that jobs are planned for."""
    return list(_table())


@functools.cache
def gpu(kind: str) -> Gpu:
    """An accelerator; case does not matter. Those that only measured rows have are known too.

    Raises:
        RlctlError: no such name.
    """
    table = _table() | _others()
    if kind.lower() not in table:
        near = difflib.get_close_matches(kind.lower(), _table(), n=1)
        raise RlctlError(
            f"unknown GPU `{kind}`", (f"did you mean `{near[0]}`? " if near else "") + f"known: {', '.join(_table())}"
        )
    return Gpu(name=kind.lower(), **table[kind.lower()])


def kind_of(name: str) -> str | None:
    """The accelerator that a driver calls so, e.g. `NVIDIA H100 80GB HBM3` is `h100`; None when it is not known."""
    words = name.lower().replace("-", " ").split()
    for kind in names():
        model, _, memory = kind.partition("-")
        if model in words and (not memory or memory in words):
            return kind
    return None


def gpu_memory_bytes(kind: str) -> int:
    """Memory of an accelerator, e.g. 80,000,000,000 for `h100`; case does not matter.

    Raises:
        RlctlError: no such name.
    """
    return int(gpu(kind).memory_bytes)
