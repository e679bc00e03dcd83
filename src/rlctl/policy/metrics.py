"""Metrics reduced as they declare, the same for any split of the work over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from rlctl.types import Batch, Metric


class MetricSums:
    """Partial results of one step on one rank. `add` each microbatch once over all ranks; `reduce` on every rank."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], list[float]] = {}  # (name, reduction) -> [value, count, squares]

    def add(self, batch: Batch, metrics: Mapping[str, Metric]) -> None:
        """Add a microbatch's metrics: over its mask for [N] values, over its valid sequences for [B] values."""
        for name, metric in metrics.items():
            chosen = _chosen(batch, metric.values).double()
            if not len(chosen):
                continue
            extreme = {"max": torch.amax, "min": torch.amin}
            value = extreme[metric.reduce](chosen) if metric.reduce in extreme else chosen.sum()
            part = [float(value), float(len(chosen)), float(chosen.square().sum())]
            _merge(self._parts, (name, metric.reduce), part)

    def reduce(self) -> dict[str, float]:
        """The metrics of all ranks, the same on each. Collective. A mean over nothing is NaN."""
        parts: list[dict[tuple[str, str], list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, self._parts)
        total: dict[tuple[str, str], list[float]] = {}
        for one in parts:
            for key, value in one.items():
                _merge(total, key, value)
        return {name: _final(how, *value) for (name, how), value in sorted(total.items())}


def _chosen(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """Those of a metric's values that count."""
    if values.shape == batch.mask.shape and values.shape != batch.valid.shape:
        return values[batch.mask]
    assert values.shape == batch.valid.shape, (values.shape, batch.mask.shape, batch.valid.shape)
    return values[batch.valid]


def _merge(into: dict[tuple[str, str], list[float]], key: tuple[str, str], value: list[float]) -> None:
    if key not in into:
        into[key] = list(value)
        return
    combine = {"max": max, "min": min}.get(key[1], lambda a, b: a + b)
    into[key] = [combine(into[key][0], value[0]), into[key][1] + value[1], into[key][2] + value[2]]


def _final(how: str, value: float, count: float, squares: float) -> float:
    if how == "effective_share":
        return value * value / (count * squares) if squares else math.nan
    if how != "mean":
        return value
    return value / count if count else math.nan
