"""The data that crosses module boundaries.

Shape legend: B sequences, P prompts, G group size (B = P * G), N tokens of all sequences, V vocabulary.
Token data is one packed stream `[N]` plus `offsets [B+1]`; padding exists only inside a backend.
Token-aligned means: entry t describes token t given those before it in its sequence. A sequence's first token is
never in `mask`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.lazy import torch

INVALID_REWARD = 0.0  # what a rollout without a vote carries; `valid` keeps it out of every statistic


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation, e.g. Message(role="user", content="What is 3 + 4?")."""

    role: str
    content: str
    tokens: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    """Of a model's message: the sampled ids behind `content`."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a rollout starts from.

    Example: Prompt(messages=(Message(role="user", content="3+4?"),), row={"answer": "7"}, index=12)
    """

    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    """The data row, for the reward. Never shown to the model."""
    index: int
    """Position in its data set."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an engine draws tokens; the same for all requests of a phase."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token. A stop token is part of the completion."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate. `seed` depends on run seed, step, prompt and sample only (`request_seed`)."""

    id: int
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    seed: int
    sampling: Sampling = Sampling()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One engine call's answer.

    Example: Completion(id=0, tokens=(55, 2), logprobs=(-0.1, -0.02), finish_reason="stop", version=3)
    """

    id: int
    tokens: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """Of the sampled tokens, under the distribution they were drawn from (after temperature and filters)."""
    finish_reason: Literal["stop", "length", "abort"]
    version: int
    """Policy steps completed when the tokens were sampled."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One scored episode. Lists are token-aligned over prompt and response."""

    prompt: Prompt
    group: int
    sample: int
    """Index in its group: 0 .. G-1."""
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    logprobs: tuple[float, ...]
    """0.0 outside `mask`."""
    version: int
    messages: tuple[Message, ...]
    """The whole conversation, the prompt's messages first."""
    reward: float
    """Weighted sum of parts; INVALID_REWARD when not `valid`."""
    reward_parts: Mapping[str, float]
    valid: bool
    """False: the environment failed or gave no vote."""
    truncated: bool
    """The last completion ended by length."""
    error: str | None = None
    """Why `valid` is False."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rollout phase, the same on every rank. Changed only by `replace`.

    Example: two sequences of 3 and 2 tokens have tokens [5], offsets [0, 3, 5], mask [F, F, T, F, T].
    """

    tokens: torch.Tensor  # [N] int64
    offsets: torch.Tensor  # [B+1] int64
    mask: torch.Tensor  # [N] bool: tokens that the loss sees
    rewards: torch.Tensor  # [B] f32
    group: torch.Tensor  # [B] int64
    valid: torch.Tensor  # [B] bool: an infrastructure failure does not vote
    truncated: torch.Tensor  # [B] bool
    rollout_logprobs: torch.Tensor  # [N] f32
    version: torch.Tensor  # [N] int32: policy steps completed when the token was sampled
    reward_parts: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [B] f32
    old_logprobs: torch.Tensor | None = None  # [N] f32
    ref_logprobs: torch.Tensor | None = None  # [N] f32
    advantages: torch.Tensor | None = None  # [N] f32
    loss_weights: torch.Tensor | None = None  # [N] f32
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [N] or [B]

    def __len__(self) -> int:
        """B."""
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, prompt and response: [B] int64."""
        return self.offsets.diff()

    @property
    def sequence(self) -> torch.Tensor:
        """The sequence of each token: [N] int64."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def replace(self, **fields: Any) -> Batch:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [B]: the sum of a token quantity over each sequence."""
        return torch.zeros(len(self), dtype=values.dtype).index_add_(0, self.sequence, values)

    def select(self, sequences: torch.Tensor) -> Batch:
        """The batch of some sequences, in the order given.

        Args:
            sequences: [b] int64 indices.
        """
        lengths = self.lengths[sequences]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
        rows = torch.repeat_interleave(self.offsets[:-1][sequences], lengths) + within

        def pick(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {k: pick(name if name != "extra" else _extra_kind(self, v), v) for k, v in value.items()}
            if value is None:
                return None
            return value[sequences] if name in _PER_SEQUENCE else value[rows]

        fields = {f.name: pick(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "offsets"}
        return Batch(offsets=offsets, **fields)

    def split(self, parts: int) -> Iterator[Batch]:
        """Minibatches of whole groups, in order; sizes differ by at most one group.

        Args:
            parts: at most the number of groups.
        """
        groups = torch.unique(self.group)
        assert 1 <= parts <= len(groups), (parts, len(groups))
        if parts == 1:
            yield self
            return
        for chunk in torch.tensor_split(groups, parts):
            yield self.select(torch.isin(self.group, chunk).nonzero().flatten())


_PER_SEQUENCE = {"rewards", "group", "valid", "truncated", "reward_parts", "[B]"}


def _extra_kind(batch: Batch, value: torch.Tensor) -> str:
    return "[B]" if value.shape[0] == len(batch) and value.shape[0] != batch.tokens.shape[0] else "[N]"


def batch_from_rollouts(rollouts: Sequence[Rollout]) -> Batch:
    """Pack rollouts into one batch, in the order given. A rollout that is not valid stays, with mask False."""
    lengths = [len(r.tokens) for r in rollouts]
    names = sorted({name for r in rollouts for name in r.reward_parts})
    return Batch(
        tokens=torch.tensor([t for r in rollouts for t in r.tokens], dtype=torch.int64),
        offsets=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        mask=torch.tensor([m and r.valid for r in rollouts for m in r.mask], dtype=torch.bool),
        rewards=torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
        group=torch.tensor([r.group for r in rollouts], dtype=torch.int64),
        valid=torch.tensor([r.valid for r in rollouts], dtype=torch.bool),
        truncated=torch.tensor([r.truncated for r in rollouts], dtype=torch.bool),
        rollout_logprobs=torch.tensor([x for r in rollouts for x in r.logprobs], dtype=torch.float32),
        version=torch.tensor([r.version for r in rollouts for _ in r.tokens], dtype=torch.int32),
        reward_parts={
            n: torch.tensor([r.reward_parts.get(n, 0.0) for r in rollouts], dtype=torch.float32) for n in names
        },
    )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """One batch of several fresh ones, in order. A reward part that one of them lacks is 0 there."""
    names = sorted({name for b in batches for name in b.reward_parts})
    lengths = torch.cat([b.lengths for b in batches])

    names_of_fields = ("tokens", "mask", "rewards", "group", "valid", "truncated", "rollout_logprobs", "version")
    fields: dict[str, Any] = {name: torch.cat([getattr(b, name) for b in batches]) for name in names_of_fields}
    return Batch(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        reward_parts={
            n: torch.cat([b.reward_parts[n] if n in b.reward_parts else torch.zeros(len(b)) for b in batches])
            for n in names
        },
        **fields,
    )


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """What a forward pass gives per token; zero where `mask` is False (and where no other output was asked for)."""

    logprobs: torch.Tensor  # [N] f32, of the batch's own tokens, after temperature
    entropy: torch.Tensor | None = None  # [N] f32, nats, without gradient
    values: torch.Tensor | None = None  # [N] f32


Reduction = Literal["mean", "sum", "max", "min", "effective_share"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity with its reduction, so that no split of the work changes what is logged.

    `mean` is over the mask for [N] values and over valid sequences for [B] values; so are `max`, `min` and `sum`.
    `effective_share` of n weights is (sum of w)^2 / (n * sum of w^2), in 1/n ... 1: the share of samples that
    would count as much if all weighed alike (Kish).
    """

    values: torch.Tensor  # [N] or [B]
    reduce: Reduction = "mean"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a logged figure is. A file that logs some has `METRICS`: full name -> Declared; docs/metrics.md shows them.

    In a name `<...>` stands for what the run brings, e.g. `time/<phase>_seconds`.
    """

    meaning: str
    formula: str
    reduce: Reduction | None
    """Of a `Metric`; None: one figure a step."""
    over: Literal["tokens", "sequences"] | None = None
    """What a `Metric` is reduced over: the tokens of the mask, or sequences with a vote."""
    healthy: str


Loss = Callable[[Batch, TokenOutputs], "tuple[torch.Tensor, dict[str, Metric]]"]
