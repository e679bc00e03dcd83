"""What a number of a recipe may be. A type cannot say it, and a wrong sign or a NaN trains silently."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlctl import config
from rlctl.errors import RlctlError
from rlctl.recipe.compose import as_values

FREE_FORM = ("policy.generation.vllm_kwargs", "policy.hf_config_overrides", "env.options")
BOUNDS: dict[str, tuple[float, float]] = {  # key -> lowest, highest
    "policy.optimizer.lr": (0, math.inf),
    "policy.optimizer.min_lr": (0, math.inf),
    "policy.optimizer.weight_decay": (0, math.inf),
    "policy.optimizer.eps": (1e-30, math.inf),
    "policy.scheduler.warmup_steps": (0, math.inf),
    "policy.scheduler.warmup_init_lr": (0, math.inf),
    "policy.scheduler.decay_steps": (1, math.inf),
    "policy.max_grad_norm": (0, math.inf),
    "policy.generation.temperature": (1e-6, math.inf),
    "grpo.seed": (0, 2**63 - 1),
    "grpo.val_period": (0, math.inf),
    "checks.sync_probe_period": (0, math.inf),
    "checks.stop_above_mismatch": (1, math.inf),
    "logger.rollouts_period": (0, math.inf),
    "env.reward_timeout_seconds": (1e-3, math.inf),
}


def check(recipe: config.Recipe) -> None:
    """Refuse a number that is not finite or outside its bounds.

    Raises:
        RlctlError: names the key, the value and the bound.
    """
    for key, value in _leaves(as_values(recipe)):
        if key.startswith(FREE_FORM) or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            raise RlctlError(f"`{key}` is {value}, it must be a finite number", "give a number")
        low, high = BOUNDS.get(key, (-math.inf, math.inf))
        if value < low:
            raise RlctlError(f"`{key}` is {value}, it must be at least {low:g}", "raise it")
        if value > high:
            raise RlctlError(f"`{key}` is {value}, it must be at most {high}", "lower it")
    optimizer = recipe.policy.optimizer
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            raise RlctlError(f"`policy.optimizer.betas` has {beta}, it must be in [0, 1)", "e.g. [0.9, 0.999]")
    starts = {"min_lr": optimizer.min_lr, "warmup_init_lr": recipe.policy.scheduler.warmup_init_lr}
    for name, value in starts.items():
        if value > optimizer.lr:
            raise RlctlError(f"`{name}` {value} is above `policy.optimizer.lr` {optimizer.lr}", "lower it")


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _leaves(value, prefix)
    else:
        yield prefix, values
