"""Checks of what a person wrote or chose: tokenizer, chat template, rewards, rows of data."""

from __future__ import annotations

import asyncio
import math

from rlctl.checks.base import Result, Sampler, Subject
from rlctl.types import Message, Prompt

GOLDS = 4  # prompts whose gold is scored
NAMED = 3  # faults of rows that are told


def identity(subject: Subject) -> Result:
    """The tokenizer's ids are rows of the model's embedding."""
    tokenizer = subject.renderer.tokenizer
    rows = next(iter(subject.policy.weights().specs().values()))[0][0]  # the embedding comes first in every model
    largest = max(tokenizer.get_vocab().values(), default=0)
    end = tokenizer.eos_token_id
    fits = largest < rows and end is not None and end < rows
    return Result(
        name="identity",
        ok=fits,
        expected=f"token ids below {rows}, the embedding's rows, and an end-of-sequence token",
        found=f"ids up to {largest}, end of sequence {end}",
        detail="" if fits else "the tokenizer is of another model: see policy.tokenizer.name",
    )


def template(subject: Subject) -> Result:
    """A prompt begins once, and the reply is opened behind it; the token that ends a reply is one that is sampled."""
    renderer, prompt = subject.renderer, subject.sampler.prompts[0]
    tokens, begin = renderer.prompt(prompt.messages), renderer.tokenizer.bos_token_id
    begins = 0 if begin is None else next((i for i, t in enumerate(tokens) if t != begin), len(tokens))
    closed, opened = (renderer.text(prompt.messages, opens=opens) for opens in (False, True))
    wrong = [f"{begins} begin-of-sequence tokens"] if begins > 1 else []
    wrong += [] if opened.startswith(closed) else ["the opening of a reply rewrites the messages before it"]
    answered = (*prompt.messages, Message(role="assistant", content="a"))
    wrong += (
        [] if renderer.text(answered, opens=False).startswith(closed) else ["a reply rewrites the messages before it"]
    )
    silent = "" if opened != closed else "the template writes nothing before a reply"
    ends = renderer.stop_token_ids or (renderer.tokenizer.eos_token_id,)
    return Result(
        name="template",
        ok=not wrong,
        expected="one beginning, and messages that stay as they are when a reply follows",
        found="; ".join(wrong) or f"{len(tokens)} tokens, replies end with {list(ends)}",
        detail=silent if not wrong else "see policy.tokenizer.chat_template, and whether the data hold special tokens",
    )


def gold(subject: Subject) -> Result:
    """A reply that is known to be right scores 1 in every part."""
    scores: list[float] = []
    texts = []
    for prompt in subject.sampler.prompts[:GOLDS]:
        text = subject.sampler.environment.gold(prompt)
        if text is not None:
            parts = asyncio.run(_score(subject, prompt, text))
            scores += [math.nan if part is None else part for part in parts.values()]
            texts.append(text)
    short = [t for t, s in zip(texts, scores, strict=False) if not s >= 1.0 - 1e-6]
    return Result(
        name="gold",
        ok=all(s >= 1.0 - 1e-6 for s in scores),
        expected="a reward of 1 for the reference answers",
        found=", ".join(f"{s:g}" for s in scores) or "no reference answers",
        detail=f"the grader does not take {short[0][:80]!r}" if short else "" if texts else "no answer is known here",
    )


async def _score(subject: Subject, prompt: Prompt, text: str) -> dict[str, float | None]:
    episode = subject.sampler.environment.start(prompt)
    try:
        await episode.step(Message(role="assistant", content=text, tokens=tuple(_encode(subject, text))))
        return await episode.reward()
    finally:
        episode.close()


def _encode(subject: Subject, text: str) -> list[int]:
    return list(subject.renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


def rows(subject: Subject) -> Result:
    """Rows of data begin once; each of their sequences has tokens to learn, the end of the last answer among them."""
    assert not isinstance(subject.source, Sampler)
    tokenizer = subject.renderer.tokenizer
    begin, ends = tokenizer.bos_token_id, subject.renderer.stop_token_ids or (tokenizer.eos_token_id,)
    wrong: list[str] = []
    for i, row in enumerate(subject.source):
        for tokens, mask in row:
            learned = [t for t, counts in zip(tokens, mask, strict=True) if counts]
            begins = 0 if begin is None else next((k for k, t in enumerate(tokens) if t != begin), len(tokens))
            wrong += [f"row {i}: {begins} begin-of-sequence tokens"] if begins > 1 else []
            wrong += [f"row {i}: nothing to learn"] if not learned else []
            wrong += [f"row {i}: its first token is to be learned"] if mask[0] else []
            wrong += [f"row {i}: the end of its answer is not learned"] if learned and learned[-1] not in ends else []
    return Result(
        name="rows",
        ok=not wrong,
        expected="one beginning, and answers that are learned up to the token that ends them",
        found="; ".join(wrong[:NAMED]) or f"{len(subject.source)} rows, answers end with {list(ends)}",
        detail="see policy.tokenizer.chat_template, and whether the data hold special tokens" if wrong else "",
    )
