"""Tasks of reasoning-gym by name: `env.name=reasoning_gym env.reasoning_gym.task=chain_sum`.

Questions are generated, and each task's own scorer judges the answer that the reply gives between <answer> tags.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl import config
from rlctl.envs.base import Split, refuse_own_prompts
from rlctl.envs.pool import Pool
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

INSTRUCTION = "Solve the task. Write the final answer, and nothing else, between <answer> and </answer>."
_VALIDATION_SEED_OFFSET = 1_000_003  # another stream of questions


@dataclass(kw_only=True)
class Config:
    """Which task."""

    task: str | None = None
    """A data set of reasoning-gym, e.g. `chain_sum`."""
    size: int = 1000
    validation_size: int = 64
    seed: int = 42
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Free-form: the task's own parameters."""
    answer: Literal["tagged", "reply"] = "tagged"
    """What is scored: the text between the last <answer> tags, or the whole reply (small models keep no format)."""
    workers: int = 2
    """Processes that score."""


class Environment:
    """Generated questions."""

    def __init__(self, options: Config, env: config.Env, data: config.Data) -> None:
        _check_task(options.task)
        if min(options.size, options.validation_size, options.workers) < 1:
            raise RlctlError(
                "env.reasoning_gym: size, validation_size and workers are at least 1",
                f"got {options.size}, {options.validation_size}, {options.workers}",
            )
        self._options, self._system_prompt = options, data.system_prompt
        self._create("train")  # refuses wrong parameters now
        arguments = {"task": options.task, "answer": options.answer}
        timeout = env.reward_timeout_seconds
        self._pool = Pool(
            "rlctl.envs.reasoning_gym:scorer", arguments, timeout_seconds=timeout, workers=options.workers
        )

    def _create(self, split: Split) -> Any:
        import reasoning_gym  # a second of imports

        o = self._options
        seed, size = (o.seed, o.size) if split == "train" else (o.seed + _VALIDATION_SEED_OFFSET, o.validation_size)
        try:
            return reasoning_gym.create_dataset(o.task, seed=seed, size=size, **o.kwargs)
        except (TypeError, ValueError, AssertionError) as error:  # the task's own check of its parameters
            raise RlctlError(
                f"env.reasoning_gym.kwargs do not fit task `{o.task}`: {error}",
                "see the task's parameters in reasoning-gym",
            ) from error

    def dataset(self, split: Split) -> Sequence[Prompt]:
        """Prompts whose row is reasoning-gym's entry: question, answer, metadata."""
        instruct = self._options.answer == "tagged" and self._system_prompt is None
        head = (Message(role="system", content=INSTRUCTION),) if instruct else ()
        return [
            Prompt(messages=(*head, Message(role="user", content=entry["question"])), row=entry, index=index)
            for index, entry in enumerate(self._create(split))
        ]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Own prompts are refused."""
        refuse_own_prompts("reasoning_gym")

    def start(self, prompt: Prompt) -> Episode:
        """One question, one reply."""
        return Episode(self._pool, dict(prompt.row))

    def gold(self, prompt: Prompt) -> str | None:
        """The entry's own answer; some tasks have none."""
        answer = prompt.row["answer"]
        if answer is None:
            return None
        return f"<answer>{answer}</answer>" if self._options.answer == "tagged" else str(answer)


class Episode:
    """One question, one reply."""

    def __init__(self, pool: Pool, entry: dict[str, Any]) -> None:
        self._pool, self._entry, self._reply = pool, entry, ""

    async def step(self, message: Message) -> Sequence[Message]:
        """The reply ends the episode."""
        self._reply = message.content
        return ()

    async def reward(self) -> dict[str, float | None]:
        """`score`: the task's own, usually 0 to 1."""
        return {"score": await self._pool.call(self._reply, self._entry)}

    def close(self) -> None:
        """Nothing is held."""


def _check_task(task: str | None) -> None:
    import reasoning_gym.factory  # a second of imports

    known = sorted(reasoning_gym.factory.DATASETS)
    if task not in known:
        near = difflib.get_close_matches(task or "", known, n=3)
        raise RlctlError(
            "env.reasoning_gym.task is not set" if task is None else f"reasoning-gym has no task `{task}`",
            (f"did you mean `{near[0]}`? " if near else "")
            + f"it has {len(known)}, e.g. {', '.join(near or known[:8])}",
        )


# --- in the worker ----------------------------------------------------------------------------------------------------


def scorer(*, task: str, answer: str) -> Callable[[str, dict], float]:
    """(reply, entry) -> the task's own score; a reply without an answer is scored as none."""
    import reasoning_gym  # a second of imports

    score = reasoning_gym.get_score_answer_fn(task)
    return lambda reply, entry: float(score(extract(reply) if answer == "tagged" else reply.strip(), entry))


def extract(reply: str) -> str | None:
    """The text between the last <answer> tags."""
    found = re.findall(r"<answer>(.*?)</answer>", reply, flags=re.DOTALL)
    return found[-1].strip() if found else None
