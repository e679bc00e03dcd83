"""Mathematical answers, graded by math-verify: `data.train_path=my.jsonl data.output_key=answer env.name=math`.

1. `check` parses every reference answer, and grades it against itself: what does not parse is refused by row.
2. A reply earns 1 when math-verify finds its answer equal to the reference, else 0.

Parsing and grading run in worker processes: symbolic algebra may take for ever.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl import config
from rlctl.envs.base import NoVoteError, Split
from rlctl.envs.pool import Pool
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

_NUMBER = re.compile(r"\s*-?\d+(\.\d+)?\s*")  # always parses; spares most data sets the check by worker
_MOST_WORDS = 8  # a final answer is shorter; longer text is a worked solution, whose parse would be nonsense


@dataclass(kw_only=True)
class Config:
    """How grading runs."""

    workers: int = 2
    """Processes."""


class Environment:
    """Own questions with reference answers."""

    def __init__(self, options: Config, env: config.Env, data: config.Data) -> None:
        if data.train_path is None or data.output_key is None:
            raise RlctlError(
                "env.name `math` grades own questions against a column of answers",
                "set data.train_path=my.jsonl and data.output_key=answer",
            )
        if options.workers < 1:
            raise RlctlError(f"env.math.workers {options.workers} is below 1", "use at least one worker")
        self._column = data.output_key
        timeout = env.reward_timeout_seconds
        self._pool = Pool("rlctl.envs.math:grader", {}, timeout_seconds=timeout, workers=options.workers)

    def dataset(self, split: Split) -> Sequence[Prompt]:
        """It has none of its own."""
        raise RlctlError("env.name `math` has no questions of its own", "set data.train_path=my.jsonl")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Every reference answer parses and equals itself."""
        asyncio.run(self._check(prompts))

    async def _check(self, prompts: Sequence[Prompt]) -> None:
        unclear = [p for p in prompts if not _NUMBER.fullmatch(str(p.row[self._column]))]
        golds = [str(p.row[self._column]) for p in unclear]
        scores = await asyncio.gather(*(self._pool.call(g, None) for g in golds), return_exceptions=True)
        for prompt, gold, score in zip(unclear, golds, scores, strict=True):
            if isinstance(score, NoVoteError):
                raise RlctlError(
                    f"row {prompt.index + 1}: `{self._column}` {gold[:60]!r} is no answer that can be graded: {score}",
                    "give the final answer alone: a number, an expression or LaTeX",
                )
            if isinstance(score, BaseException):
                raise score

    def start(self, prompt: Prompt) -> Episode:
        """One question, one reply."""
        return Episode(self._pool, str(prompt.row[self._column]))

    def gold(self, prompt: Prompt) -> str | None:
        """The reference answer, as a model gives one."""
        answer = str(prompt.row[self._column])
        return answer if "\\boxed" in answer else f"The answer is $\\boxed{{{answer.strip().strip('$')}}}$."


class Episode:
    """One question, one reply."""

    def __init__(self, pool: Pool, gold: str) -> None:
        self._pool, self._gold, self._reply = pool, gold, ""

    async def step(self, message: Message) -> Sequence[Message]:
        """The reply ends the episode."""
        self._reply = message.content
        return ()

    async def reward(self) -> dict[str, float | None]:
        """`correct`: 1 when the reply's answer equals the reference."""
        return {"correct": await self._pool.call(self._gold, self._reply)}

    def close(self) -> None:
        """Nothing is held."""


# --- in the worker ----------------------------------------------------------------------------------------------------


def grader() -> Callable[[str, str | None], float]:
    """(gold, reply) -> 1.0 or 0.0; without a reply, gold is graded against itself."""
    import math_verify  # sympy: only the workers pay for it

    # Its own timeouts need signals; the pool's timeout kills the process instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def grade(gold: str, reply: str | None) -> float:
        truth = parse_gold(gold)
        if not truth:
            raise NoVoteError("it does not parse")
        answer = truth if reply is None else math_verify.parse(reply, parsing_timeout=None)
        equal = math_verify.verify(gold=truth, target=answer, timeout_seconds=None)
        if reply is None and not equal:
            raise NoVoteError("it does not equal itself")
        return float(equal)

    return grade


def parse_gold(gold: str) -> list:
    """A reference answer's expressions; empty for text that is no mathematics.

    LaTeX is read only between delimiters, which data sets leave out: they are added where the text looks mathematical.
    """
    import math_verify  # as above

    if len(gold.split()) > _MOST_WORDS and "\\boxed" not in gold:
        return []
    delimited = "$" in gold or "\\boxed" in gold or "\\(" in gold or "\\[" in gold
    text = gold.strip()
    if not delimited and (re.search(r"[\\^_{}()\[\]=+*/<>-]", text) or re.fullmatch(r"[A-Za-z]", text)):
        text = f"${text}$"
    return math_verify.parse(text, parsing_timeout=None, fallback_mode="no_fallback")
