"""The fastest layouts that fit.

All products of degrees that divide the model and the GPUs are judged in closed form (footprint.py, steptime.py), the
fastest ones then exactly (memory.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.errors import RlctlError
from rlctl.parallel import Layout, check
from rlctl.plan import rl
from rlctl.plan.memory import Backend
from rlctl.plan.predict import Choice, Prediction, Question, job_of, predict, work_of
from rlctl.plan.steptime import Constants, step_time

BEST = 3
EXAMINED = 24  # of the fastest, exactly: a layout costs milliseconds
_TENSOR = (1, 2, 4, 8)
_CONTEXT = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one backend."""

    considered: int
    best: list[Prediction]
    """Those that fit, fastest first; empty when none of the examined fits."""


def search(question: Question, backend: Backend, *, fitted: Constants) -> Found:
    """The best layouts of a backend."""
    tps = _generation_sizes(question, fitted)
    if not tps:
        return Found(considered=0, best=[])
    layouts = list(_layouts(question, backend))
    timed = []
    for layout in layouts:
        for recompute in (False, True):
            choice = Choice(backend=backend, layout=layout, recompute=recompute, generation_tp=tps[0])
            timed.append((_learning_seconds(question, choice, fitted), choice))
    timed.sort(key=lambda pair: pair[0])
    best: list[Prediction] = []
    plausible = [choice for _, choice in timed if _plausible(question, choice)]
    for choice in plausible[:EXAMINED]:
        for tp in tps:
            prediction = predict(question, dataclasses.replace(choice, generation_tp=tp), fitted=fitted)
            if prediction.fits:
                best.append(prediction)
                break
        if len(best) == BEST:
            break
    return Found(considered=len(timed), best=best)


def _layouts(question: Question, backend: Backend) -> Iterator[Layout]:
    for layout in _products(question, backend):
        try:
            check(layout, question.hf_config)
        except RlctlError:
            continue
        if question.sequences // question.updates >= layout.dp:
            yield layout


def _products(question: Question, backend: Backend) -> Iterator[Layout]:
    shape, world = question.shape, question.gpus
    tensor = [t for t in _TENSOR if shape.groups % t == 0 and shape.heads % t == 0 and t <= question.gpu.domain]
    if backend == "dtensor":
        yield from (Layout(world=world, tp=t, sp=t > 1) for t in tensor if world % t == 0)
        return
    pipeline = [p for p in range(1, shape.layers + 1) if shape.layers % p == 0]
    expert = [e for e in range(1, shape.experts + 1) if shape.experts % e == 0] if shape.experts else [1]
    for t in tensor:
        for p in pipeline:
            for c in _CONTEXT:
                if world % (t * p * c) == 0:
                    yield from (Layout(world=world, tp=t, sp=t > 1, pp=p, cp=c, ep=e) for e in expert)


def _generation_sizes(question: Question, fitted: Constants) -> list[int]:
    """Tensor-parallel sizes of the engine, fastest rollout phase first."""
    found = []
    layout = Layout(world=question.gpus)
    for tp in _TENSOR:
        if question.shape.groups % tp or question.gpus % tp or tp > question.gpu.domain:
            continue
        choice = Choice(backend="megatron", layout=layout, recompute=False, generation_tp=tp)
        work = work_of(question, choice, job_of(question, choice))
        engines = question.gpus // tp
        generation = rl.generate(
            work.engine, question.lengths, sequences=-(-question.sequences // engines),
            prompts=question.prompts / engines, fitted=fitted,
        )  # fmt: skip
        if generation is not None:
            found.append((generation.total, tp))
    return [tp for _, tp in sorted(found)]


def _learning_seconds(question: Question, choice: Choice, fitted: Constants) -> float:
    job = job_of(question, choice)
    update = rl.packed(job, question.lengths, sequences=question.sequences // question.updates)
    return step_time(update, fitted).total


def _plausible(question: Question, choice: Choice) -> bool:
    """Whether the weights alone leave room: a cheap lower bound, so that no layout that fits is lost."""
    from rlctl.plan.footprint import local_parameters  # this file's only use of it

    job = job_of(question, choice)
    dense, routed = local_parameters(job)
    each = 6.0 if choice.backend == "megatron" else 8.0 / job.shard
    return each * 0.98 * (dense + routed) + question.utilization * question.gpu.memory_bytes < question.gpu.memory_bytes
