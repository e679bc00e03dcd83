"""The training loop, and one step of it, readable top to bottom. It never names an engine or a rank's layout.

1. `build` makes the parts that the recipe names: environment, policy, engine, algorithm.
2. `train_step` generates, scores, and updates the policy; then the engine takes the new weights.
3. `train` does that for as many steps as asked, logs, saves, and exports the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlctl import device, plugins
from rlctl import eval as evaluation
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.checkpoint import train_state
from rlctl.checkpoint.safetensors import write_model
from rlctl.config import Recipe, Steps
from rlctl.envs.render import Renderer
from rlctl.generation.base import EngineProtocol
from rlctl.log import RunLog
from rlctl.models.materialize import load_tokenizer, materialize
from rlctl.models.resolve import resolve
from rlctl.policy.base import PolicyProtocol
from rlctl.policy.schedule import learning_rate
from rlctl.rollout import Colocated, build_environment, write_rollouts


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run."""

    recipe: Recipe
    run_dir: Path
    model_dir: Path
    tokenizer: Any
    policy: PolicyProtocol
    algorithm: AlgorithmProtocol
    engine: EngineProtocol
    rollouts: Colocated
    log: RunLog


def train(recipe: Recipe, run_dir: Path, log: RunLog) -> None:
    """Run the recipe to its last step, in an initialised process group.

    Args:
        recipe: resolved.
        run_dir: exists, and is seen by every rank.
        log: open.
    """
    with log.phase("start"):
        run = build(recipe, run_dir, log)
    log.begin_steps()
    last = run.rollouts.num_steps
    if recipe.grpo.val_at_start:
        log.record(0, validate(run, 0))
    first_reward = math.nan
    for step in range(1, last + 1):
        metrics = train_step(run, step)
        first_reward = metrics["rollout/reward"] if step == 1 else first_reward
        if _due(recipe.logger.rollouts_period, step, last) and dist.get_rank() == 0:
            write_rollouts(run_dir / "rollouts" / f"step_{step:06d}.jsonl", run.rollouts.last, run.tokenizer)
        if _validates(recipe.grpo, step, last):
            metrics |= validate(run, step)
        if recipe.checkpointing.enabled and _due(recipe.checkpointing.save_period, step, last):
            with log.phase("save"):
                trainer = {"seed": recipe.grpo.seed, "prompts": step * recipe.grpo.num_prompts_per_step}
                train_state.save(run_dir, step=step, local=dict(run.policy.state().local), trainer=trainer)
        log.step(step, metrics, total=last)
    if recipe.checkpointing.save_hf:
        with log.phase("export"):
            export(run)
    log.say(f"reward {first_reward:.3f} at step 1, {metrics['rollout/reward']:.3f} at step {last}")
    run.engine.close()


def build(recipe: Recipe, run_dir: Path, log: RunLog) -> Run:
    """Make the parts, in the order in which a user's mistake is cheapest to find."""
    device.seed_everything(recipe.grpo.seed)
    algorithm_file = plugins.load("algorithm", recipe.algorithm)
    algorithm = algorithm_file.Algorithm(algorithm_file.Config(grpo=recipe.advantage, loss_fn=recipe.loss_fn))
    environment = build_environment(recipe)
    assert recipe.policy.model_name is not None
    source = resolve(recipe.policy.model_name)
    model_dir = materialize(source, progress=log.say)
    stated = recipe.policy.tokenizer
    tokenizer = load_tokenizer(model_dir, name=stated.name, chat_template=stated.chat_template)
    backend = "megatron" if recipe.policy.megatron_cfg.enabled else "dtensor"
    policy = plugins.load("backend", backend).Policy(recipe, model_dir, reference="ref" in algorithm.needs)
    assert recipe.policy.generation.backend is not None
    engine = plugins.load("engine", recipe.policy.generation.backend).Engine(recipe, model_dir)
    rollouts = Colocated(recipe, environment, engine, Renderer(tokenizer))
    rollouts.publish(policy.weights(), version=0)
    log.say(f"{recipe.algorithm} on {recipe.policy.model_name}: {backend} backend, {_layout(policy)}")
    return Run(
        recipe=recipe,
        run_dir=run_dir,
        model_dir=model_dir,
        tokenizer=tokenizer,
        policy=policy,
        algorithm=algorithm,
        engine=engine,
        rollouts=rollouts,
        log=log,
    )


