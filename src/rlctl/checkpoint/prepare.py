"""A rule's tensors read, checked against what was recorded of them, cast and hashed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.checkpoint.verify import Described, compare
from rlctl.checkpoint.views import MANIFEST, View, described
from rlctl.models.base import WeightRule

_BLOCK = 1 << 22  # elements of which the error of a cast is taken at once


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rule's tensors, ready to be written."""

    tensors: list[torch.Tensor]
    found: Described
    casts: int
    cast_error: float
    """Largest absolute change of an element."""


def prepare(
    view: View, rule: WeightRule, *, dtype: torch.dtype | None, recorded: Mapping[str, dict[str, Any]] | None
) -> Prepared:
    """Read a rule's tensors.

    Args:
        view: the source.
        rule: one of its rules.
        dtype: to cast to; None keeps what is stored.
        recorded: what a manifest beside the source says of its tensors, if it has one.

    Raises:
        RlctlError: exit status 4; a tensor is not the recorded one.
    """
    stored = view.read(rule)
    found = {name: described(t) for name, t in zip(rule.sources, stored, strict=True)}
    if recorded is not None:
        wanted = {name: recorded[name] for name in rule.sources if name in recorded}
        compare(found, wanted, here=str(view.folder), there=str(view.folder / MANIFEST))
    if dtype is None:
        return Prepared(tensors=stored, found=found, casts=0, cast_error=0.0)
    tensors, casts, error = [], 0, 0.0
    for name, before in zip(rule.sources, stored, strict=True):
        after = before.to(dtype) if before.dtype.is_floating_point else before
        if after.dtype != before.dtype:
            casts += 1
            error = max(error, _change(before, after))
            found[name] = described(after)
        tensors.append(after)
    return Prepared(tensors=tensors, found=found, casts=casts, cast_error=error)


def _change(before: torch.Tensor, after: torch.Tensor) -> float:
    pairs = zip(before.reshape(-1).split(_BLOCK), after.reshape(-1).split(_BLOCK), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs), default=0.0)
