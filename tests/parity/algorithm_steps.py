"""What the algorithms' parity test runs inside its processes: every algorithm in one start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlctl import config, plugins
from rlctl.parallel import Layout
from rlctl.types import Batch
from tests.numerics import algorithm_cases as cases
from tests.parity import dtensor_steps, megatron_steps

PRESETS = {
    "cispo": "icepop", "dapo": "token_tis", "dr_grpo": "off", "grpo": "observe", "gspo": "seq_tis",
    "reinforce_pp": "icepop", "reinforce_pp_baseline": "geo_mask", "rloo": "seq_mask",
}  # fmt: skip
MICROBATCHES = {  # sequences, or tokens packed
    "one by one": dict(train_micro_batch_size=1, sequence_packing=config.SequencePacking(enabled=False)),
    "packed": dict(sequence_packing=config.SequencePacking(train_mb_tokens=60)),
}


def rule(name: str) -> Any:
    bounds = dict(correction_min=0.97, correction_max=1.03) if PRESETS[name] == "geo_mask" else {}
    return cases.algorithm(name, cases.options(name, correction=PRESETS[name], **bounds))


def batch(name: str) -> Batch:
    """Of the parity tests, with an engine that is a little off, prepared by the algorithm."""
    made = dtensor_steps.batch()
    assert made.old_logprobs is not None
    generator = torch.Generator().manual_seed(5)
    noise = 0.2 * torch.randn(len(made.tokens), generator=generator)
    return cases.prepared(rule(name), made.replace(rollout_logprobs=made.old_logprobs + noise))


def learner(backend: str, folder: Path, **policy: Any) -> Any:
    policy_class = plugins.load("backend", backend).Policy
    if backend == "dtensor":
        return policy_class(dtensor_steps.recipe(**policy), folder)
    return policy_class(megatron_steps.recipe(Layout(world=2), **policy), folder)


def every(folder: Path, backend: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(algorithm, microbatches) -> metrics and gradients, and the metrics of an update after all of them."""
    found = {}
    for split, policy in MICROBATCHES.items():
        policy_of_split = learner(backend, folder, **policy)
        for name in cases.ALGORITHMS:
            metrics = policy_of_split.backward(batch(name), rule(name))
            found[name, split] = dict(metrics=metrics, gradients=dict(policy_of_split.gradients()))
        for name in cases.ALGORITHMS:
            found[name, split]["update"] = policy_of_split.train_step(batch(name), rule(name))
    return found
