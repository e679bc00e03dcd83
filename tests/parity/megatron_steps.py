"""What the Megatron parity tests run inside their processes: every case of a world in one start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlctl.errors import RlctlError
from rlctl.parallel import Layout
from rlctl.policy.megatron import Policy
from rlctl.types import Batch
from tests.parity import dtensor_steps


class Case(NamedTuple):
    """One model in one layout."""

    model: str
    layout: Layout
    recompute: bool = False
    sequences: int = 7


def recipe(layout: Layout, **policy: Any) -> Any:
    made = dtensor_steps.recipe(**policy)
    section = made.policy.megatron_cfg
    section.enabled, section.sequence_parallel = True, layout.sp
    section.tensor_model_parallel_size = layout.tp
    section.pipeline_model_parallel_size = layout.pp
    section.context_parallel_size = layout.cp
    section.expert_model_parallel_size, section.expert_tensor_parallel_size = layout.ep, layout.etp
    return made


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: t for bucket in policy.weights().whole(bucket_bytes=1 << 16) for name, t in bucket}


def step(model_dir: Path, layout: Layout, made: Batch, *, steps: int = 3, **policy: Any) -> dict[str, Any]:
    """Everything about one model in one layout."""
    learner = Policy(recipe(layout, **policy), model_dir)
    loaded = weights_of(learner)
    scored = learner.forward(made, outputs=("logprobs", "entropy"))
    algorithm = dtensor_steps.algorithm()
    metrics = learner.backward(made, algorithm)
    gradients = dict(learner.gradients())
    norms = [learner.train_step(made, algorithm)["grad_norm"] for _ in range(steps)]
    return dict(
        loaded=loaded, scored=scored, metrics=metrics, gradients=gradients, grad_norm=norms[0],
        weights=weights_of(learner),
    )  # fmt: skip


def every(folders: dict[str, Path], cases: list[Case]) -> dict[Case, dict[str, Any]]:
    return {
        case: step(
            folders[case.model],
            case.layout,
            dtensor_steps.batch(case.sequences),
            activation_checkpointing=case.recompute,
        )
        for case in cases
    }


def splits(folder: Path, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One model and batch, other microbatches."""
    batch = dtensor_steps.batch()
    return [step(folder, Layout(world=1), batch, **variant) for variant in variants]


def state(folder: Path, layout: Layout) -> dict[str, Any]:
    """Three steps straight, and one step, save, load into a fresh policy, two steps; bits of every weight."""
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()
    straight = Policy(recipe(layout, precision="bfloat16"), folder)
    for _ in range(3):
        straight.train_step(batch, algorithm)
    wanted = weights_of(straight)
    first = Policy(recipe(layout, precision="bfloat16"), folder)
    first.train_step(batch, algorithm)
    saved = first.state()
    second = Policy(recipe(layout, precision="bfloat16"), folder)
    second.load_state(saved)
    for _ in range(2):
        second.train_step(batch, algorithm)
    return {"wanted": wanted, "got": weights_of(second)}


def refusals(folders: dict[str, Path]) -> dict[str, str]:
    """What building a policy on each damaged directory says."""
    said = {}
    for name, folder in folders.items():
        try:
            Policy(recipe(Layout(world=1)), folder)
            said[name] = "accepted"
        except RlctlError as error:
            said[name] = error.message
    return said


def reference(folder: Path, layout: Layout) -> dict[str, Any]:
    """The reference's logprobs before and after two updates, and the policy's before and after a reference pass."""
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()
    policy = Policy(recipe(layout), folder, reference=True)
    before = policy.forward(batch, weights="reference").logprobs
    start = policy.forward(batch).logprobs
    for _ in range(2):
        policy.train_step(batch, algorithm)
    moved = policy.forward(batch).logprobs
    after = policy.forward(batch, weights="reference").logprobs
    again = policy.forward(batch).logprobs
    return dict(before=before, start=start, moved=moved, after=after, again=again)


def kept(folders: dict[str, Path], cases: list[Case]) -> list[dict[str, Any]]:
    """What outlives a step, in each case."""
    return [
        dict(state=state(folders[c.model], c.layout), reference=reference(folders[c.model], c.layout)) for c in cases
    ]
