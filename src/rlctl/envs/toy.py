"""A dense reward that a tiny random model learns in a few steps: the share of the reply's characters that are wanted.

It checks the machinery: a byte-level model starts near the wanted characters' share of all bytes and can reach 1.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl import config
from rlctl.envs.base import Split, refuse_own_prompts
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt


@dataclass(kw_only=True)
class Config:
    """What is wanted."""

    wanted: str = string.ascii_lowercase + " "
    """Characters that count."""
    size: int = 1024
    """Prompts in the training split."""
    validation_size: int = 16


class Environment:
    """Prompts that differ in one number."""

    def __init__(self, options: Config, env: config.Env, data: config.Data) -> None:
        if not options.wanted:
            raise RlctlError("env.toy.wanted is empty", "give at least one character")
        if options.size < 1 or options.validation_size < 1:
            raise RlctlError(
                f"env.toy: size {options.size}, validation_size {options.validation_size}", "both are at least 1"
            )
        self._options = options

    def dataset(self, split: Split) -> Sequence[Prompt]:
        """Numbered prompts."""
        count = self._options.size if split == "train" else self._options.validation_size
        first = 0 if split == "train" else self._options.size
        return [
            Prompt(messages=(Message(role="user", content=f"Text {first + i}:"),), row={}, index=i)
            for i in range(count)
        ]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Own prompts are refused."""
        refuse_own_prompts("toy")

    def start(self, prompt: Prompt) -> Episode:
        """One prompt, one reply."""
        return Episode(frozenset(self._options.wanted))

    def gold(self, prompt: Prompt) -> str | None:
        """A wanted character."""
        return self._options.wanted[0]


class Episode:
    """One prompt, one reply."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._reply = ""

    async def step(self, message: Message) -> Sequence[Message]:
        """The reply ends the episode."""
        self._reply = message.content
        return ()

    async def reward(self) -> dict[str, float | None]:
        """`wanted`: the share of wanted characters; 0 for an empty reply."""
        hits = sum(c in self._wanted for c in self._reply)
        return {"wanted": hits / max(len(self._reply), 1)}

    def close(self) -> None:
        """Nothing is held."""
