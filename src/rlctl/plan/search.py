"""The fastest layouts that fit.

1. All products of degrees that divide the model and the GPUs are timed in closed form (steptime.py); those whose
   parameters, gradients and optimizer state alone are too many are dropped (footprint.py).
2. From the fastest on, memory is counted exactly (memory.py), until enough fit. None that fits is passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlctl.errors import RlctlError
from rlctl.parallel import Layout, check
from rlctl.plan import footprint, rl
from rlctl.plan.memory import Backend
from rlctl.plan.predict import Choice, Prediction, Question, exceeds, job_of, predict, work_of
from rlctl.plan.steptime import Constants, step_time

BEST = 3
CLOSED_FORM_SHARE = 0.98  # of the exact bytes: norms, biases and padding are left out of the closed form
_TENSOR = (1, 2, 4, 8)
_CONTEXT = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What is not searched, since the recipe says it; None is open."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    sp: bool | None = None
    recompute: bool | None = None
    generation_tp: int | None = None

    def __str__(self) -> str:
        said = [f"{name} {value}" for name, value in vars(self).items() if value is not None]
        return ", ".join(said).replace("generation_tp", "engine tp") or "nothing"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one backend."""

    considered: int
    best: list[Prediction]
    """Those that fit, fastest first; empty when none fits."""
    closest: Prediction | None
    """Where none fits, the one with the least memory; None when no layout divides model and GPUs at all."""


def search(question: Question, backend: Backend, *, fitted: Constants, pins: Pins | None = None) -> Found:
    """The best layouts of a backend.

    Args:
        question: the job.
        backend: megatron or dtensor.
        fitted: constants.
        pins: degrees that are given.
    """
    pins = pins or Pins()
    tps = _generation_sizes(question, fitted, pins)
    timed = []
    for layout in _layouts(question, backend, pins):
        for recompute in (False, True) if pins.recompute is None else (pins.recompute,):
            choice = Choice(
                backend=backend, layout=layout, recompute=recompute,
                generation_tp=tps[0] if tps else pins.generation_tp or 1,
            )  # fmt: skip
            timed.append((_learning_seconds(question, choice, fitted), choice))
    timed.sort(key=lambda pair: pair[0])
    best: list[Prediction] = []
    for _, choice in timed:
        if not tps or len(best) == BEST:
            break
        if not _plausible(question, choice):
            continue
        each = (dataclasses.replace(choice, generation_tp=tp) for tp in tps)
        fitting = next((one for one in each if exceeds(question, one) is None), None)
        if fitting is not None:
            best.append(predict(question, fitting, fitted=fitted))
    return Found(considered=len(timed), best=best, closest=None if best else _closest(question, timed, fitted))


def _closest(question: Question, timed: list[tuple[float, Choice]], fitted: Constants) -> Prediction | None:
    if not timed:
        return None
    least = min((choice for _, choice in timed), key=lambda choice: footprint.peak(job_of(question, choice)))
    return predict(question, least, fitted=fitted)


def _layouts(question: Question, backend: Backend, pins: Pins) -> Iterator[Layout]:
    for layout in _products(question, backend, pins):
        try:
            check(layout, question.hf_config)
        except RlctlError:
            continue
        if question.sequences // question.updates >= layout.dp and question.holds_longest(layout):
            yield layout


def _products(question: Question, backend: Backend, pins: Pins) -> Iterator[Layout]:
    shape, world = question.shape, question.gpus
    possible = [t for t in _TENSOR if shape.groups % t == 0 and shape.heads % t == 0 and t <= question.gpu.domain]
    tensor = _open(pins.tp, possible)
    if backend == "dtensor":
        yield from (Layout(world=world, tp=t) for t in tensor if world % t == 0 and pins.cp in (None, 1))
        return
    pipeline = _open(pins.pp, [p for p in range(1, shape.layers + 1) if shape.layers % p == 0])
    divisors = [e for e in range(1, shape.experts + 1) if shape.experts % e == 0] if shape.experts else [1]
    expert = _open(pins.ep, divisors)
    for t in tensor:
        sequence = t > 1 if pins.sp is None else pins.sp
        if shape.experts and t > 1 and not sequence:
            continue  # Megatron-Core does not train experts so
        for p in pipeline:
            for c in _open(pins.cp, _CONTEXT):
                if world % (t * p * c) == 0:
                    yield from (
                        Layout(world=world, tp=t, sp=sequence, pp=p, cp=c, ep=e, etp=pins.etp or 1) for e in expert
                    )


def _open(pinned: int | None, values: Sequence[int]) -> Sequence[int]:
    return values if pinned is None else (pinned,)


def _generation_sizes(question: Question, fitted: Constants, pins: Pins) -> list[int]:
    """Tensor-parallel sizes of the engine, fastest rollout phase first."""
    found = []
    layout = Layout(world=question.gpus)
    for tp in _open(pins.generation_tp, _TENSOR):
        if question.shape.groups % tp or question.gpus % tp or tp > question.gpu.domain:
            continue
        choice = Choice(backend="megatron", layout=layout, recompute=False, generation_tp=tp)
        work = work_of(question, choice, job_of(question, choice))
        engines = question.gpus // tp
        generation = rl.generate(
            work.engine, question.lengths, sequences=-(-question.sequences // engines),
            prompts=question.prompts / engines, fitted=fitted, engines=engines,
        )  # fmt: skip
        if generation is not None:
            found.append((generation.total, tp))
    return [tp for _, tp in sorted(found)]


def _learning_seconds(question: Question, choice: Choice, fitted: Constants) -> float:
    job = job_of(question, choice)
    update = rl.packed(job, question.lengths, sequences=question.sequences // question.updates)
    return step_time(update, fitted).total


def _plausible(question: Question, choice: Choice) -> bool:
    """Whether state alone leaves room, by a lower bound of the exact bytes: no layout that fits is lost."""
    state = CLOSED_FORM_SHARE * footprint.weights_and_optimizer(job_of(question, choice))
    return state < question.gpu.memory_bytes
