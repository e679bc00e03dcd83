"""Generation with the model's own transformers code: for toy models, and where vLLM is absent.

1. Requests queue; `poll` takes up to `batch_size` that sample alike, pads their prompts on the left and prefills.
2. Each further `poll` decodes that batch with a key-value cache until some request ends, and drops its row.
3. Every request has its own random generator, so its completion depends on its seed, its prompt and the weights, not on
   the batch (in float32, up to rounding of the logits).

It knows nothing about text, and holds its own copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from rlctl import device
from rlctl.config import Recipe
from rlctl.generation import requests as rules
from rlctl.generation import sampling, weights
from rlctl.generation.base import WeightSource
from rlctl.models.materialize import transformers_config
from rlctl.types import Completion, Request

BATCH_SIZE = 128


@dataclass
class _Row:
    """A request under way."""

    request: Request
    generator: torch.Generator
    stops: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        if self.tokens and self.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(self.tokens) == self.request.max_new_tokens else None

    def completion(self, version: int) -> Completion:
        reason = self.finish_reason
        assert reason is not None
        return Completion(
            id=self.request.id,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            version=version,
        )


@dataclass
class _Batch:
    """Rows that decode together, and the model's input of their next step."""

    rows: list[_Row]
    cache: transformers.DynamicCache
    tokens: torch.Tensor  # [b, t]: the padded prompts, later the last token of each row
    mask: torch.Tensor  # [b, tokens so far] int64: 0 on padding

    def keep(self, indices: list[int]) -> None:
        """Drop the other rows."""
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in indices]
        if indices:
            chosen = torch.tensor(indices, device=self.mask.device)
            self.tokens, self.mask = self.tokens[chosen], self.mask[chosen]
            self.cache.batch_select_indices(chosen)


def _load(model_dir: Path, *, config: dict[str, Any], dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM
    loaded = model.from_pretrained(
        model_dir, config=transformers_config(config), dtype=dtype, attn_implementation="sdpa"
    )
    return loaded.to(device.current()).eval().requires_grad_(False)


class Engine:
    """One replica on this rank."""

    ranks_per_replica = 1

    def __init__(self, recipe: Recipe, model_dir: Path, *, batch_size: int = BATCH_SIZE) -> None:
        """Load the model.

        Args:
            recipe: precision, config overrides and the tokenizer's name are read.
            model_dir: Hugging Face directory.
            batch_size: requests that decode together.
        """
        config = rules.hf_config(recipe, model_dir)
        self._model: Any = _load(model_dir, config=config, dtype=getattr(torch, recipe.policy.precision))
        self._expected = weights.expected(config)
        self._ends = rules.end_tokens(recipe, model_dir)
        self._batch_size = batch_size
        self._version = 0
        self._queue: dict[int, Request] = {}
        self._batch: _Batch | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        config = self._model.config
        running = [row.request.id for row in self._batch.rows] if self._batch else []
        rules.check(
            requests,
            unfinished=[*self._queue, *running],
            vocabulary=config.vocab_size,
            max_length=config.max_position_embeddings,
        )
        self._queue |= {request.id: request for request in requests}

    @torch.no_grad()
    def poll(self) -> list[Completion]:
        """Decode until some request of the current batch ends."""
        if self._batch is None:
            if not self._queue:
                return []
            self._batch = self._start()
        batch = self._batch
        while not any(row.finish_reason for row in batch.rows):
            self._step(batch)
        done = [row.completion(self._version) for row in batch.rows if row.finish_reason]
        self._keep([i for i, row in enumerate(batch.rows) if not row.finish_reason])
        return done

    def abort(self, ids: Sequence[int]) -> None:
        """Drop requests; they are not reported."""
        for request in ids:
            self._queue.pop(request, None)
        if self._batch is not None:
            self._keep([i for i, row in enumerate(self._batch.rows) if row.request.id not in set(ids)])

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Take the policy's weights.

        Raises:
            RlctlError: exit status 4, naming the first tensor that is missing, repeated, unknown or of another shape.
        """
        assert self._batch is None, "weights change between batches only"
        weights.load(source, self._take, expecting=self._expected)
        self._version = version

    def sleep(self, what: Literal["weights", "kv_cache"]) -> None:
        """Move the weights to the host; caches live no longer than their batch."""
        if what == "weights":
            self._model.to("cpu")

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """The reverse of `sleep`."""
        if what == "weights":
            self._model.to(device.current())

    def close(self) -> None:
        """Free the model."""
        self._batch, self._model = None, None

    def _start(self) -> _Batch:
        """The next batch: the oldest request and those that sample as it does."""
        first = next(iter(self._queue.values()))
        alike = [r for r in self._queue.values() if r.sampling == first.sampling][: self._batch_size]
        for request in alike:
            del self._queue[request.id]
        where = device.current()
        longest = max(len(r.prompt_tokens) for r in alike)
        padding = [longest - len(r.prompt_tokens) for r in alike]
        return _Batch(
            rows=[
                _Row(
                    request=r,
                    generator=torch.Generator(where).manual_seed(r.seed),
                    stops=self._ends | set(r.sampling.stop_token_ids),
                )
                for r in alike
            ],
            cache=transformers.DynamicCache(config=self._model.config),
            tokens=torch.tensor([[0] * n + list(r.prompt_tokens) for n, r in zip(padding, alike, strict=True)]).to(
                where
            ),
            mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]).to(where),
        )

    def _step(self, batch: _Batch) -> None:
        """One token for each row."""
        positions = (batch.mask.cumsum(1) - 1).clamp_min(0)[:, -batch.tokens.shape[1] :]
        logits = self._model(
            input_ids=batch.tokens,
            attention_mask=batch.mask,
            position_ids=positions,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        logprobs = sampling.log_distribution(logits, batch.rows[0].request.sampling)
        drawn = sampling.draw(logprobs, [row.generator for row in batch.rows])
        chosen = logprobs.gather(1, drawn[:, None])[:, 0]
        for row, token, logprob in zip(batch.rows, drawn.tolist(), chosen.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        batch.tokens = drawn[:, None]
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=1)

    def _keep(self, indices: list[int]) -> None:
        assert self._batch is not None
        self._batch.keep(indices)
        if not indices:
            self._batch = None

    @torch.no_grad()
    def _take(self, tensors: Iterator[weights.NamedTensor]) -> None:
        parameters = dict(self._model.named_parameters())  # a tied projection is listed once
        if parameters.keys() == self._expected.keys():
            for name, tensor in tensors:
                parameters[name].copy_(tensor)
            return
        # transformers keeps this model's weights in another form than its files (experts of a layer in one tensor).
        rebuilt = type(self._model).from_pretrained(
            None, config=self._model.config, state_dict=dict(tensors), dtype=self._model.dtype
        )
        self._model.load_state_dict(rebuilt.state_dict())
