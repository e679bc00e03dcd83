"""How far a run is: go on from its newest checkpoint, and write the next one."""

from __future__ import annotations

import difflib
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from rlctl import device
from rlctl.checkpoint import identity, train_state
from rlctl.config import Checkpointing, Recipe
from rlctl.errors import RlctlError
from rlctl.parts import Run
from rlctl.restore import backend_of, load
from rlctl.rollout import Colocated


@dataclass(kw_only=True)
class Progress:
    """What of a run is done."""

    step: int = 0
    saved: int = 0
    """The step of the newest checkpoint."""
    first_reward: float = math.nan
    """Of the first step, by which the run's end is measured; the loss where nothing is rewarded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of `step`."""


def restore(run: Run) -> Progress:
    """Go on from the newest checkpoint, if there is one, and give the engine the weights. Collective.

    Raises:
        RlctlError: the checkpoint is damaged, or of another model, tokenizer, recipe or layout.
    """
    checkpoint, done, random_state = train_state.newest(run.run_dir), Progress(), device.rng_state()
    if checkpoint is not None:
        trainer = train_state.read_trainer(checkpoint)
        identity.check(checkpoint, trainer["identity"], run.identity)
        before, now = (trainer["backend"], trainer["layout"]), (backend_of(run.recipe), str(run.policy.layout))
        local = load(run.policy, checkpoint, trainer, now=now)
        if local is None:
            run.log.say(f"saved as {' '.join(before)}, goes on as {' '.join(now)}: weights and optimizer are resharded")
        else:
            random_state = local["random"]
        done = Progress(
            step=trainer["step"],
            saved=trainer["step"],
            first_reward=trainer["first_reward"],
            metrics=trainer["metrics"],
        )
        run.log.say(f"resuming after step {done.step}, from {checkpoint}")
    if dist.get_rank() == 0:
        train_state.rewind(run.run_dir, train_state.NOTHING if checkpoint is None else done.step)
        if done.step < run.rollouts.num_steps:
            shutil.rmtree(run.run_dir / "hf", ignore_errors=True)  # of an earlier end, if it had fewer steps to do
    if isinstance(run.rollouts, Colocated):
        if checkpoint is not None:
            run.rollouts.queue.position = trainer["queue"]
        run.rollouts.publish(run.policy.weights(), version=done.step)
    device.set_rng_state(random_state)
    return done


def save(run: Run, done: Progress) -> None:
    """Write a checkpoint of what is done, unless there is one or the recipe wants none. Collective."""
    recipe, metrics = run.recipe, done.metrics
    if not recipe.checkpointing.enabled or done.saved == done.step:
        return
    _check_metric(recipe, metrics)
    trainer = {
        "backend": backend_of(recipe),
        "layout": str(run.policy.layout),
        "updates": run.policy.num_updates,
        "epoch_steps": run.rollouts.order.num_steps(recipe.grpo.max_num_epochs),
        "first_reward": done.first_reward,
        "queue": run.rollouts.queue.position if isinstance(run.rollouts, Colocated) else None,
        "identity": run.identity,
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }
    with run.log.phase("save"):
        local: dict[str, Any] = {"random": device.rng_state()}
        whole: Iterable[tuple[str, train_state.Named]] = ()
        if _reshardable(recipe.checkpointing, last=done.step == run.rollouts.num_steps):
            whole = run.policy.whole_state(train_state.CHUNK_BYTES)
        else:
            local["policy"] = dict(run.policy.state().local)
        options = recipe.checkpointing
        train_state.save(run.run_dir, step=done.step, local=local, trainer=trainer, options=options, whole=whole)
    done.saved = done.step


def _check_metric(recipe: Recipe, metrics: Mapping[str, float]) -> None:
    """Refuse a `checkpointing.metric_name` that no step has, at the first save."""
    name = recipe.checkpointing.metric_name
    validated = any(metric.startswith("val/") for metric in metrics)
    waits = recipe.grpo.val_period > 0 and not validated  # its first validation comes later
    if name is None or name in metrics or (name.startswith("val/") and waits):
        return
    near = difflib.get_close_matches(name, metrics, n=1)
    suggestion = f"did you mean `{near[0]}`?" if near else f"it logs {', '.join(sorted(metrics))}"
    raise RlctlError(f"`checkpointing.metric_name` is `{name}`, which this run does not log", suggestion)


def _reshardable(options: Checkpointing, *, last: bool) -> bool:
    return options.optimizer_format == "reshardable" or (options.optimizer_format == "auto" and last)
