"""What an environment is: prompts, replies and a reward. It knows messages and rows, not tokens.

An environment's file defines `Environment`, built as `Environment(config, recipe_env, recipe_data)`, and `Config`, its
options under `env.<name>.*`.
It bounds its own waits: a step or a reward that may hang runs in `pool.Pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn, Protocol

from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

Split = Literal["train", "validation"]


class NoVoteError(Exception):
    """Raised by an episode's step or reward: the rollout is invalid and the text says why."""


class Episode(Protocol):
    """One conversation under way."""

    async def step(self, message: Message) -> Sequence[Message]:
        """The environment's answer to the model's message; empty ends the episode."""
        ...

    async def reward(self) -> dict[str, float | None]:
        """Named parts; None is no vote: the rollout is invalid, counted, and left out of every statistic."""
        ...

    def close(self) -> None:
        """Free what the episode holds."""
        ...


class EnvironmentProtocol(Protocol):
    """Prompts and their episodes."""

    def dataset(self, split: Split) -> Sequence[Prompt]:
        """Indexable prompts of a split; the same on every rank."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Judge own prompts (`data.train_path`) before they are used.

        Raises:
            RlctlError: this environment cannot score them.
        """
        ...

    def start(self, prompt: Prompt) -> Episode:
        """Begin an episode."""
        ...

    def gold(self, prompt: Prompt) -> str | None:
        """A reply that must score 1.0 in every reward part; None where the environment knows none."""
        ...


def refuse_own_prompts(name: str) -> NoReturn:
    """An environment that makes its prompts cannot score others.

    Raises:
        RlctlError: always.
    """
    raise RlctlError(
        f"env.name `{name}` brings its own prompts, but data.train_path is set as well",
        "drop one of the two; own prompts are scored by env.reward=my_file.py:score or env.name=math",
    )
