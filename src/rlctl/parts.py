"""The parts of a run, made from what the recipe names: environment, policy, engine, algorithm, data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import device, plugins
from rlctl.algorithms import base as algorithms
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.checkpoint import identity
from rlctl.config import Recipe
from rlctl.envs.render import Renderer
from rlctl.generation.base import EngineProtocol
from rlctl.log import RunLog
from rlctl.models.materialize import load_tokenizer, materialize
from rlctl.models.resolve import resolve
from rlctl.policy.base import PolicyProtocol
from rlctl.restore import backend_of
from rlctl.rollout import Colocated, build_environment, input_limit
from rlctl.supervised import Supervised


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

    @property
    def headline(self) -> str:
        """The metric that says whether the run gets anywhere."""
        return "rollout/reward" if isinstance(self.rollouts, Colocated) else "train/loss"


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
        rollouts = Colocated(
            recipe,
            environment,
            engine,
            Renderer(tokenizer),
            refill=algorithms.refill(algorithm),
            progress=log.progress,
        )
    log.say(f"{recipe.algorithm} on {recipe.policy.model_name}: {backend} backend, {policy.layout}")
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
