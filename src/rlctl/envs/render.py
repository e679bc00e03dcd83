"""Messages to tokens and back, with masks by position.

1. A prompt is rendered once by the chat template, with the assistant's opening, and has exactly one begin-of-sequence
   token (if the tokenizer uses one).
2. Sampled tokens are kept as they are, the stop token included; they are never decoded and encoded again.
3. An environment's answer is appended as the text that the template puts between the assistant's message and its next.

It knows no engine: what it returns are token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.errors import RlctlError
from rlctl.types import Message

_MARK = "@rlctl-reply@"  # stands for an assistant's content in the template's output


class Renderer:
    """The chat template and tokenizer of one model."""

    def __init__(self, tokenizer: Any) -> None:
        """Probe the template once.

        Args:
            tokenizer: a transformers tokenizer.

        Raises:
            RlctlError: it has no chat template, or one that fails on a plain conversation.
        """
        if not tokenizer.chat_template:
            raise RlctlError(
                "the tokenizer has no chat template (a base model?)",
                "set policy.tokenizer.chat_template to a Jinja template or a file that holds one",
            )
        self.tokenizer = tokenizer
        self._begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [
            tokenizer.bos_token_id
        ]
        probe = (Message(role="user", content="a"), Message(role="assistant", content=_MARK))
        self._closing = self._after_mark(self.text(probe, opens=False))
        self.stop_token_ids = self._end_of_turn()
        """The special token with which the template closes an assistant's message; none if it closes with text."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that the assistant continues.

        Raises:
            RlctlError: the template refuses the messages, or begins twice.
        """
        ids = self._encode(self.text(messages, opens=True))
        begin = self.tokenizer.bos_token_id
        if begin is None:
            return ids
        if self._begins and ids[:1] != [begin]:
            ids = [begin, *ids]
        if ids[:2] == [begin, begin]:
            raise RlctlError(
                f"a prompt begins with {self.tokenizer.bos_token!r} twice",
                "remove it from the chat template or the data",
            )
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def reply(self, history: Sequence[Message], answer: Sequence[Message], last_token: int) -> list[int]:
        """What to append after a completion, so that the model answers the environment.

        Args:
            history: the conversation, the model's last message at its end.
            answer: the environment's messages.
            last_token: of the completion; a stop token is not written twice.

        Raises:
            RlctlError: the template rewrites earlier messages when later ones follow.
        """
        marked = (*history[:-1], Message(role="assistant", content=_MARK))
        before, after = self.text(marked, opens=False), self.text((*marked, *answer), opens=True)
        head = before[: before.index(_MARK)] if _MARK in before else None
        if head is None or not after.startswith(head + _MARK):
            raise RlctlError(
                "the chat template rewrites earlier messages once later ones follow: a conversation cannot go on",
                "set policy.tokenizer.chat_template to one that renders each message on its own",
            )
        tail = after[len(head) + len(_MARK) :]
        stop = self.tokenizer.decode([last_token], skip_special_tokens=False)
        tail = tail.removeprefix(stop)
        # Encoded behind the stop token, where it stands: some tokenizers treat a beginning differently.
        ids = self._encode(stop + tail)
        return ids[1:] if ids[:1] == [last_token] else self._encode(tail)

    def conversation(self, messages: Sequence[Message], *, last_only: bool) -> tuple[list[int], list[bool]]:
        """Tokens of a whole conversation, and which of them the assistant would have to sample.

        An answer is encoded behind its prompt as `prompt` encodes it, and ends with the token that ends a turn, so that
        a model is trained on what it meets when it generates.

        Args:
            messages: begins with another role's and ends with the assistant's.
            last_only: only the last answer counts.

        Returns:
            Token ids [n], and mask [n]: True on answers, their end-of-turn token included.

        Raises:
            RlctlError: the template rewrites earlier messages when later ones follow.
        """
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        tokens: list[int] = []
        mask: list[bool] = []
        done = ""
        for i in answers[-1:] if last_only else answers:
            opened, closed = self.text(messages[:i], opens=True), self.text(messages[: i + 1], opens=False)
            if not opened.startswith(done) or not closed.startswith(opened):
                raise RlctlError(
                    "the chat template rewrites earlier messages once later ones follow: masks would be wrong",
                    "set policy.tokenizer.chat_template to one that renders each message on its own",
                )
            before = self._encode(opened[len(done) :]) if tokens else self.prompt(messages[:i])
            answer = self._encode(closed[len(opened) :])
            after = self._after_turn(answer)
            tokens += before + answer
            mask += [False] * len(before) + [True] * (len(answer) - after) + [False] * after
            done = closed
        if not self.stop_token_ids and tokens[-1] != self.tokenizer.eos_token_id:
            tokens, mask = [*tokens, self.tokenizer.eos_token_id], [*mask, True]
        return tokens, mask

    def _after_turn(self, answer: Sequence[int]) -> int:
        """How many tokens the template writes behind the one that ends the turn, e.g. 1 for a line feed."""
        ends = [i for i, token in enumerate(answer) if token in self.stop_token_ids]
        return len(answer) - 1 - ends[-1] if ends else 0

    def text(self, messages: Sequence[Message], *, opens: bool) -> str:
        """A conversation as the template writes it.

        Args:
            messages: in order.
            opens: with the opening of the assistant's reply.

        Raises:
            RlctlError: the template refuses the messages.
        """
        dicts = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self.tokenizer.apply_chat_template(dicts, add_generation_prompt=opens, tokenize=False)
        except Exception as error:  # Jinja's errors, and what a template raises on purpose
            roles = ", ".join(m.role for m in messages)
            raise RlctlError(
                f"the chat template refuses a conversation of {roles}: {type(error).__name__}: {error}",
                "change the data, or set policy.tokenizer.chat_template",
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @staticmethod
    def _after_mark(text: str) -> str:
        return text.partition(_MARK)[2]

    def _end_of_turn(self) -> tuple[int, ...]:
        ids = self._encode(self._closing)
        return (ids[0],) if ids and ids[0] in self.tokenizer.all_special_ids else ()
