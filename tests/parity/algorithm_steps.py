"""What the algorithms' parity test runs inside its processes: every algorithm and split in one start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlctl import config, plugins
from rlctl.parallel import Layout
from rlctl.types import Batch
from tests.numerics import algorithm_cases as cases
from tests.parity import dtensor_steps, megatron_steps

ALGORITHMS = (*cases.ALGORITHMS, "sft", "dpo")
PRESETS = {
    "cispo": "icepop", "dapo": "token_tis", "dr_grpo": "off", "grpo": "observe", "gspo": "seq_tis",
    "reinforce_pp": "icepop", "reinforce_pp_baseline": "geo_mask", "rloo": "seq_mask",
}  # fmt: skip
PACKED = dict(sequence_packing=config.SequencePacking(train_mb_tokens=60))
PAIRS = dict(train_micro_batch_size=2, sequence_packing=config.SequencePacking(enabled=False))
SPLITS: dict[str, dict[str, tuple[dict[str, Any], dict[str, int]]]] = {  # backend -> split -> policy keys, degrees
    "dtensor": {
        "dp2, two sequences each": (PAIRS, {}),
        "dp2, packed": (PACKED, {}),
        "tp2, packed": (PACKED, {"tp": 2}),
    },
    "megatron": {
        "dp2, two sequences each": (PAIRS, {}),
        "dp2, packed": (PACKED, {}),
        "cp2, packed": (PACKED, {"cp": 2}),
        "pp2, two sequences each": (PAIRS, {"pp": 2}),
    },
}
PLAIN = "dp2, packed"


def rule(name: str) -> Any:
    if name not in PRESETS:
        options = plugins.load("algorithm", name).Config()
        if name == "dpo":
            options.loss_fn.sft_loss_weight = 0.3
        return cases.algorithm(name, options)
    bounds = dict(correction_min=0.97, correction_max=1.03) if PRESETS[name] == "geo_mask" else {}
    return cases.algorithm(name, cases.options(name, correction=PRESETS[name], **bounds))


def batch(name: str) -> Batch:
    """Of the parity tests, with an engine that is a little off, prepared by the algorithm."""
    made = dtensor_steps.batch(8)
    assert made.old_logprobs is not None
    generator = torch.Generator().manual_seed(5)
    noise = 0.2 * torch.randn(len(made.tokens), generator=generator)
    if name == "dpo":
        made = made.replace(group=torch.arange(8) // 2)
    return cases.prepared(rule(name), made.replace(rollout_logprobs=made.old_logprobs + noise))


def learner(backend: str, folder: Path, policy: dict[str, Any], degrees: dict[str, int]) -> Any:
    policy_class = plugins.load("backend", backend).Policy
    if backend == "dtensor":
        return policy_class(dtensor_steps.recipe(**policy, **degrees), folder)
    return policy_class(megatron_steps.recipe(Layout(world=2, **degrees), **policy), folder)


def every(folder: Path, backend: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(algorithm, split) -> metrics and gradients, and the metrics of an update after all of them."""
    found = {}
    for split, (policy, degrees) in SPLITS[backend].items():
        policy_of_split = learner(backend, folder, policy, degrees)
        for name in ALGORITHMS:
            metrics = policy_of_split.backward(batch(name), rule(name))
            found[name, split] = dict(metrics=metrics, gradients=dict(policy_of_split.gradients()))
        for name in ALGORITHMS:
            found[name, split]["update"] = policy_of_split.train_step(batch(name), rule(name))
    return found
