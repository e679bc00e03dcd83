"""One RL job on one layout: bytes and seconds, whether it fits, and what limits it.

Memory is memory.py's, time is rl.py's. A `Question` is what stays the same while layouts change.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rlctl.parallel import Layout
from rlctl.plan import memory, rl
from rlctl.plan.hardware import Gpu
from rlctl.plan.memory import Backend, Memory, Precision
from rlctl.plan.shape import Shape, from_config
from rlctl.plan.steptime import Constants, Job, StepTime, step_time

PARTS = ("weights", "gradients", "main_weights", "optimizer", "gathered", "activations", "logits")
"""Of plan/memory.py's Memory, while training."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job whose layout is open."""

    hf_config: dict[str, Any]
    gpu: Gpu
    gpus: int
    precision: Precision
    microbatch_tokens: int
    """The budget of a packed microbatch."""
    longest: int = 1
    """Tokens of the longest sequence."""
    sequences: int
    """Of a step."""
    prompts: int
    updates: int
    lengths: rl.Lengths
    reference: bool
    utilization: float
    """The engine's share of a GPU."""

    @functools.cached_property
    def shape(self) -> Shape:
        """The model's dimensions."""
        return from_config(self.hf_config)

    def holds_longest(self, layout: Layout) -> bool:
        """Whether a microbatch holds the longest sequence with the padding that the layout asks for."""
        return -(-self.longest // layout.pad_unit) * layout.pad_unit <= self.microbatch_tokens


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search chooses."""

    backend: Backend
    layout: Layout
    recompute: bool
    generation_tp: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer for one choice."""

    choice: Choice
    memory: Memory
    fits: bool
    limit: str
    """Why it does not fit; or the phase that takes most of the time."""
    step: rl.Step | None
    """None when the engine does not hold the model."""
    update: StepTime
    """One optimizer update, by what its time is spent on; without rl_overhead."""


def job_of(question: Question, choice: Choice) -> Job:
    """The training job of a choice. Megatron has fused layers; DTensor runs transformers' own."""
    layout, megatron = choice.layout, choice.backend == "megatron"
    return Job(
        shape=question.shape,
        gpu=question.gpu,
        gpus=layout.world,
        microbatch_tokens=question.microbatch_tokens,
        microbatches=1,
        span=question.lengths.total,
        precision="bfloat16",
        kernels="fused" if megatron else "eager",
        tp=layout.tp,
        sp=layout.sp or layout.tp == 1,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp if question.shape.moe_layers else 1,
        shard=1 if megatron else layout.world // layout.tp,
        recompute=1.0 if choice.recompute else 0.0,
    )


def predict(question: Question, choice: Choice, *, fitted: Constants) -> Prediction:
    """Bytes and seconds of one choice.

    Args:
        question: the job.
        choice: a layout that parallel.check takes.
        fitted: constants.
    """
    found = _memory(question, choice)
    job = job_of(question, choice)
    step = rl.rl_step(work_of(question, choice, job), fitted)
    over = _over(question, found)
    update = step_time(rl.packed(job, question.lengths, sequences=question.sequences // question.updates), fitted)
    return Prediction(
        choice=choice, memory=found, fits=over is None and step is not None, step=step, update=update,
        limit=over or ("the engine's weights exceed its share" if step is None else _slowest(step)),
    )  # fmt: skip


def exceeds(question: Question, choice: Choice) -> str | None:
    """Which memory is too small for a choice; None when it fits."""
    return _over(question, _memory(question, choice))


def _memory(question: Question, choice: Choice) -> Memory:
    return memory.estimate(
        question.hf_config,
        choice.layout,
        precision=question.precision,
        backend=choice.backend,
        max_tokens_per_microbatch=question.microbatch_tokens,
        activation_checkpointing=choice.recompute,
        reference=question.reference,
        generation_tp=choice.generation_tp,
    )


def work_of(question: Question, choice: Choice, job: Job) -> rl.Work:
    """The whole RL step of a choice."""
    engine = rl.Engine(
        shape=question.shape, gpu=question.gpu, tp=choice.generation_tp,
        memory_bytes=question.utilization * question.gpu.memory_bytes,
    )  # fmt: skip
    return rl.Work(
        job=job, engine=engine, lengths=question.lengths, sequences=question.sequences, prompts=question.prompts,
        updates=question.updates, logprob_passes=2 if question.reference else 1, generation_gpus=question.gpus,
    )  # fmt: skip


def _over(question: Question, found: Memory) -> str | None:
    size, share = question.gpu.memory_bytes, question.utilization
    if found.training > size:
        parts = {name: getattr(found, name) for name in PARTS}
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"training needs {found.training / 1e9:.1f} GB of {size / 1e9:.0f} GB; the largest part is {largest}, "
            f"{parts[largest] / 1e9:.1f} GB"
        )
    awake = found.generating(size, utilization=share)
    if awake > size:
        return (
            f"while generating, the policy keeps {found.resident / 1e9:.1f} GB and the engine takes "
            f"{share * size / 1e9:.1f} GB of {size / 1e9:.0f} GB"
        )
    if found.cache_tokens(size, utilization=share) < question.lengths.total:
        return f"the engine's weights, {found.engine_weights / 1e9:.1f} GB, leave its share no cache"
    return None


def _slowest(step: rl.Step) -> str:
    phases = {"generation": step.generation.total, "logprobs": step.logprobs, "training": step.training,
              "weight sync": step.sync}  # fmt: skip
    return max(phases, key=lambda name: phases[name])