def train_step(run: Run, step: int) -> dict[str, float]:
    """One step: a rollout phase and the updates on it.

    Args:
        run: the parts.
        step: 1-based.

    Returns:
        Metrics by full name, the same on every rank.
    """
    recipe, policy, algorithm, log = run.recipe, run.policy, run.algorithm, run.log
    with log.phase("generate"):
        batch = run.rollouts.next(step)
    updates = _updates(recipe)
    if "old" in algorithm.needs or updates > 1:
        with log.phase("old_logprobs"):
            batch = batch.replace(old_logprobs=policy.forward(batch).logprobs)
    if "ref" in algorithm.needs:
        with log.phase("ref_logprobs"):
            batch = batch.replace(ref_logprobs=policy.forward(batch, weights="reference").logprobs)
    batch = batch.replace(advantages=algorithm.advantages(batch))
    rate = learning_rate(step, optimizer=recipe.policy.optimizer, scheduler=recipe.policy.scheduler)
    policy.set_lr(rate)
    with log.phase("train"):
        results = []
        for mini in batch.split(updates):
            results.append(policy.train_step(mini.replace(loss_weights=algorithm.loss_weights(mini)), algorithm))
    with log.phase("weight_sync"):
        policy.offload("optimizer")
        run.rollouts.publish(policy.weights(), version=step)
        policy.onload("optimizer")
    return _metrics(results) | run.rollouts.stats | {"train/lr": rate}


def validate(run: Run, step: int) -> dict[str, float]:
    """Score the held-out prompts with the weights after `step` steps, and dump them; `val/...` metrics."""
    with run.log.phase("validation"):
        run.policy.offload("optimizer")
        metrics = evaluation.validate(run.rollouts)
        run.policy.onload("optimizer")
    if dist.get_rank() == 0:
        write_rollouts(run.run_dir / "validation" / f"step_{step:06d}.jsonl", run.rollouts.last, run.tokenizer)
    run.log.say(f"validation after step {step}: reward {metrics['val/reward']:.3f}")
    return metrics


def export(run: Run) -> None:
    """Write the policy as a Hugging Face directory, `hf/` of the run."""
    if dist.get_rank() == 0:
        write_model(run.run_dir / "hf", run.policy.weights().whole(to=0), source=run.model_dir)
        run.tokenizer.save_pretrained(run.run_dir / "hf")
    else:
        for _ in run.policy.weights().whole(to=0):
            pass
    dist.barrier()


def _updates(recipe: Recipe) -> int:
    """Optimizer updates of a step."""
    sequences = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
    return sequences // (recipe.policy.train_global_batch_size or sequences)


def _due(period: int, step: int, last: int) -> bool:
    return period > 0 and (step % period == 0 or step == last)


def _validates(steps: Steps, step: int, last: int) -> bool:
    return (steps.val_period > 0 and step % steps.val_period == 0) or (steps.val_at_end and step == last)


def _layout(policy: PolicyProtocol) -> str:
    return str(policy.layout)


def _metrics(results: list[dict[str, float]]) -> dict[str, float]:
    """The step's metrics; several updates are averaged, but the mismatch is the first one's, on unchanged weights."""
    names = set(results[0])
    merged = {name: sum(r[name] for r in results) / len(results) for name in sorted(names)}
    mismatch = {f"mismatch/{n}": results[0][n] for n in ("token_mult_prob_error", "max_logprob_error")}
    return {
        **{f"train/{name}": value for name, value in merged.items() if f"mismatch/{name}" not in mismatch},
        **mismatch,
    }
