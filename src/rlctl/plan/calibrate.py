"""Constants refined by the user's own measurements: `rlctl plan --calibrate report.json` writes a profile.

1. Each side of a bench report gives the seconds of an update and of a pass for logprobs, of a job that is known.
2. The constants that explain them best, not far from the shipped ones: a log-normal prior of PRIOR around each, errors
   of NOISE (independent reruns of one configuration in data/measured.csv differ by about so much).
3. profile.py keeps them.

What a report does not measure (generation, other GPUs) changes only as far as it shares constants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlctl.errors import RlctlError
from rlctl.models import resolve
from rlctl.parallel import Layout
from rlctl.plan.hardware import gpu, kind_of
from rlctl.plan.rl import Lengths, packed
from rlctl.plan.shape import from_config
from rlctl.plan.steptime import Constants, Job, step_time

PRIOR = 0.3  # standard deviation of a constant's logarithm
NOISE = 0.1  # of a measured phase's
REFINED = ("matmul_16", "matmul_blackwell", "attention_hopper", "passes", "expert_passes", "unfused", "host_expert",
           "expert_tokens_half", "tp_exposed", "fsdp_exposed", "rl_overhead")  # fmt: skip
_TRAINING = ("forward", "backward", "forward_backward", "optimizer", "advantages")
_ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A measured phase of a known job."""

    what: str
    job: Job
    repeats: int
    """Updates of a step, or 1."""
    seconds: float

    def predicted(self, constants: Constants) -> float:
        """Seconds."""
        return constants.rl_overhead * self.repeats * step_time(self.job, constants).total


def observations(report: Mapping[str, Any], where: str) -> list[Observation]:
    """The phases of a bench report's sides.

    Args:
        report: as bench/compare.py's `load` gives it.
        where: its name, for messages.

    Raises:
        RlctlError: it was made without GPUs or on an unknown kind, in float32, or timed nothing.
    """
    name = report["machine"]["gpu_name"]
    kind = kind_of(name) if name else None
    on_host = "CPU processes" in report["where"]
    if kind is None or on_host:
        what = "by processes on a host" if on_host or not name else f"on `{name}`"
        raise RlctlError(
            f"`{where}` was measured {what}, and the plan predicts known GPUs",
            "give a report.json of a benchmark on GPUs that src/rlctl/plan/hardware.yaml lists",
        )
    found = []
    for side, data in report["sides"].items():
        if data["timing"] is not None:
            found += _of_side(report, side, data, kind)
    if not found:
        raise RlctlError(f"`{where}` has no timings", "record one without `--parity-only`, whose parity passes")
    return found


def _of_side(report: Mapping[str, Any], side: str, data: Mapping[str, Any], kind: str) -> list[Observation]:
    facts, phases = data["facts"], data["timing"]["phases"]
    if facts["precision"] != "bfloat16":
        raise RlctlError(
            f"side `{side}` ran in {facts['precision']}, and the plan's constants are for bfloat16",
            "record the report with policy.precision=bfloat16",
        )
    _, tp, pp, cp, ep = facts["layout (dp tp pp cp ep)"]
    layout = Layout(world=facts["processes"], tp=tp, sp=side.startswith("megatron") and tp > 1, pp=pp, cp=cp, ep=ep)
    size = report["rollouts_size"]
    length, sequences = size["length_mean"], size["sequences"] // size["steps"]
    tokens = facts["microbatch tokens"] or [n * size["length_max"] for n in facts["microbatch sequences"]]
    lengths = Lengths(prompt=0.0, response=length, limit=length)
    updates = sequences // (facts["sequences of an update"] or sequences)
    update, forward = (
        packed(
            dataclasses.replace(_job(report, side, facts, kind, layout), microbatch_tokens=float(n)),
            lengths, sequences=count,
        )
        for n, count in zip(tokens, (sequences // updates, sequences), strict=True)
    )  # fmt: skip
    training = sum(phases[name]["median"] for name in _TRAINING if name in phases)
    found = [Observation(what=f"{side} training", job=update, repeats=updates, seconds=training)]
    forward = dataclasses.replace(forward, forward_only=True)
    for name in ("old_logprobs", "ref_logprobs"):
        if name in phases:
            found.append(Observation(what=f"{side} {name}", job=forward, repeats=1, seconds=phases[name]["median"]))
    return found


def _job(report: Mapping[str, Any], side: str, facts: Mapping[str, Any], kind: str, layout: Layout) -> Job:
    megatron = side.startswith("megatron")
    shape = from_config(resolve.resolve(facts["model"], facts["model changes"]).config)
    return Job(
        shape=shape, gpu=gpu(kind), gpus=layout.world, microbatch_tokens=1.0, microbatches=1,
        span=report["rollouts_size"]["length_mean"], kernels="fused" if megatron else "eager", tp=layout.tp,
        sp=layout.sp or layout.tp == 1, pp=layout.pp, cp=layout.cp, ep=layout.ep,
        shard=1 if megatron else layout.world // layout.tp, recompute=1.0 if facts["recompute"] else 0.0,
    )  # fmt: skip


def refine(seen: Sequence[Observation], start: Constants) -> Constants:
    """The most probable constants, by Gauss-Newton on their logarithms."""
    scale = np.array([math.log(getattr(start, name)) for name in REFINED])
    at = scale.copy()

    def constants(point: np.ndarray) -> Constants:
        return dataclasses.replace(start, **dict(zip(REFINED, map(float, np.exp(point)), strict=True)))

    def residuals(point: np.ndarray) -> np.ndarray:
        chosen = constants(point)
        measured = [math.log(o.seconds / o.predicted(chosen)) / NOISE for o in seen]
        return np.array([*measured, *((point - scale) / PRIOR)])

    for _ in range(_ROUNDS):
        now = residuals(at)
        jacobian = np.stack([(residuals(at + 1e-4 * e) - now) / 1e-4 for e in np.eye(len(REFINED))], axis=1)
        step = np.linalg.lstsq(jacobian, -now, rcond=None)[0]
        for share in (1.0, 0.5, 0.25, 0.1):
            if (residuals(at + share * step) ** 2).sum() < (now**2).sum():
                at = at + share * step
                break
        else:
            break
    return constants(at)


def errors(seen: Sequence[Observation], constants: Constants) -> list[float]:
    """Predicted over measured, minus one."""
    return [o.predicted(constants) / o.seconds - 1.0 for o in seen]
