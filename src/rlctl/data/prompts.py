"""Own prompts from JSONL or parquet, and the order in which steps take prompts.

1. `load` reads rows into prompts and refuses what it cannot read, by line.
2. `drop_long` applies the length policy once, at load, and counts what it drops.
3. `PromptOrder` says which prompts a step takes: arithmetic on the step alone, so that a resume needs no state.

It knows no tokenizer and no environment.
"""

from __future__ import annotations

import difflib
import functools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl import config
from rlctl.errors import RlctlError
from rlctl.types import Message, Prompt

_SUFFIXES = {".jsonl": "JSONL", ".parquet": "parquet"}


def load(data: config.Data, *, key: Literal["train_path", "val_path"] = "train_path") -> list[Prompt]:
    """The prompts of a file, in the file's order.

    Args:
        data: names the columns.
        key: which of its files.

    Raises:
        RlctlError: no such file, unknown format, broken line, missing column, no rows, or an unusable prompt.
    """
    prompts: list[Prompt] = []
    for where, row in rows(data, key=key):
        check_columns(row, {"data.input_key": data.input_key, "data.output_key": data.output_key}, where)
        prompts.append(
            Prompt(messages=messages(row[data.input_key], data.input_key, where), row=row, index=len(prompts))
        )
    return prompts


def rows(
    data: config.Data, *, key: Literal["train_path", "val_path"] = "train_path"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each row stands, and the row. At least one.

    Raises:
        RlctlError: no such file, unknown format, broken line, or no rows.
    """
    path = Path(getattr(data, key))
    read = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in _SUFFIXES:
        raise RlctlError(
            f"data.{key} `{path}` is neither JSONL nor parquet", "give a file that ends in .jsonl or .parquet"
        )
    if not path.is_file():
        raise RlctlError(f"data.{key}: no file `{path}`", f"give an existing file (looked in {path.absolute().parent})")
    found = False
    for where, row in read[path.suffix](path):
        found = True
        yield where, row
    if not found:
        raise RlctlError(f"data.{key} `{path}` has no rows", "give a file with at least one row")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # broken JSON or broken UTF-8
                raise RlctlError(f"{where}: not JSON: {error}", "write one JSON object a line") from error
            if not isinstance(row, dict):
                raise RlctlError(f"{where}: a {type(row).__name__}, not an object", "write one JSON object a line")
            yield where, row


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow  # heavy, and only parquet needs it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise RlctlError(f"`{path}` is not a readable parquet file: {error}", "write it again") from error


def check_columns(row: Mapping[str, Any], columns: Mapping[str, str | None], where: str) -> None:
    """Refuse a row without a column, by the recipe's key that names it.

    Raises:
        RlctlError: names the column, the key and the columns that are there.
    """
    for key, column in columns.items():
        if column is not None and column not in row:
            near = difflib.get_close_matches(column, row, n=1)
            raise RlctlError(
                f"{where}: no column `{column}` ({key})",
                (f"did you mean `{near[0]}`? " if near else "") + f"columns: {', '.join(row) or 'none'}",
            )


def messages(value: Any, column: str, where: str) -> tuple[Message, ...]:
    """A prompt column's conversation: a text is one user message."""
    if isinstance(value, str) and value.strip():
        return (Message(role="user", content=value),)
    fits = isinstance(value, list) and value and all(is_message(m) for m in value)
    if not fits:
        raise RlctlError(
            f"{where}: column `{column}` holds {str(value)[:60]!r}, which is no prompt",
            "give a text that is not empty, or a list of {role, content}",
        )
    if value[-1]["role"] == "assistant":
        raise RlctlError(
            f"{where}: the last message of `{column}` is the assistant's",
            "end the prompt with the message that the model shall answer",
        )
    return tuple(Message(role=m["role"], content=m["content"]) for m in value)


def is_message(value: Any) -> bool:
    """Whether it has a role and a content, both text."""
    return isinstance(value, Mapping) and all(isinstance(value.get(k), str) for k in ("role", "content"))


def with_system_prompt(prompts: Sequence[Prompt], text: str | None) -> Sequence[Prompt]:
    """The prompts with a system message first; a conversation that has its own keeps it."""
    if text is None:
        return prompts
    system = Message(role="system", content=text)
    return [
        p if p.messages[0].role == "system" else Prompt(messages=(system, *p.messages), row=p.row, index=p.index)
        for p in prompts
    ]


def drop_long(prompts: Iterable[Prompt], *, limit: int, length: Callable[[Prompt], int]) -> tuple[list[Prompt], int]:
    """The prompts of at most `limit` tokens, and how many were dropped. `index` stays the position in the file.

    Raises:
        RlctlError: none is short enough.
    """
    kept, shortest, total = [], None, 0
    for prompt in prompts:
        tokens = length(prompt)
        total += 1
        shortest = tokens if shortest is None else min(shortest, tokens)
        if tokens <= limit:
            kept.append(prompt)
    if not kept:
        raise RlctlError(
            f"all {total} prompts are longer than {limit} tokens (the shortest has {shortest})",
            "raise data.max_input_seq_length or policy.max_total_sequence_length",
        )
    return kept, total - len(kept)


@dataclass(frozen=True, kw_only=True)
class PromptOrder:
    """Which prompts each step takes. Steps count from 1; epochs wrap inside a step.

    Example: n=5, per_step=2, no shuffle: step 1 takes 0 1, step 2 takes 2 3, step 3 takes 4 0.
    """

    n: int
    per_step: int
    seed: int
    shuffle: bool = True

    def at(self, step: int) -> list[int]:
        """Positions in the data set of the step's prompts: [per_step]."""
        assert step >= 1, step
        return self.between((step - 1) * self.per_step, step * self.per_step)

    def between(self, start: int, end: int) -> list[int]:
        """Positions in the data set of the prompts that are taken as number `start` (from 0) up to before `end`."""
        return [self._permutation(at // self.n)[at % self.n] for at in range(start, end)]

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, index) of the step's first prompt."""
        return divmod((step - 1) * self.per_step, self.n)

    def num_steps(self, epochs: int) -> int:
        """Steps until every prompt was taken `epochs` times."""
        return -(-self.n * epochs // self.per_step)

    def _permutation(self, epoch: int) -> Sequence[int]:
        return _permutation(self.n, self.seed, epoch) if self.shuffle else range(self.n)


@dataclass(kw_only=True)
class PromptQueue:
    """Prompts in their order, where the number that a step takes is not known before.

    Example: n=5, no shuffle: take(3) gives 0 1 2; after give_back([2]), take(3) gives 2 3 4.
    """

    order: PromptOrder
    taken: int = 0
    """Prompts that were taken from the order."""
    returned: list[int] = field(default_factory=list)
    """Positions that come first when more are taken."""

    def take(self, count: int) -> list[int]:
        """The next positions in the data set: [count]."""
        first, self.returned = self.returned[:count], self.returned[count:]
        start, self.taken = self.taken, self.taken + count - len(first)
        return first + self.order.between(start, self.taken)

    def give_back(self, positions: Sequence[int]) -> None:
        """What was taken and not used comes first again."""
        self.returned = [*positions, *self.returned]

    @property
    def position(self) -> dict[str, Any]:
        """What a resume needs, for JSON."""
        return {"taken": self.taken, "returned": self.returned}

    @position.setter
    def position(self, value: Mapping[str, Any]) -> None:
        self.taken, self.returned = value["taken"], list(value["returned"])


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
