"""What a run's numbers say: did it learn, is it healthy, what is slow. Each answer names the figures it rests on.

The limits are rules of thumb, shown next to what was found, so that a reader can disagree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlctl import estimates
from rlctl.report.charts import number
from rlctl.report.run import Run, read_samples

MISMATCH_LIMIT = 1.05  # mean ratio between engine and trainer; clipping starts to bite on noise alone above it
INVALID_LIMIT, TRUNCATED_LIMIT = 0.01, 0.3
ENTROPY_LEFT = 0.05  # of the first steps' entropy: below, samples of a prompt are nearly the same
EMPTY_LIMIT = 0.2
SPIKE = 10.0  # gradient norm over its median
_MISMATCH = "mismatch of engine and trainer"
_NAMED = 3  # checks in the sentence; all are in the table
_SIGNIFICANT = 3.0  # standard errors
Verdict = Literal["good", "bad", "open"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question's answer in a sentence."""

    question: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """One sign of health, e.g. Check(name="samples without a reward", found="0 %", expected="at most 1 %", ok=True)."""

    name: str
    found: str
    expected: str
    ok: bool


def ends(points: Sequence[tuple[int, float]]) -> tuple[float, float, int]:
    """Means over the first and the last steps, and over how many: a fifth of the run, at most 10."""
    size = max(1, min(10, len(points) // 5))
    values = [y for _, y in points]
    return statistics.fmean(values[:size]), statistics.fmean(values[-size:]), size


@dataclass(frozen=True, kw_only=True)
class Final:
    """A figure at the end of a run with its 95 % interval, e.g. "0.910 [0.882, 0.935]"."""

    value: float
    low: float
    high: float
    step: int
    """The last one that it was measured on."""
    steps: str
    """All of what it was measured on."""

    def __str__(self) -> str:
        return f"{number_3(self.value)} [{number_3(self.low)}, {number_3(self.high)}]"


def final_reward(run: Run) -> Final | None:
    """Mean training reward of the last steps.

    The interval takes the samples' spread for that of prompts' means: it is rather too wide than too narrow.
    """
    reward = run.series("rollout/reward")
    if not reward:
        return None
    _, last, size = ends(reward)
    half = estimates.CONFIDENCE_Z * _noise(run, size)
    return Final(value=last, low=last - half, high=last + half, step=reward[-1][0], steps=_steps(reward[-size:]))


def final_validation(run: Run) -> Final | None:
    """The last validation that has its samples, over prompts (estimates.py)."""
    for step, file in reversed(run.dumps("validation").items()):
        groups: dict[int, list[float]] = {}
        for sample in read_samples(file).rows:
            if sample["valid"]:
                groups.setdefault(sample["group"], []).append(sample["reward"])
        if groups:
            found = estimates.estimate([statistics.fmean(g) for g in groups.values()])
            steps = f"(step {step}, {len(groups)} prompts)"
            return Final(value=found.value, low=found.low, high=found.high, step=step, steps=steps)
    return None


def _noise(run: Run, size: int) -> float:
    """Standard error of the mean reward of `size` steps, prompts being independent."""
    spread = [y for _, y in run.series("rollout/reward_std")]
    prompts = run.recipe["grpo"]["num_prompts_per_step"]
    return statistics.fmean(spread) / math.sqrt(prompts * size) if spread else 0.0


def median_step_seconds(run: Run) -> float | None:
    """Of all steps."""
    found = [y for _, y in run.series("time/step_seconds")]
    return statistics.median(found) if found else None


def learned(run: Run) -> Answer:
    """Whether the reward rose by more than its noise."""
    question, reward = "Did it learn?", run.series("rollout/reward")
    if not reward and run.rows:
        return Answer(question=question, verdict="open", text=_without_reward(run))
    if len(reward) < 2:
        return Answer(question=question, verdict="open", text="Fewer than two steps are logged.")
    first, last, size = ends(reward)
    far = abs(last - first) > _SIGNIFICANT * math.sqrt(2) * _noise(run, size)
    where = f"from {number_3(first)} {_steps(reward[:size])} to {number_3(last)} {_steps(reward[-size:])}"
    if far and last > first:
        verdict, text = "good", f"Yes. Training reward rose {where}."
        if healthy(run).verdict == "bad":
            verdict, text = (
                "open",
                f"{text} But not all signs of health are good: trust it only when they are explained.",
            )
    elif far:
        verdict, text = "bad", f"No. Training reward fell {where}."
    else:
        verdict, text = "open", f"Not clearly. Training reward went {where}, which is within its noise."
    return Answer(question=question, verdict=verdict, text=text + _validation(run))  # type: ignore[arg-type]


def _without_reward(run: Run) -> str:
    """Of training on data: the loss, which alone decides nothing."""
    loss = run.series("train/loss")
    if len(loss) < 2:
        return "Neither a reward nor two losses are logged."
    first, last, size = ends(loss)
    return (
        f"No reward is logged. The loss went from {number_3(first)} {_steps(loss[:size])} to {number_3(last)} "
        f"{_steps(loss[-size:])}."
    )


def _steps(points: Sequence[tuple[int, float]]) -> str:
    a, b = points[0][0], points[-1][0]
    return f"(step {a})" if a == b else f"(mean of steps {a} to {b})"


def _validation(run: Run) -> str:
    points = run.series("val/reward")
    if not points:
        return " No validation was made (grpo.val_period)."
    best = max(points, key=lambda p: p[1])
    (first_step, first), (last_step, last) = points[0], points[-1]
    measured = final_validation(run)
    current = measured is not None and measured.step == last_step
    interval = f", 95 % interval {number_3(measured.low)} to {number_3(measured.high)}" if measured and current else ""
    if len(points) == 1:
        return f" Validation reward is {number_3(last)} after step {last_step}{interval}."
    return (
        f" Validation reward went from {number_3(first)} (after step {first_step}) to {number_3(last)} "
        f"(step {last_step}{interval}); its best is {number_3(best[1])} (step {best[0]})."
    )


def number_3(value: float) -> str:
    """Three decimals, more for small values."""
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else number(value)


def checks(run: Run) -> list[Check]:
    """Signs of health that the run logged."""
    found = [_mismatch(run), _finite(run), _share(run, "invalid", "samples without a reward", INVALID_LIMIT)]
    found += [
        _share(run, "truncated", "samples cut off by length", TRUNCATED_LIMIT),
        _entropy(run),
        _gradients(run),
        _signal(run),
    ]
    return [check for check in found if check is not None]


def healthy(run: Run) -> Answer:
    """The checks in a sentence."""
    question, made = "Is it healthy?", checks(run)
    wrong = [c for c in made if not c.ok]
    failed = [str(c["name"]) for c in run.start_checks if not c["ok"]]
    error = f"The run failed: {run.error.rstrip('.')}. " if run.error and run.status == "failed" else ""
    error += f"Before the first step, {', '.join(failed)} did not hold. " if failed else ""
    if not run.rows:
        return Answer(question=question, verdict="bad" if error else "open", text=error + "No step is logged.")
    if wrong:
        named = "; ".join(f"{c.name} ({c.found})" for c in wrong[:_NAMED]) + "; ..." * (len(wrong) > _NAMED)
        expected = f", expected {wrong[0].expected}" if len(wrong) == 1 else ""
        text = f"{error}{len(wrong)} of {len(made)} checks need{'s' * (len(wrong) == 1)} a look: {named}{expected}."
        return Answer(question=question, verdict="bad", text=text)
    before = f", and {len(run.start_checks)} before the first step" if run.start_checks and not failed else ""
    text = f"{error}{'' if error else 'Yes. '}All {len(made)} checks passed{before}."
    return Answer(question=question, verdict="bad" if error else "good", text=text)


def mismatch(run: Run) -> Answer:
    """Whether the engine samples from the policy that is trained."""
    question, found = "Is the mismatch healthy?", _mismatch(run)
    if found is None:
        return Answer(question=question, verdict="open", text="No mismatch is logged.")
    meaning = "how far the engine's probability of a sampled token is from the trainer's"
    text = f"{'Yes' if found.ok else 'No'}: {found.found}; {found.expected} ({meaning})."
    return Answer(question=question, verdict="good" if found.ok else "bad", text=text)


def _mismatch(run: Run) -> Check | None:
    points = run.series("mismatch/token_mult_prob_error")
    if not points:
        return None
    step, worst = max(points, key=lambda p: p[1])
    return Check(
        name=_MISMATCH, found=f"mean ratio peaks at {worst:.4f} (step {step})",
        expected=f"1 is exact, below {MISMATCH_LIMIT} is fine", ok=worst < MISMATCH_LIMIT,
    )  # fmt: skip


def _finite(run: Run) -> Check:
    bad = [(row["step"], name) for row in run.rows for name, value in row.items() if value is None]
    found = "none" if not bad else f"{len(bad)}, the first is {bad[0][1]} at step {bad[0][0]}"
    return Check(name="values that are not finite", found=found, expected="none", ok=not bad)


def _share(run: Run, kind: str, name: str, limit: float) -> Check | None:
    points = run.series(f"rollout/{kind}_share")
    if not points:
        return None
    _, last, size = ends(points)
    worst = max(y for _, y in points)
    steps = "the last step" if size == 1 else f"the last {size} steps"
    return Check(
        name=name, found=f"{last:.1%} in {steps}, peak {worst:.1%}", expected=f"at most {limit:.0%} at the end",
        ok=last <= limit,
    )  # fmt: skip


def _entropy(run: Run) -> Check | None:
    points = run.series("train/entropy")
    if len(points) < 2:
        return None
    first, last, _ = ends(points)
    return Check(
        name="entropy", found=f"{number_3(first)} nats a token at the start, {number_3(last)} at the end",
        expected=f"above {ENTROPY_LEFT:.0%} of the start: below, samples hardly differ", ok=last > ENTROPY_LEFT * first,
    )  # fmt: skip


def _signal(run: Run) -> Check | None:
    """Groups whose rewards are all alike have no advantage; a step of such groups alone has no gradient."""
    points = run.series("train/grad_norm")
    if not points or not run.series("rollout/reward"):
        return None
    empty = [step for step, y in points if y == 0]
    first = f", the first is step {empty[0]}" if empty else ""
    return Check(
        name="steps that teach nothing", found=f"{len(empty)} of {len(points)}{first}",
        expected=f"at most {EMPTY_LIMIT:.0%} without a gradient: rewards in each group alike",
        ok=len(empty) <= EMPTY_LIMIT * len(points),
    )  # fmt: skip


def _gradients(run: Run) -> Check | None:
    points = run.series("train/grad_norm")
    if len(points) < 3:
        return None
    step, worst = max(points, key=lambda p: p[1])
    middle = statistics.median(y for _, y in points)
    return Check(
        name="gradient norm", found=f"median {number_3(middle)}, peak {number_3(worst)} (step {step})",
        expected=f"no spike above {SPIKE:.0f} times the median", ok=worst <= SPIKE * middle,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where time went."""

    name: str
    median_seconds: float
    total_seconds: float
    share: float
    """Of all steps' time."""


def phases(run: Run) -> list[Phase]:
    """Phases by total time, the longest first; what no phase covers is `other`."""
    total = sum(y for _, y in run.series("time/step_seconds"))
    if not total:
        return []
    named = {name: [y for _, y in points] for name, points in phase_points(run).items()}
    made = [
        Phase(name=n, median_seconds=statistics.median(v), total_seconds=sum(v), share=sum(v) / total)
        for n, v in named.items()
    ]
    return sorted(made, key=lambda p: -p.total_seconds)


def phase_points(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Phase -> (step, seconds), with what is left of each step under `other`."""
    whole = ("time/step_seconds", "time/other_seconds")  # what is left is counted here, logged or not
    names = [n for n in run.metrics("time/") if n.endswith("_seconds") and n not in whole]
    points = {n.removeprefix("time/").removesuffix("_seconds"): run.series(n) for n in names}
    left = dict(run.series("time/step_seconds"))
    for series in points.values():
        for step, seconds in series:
            if step in left:
                left[step] -= seconds
    return points | {"other": [(step, max(0.0, seconds)) for step, seconds in left.items()]}


def tokens_per_second(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Tokens that the engine sampled in a second of generation, and all tokens in a second of the step."""
    rates: dict[str, list[tuple[int, float]]] = {"generated, in `generate`": [], "all, in the whole step": []}
    pairs = (("rollout/response_length", "time/generate_seconds"), ("rollout/total_length", "time/step_seconds"))
    for label, (length, seconds) in zip(rates, pairs, strict=True):
        valid, took = dict(run.series("rollout/invalid_share")), dict(run.series(seconds))
        rates[label] = [
            (step, mean * run.sequences_per_step * (1 - valid[step]) / took[step])
            for step, mean in run.series(length)
            if step in took and step in valid and took[step] > 0
        ]
    return rates


def slow(run: Run) -> Answer:
    """The longest phase."""
    question, made, seconds = "What is slow?", phases(run), run.series("time/step_seconds")
    if not made:
        return Answer(question=question, verdict="open", text="No step is logged.")
    shares = ", ".join(f"{p.name} {p.share:.0%}" for p in made[1:4])
    text = (
        f"{made[0].name.capitalize()}: {made[0].share:.0%} of the steps' time{f' (then {shares})' if shares else ''}."
    )
    text += f" A step takes {number_3(statistics.median(y for _, y in seconds))} s (median)"
    rates = tokens_per_second(run)["all, in the whole step"]
    text += f", {statistics.median(y for _, y in rates):,.0f} tokens/s." if rates else "."
    return Answer(question=question, verdict="open", text=text)
