"""The 10-90 % interval of a prediction: quantiles of residuals, by the class of the job.

A residual is log(measured / predicted) of throughput: cross-validated for training, of the fit itself for generation
and RL steps, whose rows are few. A class of training jobs with fewer than 15 residuals takes those of all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlctl.plan.steptime import Constants, Job

_FILE = Path(__file__).parent / "data" / "constants.yaml"
ENOUGH = 15
_OTHERS = ("generation", "rl step")


def kind(job: Job) -> str:
    """The class of a training job, e.g. `fused, experts`."""
    return f"{job.kernels}, {'experts' if job.shape.moe_layers else 'dense'}"


@functools.cache
def _quantiles() -> dict[str, list[float]]:
    return yaml.safe_load(_FILE.read_text())["intervals"]


def bounds(job: Job) -> tuple[float, float]:
    """Factors on a job's predicted throughput: its 10 % and 90 % quantile."""
    return of(kind(job))


def of(name: str) -> tuple[float, float]:
    """The factors of a class by name; `generation` is one."""
    table = _quantiles()
    low, high = table[name] if name in table else table["all"]
    return low, high


def ratio(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """The factors of the ratio of two predictions whose errors are independent (on the logarithm, in quadrature).

    Args:
        first: factors of the numerator, below and above 1 or close to it.
        second: of the denominator.
    """
    low = math.hypot(math.log(first[0]), math.log(second[1]))
    high = math.hypot(math.log(first[1]), math.log(second[0]))
    return math.exp(-low), math.exp(high)


def quantile(values: Sequence[float], share: float) -> float:
    """Of a sample, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def write(file: Path, constants: Constants, residuals: Mapping[str, Sequence[float]]) -> None:
    """Write constants.yaml.

    Args:
        file: where.
        constants: the fitted ones.
        residuals: log(measured / predicted) by class, from constants that did not see the row.
    """
    training = [r for name, values in residuals.items() if name not in _OTHERS for r in values]
    classes = {name: values for name, values in residuals.items() if len(values) >= ENOUGH or name in _OTHERS} | {
        "all": training
    }
    table: dict[str, Any] = {
        "constants": {name: float(f"{value:.4g}") for name, value in vars(constants).items()},
        "intervals": {
            name: [round(math.exp(quantile(values, share)), 3) for share in (0.1, 0.9)]
            for name, values in sorted(classes.items())
        },
    }
    head = (
        "# Written by scripts/benchmarks/calibrate_plan.py --write; fields are those of plan/steptime.py's Constants.\n"
    )
    file.write_text(head + yaml.safe_dump(table, sort_keys=False, default_flow_style=None))
    _quantiles.cache_clear()
