"""Fit the constants of plan/steptime.py and plan/rl.py on measured rows, and say how good they are on rows not fitted.

    python scripts/benchmarks/calibrate_plan.py            # prints the accuracy of the constants in the repository
    python scripts/benchmarks/calibrate_plan.py --write    # fits, writes constants.yaml, prints the accuracy

1. Rows are grouped by configuration: framework, model, GPU, workload, precision and length. A hash of the group's name
   puts a fifth of the groups aside; they are never fitted.
2. The constants minimise robust squared errors of log(tokens/s) over the other rows; a group weighs as the root of its
   rows.
3. The residuals of cross-validation inside the fitted part give the 10-90 % interval.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import yaml

from rlctl.plan import interval, rl, rows, steptime
from rlctl.plan.rows import HELD_OUT, fold

DATA = Path(rows.__file__).parent / "data"
HUBER = 0.15  # log units: beyond, an error counts linearly
BOUNDS = {
    "matmul_16": (0.4, 0.95), "matmul_8": (0.3, 0.95), "matmul_blackwell": (0.6, 1.1),
    "attention_hopper": (0.15, 0.6), "passes": (5, 200), "expert_passes": (1, 200), "unfused": (0.4, 1.0),
    "host_expert": (1e-4, 1.2e-2), "expert_tokens_half": (10, 3000), "tp_exposed": (0.01, 1), "fsdp_exposed": (0.01, 1),
}  # fmt: skip
GENERATION_BOUNDS = {
    "decode_bandwidth": (0.2, 0.95),
    "decode_host": (2e-4, 3e-2),
    "decode_expert": (0.1, 1.0),
    "rl_overhead": (1.0, 4.0),
}


def fit(
    error: Callable[[steptime.Constants], np.ndarray], weights: np.ndarray, bounds: dict, start: steptime.Constants
) -> steptime.Constants:
    """Levenberg-Marquardt on the logarithms of the constants, with Huber weights."""
    names = list(bounds)
    low, high = (np.log([bounds[n][i] for n in names]) for i in (0, 1))
    at = np.log([getattr(start, n) for n in names])

    def constants(point: np.ndarray) -> steptime.Constants:
        return dataclasses.replace(start, **dict(zip(names, map(float, np.exp(point)), strict=True)))

    def loss(residuals: np.ndarray) -> float:
        size = np.abs(residuals)
        return float((weights * np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2)).sum())

    damping, now = 1e-2, error(constants(at))
    for _ in range(60):
        robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-9))
        jacobian = np.stack([(error(constants(at + 1e-3 * e)) - now) / 1e-3 for e in np.eye(len(names))], axis=1)
        normal = (jacobian.T * robust) @ jacobian
        gradient = (jacobian.T * robust) @ now
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-3), -gradient)
        trial = np.clip(at + np.clip(step, -0.5, 0.5), low, high)
        then = error(constants(trial))
        if loss(then) < loss(now):
            done = loss(now) - loss(then) < 1e-7
            at, now, damping = trial, then, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return constants(at)


def errors(pairs: Sequence, constants: steptime.Constants) -> np.ndarray:
    """log(measured / predicted) of tokens/s."""
    return np.array([math.log(rows.measured_tokens(r) / rows.tokens_per_second(j, constants)) for r, j in pairs])


def weights(pairs: Sequence) -> np.ndarray:
    count = collections.Counter(rows.group(r) for r, _ in pairs)
    return np.array([count[rows.group(r)] ** -0.5 for r, _ in pairs])


def fit_training(pairs: Sequence, start: steptime.Constants) -> steptime.Constants:
    return fit(lambda c: errors(pairs, c), weights(pairs), BOUNDS, start)


def fit_generation(pairs: Sequence, steps: Sequence, start: steptime.Constants) -> steptime.Constants:
    """The constants of decoding, and the one of whole RL steps, whose rows are few, together."""

    def error(constants: steptime.Constants) -> np.ndarray:
        rates = [math.log(measured / rl.predicted_rate(work, constants)) for _, work, measured in pairs]
        return np.array(rates + [math.log(rl.rl_step(w, constants).total / seconds) for w, seconds in steps])

    return fit(error, np.ones(len(pairs) + len(steps)), GENERATION_BOUNDS, start)


def cross_validated(pairs: Sequence, start: steptime.Constants) -> dict[str, list[float]]:
    """Residuals by class of rows, each from constants that did not see its group."""
    found = collections.defaultdict(list)
    for part in range(4):
        rest = [p for p in pairs if fold("cv" + rows.group(p[0]), 4) != part]
        own = [p for p in pairs if fold("cv" + rows.group(p[0]), 4) == part]
        fitted = fit_training(rest, start)
        for (_, job), residual in zip(own, errors(own, fitted), strict=True):
            found[interval.kind(job)].append(float(residual))
    return found


def six_nd(fitted: Sequence, held: Sequence) -> list[float]:
    """Errors of `6 N D at one fitted utilisation for each GPU and precision`."""
    use = collections.defaultdict(list)
    for row, job in fitted:
        peak = steptime.matmul_peak(job, steptime.Constants(matmul_16=1, matmul_8=1, matmul_blackwell=1))
        use[job.precision, job.gpu.generation].append(6 * job.shape.active * rows.measured_tokens(row) / peak)
    found = []
    for row, job in held:
        peak = steptime.matmul_peak(job, steptime.Constants(matmul_16=1, matmul_8=1, matmul_blackwell=1))
        predicted = statistics.median(use[job.precision, job.gpu.generation]) * peak / (6 * job.shape.active)
        found.append(abs(rows.measured_tokens(row) / predicted - 1))
    return found


def ordered(pairs: Sequence, constants: steptime.Constants) -> tuple[int, int]:
    """Pairs of the same model and GPU whose tokens/s differ by over 5 %: (in the right order, all).

    Releases of one configuration have one prediction: they are no pair.
    """
    same = collections.defaultdict(list)
    for row, job in pairs:
        same[row["model"], row["hardware"], row["workload"]].append(
            (rows.measured_tokens(row), rows.tokens_per_second(job, constants))
        )
    right = total = 0
    for points in same.values():
        for i, (m, p) in enumerate(points):
            for n, q in points[:i]:
                if abs(math.log(m / n)) > math.log(1.05) and p != q:
                    total += 1
                    right += (m > n) == (p > q)
    return right, total


def report(title: str, pairs: Sequence, constants: steptime.Constants) -> None:
    size = sorted(abs(math.exp(e) - 1) for e in errors(pairs, constants))
    inside = 0
    for (_, job), e in zip(pairs, errors(pairs, constants), strict=True):
        low, high = interval.bounds(job)
        inside += low <= math.exp(e) <= high
    print(
        f"{title:34s} {len(size):4d} rows   median {100 * statistics.median(size):5.1f} %   "
        f"p90 {100 * size[int(0.9 * len(size))]:5.1f} %   10-90 % interval holds {100 * inside / len(size):3.0f} %"
    )


def show(pairs: Sequence, constants: steptime.Constants, *, worst: int) -> None:
    classes = collections.defaultdict(list)
    for pair in pairs:
        classes[interval.kind(pair[1])].append(pair)
    report("held out, all", pairs, constants)
    for name, own in sorted(classes.items()):
        report(f"held out, {name}", own, constants)
    own = [p for p in pairs if p[1].gpu.name == "h100" and not p[1].shape.moe_layers]
    report("held out, H100 dense", own, constants)
    right, total = ordered(pairs, constants)
    print(f"{'pairs over 5 % apart':34s} {total:4d} pairs  {100 * right / max(total, 1):.0f} % in the right order")
    ranked = sorted(zip(errors(pairs, constants), pairs, strict=True), key=lambda x: -abs(x[0]))
    print(
        "worst: "
        + "; ".join(f"{r['row_id']} {r['model']} {r['hardware']} x{math.exp(e):.2f}" for e, (r, _) in ranked[:worst])
    )


def plot(file: Path, pairs: Sequence, constants: steptime.Constants) -> None:
    """Held-out rows, predicted against measured tokens/s of a GPU."""
    from matplotlib import pyplot  # of the cpu pins, by reasoning-gym; only this option needs it

    figure, axes = pyplot.subplots(figsize=(6.4, 5.2))
    classes = collections.defaultdict(list)
    for row, job in pairs:
        classes[interval.kind(job)].append((rows.measured_tokens(row), rows.tokens_per_second(job, constants)))
    for name, points in sorted(classes.items()):
        axes.scatter(*zip(*points, strict=True), s=18, alpha=0.7, label=f"{name} ({len(points)})")
    low, high = (f(v for points in classes.values() for pair in points for v in pair) for f in (min, max))
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="equal")
    for factor in (1.25, 0.8):
        axes.plot([low, high], [low * factor, high * factor], color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured tokens/s of a GPU", ylabel="predicted")
    axes.set_title(f"{len(pairs)} rows that were not fitted; dashed: 25 % apart", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def memory(table: Sequence) -> None:
    for family, found in rows.memory_errors(table).items():
        size = sorted(abs(e) for e in found)
        print(f"{'memory, ' + family:34s} {len(size):4d} rows   median {100 * statistics.median(size):5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="fit, and write constants.yaml")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the held-out rows")
    arguments = parser.parse_args()
    table = rows.read(DATA / "measured.csv")
    pairs = rows.usable(table)
    fitted = [p for p in pairs if fold(rows.group(p[0])) != HELD_OUT]
    held = [p for p in pairs if fold(rows.group(p[0])) == HELD_OUT]
    generation = rl.usable(table)
    to_fit = [g for g in generation if fold(g[0]["row_id"]) != HELD_OUT]
    steps = rl.whole_steps(table)
    groups = {row["row_id"]: rows.group(row) for row in table}
    steps_to_fit = [step for name, step in steps.items() if fold(groups[name]) != HELD_OUT]
    if arguments.write:
        start = steptime.Constants()
        constants = fit_generation(to_fit, steps_to_fit, fit_training(fitted, start))
        residuals = cross_validated(fitted, start)
        residuals["rl step"] = [math.log(rl.rl_step(w, constants).total / s) for w, s in steps_to_fit]
        residuals["generation"] = [math.log(m / rl.predicted_rate(w, constants)) for _, w, m in to_fit]
        interval.write(DATA / "constants.yaml", constants, residuals)
        steptime.constants.cache_clear()
    constants = steptime.constants()
    print(yaml.safe_dump({k: float(f"{v:.4g}") for k, v in vars(constants).items()}, sort_keys=False))
    print(f"fitted on {len(fitted)} training rows in {len({rows.group(r) for r, _ in fitted})} groups")
    report("fitted", fitted, constants)
    show(held, constants, worst=10)
    if arguments.plot:
        plot(arguments.plot, held, constants)
    simple = sorted(six_nd(fitted, held))
    print(
        f"{'6 N D at fitted utilisation':34s} {len(simple):4d} rows  median {100 * statistics.median(simple):5.1f} %   "
        f"p90 {100 * simple[int(0.9 * len(simple))]:5.1f} %"
    )
    for title, own in (
        ("generation, fitted", to_fit),
        ("generation, held out", [g for g in generation if g not in to_fit]),
    ):
        size = sorted(abs(m / rl.predicted_rate(w, constants) - 1) for _, w, m in own)
        print(f"{title:34s} {len(size):4d} rows   median {100 * statistics.median(size):5.1f} %")
    for title, wanted in (("whole RL step, fitted", False), ("whole RL step, held out", True)):
        own_steps = [step for name, step in steps.items() if (fold(groups[name]) == HELD_OUT) == wanted]
        size = sorted(abs(rl.rl_step(work, constants).total / seconds - 1) for work, seconds in own_steps)
        print(f"{title:34s} {len(size):4d} rows   median {100 * statistics.median(size):5.1f} %")
    memory(table)
    choices = rows.layout_choices(table, constants)
    near = sum(share >= 0.9 for share in choices)
    print(f"{'layout within 10 % of the fastest':34s} {near:4d} of {len(choices)} configurations")


if __name__ == "__main__":
    main()
