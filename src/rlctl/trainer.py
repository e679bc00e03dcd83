"""The training loop, and one step of it, readable top to bottom. It never names an engine or a rank's layout.

1. parts.py makes what the recipe names: environment, policy, engine, algorithm.
2. `train_step` generates, scores, and updates the policy; then the engine takes the new weights.
3. `train` does that from the newest checkpoint on (progress.py) for as many steps as asked, and exports the policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlctl import device, export
from rlctl import eval as evaluation
from rlctl.checks import startup
from rlctl.checks.base import Sampler, Subject
from rlctl.config import Recipe, Steps
from rlctl.errors import CHECK_FAILED, RlctlError
from rlctl.log import RunLog
from rlctl.parts import Run, build
from rlctl.phase import write_rollouts
from rlctl.policy.schedule import learning_rate
from rlctl.progress import Progress, restore, save
from rlctl.rollout import Colocated
from rlctl.supervised import Row, Supervised
from rlctl.types import Batch, Declared

METRICS = {
    "train/lr": Declared(
        meaning="learning rate of the step", formula="see policy.scheduler", reduce=None, healthy="as planned"
    ),
    "train/tokens": Declared(
        meaning="tokens that the step trained on, prompts included",
        formula="count",
        reduce=None,
        healthy="steady",
    ),
}
MISMATCH_WARNING = 1.05  # of mismatch/token_mult_prob_error; 1 is agreement


def train(recipe: Recipe, run_dir: Path, log: RunLog, *, stop: Callable[[float], bool]) -> bool:
    """Run the recipe to its last step, in an initialised process group.

    Args:
        recipe: resolved.
        run_dir: exists, and is seen by every rank.
        log: open.
        stop: asked on every rank before each step, with the seconds of the longest step so far; if it says yes on any,
            the run saves and ends.

    Returns:
        Whether all steps are done.
    """
    with log.phase("start"):
        run = build(recipe, run_dir, log)
        done = restore(run)
        if recipe.checks.enabled:
            check(run, done)
    log.begin_steps(done=done.step)
    last = run.rollouts.num_steps
    if recipe.grpo.val_at_start and done.step == 0:
        log.record(0, validate(run, 0))
    longest = 0.0
    for step in range(done.step + 1, last + 1):
        if _on_any_rank(stop(longest)):
            _end_early(run, done)
            return False
        began = time.monotonic()
        metrics = train_step(run, step)
        if _due(recipe.logger.rollouts_period, step, last):
            _dump(run, "rollouts", step)
        _show_sample(run)
        if _validates(recipe.grpo, step, last):
            metrics |= validate(run, step)
        log.step(step, metrics, total=last)  # before the save: a checkpoint's step has its line, whenever the run dies
        judge_mismatch(log, recipe.checks.stop_above_mismatch, step, metrics)
        done.step, done.metrics = step, metrics
        done.first_reward = metrics[run.headline] if step == 1 else done.first_reward
        if _due(recipe.checkpointing.save_period, step, last):
            save(run, done)
        longest = max(longest, time.monotonic() - began)
    if recipe.checkpointing.save_hf:
        with log.phase("export"):
            export.write(run.policy, run_dir / evaluation.HF, model_dir=run.model_dir, tokenizer=run.tokenizer)
    name = run.headline
    log.say(f"{name.split('/')[1]} {done.first_reward:.3f} at step 1, {done.metrics[name]:.3f} at step {done.step}")
    log.say(
        (f"model  {run_dir / 'hf'}\n" if recipe.checkpointing.save_hf else "") + f"look   rlctl runs show {run_dir}"
    )
    if run.engine is not None:
        run.engine.close()
    return True


def check(run: Run, done: Progress) -> None:
    """Do the start-up self-checks; all is as before, after them. Collective.

    Raises:
        RlctlError: one failed.
    """
    began = time.monotonic()
    with run.log.phase("checks"):
        results = startup.run(_subject(run, done.step), run.run_dir)
    run.log.say(f"checks: {len(results)} passed in {time.monotonic() - began:.1f} s")


def _subject(run: Run, step: int) -> Subject:
    """What is checked after `step` steps."""
    rollouts = run.rollouts
    if isinstance(rollouts, Supervised):
        source: Sampler | Sequence[Row] = rollouts.rows
    else:
        assert run.engine is not None
        source = Sampler(
            engine=run.engine,
            environment=rollouts.environment,
            prompts=rollouts.prompts,
            publish=lambda: rollouts.publish(run.policy.weights(), version=step),
        )
    return Subject(
        recipe=run.recipe,
        policy=run.policy,
        algorithm=run.algorithm,
        renderer=rollouts.renderer,
        source=source,
        fresh=step == 0,
    )


def _end_early(run: Run, done: Progress) -> None:
    save(run, done)
    saved = f"saved as step {done.saved}" if done.saved == done.step else "not saved: checkpointing.enabled is false"
    if done.step == 0:
        saved = "nothing to save yet"
    run.log.say(f"stopped after step {done.step} of {run.rollouts.num_steps}: {saved}")
    if run.engine is not None:
        run.engine.close()


def _dump(run: Run, folder: str, step: int) -> None:
    """Write the last phase's rollouts."""
    if isinstance(run.rollouts, Colocated) and dist.get_rank() == 0:
        write_rollouts(run.run_dir / folder / f"step_{step:06d}.jsonl", run.rollouts.last, run.tokenizer)


