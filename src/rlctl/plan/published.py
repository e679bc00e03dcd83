"""Published whole RL steps beside what is predicted for the same configuration: data/published_steps.yaml."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlctl.models import resolve
from rlctl.parallel import Layout
from rlctl.plan import rl
from rlctl.plan.hardware import gpu
from rlctl.plan.memory import Backend
from rlctl.plan.predict import Choice, Prediction, Question, predict
from rlctl.plan.steptime import Constants

PHASES = ("generation", "logprobs", "training", "weight sync", "step")
SEQUENCES, PROMPTS, UPDATES, UTILIZATION = 2048, 64, 4, 0.6  # of every row
_FILE = Path(__file__).parent / "data" / "published_steps.yaml"


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """One row."""

    model: str
    backend: Backend
    gpus: int
    layout: dict[str, Any]
    engine_tp: int
    length: int
    """Tokens of the longest sequence, and of a microbatch."""
    response_tokens: int
    batching: str
    script: str
    """scripts/reproduce/<script>.sh runs it."""
    seconds: dict[str, float]
    """By phase, and `step`, which has what no phase names as well."""
    unpublished: list[str] = field(default_factory=list)


@functools.cache
def _file() -> dict:
    return yaml.safe_load(_FILE.read_text())


def source() -> str:
    """Where the rows are from."""
    return _file()["source"]


def task() -> str:
    """What their steps are."""
    return _file()["task"]


@functools.cache
def steps() -> tuple[PublishedStep, ...]:
    """All rows."""
    return tuple(PublishedStep(**row) for row in _file()["rows"])


def matching(model: str, gpus: int, gpu_kind: str) -> list[PublishedStep]:
    """Rows of a catalogue model on that many GPUs of a kind."""
    return [s for s in steps() if s.model == model and s.gpus == gpus and gpu_kind == _file()["accelerator"]]


def predicted(row: PublishedStep, fitted: Constants) -> Prediction:
    """The prediction of rlctl for a row's own layout and lengths."""
    prompt = float(_file()["prompt_tokens"])
    question = Question(
        hf_config=resolve.resolve(row.model, {}).config, gpu=gpu(_file()["accelerator"]), gpus=row.gpus,
        precision="bfloat16", microbatch_tokens=row.length, longest=row.length, sequences=SEQUENCES, prompts=PROMPTS,
        updates=UPDATES, reference=True, utilization=UTILIZATION,
        lengths=rl.Lengths(prompt=prompt, response=row.response_tokens, limit=row.length - prompt),
    )  # fmt: skip
    layout = Layout(world=row.gpus, **row.layout)
    choice = Choice(backend=row.backend, layout=layout, recompute=False, generation_tp=row.engine_tp)
    return predict(question, choice, fitted=fitted)


def seconds(step: rl.Step) -> dict[str, float]:
    """A predicted step in the rows' phases."""
    values = (step.generation.total, step.logprobs, step.training, step.sync, step.total)
    return dict(zip(PHASES, values, strict=True))
