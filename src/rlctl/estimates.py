"""Pass@k and means over prompts, with 95 % intervals.

1. `pass_at_k` is the unbiased estimate from n samples of a prompt, c of them correct: 1 - C(n-c, k) / C(n, k).
2. An estimate is a mean over prompts, which are what was drawn at random; a prompt's samples are not independent.
3. Its interval is Wilson's where every prompt's value is 0 or 1, else the percentile bootstrap over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

CONFIDENCE_Z = 1.959963984540054  # of 95 %, two-sided
RESAMPLES = 10_000
_CHUNK = 2_000_000  # drawn indices held at once


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts, e.g. Estimate(value=0.8, low=0.7, high=0.88, method="wilson", prompts=64)."""

    value: float
    low: float
    high: float
    method: str
    """`wilson` or `bootstrap`."""
    prompts: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that of k samples at least one is correct, estimated without bias.

    Args:
        n: samples drawn.
        c: of these, correct ones.
        k: at most n.
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, which ends the list."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a prompt, with its interval.

    Args:
        values: at least one.
    """
    mean = math.fsum(values) / len(values)
    binary = all(v in (0.0, 1.0) for v in values)
    low, high = wilson(mean, len(values)) if binary else bootstrap(values)
    return Estimate(
        value=mean, low=low, high=high, method="wilson" if binary else "bootstrap", prompts=len(values)
    )  # fmt: skip


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a share of n independent trials."""
    z2 = CONFIDENCE_Z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = CONFIDENCE_Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of the mean, by resampling the values; the same for the same values."""
    data, generator = numpy.asarray(values, dtype=numpy.float64), numpy.random.default_rng(seed)
    at_once = max(1, _CHUNK // len(data))
    means = [
        data[generator.integers(len(data), size=(min(at_once, RESAMPLES - done), len(data)))].mean(axis=1)
        for done in range(0, RESAMPLES, at_once)
    ]
    low, high = numpy.percentile(numpy.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