def _warn(run: Run, batch: Batch, step: int) -> None:
    """Say what a curve alone would hide: rollouts without a vote, and a step without anything to learn from."""
    if isinstance(run.rollouts, Supervised):
        return
    assert batch.advantages is not None
    if run.rollouts.first_error is not None:
        run.log.warn_once("invalid", f"step {step}: a rollout has no vote: {run.rollouts.first_error}")
    if run.rollouts.stats.get("rollout/prompts_filled"):
        found, rounds = (int(run.rollouts.stats[f"rollout/{name}"]) for name in ("prompts_teaching", "rounds"))
        run.log.warn_once(
            "refill", f"step {step}: {rounds} rounds of generation found {found} prompts whose rewards differ; others "
            "fill the step: raise grpo.dynamic_sampling_max_gen_batches or grpo.batch_multiplier, or mend the data",
        )  # fmt: skip
    if not batch.advantages.any():
        run.log.warn_once("signal", f"step {step}: no group has differing rewards, so the step teaches nothing")


def judge_mismatch(log: RunLog, limit: float | None, step: int, metrics: Mapping[str, float]) -> None:
    """Warn once where trainer and engine drift apart; end the run where the recipe says so.

    Args:
        log: of the run.
        limit: `checks.stop_above_mismatch`.
        step: of the metrics; its line is written, its checkpoint is not.
        metrics: the same on every rank.

    Raises:
        RlctlError: exit status 4; the mismatch is above the limit.
    """
    name = "mismatch/token_mult_prob_error"
    if name not in metrics:
        return
    found = metrics[name]
    if limit is not None and not found <= limit:
        raise RlctlError(
            f"step {step}: {name} is {found:.4f}, above checks.stop_above_mismatch {limit:g}",
            "the engine draws with other probabilities than the trainer computes: look for the cause, set "
            "loss_fn.correction, or raise the limit; the checkpoint before is intact",
            exit_status=CHECK_FAILED,
        )
    if not found <= MISMATCH_WARNING:
        log.warn_once(
            "mismatch", f"step {step}: {name} is {found:.3f}, above {MISMATCH_WARNING}: engine and trainer disagree"
        )


def _show_sample(run: Run) -> None:
    """The step's first rollout, where somebody looks."""
    if run.log.shows_samples and isinstance(run.rollouts, Colocated):
        rollout = run.rollouts.last[0]
        start = rollout.mask.index(True) if True in rollout.mask else len(rollout.tokens)
        response = run.tokenizer.decode(rollout.tokens[start:], skip_special_tokens=True)
        reward = rollout.reward if rollout.valid else None
        run.log.sample(prompt=rollout.prompt.messages[-1].content, response=response, reward=reward)


def _on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on some rank; the same answer on all."""
    found = torch.tensor(float(flag), device=device.current())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


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
    _warn(run, batch, step)
    rate = learning_rate(step, optimizer=recipe.policy.optimizer, scheduler=recipe.policy.scheduler)
    policy.set_lr(rate)
    with log.phase("train"):
        results = []
        for mini in batch.split(updates):
            results.append(policy.train_step(mini.replace(loss_weights=algorithm.loss_weights(mini)), algorithm))
    if isinstance(run.rollouts, Colocated):
        with log.phase("weight_sync"):
            policy.offload("optimizer")
            run.rollouts.publish(policy.weights(), version=step)
            policy.onload("optimizer")
        if recipe.checks.sync_probe_period and step % recipe.checks.sync_probe_period == 0:
            with log.phase("sync_probe"):
                startup.sync(_subject(run, step), step=step)
    metrics = _metrics(results, sampled=isinstance(run.rollouts, Colocated)) | run.rollouts.stats
    packing = {f"packing/{name}": value for name, value in policy.packing.items()}
    return metrics | packing | {"train/lr": rate, "train/tokens": float(len(batch.tokens))}


def validate(run: Run, step: int) -> dict[str, float]:
    """Score the held-out prompts with the weights after `step` steps, and dump them; `val/...` metrics."""
    with run.log.phase("validation"):
        if isinstance(run.rollouts, Supervised):
            metrics = run.rollouts.validate(run.policy, run.algorithm)
        else:
            run.policy.offload("optimizer")
            metrics = evaluation.validate(run.rollouts)
            run.policy.onload("optimizer")
    _dump(run, "validation", step)
    name = run.headline.split("/")[1]
    run.log.say(f"validation after step {step}: {name} {metrics[f'val/{name}']:.3f}")
    return metrics


def _updates(recipe: Recipe) -> int:
    """Optimizer updates of a step."""
    sequences = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
    return sequences // (recipe.policy.train_global_batch_size or sequences)


def _due(period: int, step: int, last: int) -> bool:
    return period > 0 and (step % period == 0 or step == last)


def _validates(steps: Steps, step: int, last: int) -> bool:
    return (steps.val_period > 0 and step % steps.val_period == 0) or (steps.val_at_end and step == last)


def _metrics(results: list[dict[str, float]], *, sampled: bool) -> dict[str, float]:
    """The step's metrics; several updates are averaged, but the mismatch is the first one's, on unchanged weights.

    Args:
        results: of each update.
        sampled: whether an engine sampled the tokens; else there is nothing to mismatch.
    """
    merged = {name: sum(r[name] for r in results) / len(results) for name in sorted(results[0])}
    mismatch = {name: value for name, value in results[0].items() if name.startswith("mismatch/")}
    return {f"train/{name}": value for name, value in merged.items() if name not in mismatch} | (
        mismatch if sampled else {}
    )
