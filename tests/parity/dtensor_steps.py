"""What the DTensor parity tests run inside their processes: every layout of a world in one start."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from rlctl.algorithms import grpo
from rlctl.config import Recipe
from rlctl.policy.dtensor import Policy
from rlctl.types import Batch


def recipe(*, tp: int = 1, **policy: Any) -> Recipe:
    """fp32, microbatches of about two sequences, Adam's eps large enough that rounding does not show."""
    made = Recipe()
    section = made.policy
    section.precision = "float32"
    section.max_total_sequence_length = 32
    section.train_micro_batch_size = 2
    section.dtensor_cfg.tensor_parallel_size = tp
    section.optimizer.lr, section.optimizer.eps, section.optimizer.weight_decay = 1e-2, 1e-3, 0.1
    section.generation.temperature = 0.8
    for name, value in policy.items():
        setattr(section, name, value)
    return made


def algorithm() -> Any:
    config = grpo.Config()
    config.loss_fn.reference_policy_kl_penalty = 0.1
    return grpo.Algorithm(config)


def batch(sequences: int = 7, seed: int = 0) -> Batch:
    """Unequal lengths, holes in the mask, one invalid sequence; old, ref, advantages and weights are set."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(4, 30) for _ in range(sequences)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n = int(offsets[-1])
    valid = torch.arange(sequences) != 2
    mask = torch.rand(n, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    made = Batch(
        tokens=torch.randint(0, 256, (n,), generator=generator),
        offsets=offsets,
        mask=mask & torch.repeat_interleave(valid, offsets.diff()),
        rewards=torch.randn(sequences, generator=generator),
        group=torch.arange(sequences) // 4,
        valid=valid,
        truncated=torch.zeros(sequences, dtype=torch.bool),
        rollout_logprobs=torch.zeros(n),
        version=torch.zeros(n, dtype=torch.int32),
        old_logprobs=-4.5 + torch.randn(n, generator=generator),
        ref_logprobs=-4.5 + torch.randn(n, generator=generator),
    )
    made = made.replace(advantages=algorithm().advantages(made))
    return made.replace(loss_weights=algorithm().loss_weights(made))


def gradients(model_dir: Path, tp: int, made: Batch, **policy: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    learner = Policy(recipe(tp=tp, **policy), model_dir)
    metrics = learner.backward(made, algorithm())
    return metrics, dict(learner.gradients())


def step(model_dir: Path, tp: int, made: Batch, *, steps: int = 3) -> dict[str, Any]:
    """Everything about one model in one layout."""
    learner = Policy(recipe(tp=tp), model_dir)
    scored = learner.forward(made, outputs=("logprobs", "entropy"))
    metrics = learner.backward(made, algorithm())
    found = dict(learner.gradients())
    for _ in range(steps):
        learner.train_step(made, algorithm())
    weights = {name: t for bucket in learner.weights().whole(bucket_bytes=1 << 16) for name, t in bucket}
    return dict(scored=scored, metrics=metrics, gradients=found, weights=weights, specs=learner.weights().specs())


def every(folders: dict[str, Path], layouts: list[int]) -> dict[tuple[str, int], dict[str, Any]]:
    """Every model in every layout; layouts are tensor-parallel sizes of this world."""
    made = batch()
    return {(name, tp): step(folder, tp, made) for name, folder in folders.items() for tp in layouts}
