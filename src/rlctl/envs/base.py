"""What an environment is: prompts, replies and a reward. It knows messages and rows, not tokens.

An environment's file defines `Environment`, built as `Environment(config, recipe_env, recipe_data)`, and `Config`, its
options under `env.<name>.*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from rlctl.types import Message, Prompt

Split = Literal["train", "validation"]


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

    def start(self, prompt: Prompt) -> Episode:
        """Begin an episode."""
        ...
