"""Own prompts and an own reward function: `data.train_path=my.jsonl env.reward=my_file.py:score`.

1. The function runs in worker processes (pool.py): it may be slow, hang or crash without harm to the training.
2. `env.reward_style` says how it is called:
   `rlctl`: score(prompt, completion, row) -> float, {part: float} or None; sync or async. `prompt` is the row's own
   prompt (text or messages), `completion` the reply's text.
   `trl`: a TRL reward function, called with lists of one element.
   `verl`: compute_score(data_source, solution_str, ground_truth, extra_info).
3. None, NaN, an error and a late answer are no vote.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl import config, plugins
from rlctl.envs.base import NoVoteError, Split
from rlctl.envs.pool import Pool
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

_OFFERED = {  # style -> what the function is called with, besides a row's columns (trl) and env.function.kwargs
    "rlctl": ("prompt", "completion", "row"),
    "trl": ("prompts", "completions", "completion_ids"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}


@dataclass(kw_only=True)
class Config:
    """How the function runs."""

    workers: int = 4
    """Processes, for a synchronous function."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Free-form: more keyword arguments of the function."""


class Environment:
    """Prompts from data.train_path, scored by env.reward."""

    def __init__(self, options: Config, env: config.Env, data: config.Data) -> None:
        if env.reward is None:
            raise RlctlError("env.name `function` needs a reward", "set env.reward=my_file.py:score")
        if data.train_path is None:
            raise RlctlError("env.reward is set, but there are no prompts to score", "set data.train_path=my.jsonl")
        if options.workers < 1:
            raise RlctlError(f"env.function.workers {options.workers} is below 1", "use at least one worker")
        self._style, self._data, self._reference = env.reward_style, data, env.reward
        arguments = {"reference": env.reward, "style": env.reward_style, "kwargs": options.kwargs}
        timeout = env.reward_timeout_seconds
        self._pool = Pool("rlctl.envs.function:scorer", arguments, timeout_seconds=timeout, workers=options.workers)

    def dataset(self, split: Split) -> Sequence[Prompt]:
        """It has none of its own."""
        raise RlctlError("env.name `function` has no prompts of its own", "set data.train_path=my.jsonl")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """What the function asks for beyond what every call gives must be a column of each row."""
        for prompt in prompts:
            if self._style == "verl":
                _verl_arguments("", prompt.row, self._data.output_key)
            missing = [p for p in self._pool.info["columns"] if p not in prompt.row]
            if missing:
                raise RlctlError(
                    f"env.reward `{self._reference}` takes `{missing[0]}`, no column of row {prompt.index + 1}",
                    f"columns: {', '.join(prompt.row)}",
                )

    def start(self, prompt: Prompt) -> Episode:
        """One prompt, one reply."""
        return Episode(self._pool, prompt, self._data)

    def gold(self, prompt: Prompt) -> str | None:
        """None: what the function wants is not known."""
        return None


class Episode:
    """One prompt, one reply."""

    def __init__(self, pool: Pool, prompt: Prompt, data: config.Data) -> None:
        self._pool, self._prompt, self._data = pool, prompt, data
        self._reply = Message(role="assistant", content="")

    async def step(self, message: Message) -> Sequence[Message]:
        """The reply ends the episode."""
        self._reply = message
        return ()

    async def reward(self) -> dict[str, float | None]:
        """The function's parts; a bare number is the part `reward`."""
        keys = {"input_key": self._data.input_key, "output_key": self._data.output_key}
        row = dict(self._prompt.row)
        return await self._pool.call(row, self._reply.content, list(self._reply.tokens or ()), keys)

    def close(self) -> None:
        """Nothing is held."""


# --- in the worker ----------------------------------------------------------------------------------------------------

Call = tuple[tuple, dict[str, Any]]


