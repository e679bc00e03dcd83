"""Prompts x episodes x engine -> scored rollouts -> one Batch, the same on every rank.

1. The step's prompts and samples are shared out over the engine's replicas, in contiguous parts.
2. Each replica plays its part (episodes.py).
3. All ranks gather the numbers (tokens, masks, logprobs, rewards); text stays where it was made.

It knows no backend and no kind of engine.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlctl import config, plugins
from rlctl.algorithms.base import Refill
from rlctl.data import prompts as own_prompts
from rlctl.envs.base import EnvironmentProtocol, Split
from rlctl.envs.render import Renderer
from rlctl.episodes import Player, Replica, Run
from rlctl.errors import RlctlError
from rlctl.generation.base import EngineProtocol, WeightSource
from rlctl.lazy import dist
from rlctl.phase import Phase, chosen, joined, statistics
from rlctl.types import Batch, Declared, Prompt, Rollout, batch_from_rollouts, concatenate

METRICS = {
    "rollout/rounds": Declared(
        meaning="rounds of generation in the step; only with dynamic sampling, as the next three",
        formula="count",
        reduce=None,
        healthy="1 to 3; at dynamic_sampling_max_gen_batches the data are too easy or too hard",
    ),
    "rollout/prompts_drawn": Declared(
        meaning="prompts that were sampled for the step", formula="count", reduce=None, healthy="as few as possible"
    ),
    "rollout/prompts_teaching": Declared(
        meaning="those of them whose rewards differ",
        formula="count",
        reduce=None,
        healthy="at least num_prompts_per_step",
    ),
    "rollout/prompts_filled": Declared(
        meaning="prompts without signal that fill the step, since the cap on rounds was met",
        formula="max(num_prompts_per_step - prompts_teaching, 0)",
        reduce=None,
        healthy="0",
    ),
}
_log = logging.getLogger(__name__)
_ERROR_CHARACTERS = 300  # of an invalid rollout's error that are gathered


def build_environment(recipe: config.Recipe) -> EnvironmentProtocol:
    """The recipe's environment. Needs no torch.

    Raises:
        RlctlError: no task is named, the environment is unknown, or its options do not fit.
    """
    env = recipe.env
    name = env.name or ("function" if env.reward else None)
    if name is None:
        raise RlctlError(
            "the recipe names no task",
            "set env.name (" + ", ".join(plugins.names("environment")) + "), or data.train_path and env.reward",
        )
    if env.reward and name != "function":
        raise RlctlError(f"both env.name `{name}` and env.reward `{env.reward}` are set", "drop one of them")
    if not env.reward_timeout_seconds > 0:
        raise RlctlError(f"env.reward_timeout_seconds {env.reward_timeout_seconds} is not positive", "give seconds")
    module = plugins.load("environment", name)
    options = module.Config() if env.options is None else env.options
    return module.Environment(options, env, recipe.data)


def load_prompts(recipe: config.Recipe, environment: EnvironmentProtocol, split: Split = "train") -> Sequence[Prompt]:
    """Own prompts where `data.train_path` (for validation `data.val_path`) is set, else the environment's.

    Needs no torch.

    Raises:
        RlctlError: the file or its rows do not fit, or own prompts have no held-out ones.
    """
    data = recipe.data
    own = data.train_path if split == "train" else data.val_path
    if own is not None:
        prompts: Sequence[Prompt] = own_prompts.load(data, key="train_path" if split == "train" else "val_path")
        environment.check(prompts)
    elif split == "validation" and data.train_path is not None:
        raise RlctlError("there are no held-out prompts: data.val_path is not set", "set data.val_path=held_out.jsonl")
    else:
        prompts = environment.dataset(split)
    return own_prompts.with_system_prompt(prompts, recipe.data.system_prompt)


def input_limit(recipe: config.Recipe) -> int:
    """Tokens that a prompt may have.

    Raises:
        RlctlError: such a prompt would leave no room for a response.
    """
    total, limit = recipe.policy.max_total_sequence_length, recipe.data.max_input_seq_length
    if limit is None:
        return total - 1
    if not 1 <= limit < total:
        raise RlctlError(
            f"data.max_input_seq_length {limit} is not in 1..{total - 1}",
            f"policy.max_total_sequence_length is {total}, and a response needs at least one token",
        )
    return limit


class Colocated:
    """Rollouts that are generated when they are asked for, by an engine on the trainer's own ranks."""

    def __init__(
        self,
        recipe: config.Recipe,
        environment: EnvironmentProtocol,
        engine: EngineProtocol,
        renderer: Renderer,
        *,
        trains: bool = True,
        refill: Refill | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the prompts. Collective where an engine spans ranks.

        Args:
            recipe: resolved.
            environment: scores.
            engine: this rank's part of its replica.
            renderer: of the model's tokenizer.
            trains: False: only held-out prompts are asked for, and the training ones are not read.
            refill: of the algorithm: how groups that teach nothing are replaced.
            progress: told how many of this rank's rollouts of a phase are done, and of how many.
        """
        self._progress = progress
        self.recipe, self.engine, self.renderer, self.environment = recipe, engine, renderer, environment
        self.prompts, self.dropped = self._load("train") if trains else ([], 0)
        """`dropped`: prompts that were too long."""
        steps = recipe.grpo
        self.order = own_prompts.PromptOrder(
            n=len(self.prompts), per_step=steps.num_prompts_per_step, seed=steps.seed, shuffle=recipe.data.shuffle
        )
        self.stats: dict[str, float] = {}
        """Of the last phase, as logged; the same on every rank."""
        self.first_error: str | None = None
        """Why the last phase's first invalid rollout has no vote."""
        self._replica = Replica(engine.ranks_per_replica)
        self._last: Phase | None = None
        self._refill = refill
        self.queue = own_prompts.PromptQueue(order=self.order)
        """Where the data are read, with dynamic sampling; without it the step alone says that."""

    def _load(self, split: Split) -> tuple[list[Prompt], int]:
        limit = input_limit(self.recipe)
        prompts, dropped = own_prompts.drop_long(
            load_prompts(self.recipe, self.environment, split),
            limit=limit,
            length=lambda p: len(self.renderer.prompt(p.messages)),
        )
        if dropped:
            _log.warning("dropped %d %s prompts of more than %d tokens", dropped, split, limit)
        return prompts, dropped

    @functools.cached_property
    def held_out(self) -> list[Prompt]:
        """The validation prompts, at most grpo.max_val_samples."""
        return self._load("validation")[0][: self.recipe.grpo.max_val_samples]

    @property
    def num_steps(self) -> int:
        """Steps that grpo.max_num_steps and grpo.max_num_epochs allow."""
        return min(self.recipe.grpo.max_num_steps, self.order.num_steps(self.recipe.grpo.max_num_epochs))

    def next(self, step: int) -> Batch:
        """The rollouts of a step (from 1), ordered by group, then sample. Collective; the same on every rank.

        Raises:
            RlctlError: no rollout has a vote.
        """
        if self._refill is None:
            batch = self.sample([self.prompts[i] for i in self.order.at(step)], samples=self._group_size, step=step)
        else:
            batch = self._until_enough(step, self._refill)
        self.engine.sleep("kv_cache")
        self.engine.sleep("weights")
        return batch

    @property
    def _group_size(self) -> int:
        return self.recipe.grpo.num_generations_per_prompt

    def _until_enough(self, step: int, refill: Refill) -> Batch:
        """Groups that teach, from as many rounds as it takes; after the last round others fill up.

        Groups that teach and are one too many go back to the queue as prompts: rollouts kept for the next step would
        be another policy's. Metrics are of all rollouts, since those that are kept are no sample of the task.
        """
        wanted = self.recipe.grpo.num_prompts_per_step
        size = math.ceil(wanted * refill.batch_multiplier)
        drawn: list[Phase] = []
        positions: list[int] = []
        taken: Counter[int] = Counter()
        for _ in range(refill.max_rounds):
            positions += (new := self.queue.take(size))
            drawn.append(self._play([self.prompts[i] for i in new], self._group_size, step, taken))
            everything = joined(drawn)
            teaching = everything.batch.group[refill.teaches(everything.batch)].unique().tolist()
            if len(teaching) >= wanted:
                break
        others = [group for group in range(len(positions)) if group not in set(teaching)]
        self.queue.give_back([positions[group] for group in teaching[wanted:]])
        self._last = chosen(everything, [*teaching, *others][:wanted])
        self.stats = statistics(everything.batch) | {
            "rollout/rounds": float(len(drawn)),
            "rollout/prompts_drawn": float(len(positions)),
            "rollout/prompts_teaching": float(len(teaching)),
            "rollout/prompts_filled": float(max(wanted - len(teaching), 0)),
        }
        return self._last.batch

    def publish(self, source: WeightSource, version: int) -> None:
        """Give the engine the policy's weights after `version` steps. Collective."""
        self.engine.wake("weights")
        self.engine.load_weights(source, version)
        self.engine.wake("kv_cache")

    def sample(self, prompts: Sequence[Prompt], *, samples: int, step: int) -> Batch:
        """`samples` rollouts of each prompt; group is the prompt's position here. Collective."""
        self._last = self._play(prompts, samples, step, Counter())
        self.stats = statistics(self._last.batch)
        return self._last.batch

    def _play(self, prompts: Sequence[Prompt], samples: int, step: int, taken: Counter[int]) -> Phase:
        """One phase; `taken` counts by index how often a prompt was sampled in this step, before and after."""
        self.engine.wake("weights")
        self.engine.wake("kv_cache")
        runs = self._share(prompts, samples, taken)
        player = Player(self.recipe, self.engine, self.renderer, self._replica, step)
        rollouts: list[Rollout] = []
        if self._replica.leads:
            player.lead([self._open(run) for run in runs], progress=self._progress)
            rollouts = [run.rollout(self.recipe.env.reward_weights) for run in runs]
        else:
            player.follow()
        errors = [(r.error or "")[:_ERROR_CHARACTERS] for r in rollouts if not r.valid]
        for error in errors:
            _log.warning("step %d: no vote: %s", step, error)
        parts = {tuple(sorted(r.reward_parts)) for r in rollouts if r.valid}
        gathered = _gather((batch_from_rollouts(rollouts), errors, parts))
        _check_parts(set().union(*(p for _, _, p in gathered)))
        batch = concatenate([b for b, _, _ in gathered])
        self.first_error = next((e for _, part, _ in gathered for e in part), None)
        self._judge(batch)
        return Phase(prompts=prompts, batch=batch, own=rollouts)

    @property
    def last(self) -> list[Rollout]:
        """The rollouts of the last phase, or of the last step, for a dump."""
        assert self._last is not None
        return self._last.rollouts(self.renderer)

    def _share(self, prompts: Sequence[Prompt], samples: int, taken: Counter[int]) -> list[Run]:
        total, replica = len(prompts) * samples, self._replica
        mine = range(replica.index * total // replica.count, (replica.index + 1) * total // replica.count)
        occurrence = []  # a prompt that a step takes twice must not give the same samples twice
        for prompt in prompts:
            occurrence.append(taken[prompt.index])
            taken[prompt.index] += 1
        return [
            Run(prompt=prompts[g], group=g, sample=s, draw=occurrence[g] * samples + s)
            for g, s in (divmod(i, samples) for i in mine)
        ]

    def _open(self, run: Run) -> Run:
        run.messages = list(run.prompt.messages)
        run.episode = self.environment.start(run.prompt)
        run.extend(self.renderer.prompt(run.messages))
        return run

    def _judge(self, batch: Batch) -> None:
        if not bool(batch.valid.any()):
            raise RlctlError(
                f"none of {len(batch)} rollouts has a reward; the first says: {self.first_error}",
                "mend the reward or the environment; rollouts without a vote are left out, but here all are",
                exit_status=1,
            )
        for name in self.recipe.env.reward_weights:
            if name not in batch.reward_parts:
                near = difflib.get_close_matches(name, batch.reward_parts, n=1)
                raise RlctlError(
                    f"env.reward_weights names `{name}`, which is no part of the reward",
                    (f"did you mean `{near[0]}`? " if near else "") + f"parts: {', '.join(batch.reward_parts)}",
                )


def _check_parts(found: set[tuple[str, ...]]) -> None:
    """Every rollout with a vote has the same reward parts: one that is left out would count as 0."""
    if len(found) > 1:
        one, other = sorted(found)[:2]
        raise RlctlError(
            f"rewards differ in their parts: {', '.join(one) or 'none'} in one rollout, {', '.join(other)} in another",
            "return every part for every reply; None for a part without a vote",
        )


def _gather(value: Any) -> list[Any]:
    """Every rank's value."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
