"""The training loop, and one step of it, readable top to bottom. It never names an engine or a rank's layout.

1. `build` makes the parts that the recipe names: environment, policy, engine, algorithm.
2. `train_step` generates, scores, and updates the policy; then the engine takes the new weights.
3. `train` does that from the newest checkpoint on, for as many steps as asked; it logs, saves, and exports the policy.
"""

from __future__ import annotations

import difflib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl import checks, device, export, plugins
from rlctl import eval as evaluation
from rlctl.algorithms import base as algorithms
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.checkpoint import identity, train_state
from rlctl.config import Checkpointing, Recipe, Steps
from rlctl.envs.render import Renderer
from rlctl.errors import CHECK_FAILED, RlctlError
from rlctl.generation.base import EngineProtocol
from rlctl.log import RunLog
from rlctl.models.materialize import load_tokenizer, materialize
from rlctl.models.resolve import resolve
from rlctl.policy.base import PolicyProtocol
from rlctl.policy.schedule import learning_rate
from rlctl.restore import backend_of, load
from rlctl.rollout import Colocated, build_environment, input_limit, write_rollouts
from rlctl.supervised import Supervised
from rlctl.types import Batch

MISMATCH_WARNING = 1.05  # of mismatch/token_mult_prob_error; 1 is agreement


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run."""

    recipe: Recipe
    run_dir: Path
    model_dir: Path
    tokenizer: Any
    policy: PolicyProtocol
    algorithm: AlgorithmProtocol
    engine: EngineProtocol | None
    """None where nothing is generated."""
    rollouts: Colocated | Supervised
    log: RunLog
    identity: dict[str, str]
    """Hashes of what the run is about (checkpoint/identity.py)."""


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
        done.first_reward = metrics[_headline(run)] if step == 1 else done.first_reward
        if _due(recipe.checkpointing.save_period, step, last):
            save(run, done)
        longest = max(longest, time.monotonic() - began)
    if recipe.checkpointing.save_hf:
        with log.phase("export"):
            export.write(run.policy, run_dir / evaluation.HF, model_dir=run.model_dir, tokenizer=run.tokenizer)
    name = _headline(run)
    log.say(f"{name.split('/')[1]} {done.first_reward:.3f} at step 1, {done.metrics[name]:.3f} at step {done.step}")
    log.say(
        (f"model  {run_dir / 'hf'}\n" if recipe.checkpointing.save_hf else "") + f"look   rlctl runs show {run_dir}"
    )
    if run.engine is not None:
        run.engine.close()
    return True


def build(recipe: Recipe, run_dir: Path, log: RunLog) -> Run:
    """Make the parts, in the order in which a user's mistake is cheapest to find."""
    device.seed_everything(recipe.grpo.seed)
    algorithm_file = plugins.load("algorithm", recipe.algorithm)
    algorithm = algorithm_file.Algorithm(algorithm_file.Config(grpo=recipe.advantage, loss_fn=recipe.loss_fn))
    generates = algorithms.source(recipe.algorithm) == "rollouts"
    environment = build_environment(recipe) if generates else None
    assert recipe.policy.model_name is not None
    source = resolve(recipe.policy.model_name)
    model_dir = materialize(source, progress=log.say)
    stated = recipe.policy.tokenizer
    tokenizer = load_tokenizer(model_dir, name=stated.name, chat_template=stated.chat_template)
    backend = backend_of(recipe)
    log.doing(f"building the {backend} policy")
    policy = plugins.load("backend", backend).Policy(recipe, model_dir, reference="ref" in algorithm.needs)
    engine: EngineProtocol | None = None
    rollouts: Colocated | Supervised
    if environment is None:
        rollouts = Supervised(recipe, Renderer(tokenizer))
    else:
        assert recipe.policy.generation.backend is not None
        log.doing(f"building the engine, {recipe.policy.generation.backend}")
        engine = plugins.load("engine", recipe.policy.generation.backend).Engine(recipe, model_dir)
        log.doing("reading the prompts")
        rollouts = Colocated(recipe, environment, engine, Renderer(tokenizer), progress=log.progress)
    log.say(f"{recipe.algorithm} on {recipe.policy.model_name}: {backend} backend, {_layout(policy)}")
    log.say(_data_line(rollouts))
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
        identity=identity.of_run(recipe, model_dir, tokenizer),
    )