def scorer(*, reference: str, style: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function behind env.reward, as (row, completion, completion_ids, keys) -> parts.

    Raises:
        RlctlError: it does not import, or cannot be called in this style.
    """
    location = reference.rpartition(":")[0]
    # A reward file may import its neighbours, a module be one of the working directory.
    sys.path.append(str(Path(location).absolute().parent) if location.endswith(".py") else str(Path.cwd()))
    function = plugins.load_object(reference, what="env.reward")
    columns = _check_signature(function, reference, style, kwargs)
    arguments = functools.partial(_arguments, function, style, kwargs)

    def score(row: dict, completion: str, ids: list[int], keys: dict[str, str]) -> dict[str, float | None]:
        positional, named = arguments(row, completion, ids, keys)
        return as_parts(function(*positional, **named), style)

    async def score_async(row: dict, completion: str, ids: list[int], keys: dict[str, str]) -> dict[str, float | None]:
        positional, named = arguments(row, completion, ids, keys)
        return as_parts(await function(*positional, **named), style)

    chosen: Any = score_async if _is_async(function) else score
    chosen.info = {"columns": columns}
    return chosen


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_signature(function: Any, reference: str, style: str, kwargs: Mapping[str, Any]) -> list[str]:
    """The columns that a function in TRL's style asks for by name."""
    if not callable(function):
        raise RlctlError(f"env.reward `{reference}` is a {type(function).__name__}, not a function", "name a function")
    offered = _OFFERED[style]
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return []
    columns: list[str] = []
    if style == "trl":
        columns = [
            p.name
            for p in signature.parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.default is p.empty
            and p.name not in (*offered, *kwargs)
        ]
    try:
        if style == "rlctl":
            signature.bind(*offered, **kwargs)
        else:
            named = (
                _accepted(signature, dict.fromkeys((*offered, *columns))) if style == "trl" else dict.fromkeys(offered)
            )
            signature.bind(**(named | dict(kwargs)))
    except TypeError as error:
        others = [s for s in _OFFERED if s != style]
        raise RlctlError(
            f"env.reward `{reference}` takes {signature}, but env.reward_style `{style}` calls it with "
            f"({', '.join((*offered, *kwargs))}): {error}",
            f"change its parameters, or set env.reward_style to {' or '.join(others)}",
        ) from error
    return columns


def _accepted(signature: inspect.Signature, named: dict[str, Any]) -> dict[str, Any]:
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return named
    return {k: v for k, v in named.items() if k in signature.parameters}


def _arguments(
    function: Any, style: str, kwargs: Mapping[str, Any], row: dict, completion: str, ids: list[int], keys: dict
) -> Call:
    prompt = row[keys["input_key"]]
    if style == "rlctl":
        return (prompt, completion, row), dict(kwargs)
    if style == "verl":
        return (), _verl_arguments(completion, row, keys["output_key"]) | dict(kwargs)
    conversational = not isinstance(prompt, str)
    reply = [{"role": "assistant", "content": completion}] if conversational else completion
    columns = {k: [v] for k, v in row.items() if k not in ("prompt", "completion", "completion_ids")}
    named = columns | {"prompts": [prompt], "completions": [reply], "completion_ids": [ids]} | dict(kwargs)
    return (), _accepted(inspect.signature(function), named)


def _verl_arguments(completion: str, row: Mapping[str, Any], output_key: str | None) -> dict[str, Any]:
    """A verl row has `reward_model.ground_truth`; another row's reference answer is data.output_key's."""
    if output_key is not None:
        truth = row[output_key]
    elif isinstance(row.get("reward_model"), Mapping) and "ground_truth" in row["reward_model"]:
        truth = row["reward_model"]["ground_truth"]
    else:
        raise RlctlError(
            "env.reward_style `verl` needs a ground truth, and a row has no reward_model.ground_truth",
            f"set data.output_key to one of: {', '.join(row)}",
        )
    extra = row.get("extra_info")  # both columns are optional in verl's own data
    return {
        "data_source": row.get("data_source"), "solution_str": completion,
        "ground_truth": truth, "extra_info": {} if extra is None else extra,
    }  # fmt: skip


def as_parts(value: Any, style: str) -> dict[str, float | None]:
    """What the function returned, as named numbers.

    Raises:
        NoVoteError: it is not a number, or not finite.
    """
    if style == "trl":
        if not isinstance(value, Sequence) and not hasattr(value, "__len__"):
            raise NoVoteError(f"returned {value!r}, not a list of one reward")
        if len(value) != 1:
            raise NoVoteError(f"returned {len(value)} rewards for one completion")
        value = value[0]
    if isinstance(value, Mapping):
        # verl sums nothing: `score` is the reward, the other entries are notes.
        parts = {"score": value["score"]} if style == "verl" else dict(value)
        if not parts:
            raise NoVoteError("returned an empty dict")
        return {str(name): _number(part, f"part `{name}`") for name, part in parts.items()}
    return {"reward": _number(value, "the reward")}


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise NoVoteError(f"{what} is {value!r}, not a number") from None
    if not math.isfinite(number):
        raise NoVoteError(f"{what} is {number}")
    return number
