"""From measured steps to a table and a verdict; and one report against an earlier one. Needs no torch.

1. A phase's figures are over all steps of all repeats, warm-up dropped.
2. The ratio of two sides is of their median step seconds; its 95 % interval is the percentile bootstrap that draws
   repeats, then steps within them, since the steps of one start of the processes are not independent.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from rlctl.errors import RlctlError

SCHEMA = 1
RESAMPLES = 2000
UNACCOUNTED = 0.02  # of a step's seconds that the phases may leave out
PHASES = ("old_logprobs", "ref_logprobs", "advantages", "forward_backward", "optimizer", "weight_gather")
BASELINE_SAME = ("model", "rollouts", "machine", "recipe_hash", "steps", "repeats")
"""What two reports must share."""


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation."""
    return float(numpy.percentile(numpy.asarray(values, dtype=numpy.float64), 100 * share))


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One side's figures.

    Args:
        results: of its repeats, as bench/measure.py writes them.
    """
    steps = [step for result in results for step in result["steps"]]
    walls = [step["wall"] for step in steps]
    total = sum(walls)
    missing = total - sum(seconds for step in steps for name, seconds in step.items() if name != "wall")
    shown = [name for name in PHASES if any(name in step for step in steps)]
    phases = {name: _figures([step.get(name, 0.0) for step in steps]) for name in shown}
    real = sum(n for result in results for n in result["real_tokens"])
    padded = sum(n for result in results for n in result["padded_tokens"])
    flops = sum(n for result in results for n in result["flops"])
    peak = statistics.median(result["matmul_flops_per_second"] for result in results)
    gather = statistics.median(step["weight_gather"] for step in steps)
    copy = statistics.median(result["memcpy_seconds"] for result in results)
    return {
        "phases": phases | {"step": _figures(walls)},
        "unaccounted_share": missing / total,
        "tokens_per_second": real / total,
        "padding_share": 1.0 - real / padded,
        "flops_per_second": flops / total,
        "matmul_flops_per_second": peak,
        "mfu": flops / total / peak,
        "peak_memory_bytes": max(result["peak_memory_bytes"] for result in results),
        "weight_gather_bytes_per_second": results[0]["weight_bytes"] / gather,
        "memcpy_bytes_per_second": results[0]["weight_bytes"] / copy,
        "step_seconds": [[step["wall"] for step in result["steps"]] for result in results],
    }


def _figures(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
        "n": len(values),
    }


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, seed: int = 0) -> dict[str, Any]:
    """Median step seconds of one side over the other's.

    Args:
        ours: step seconds of each repeat.
        theirs: the denominator.
        seed: of the bootstrap.
    """
    generator = numpy.random.default_rng(seed)

    def median(repeats: Sequence[Sequence[float]]) -> float:
        return statistics.median(value for repeat in repeats for value in repeat)

    def drawn(repeats: Sequence[Sequence[float]]) -> float:
        chosen = [list(repeats[i]) for i in generator.integers(len(repeats), size=len(repeats))]
        return float(numpy.median(numpy.concatenate([generator.choice(r, size=len(r)) for r in chosen])))

    found = [drawn(ours) / drawn(theirs) for _ in range(RESAMPLES)]
    return {
        "value": median(ours) / median(theirs),
        "low": percentile(found, 0.025),
        "high": percentile(found, 0.975),
        "method": f"95 %, bootstrap over {len(ours)} and {len(theirs)} repeats and their steps",
    }


def curves(sides: Mapping[str, Mapping[str, Any]], *, tolerance: float) -> dict[str, Any]:
    """Whether replayed training gives the same curves.

    Args:
        sides: name -> result of a `train` job; two of them.
        tolerance: largest difference of the loss (absolute), and of gradient norm and entropy (relative).

    Returns:
        `diverged_at`: the first step that differs, or None; `figure`, `first_tensor` and `error` there.
    """
    (a, first), (b, second) = sides.items()
    worst = 0.0
    for i, (x, y) in enumerate(zip(first["curve"], second["curve"], strict=True)):
        for name in x:
            error = abs(x[name] - y[name]) / (1.0 if name == "loss" else max(abs(y[name]), 1e-12))
            worst = max(worst, error)
            if not error <= tolerance:
                return {
                    "diverged_at": i + 1, "figure": name, "error": error, "sides": [a, b], "tolerance": tolerance,
                    "first_tensor": _first_tensor(first["norms"], second["norms"], tolerance),
                }  # fmt: skip
    return {"diverged_at": None, "error": worst, "steps": len(first["curve"]), "tolerance": tolerance, "sides": [a, b]}


def _first_tensor(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], limit: float) -> str:
    """The tensor whose norm is first apart by more than the limit, with its step; the worst one if none is."""
    worst, largest = "", -1.0
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True), 1):
        for name, value in y.items():
            error = abs(x[name] - value) / max(abs(value), 1e-12)
            if error > limit:
                return f"{name} after step {i}"
            if error > largest:
                worst, largest = f"{name} after step {i}, whose norm differs by {error:.1e} only", error
    return worst


def load(path: Path) -> dict[str, Any]:
    """A report.json.

    Raises:
        RlctlError: it is not there, no report, or of another schema.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RlctlError(f"cannot read `{path}`: {error}", "give a report.json that `rlctl bench` wrote") from error
    if not isinstance(found, dict) or "bench_schema" not in found:
        raise RlctlError(f"`{path}` is no report of `rlctl bench`", "give a report.json that `rlctl bench` wrote")
    if found["bench_schema"] != SCHEMA:
        raise RlctlError(
            f"`{path}` has schema {found['bench_schema']}, this rlctl reads {SCHEMA}", "record it again with this rlctl"
        )
    return found


def against(before: Mapping[str, Any], after: Mapping[str, Any], *, fail_over: float) -> dict[str, Any]:
    """A later report against an earlier one.

    Args:
        before: the baseline.
        after: measured now.
        fail_over: growth of the median step that is a regression, e.g. 0.05.

    Raises:
        RlctlError: no side is in both, or one has no timing.
    """
    apart = [n for n in BASELINE_SAME if before[n] != after[n]]
    names = [name for name in before["sides"] if name in after["sides"]]
    if not names or not all(r["sides"][n]["timing"] for r in (before, after) for n in names):
        raise RlctlError(
            "the reports have no timed side in common", f"they have {list(before['sides'])} and {list(after['sides'])}"
        )

    def seconds(report: Mapping[str, Any], name: str) -> Any:
        return report["sides"][name]["timing"]["step_seconds"]

    rows = {n: ratio(seconds(after, n), seconds(before, n)) for n in names}
    slower = [n for n, r in rows.items() if r["value"] > 1 + fail_over]
    return {"sides": rows, "fail_over": fail_over, "slower": slower, "not_comparable": apart}
