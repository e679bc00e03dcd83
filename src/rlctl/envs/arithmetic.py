"""Sums and products of small numbers: a task with a signal from the first step for a model of 135M parameters.

The reward is 1 when the answer stands in the reply as a whole number, else 0. Operands are chosen so that repeating the
question earns nothing. Train and validation questions are disjoint.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlctl import config
from rlctl.envs.base import Split, refuse_own_prompts
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

_SYMBOLS = {"add": "+", "multiply": "*"}
_HELD_OUT = 0.1  # share of the questions that only validation asks
_MOST_DIGITS = 4  # all pairs of operands are sampled from, not listed, yet answers must stay short


@dataclass(kw_only=True)
class Config:
    """Which questions."""

    operations: list[str] = field(default_factory=lambda: ["add"])
    """Of `add`, `multiply`."""
    digits: int = 1
    """Of each operand."""
    size: int = 4096
    """Prompts in the training split; questions repeat."""
    validation_size: int = 64
    seed: int = 0


class Environment:
    """Arithmetic questions."""

    def __init__(self, options: Config, env: config.Env, data: config.Data) -> None:
        unknown = [o for o in options.operations if o not in _SYMBOLS]
        if unknown or not options.operations:
            raise RlctlError(f"env.arithmetic.operations: {unknown or 'empty'}", f"choose from {', '.join(_SYMBOLS)}")
        if not 1 <= options.digits <= _MOST_DIGITS:
            raise RlctlError(
                f"env.arithmetic.digits {options.digits} is not in 1..{_MOST_DIGITS}", "ask for smaller numbers"
            )
        if options.size < 1 or options.validation_size < 1:
            raise RlctlError(
                f"env.arithmetic: size {options.size}, validation_size {options.validation_size}", "both are at least 1"
            )
        self._options = options

    def dataset(self, split: Split) -> Sequence[Prompt]:
        """Prompts whose row has `question` and `answer`."""
        count = self._options.size if split == "train" else self._options.validation_size
        return [self._prompt(split, index) for index in range(count)]

    def _prompt(self, split: Split, index: int) -> Prompt:
        rng = random.Random(f"{self._options.seed}/{split}/{index}")
        while True:
            operation, a, b = self._draw(rng)
            answer = a + b if operation == "add" else a * b
            question = f"What is {a} {_SYMBOLS[operation]} {b}?"
            held_out = random.Random(question).random() < _HELD_OUT
            if answer not in (a, b) and held_out == (split == "validation"):
                row = {"question": question, "answer": str(answer)}
                return Prompt(messages=(Message(role="user", content=question),), row=row, index=index)

    def _draw(self, rng: random.Random) -> tuple[str, int, int]:
        low = 0 if self._options.digits == 1 else 10 ** (self._options.digits - 1)
        high = 10**self._options.digits - 1
        return rng.choice(self._options.operations), rng.randint(low, high), rng.randint(low, high)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Own prompts are refused."""
        refuse_own_prompts("arithmetic")

    def start(self, prompt: Prompt) -> Episode:
        """One question, one reply."""
        return Episode(prompt.row["answer"])

    def gold(self, prompt: Prompt) -> str | None:
        """The sum or product."""
        return str(prompt.row["answer"])


class Episode:
    """One question, one reply."""

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._reply = ""

    async def step(self, message: Message) -> Sequence[Message]:
        """The reply ends the episode."""
        self._reply = message.content
        return ()

    async def reward(self) -> dict[str, float | None]:
        """`correct`: 1 when the answer stands in the reply."""
        return {"correct": float(contains_number(self._reply, self._answer))}

    def close(self) -> None:
        """Nothing is held."""


def contains_number(text: str, number: str) -> bool:
    """Whether a whole number stands in a text by itself: 7 is in "= 7." but not in 17, 7.5 or 7,000."""
    return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)(?![.,]\d)", text) is not None
