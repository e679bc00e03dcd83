"""The learning rate of a step: one function for both backends."""

from __future__ import annotations

import math

from rlctl.config import Optimizer, Scheduler


def learning_rate(step: int, *, optimizer: Optimizer, scheduler: Scheduler) -> float:
    """Warm-up, then constant, linear or cosine decay to `min_lr`, then `min_lr`. It never looks at the number of steps.

    Args:
        step: 1-based; step 1 uses the rate at the start of the schedule.
        optimizer: gives `lr` and `min_lr`.
        scheduler: linear warm-up from `warmup_init_lr` over `warmup_steps`, reaching `lr` on the step after.
    """
    done = step - 1
    if done < scheduler.warmup_steps:
        return scheduler.warmup_init_lr + (optimizer.lr - scheduler.warmup_init_lr) * done / scheduler.warmup_steps
    if scheduler.decay_style == "constant":
        return optimizer.lr
    assert scheduler.decay_steps, "checked when the recipe was composed"
    progress = min(1.0, (done - scheduler.warmup_steps) / scheduler.decay_steps)
    share = 1 - progress if scheduler.decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share
