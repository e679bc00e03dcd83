"""Whether two models on disk are the same, tensor by tensor and bit by bit, whichever formats they are in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from rlctl.checkpoint.pipeline import in_order
from rlctl.checkpoint.views import MANIFEST, View, described_tensors, read_manifest
from rlctl.errors import CHECK_FAILED, RlctlError

Described = dict[str, dict[str, Any]]
Progress = Callable[[str, int], None]  # what is done, bytes since the last call


def silent(what: str, num_bytes: int) -> None:
    """A progress that shows nothing."""


def tensors_of(view: View, progress: Progress = silent, *, workers: int = 2) -> Described:
    """Dtype, shape and hash of every tensor by name; reads the model once."""
    found: Described = {}
    for tensors in in_order(lambda rule: described_tensors(view, rule), view.rules, workers=workers):
        assert not found.keys() & tensors.keys()
        found |= tensors
        progress("reading", sum(num_bytes(t) for t in tensors.values()))
    return found


def num_bytes(tensor: dict[str, Any]) -> int:
    """Of a described tensor."""
    return math.prod(tensor["shape"]) * getattr(torch, tensor["dtype"]).itemsize


def against_manifest(view: View, progress: Progress = silent) -> Described:
    """Check a converted model against what its conversion recorded.

    Raises:
        RlctlError: exit status 2 without a manifest, 4 for tensors that differ.
    """
    root = view.folder
    manifest = read_manifest(root)
    if manifest is None:
        raise RlctlError(
            f"`{root}` has no {MANIFEST}: nothing is known of how it was", "name a second model to compare it with"
        )
    found = tensors_of(view, progress)
    compare(found, manifest["tensors"], here=str(root), there=f"{root / MANIFEST}")
    return found


def compare(found: Described, wanted: Described, *, here: str, there: str) -> None:
    """Refuse any difference.

    Raises:
        RlctlError: exit status 4; names the first tensor that differs and how.
    """
    names = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
    if not names:
        return
    name = names[0]
    raise RlctlError(
        f"{len(names)} of {len(found.keys() | wanted.keys())} tensors differ, first `{name}`: "
        f"{_text(found.get(name))} in `{here}`, {_text(wanted.get(name))} in `{there}`",
        "convert again from the original, or restore the damaged side",
        exit_status=CHECK_FAILED,
    )


def _text(tensor: dict[str, Any] | None) -> str:
    if tensor is None:
        return "absent"
    return f"{tensor['dtype']} {tuple(tensor['shape'])} {tensor['xxh3_128'][:12]}"
