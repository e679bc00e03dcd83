"""Data without rollouts: conversations to learn (sft), and pairs of answers to prefer (dpo). JSONL or parquet.

Both give examples: the conversations of one row, in the order in which the algorithm wants them. It knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlctl import config
from rlctl.data import prompts
from rlctl.errors import RlctlError
from rlctl.types import Message

Kind = Literal["conversations", "preferences"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row, e.g. of dpo: conversations=((user, chosen), (user, rejected)), index=3."""

    conversations: tuple[tuple[Message, ...], ...]
    """One of sft; two of dpo, the chosen one first."""
    index: int
    """Position in its file."""


def load(data: config.Data, kind: Kind, *, key: Literal["train_path", "val_path"] = "train_path") -> list[Example]:
    """The examples of a file, in the file's order.

    Args:
        data: names the columns.
        kind: what a row holds.
        key: which of its files.

    Raises:
        RlctlError: no such file, unknown format, broken line, missing column, no rows, or an unusable conversation.
    """
    read = {"conversations": _conversation, "preferences": _pair}[kind]
    found: list[Example] = []
    for where, row in prompts.rows(data, key=key):
        conversations = tuple(_with_system(c, data.system_prompt) for c in read(row, data, where))
        found.append(Example(conversations=conversations, index=len(found)))
    return found


def _with_system(conversation: tuple[Message, ...], text: str | None) -> tuple[Message, ...]:
    if text is None or conversation[0].role == "system":
        return conversation
    return (Message(role="system", content=text), *conversation)


def _conversation(row: Mapping[str, Any], data: config.Data, where: str) -> tuple[tuple[Message, ...], ...]:
    prompts.check_columns(row, {"data.messages_key": data.messages_key}, where)
    value = row[data.messages_key]
    fits = isinstance(value, list) and value and all(prompts.is_message(m) for m in value)
    if not fits or value[0]["role"] == "assistant" or value[-1]["role"] != "assistant":
        raise RlctlError(
            f"{where}: column `{data.messages_key}` holds {str(value)[:60]!r}, which is no conversation to learn",
            "give a list of {role, content} that begins with a system's or user's message and ends with the "
            "assistant's",
        )
    return (tuple(Message(role=m["role"], content=m["content"]) for m in value),)


def _pair(row: Mapping[str, Any], data: config.Data, where: str) -> tuple[tuple[Message, ...], ...]:
    columns = {f"data.{name}": getattr(data, name) for name in ("prompt_key", "chosen_key", "rejected_key")}
    prompts.check_columns(row, columns, where)
    prompt = prompts.messages(row[data.prompt_key], data.prompt_key, where)
    return tuple((*prompt, _answer(row[c], prompt, c, where)) for c in (data.chosen_key, data.rejected_key))


def _answer(value: Any, prompt: tuple[Message, ...], column: str, where: str) -> Message:
    """An answer column: text, the assistant's message, or the prompt's messages and then it."""
    if isinstance(value, str) and value:
        return Message(role="assistant", content=value)
    if isinstance(value, list) and value and all(prompts.is_message(m) for m in value):
        said = [Message(role=m["role"], content=m["content"]) for m in value]
        if tuple(said[:-1]) in ((), prompt) and said[-1].role == "assistant":
            return said[-1]
    raise RlctlError(
        f"{where}: column `{column}` holds {str(value)[:60]!r}, which is no answer to the prompt",
        "give a text that is not empty, or messages: the prompt's own and one of the assistant's",
    )
