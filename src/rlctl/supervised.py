"""Batches from data instead of rollouts, for sft and dpo: the trainer's loop without an engine.

1. All rows are rendered at the start; a row with a sequence that is too long is dropped, and counted.
2. A step takes rows in the order that prompts are taken in, so that a resume needs no state.
3. Validation is the loss on held-out rows under the policy itself.

A row's sequences are one group, e.g. a pair of dpo.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal

from rlctl import config
from rlctl.algorithms import base
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.data import examples
from rlctl.data.prompts import PromptOrder
from rlctl.envs.render import Renderer
from rlctl.errors import RlctlError
from rlctl.lazy import dist, torch
from rlctl.policy.base import PolicyProtocol
from rlctl.policy.metrics import MetricSums
from rlctl.types import Batch, Declared

METRICS = {
    "data/answer_tokens": Declared(
        meaning="tokens of the step that are learned", formula="count", reduce=None, healthy="steady"
    ),
    "data/sequence_length": Declared(
        meaning="all tokens of a sequence of the step",
        formula="mean over sequences",
        reduce=None,
        healthy="well below policy.max_total_sequence_length",
    ),
    "val/loss": Declared(
        meaning="sft and dpo: the loss on held-out rows",
        formula="as train/loss, over all held-out rows",
        reduce=None,
        healthy="falls; rises while train/loss falls: the data are learned by heart, stop earlier",
    ),
}
_log = logging.getLogger(__name__)
Row = list[tuple[list[int], list[bool]]]  # of each sequence: tokens and mask


def load(recipe: config.Recipe, key: Literal["train_path", "val_path"] = "train_path") -> list[examples.Example]:
    """The rows of the recipe's file. Needs no torch.

    Raises:
        RlctlError: the file or its rows do not fit, or validation is asked for without `data.val_path`.
    """
    kind = base.source(recipe.algorithm)
    assert kind != "rollouts", recipe.algorithm
    if getattr(recipe.data, key) is None:
        raise RlctlError(
            f"{'there are no held-out rows' if key == 'val_path' else f'{recipe.algorithm} learns from data'}: "
            f"data.{key} is not set",
            f"set data.{key}=my.jsonl",
        )
    return examples.load(recipe.data, kind, key=key)


class Supervised:
    """A data set, as the trainer takes batches from it."""

    def __init__(self, recipe: config.Recipe, renderer: Renderer) -> None:
        """Read and render the training rows."""
        self.recipe, self.renderer = recipe, renderer
        self._last_only = base.source(recipe.algorithm) == "preferences"
        self.rows, self.dropped = self._load("train_path")
        steps = recipe.grpo
        self.order = PromptOrder(
            n=len(self.rows), per_step=steps.num_prompts_per_step, seed=steps.seed, shuffle=recipe.data.shuffle
        )
        self.stats: dict[str, float] = {}
        """Of the last step's batch, as logged."""

    def _load(self, key: Literal["train_path", "val_path"]) -> tuple[list[Row], int]:
        limit = self.recipe.policy.max_total_sequence_length
        rendered = [
            [self.renderer.conversation(c, last_only=self._last_only) for c in example.conversations]
            for example in load(self.recipe, key)
        ]
        kept = [row for row in rendered if all(len(tokens) <= limit for tokens, _ in row)]
        if not kept:
            raise RlctlError(
                f"all {len(rendered)} rows of data.{key} are longer than {limit} tokens",
                "raise policy.max_total_sequence_length",
            )
        dropped = len(rendered) - len(kept)
        if dropped:
            _log.warning("dropped %d rows of data.%s of more than %d tokens", dropped, key, limit)
        return kept, dropped

    @property
    def num_steps(self) -> int:
        """Steps that grpo.max_num_steps and grpo.max_num_epochs allow."""
        return min(self.recipe.grpo.max_num_steps, self.order.num_steps(self.recipe.grpo.max_num_epochs))

    def next(self, step: int) -> Batch:
        """The rows of a step (from 1); the same on every rank."""
        batch = to_batch([self.rows[i] for i in self.order.at(step)])
        self.stats = {
            "data/answer_tokens": float(batch.mask.sum()),
            "data/sequence_length": float(batch.lengths.double().mean()),
        }
        return batch

    @functools.cached_property
    def held_out(self) -> Batch:
        """The validation rows, at most grpo.max_val_samples."""
        return to_batch(self._load("val_path")[0][: self.recipe.grpo.max_val_samples])

    def validate(self, policy: PolicyProtocol, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """`val/loss` and the algorithm's metrics on the held-out rows. Collective."""
        batch = self.held_out
        batch = batch.replace(advantages=algorithm.advantages(batch), loss_weights=algorithm.loss_weights(batch))
        out = policy.forward(batch)
        if "ref" in algorithm.needs:
            batch = batch.replace(ref_logprobs=policy.forward(batch, weights="reference").logprobs)
        loss, metrics = algorithm.loss(batch, out)
        sums = MetricSums()
        if dist.get_rank() == 0:  # every rank has the same batch, which counts once
            sums.add(batch, metrics)
        assert batch.loss_weights is not None
        found = {"loss": float((batch.loss_weights * loss).sum()), **sums.reduce()}
        return {f"val/{name}": value for name, value in found.items()}


def to_batch(rows: Sequence[Row]) -> Batch:
    """One batch of rows; a row's sequences are a group."""
    sequences = [(g, tokens, mask) for g, row in enumerate(rows) for tokens, mask in row]
    count, n = len(sequences), sum(len(tokens) for _, tokens, _ in sequences)
    return Batch(
        tokens=torch.tensor([t for _, tokens, _ in sequences for t in tokens], dtype=torch.int64),
        offsets=torch.tensor([0, *(len(tokens) for _, tokens, _ in sequences)], dtype=torch.int64).cumsum(0),
        mask=torch.tensor([m for _, _, mask in sequences for m in mask], dtype=torch.bool),
        rewards=torch.zeros(count),
        group=torch.tensor([g for g, _, _ in sequences], dtype=torch.int64),
        valid=torch.ones(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
        rollout_logprobs=torch.zeros(n),
        version=torch.zeros(n, dtype=torch.int32),
    )
