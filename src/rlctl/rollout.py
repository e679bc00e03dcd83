"""Prompts x episodes x engine -> scored rollouts -> one Batch, the same on every rank.

1. The step's prompts and samples are shared out over the engine's replicas, in contiguous parts.
2. Each replica plays its part (episodes.py).
3. All ranks gather the numbers (tokens, masks, logprobs, rewards); text stays where it was made.

It knows no backend and no kind of engine.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl import config, plugins
from rlctl.data import prompts as own_prompts
from rlctl.envs.base import EnvironmentProtocol, Split
from rlctl.envs.render import Renderer
from rlctl.episodes import Player, Replica, Run
from rlctl.errors import RlctlError
from rlctl.generation.base import EngineProtocol, WeightSource
from rlctl.lazy import dist
from rlctl.types import (
    Batch,
    Message,
    Prompt,
    Rollout,
    batch_from_rollouts,
    concatenate,
)

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
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the prompts. Collective where an engine spans ranks.

        Args:
            recipe: resolved.
            environment: scores.
            engine: this rank's part of its replica.
            renderer: of the model's tokenizer.
            trains: False: only held-out prompts are asked for, and the training ones are not read.
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
        self._last: tuple[Sequence[Prompt], Batch, list[Rollout]] | None = None

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
        chosen = [self.prompts[i] for i in self.order.at(step)]
        batch = self.sample(chosen, samples=self.recipe.grpo.num_generations_per_prompt, step=step)
        self.engine.sleep("kv_cache")
        self.engine.sleep("weights")
        return batch

    def publish(self, source: WeightSource, version: int) -> None:
        """Give the engine the policy's weights after `version` steps. Collective."""
        self.engine.wake("weights")
        self.engine.load_weights(source, version)
        self.engine.wake("kv_cache")

    def sample(self, prompts: Sequence[Prompt], *, samples: int, step: int) -> Batch:
        """`samples` rollouts of each prompt; group is the prompt's position here. Collective."""
        self.engine.wake("weights")
        self.engine.wake("kv_cache")
        runs = self._share(prompts, samples)
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
        self._last = (prompts, batch, rollouts)
        self.first_error = next((e for _, part, _ in gathered for e in part), None)
        self._judge(batch)
        self.stats = _stats(batch)
        return batch

    @property
    def last(self) -> list[Rollout]:
        """The last phase's rollouts, for a dump. Other replicas' text is decoded again from their tokens."""
        assert self._last is not None
        prompts, batch, own = self._last
        mine = {(r.group, r.sample): r for r in own}
        seen: Counter[int] = Counter()
        rollouts = []
        for i, group in enumerate(batch.group.tolist()):
            key = (group, seen[group])
            seen[group] += 1
            rollouts.append(mine[key] if key in mine else self._decoded(batch, i, key, prompts[group]))
        return rollouts

    def _share(self, prompts: Sequence[Prompt], samples: int) -> list[Run]:
        total, replica = len(prompts) * samples, self._replica
        mine = range(replica.index * total // replica.count, (replica.index + 1) * total // replica.count)
        taken: Counter[int] = Counter()  # a prompt that a step takes twice must not give the same samples twice
        occurrence = []
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

    def _decoded(self, batch: Batch, i: int, key: tuple[int, int], prompt: Prompt) -> Rollout:
        rows = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        tokens, start = batch.tokens[rows].tolist(), len(self.renderer.prompt(prompt.messages))
        valid = bool(batch.valid[i])
        return Rollout(
            prompt=prompt,
            group=key[0],
            sample=key[1],
            tokens=tuple(tokens),
            mask=tuple(batch.mask[rows].tolist() if valid else (t >= start for t in range(len(tokens)))),
            logprobs=tuple(batch.rollout_logprobs[rows].tolist()),
            version=int(batch.version[rows][-1]),
            messages=(*prompt.messages, Message(role="assistant", content=self.renderer.decode(tokens[start:]))),
            reward=float(batch.rewards[i]),
            reward_parts={name: float(part[i]) for name, part in batch.reward_parts.items()},
            valid=valid,
            truncated=bool(batch.truncated[i]),
            error=None if valid else "see the log of its rank",
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


def _stats(batch: Batch) -> dict[str, float]:
    """What is logged of a phase. Means are over rollouts with a vote."""
    valid = batch.valid
    rewards = batch.rewards[valid].double()
    sampled = batch.sequence_sum(batch.mask.long())[valid].double()
    parts = {f"rollout/reward/{name}": float(part[valid].mean()) for name, part in batch.reward_parts.items()}
    return {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/response_length": float(sampled.mean()),
        "rollout/total_length": float(batch.lengths[valid].double().mean()),
        "rollout/truncated_share": float(batch.truncated[valid].double().mean()),
        "rollout/invalid_share": 1.0 - float(valid.double().mean()),
        "rollout/invalid": float(len(batch) - int(valid.sum())),
        **(parts if len(parts) > 1 else {}),
    }


def write_rollouts(path: Path, rollouts: Sequence[Rollout], tokenizer: Any) -> None:
    """Write one JSON line a rollout; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as out:
        for rollout in rollouts:
            out.write(as_line(rollout, tokenizer))
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(path)


def as_line(rollout: Rollout, tokenizer: Any) -> str:
    """A rollout as a JSON line, for people and for `rlctl runs rollouts`."""
    start = rollout.mask.index(True) if True in rollout.mask else len(rollout.tokens)
    line = {
        "group": rollout.group,
        "sample": rollout.sample,
        "index": rollout.prompt.index,
        "prompt": [{"role": m.role, "content": m.content} for m in rollout.prompt.messages],
        "response": tokenizer.decode(rollout.tokens[start:], skip_special_tokens=True),
        "reward": rollout.reward if rollout.valid else None,
        "reward_parts": dict(rollout.reward_parts),
        "valid": rollout.valid,
        "truncated": rollout.truncated,
        "error": rollout.error,
        "response_tokens": sum(rollout.mask),
        "version": rollout.version,
    }
    return json.dumps(line, ensure_ascii=False) + "\n"