def restore(run: Run) -> Progress:
    """Go on from the newest checkpoint, if there is one, and give the engine the weights. Collective.

    Raises:
        RlctlError: the checkpoint is damaged, or of another model, tokenizer, recipe or layout.
    """
    checkpoint, done, random_state = train_state.newest(run.run_dir), Progress(), device.rng_state()
    if checkpoint is not None:
        trainer = train_state.read_trainer(checkpoint)
        identity.check(checkpoint, trainer["identity"], run.identity)
        before, now = (trainer["backend"], trainer["layout"]), (backend_of(run.recipe), _layout(run.policy))
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
        run.rollouts.publish(run.policy.weights(), version=done.step)
    device.set_rng_state(random_state)
    return done


def check(run: Run, done: Progress) -> None:
    """Do the start-up self-checks; all is as before, after them. Collective.

    Raises:
        RlctlError: one failed.
    """
    rollouts, engine = run.rollouts, run.engine
    if isinstance(rollouts, Supervised) or engine is None:
        return  # the probe is a rollout
    began = time.monotonic()
    subject = checks.Subject(
        recipe=run.recipe,
        policy=run.policy,
        algorithm=run.algorithm,
        engine=engine,
        environment=rollouts.environment,
        renderer=rollouts.renderer,
        prompts=rollouts.prompts,
        publish=lambda: rollouts.publish(run.policy.weights(), version=done.step),
    )
    with run.log.phase("checks"):
        results = checks.run(subject, run.run_dir)
    run.log.say(f"checks: {len(results)} passed in {time.monotonic() - began:.1f} s")


def save(run: Run, done: Progress) -> None:
    """Write a checkpoint of what is done, unless there is one or the recipe wants none. Collective."""
    recipe, metrics = run.recipe, done.metrics
    if not recipe.checkpointing.enabled or done.saved == done.step:
        return
    _check_metric(recipe, metrics)
    trainer = {
        "backend": backend_of(recipe),
        "layout": _layout(run.policy),
        "updates": run.policy.num_updates,
        "epoch_steps": run.rollouts.order.num_steps(recipe.grpo.max_num_epochs),
        "first_reward": done.first_reward,
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


def _headline(run: Run) -> str:
    """The metric that says whether the run gets anywhere."""
    return "rollout/reward" if isinstance(run.rollouts, Colocated) else "train/loss"


def _data_line(rollouts: Colocated | Supervised) -> str:
    """What the prompts amount to; a step that takes more than there are repeats some."""
    generates = isinstance(rollouts, Colocated)
    prompts, steps = rollouts.order.n, rollouts.recipe.grpo
    what = "prompts" if generates else "rows"
    limit = input_limit(rollouts.recipe) if generates else rollouts.recipe.policy.max_total_sequence_length
    parts = [f"data: {prompts} {what}", f"{rollouts.order.num_steps(1)} steps an epoch"]
    if rollouts.dropped:
        parts.append(f"{rollouts.dropped} dropped, longer than {limit} tokens")
    if prompts < steps.num_prompts_per_step:
        parts.append(f"warning: fewer than the {steps.num_prompts_per_step} of a step, so {what} repeat in it")
    return ", ".join(parts)


def _warn(run: Run, batch: Batch, step: int) -> None:
    """Say what a curve alone would hide: rollouts without a vote, and a step without anything to learn from."""
    if isinstance(run.rollouts, Supervised):
        return
    assert batch.advantages is not None
    if run.rollouts.first_error is not None:
        run.log.warn_once("invalid", f"step {step}: a rollout has no vote: {run.rollouts.first_error}")
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
    name = _headline(run).split("/")[1]
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


def _reshardable(options: Checkpointing, *, last: bool) -> bool:
    return options.optimizer_format == "reshardable" or (options.optimizer_format == "auto" and last)


def _layout(policy: PolicyProtocol) -> str:
    return str(policy.layout)


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
