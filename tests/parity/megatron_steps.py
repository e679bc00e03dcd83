"""What the Megatron parity tests run inside their processes: every layout of a world in one start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlctl.policy.megatron import Policy
from rlctl.types import Batch
from tests.parity import dtensor_steps

Layout = tuple[int, bool]  # tensor-parallel size, sequence parallelism


def recipe(layout: Layout, **policy: Any) -> Any:
    made = dtensor_steps.recipe(**policy)
    made.policy.megatron_cfg.enabled = True
    made.policy.megatron_cfg.tensor_model_parallel_size, made.policy.megatron_cfg.sequence_parallel = layout
    return made


def step(model_dir: Path, layout: Layout, made: Batch, *, steps: int = 3, **policy: Any) -> dict[str, Any]:
    """Everything about one model in one layout."""
    learner = Policy(recipe(layout, **policy), model_dir)
    loaded = {name: t for bucket in learner.weights().whole(bucket_bytes=1 << 16) for name, t in bucket}
    scored = learner.forward(made, outputs=("logprobs", "entropy"))
    algorithm = dtensor_steps.algorithm()
    metrics = learner.backward(made, algorithm)
    gradients = dict(learner.gradients())
    norms = [learner.train_step(made, algorithm)["grad_norm"] for _ in range(steps)]
    weights = {name: t for bucket in learner.weights().whole() for name, t in bucket}
    return dict(loaded=loaded, scored=scored, metrics=metrics, gradients=gradients, grad_norm=norms[0], weights=weights)


def every(folders: dict[str, Path], layouts: list[Layout]) -> dict[tuple[str, Layout], dict[str, Any]]:
    batch = dtensor_steps.batch()
    return {(name, layout): step(folder, layout, batch) for name, folder in folders.items() for layout in layouts}


def splits(folder: Path, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One model and batch, other microbatches."""
    batch = dtensor_steps.batch()
    return [step(folder, (1, False), batch, **variant) for variant in variants]


def state(folder: Path) -> dict[str, Any]:
    """Three steps straight, and one step, save, load into a fresh policy, two steps; bits of every weight."""
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()

    def weights(policy: Policy) -> dict[str, torch.Tensor]:
        return {name: t for bucket in policy.weights().whole() for name, t in bucket}

    straight = Policy(recipe((1, False), precision="bfloat16"), folder)
    for _ in range(3):
        straight.train_step(batch, algorithm)
    wanted = weights(straight)
    first = Policy(recipe((1, False), precision="bfloat16"), folder)
    first.train_step(batch, algorithm)
    saved = first.state()
    second = Policy(recipe((1, False), precision="bfloat16"), folder)
    second.load_state(saved)
    for _ in range(2):
        second.train_step(batch, algorithm)
    return {"wanted": wanted, "got": weights(second)}


def reference(folder: Path) -> dict[str, Any]:
    """The reference's logprobs before and after two updates, and the policy's before and after a reference pass."""
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()
    policy = Policy(recipe((1, False)), folder, reference=True)
    before = policy.forward(batch, weights="reference").logprobs
    start = policy.forward(batch).logprobs
    for _ in range(2):
        policy.train_step(batch, algorithm)
    moved = policy.forward(batch).logprobs
    after = policy.forward(batch, weights="reference").logprobs
    again = policy.forward(batch).logprobs
    return dict(before=before, start=start, moved=moved, after=after, again=again)
