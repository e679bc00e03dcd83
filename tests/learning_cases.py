"""What runs inside the process of tests/numerics/test_learning.py: short runs of every RL algorithm, tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl import device, trainer
from rlctl.log import RunLog
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive

COMMON = (
    "cluster.procs=1", "policy.megatron_cfg.enabled=false", "grpo.num_prompts_per_step=4",
    "policy.optimizer.lr=6e-3", "checks.enabled=false", "checkpointing.save_hf=false",
)  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "cispo": ("policy.train_global_batch_size=16",),
    "dapo": ("grpo.use_dynamic_sampling=true",),
    "dr_grpo": (),
    "grpo": ("loss_fn.reference_policy_kl_penalty=0.01", "grpo.val_at_end=true", "grpo.max_val_samples=8"),
    "gspo": ("policy.train_global_batch_size=16",),
    "reinforce_pp": ("grpo.reference_policy_kl_penalty=0.01",),
    "reinforce_pp_baseline": ("loss_fn.reference_policy_kl_penalty=0.01",),
    "rloo": (),
}
SPARSE = ("grpo.use_dynamic_sampling=true", "grpo.num_generations_per_prompt=2")
"""Of few samples some agree, so that groups are dropped."""


def curves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics by algorithm; `straight` and `resumed` are four steps of dapo, the latter stopped after two."""
    found = {}
    for name, options in OPTIONS.items():
        found[name] = _run(folder / name, name, *options, "grpo.max_num_steps=10", "checkpointing.enabled=false")
    found["straight"] = _run(folder / "straight", "dapo", *SPARSE, "grpo.max_num_steps=4")
    for steps in (2, 4):
        found["resumed"] = _run(folder / "resumed", "dapo", *SPARSE, f"grpo.max_num_steps={steps}")
    return found


def _run(folder: Path, algorithm: str, *options: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    recipe = derive(compose(algorithm, "smoke-tiny", [*COMMON, *options]), device.probe()).recipe
    log = RunLog(folder, writes=True, tensorboard=False, console=None)
    assert trainer.train(recipe, folder, log, stop=lambda seconds: False)
    log.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
