"""Dr. GRPO: GRPO without its two biases, the division by the group's deviation and by each response's length.

Paper: https://arxiv.org/abs/2503.20783. The advantage is reward minus group mean; a sequence's loss is its sum over
tokens divided by a constant, so that long wrong answers are not excused. Not where rewards differ in scale between
prompts: nothing evens them out. As in the paper by default: no KL, clip 0.2, the constant is the response limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.algorithms import correction, ops, options
from rlctl.algorithms.base import Need
from rlctl.config import Recipe
from rlctl.lazy import torch
from rlctl.types import Batch, Metric, TokenOutputs


@dataclass(kw_only=True)
class Advantage:
    """Dr. GRPO's part of `grpo.*`: it has no choice to make."""


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    length_normalizer: int | None = None
    """Tokens that a sequence's sum is divided by; derived: policy.generation.max_new_tokens."""
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """Dr. GRPO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        loss = self.loss_fn
        options.compares_samples(recipe)
        options.clip_range(loss.ratio_clip_min, loss.ratio_clip_max)
        if loss.length_normalizer is None:
            loss.length_normalizer = recipe.policy.generation.max_new_tokens
        options.within("loss_fn.length_normalizer", loss.length_normalizer, above=0)
        correction.complete(loss)


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"
    needs: frozenset[Need] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: reward minus group mean at each token of the mask."""
        per_sequence = ops.group_advantages(
            batch.rewards, batch.group, batch.valid, leave_one_out=False, normalize=False
        )
        return ops.to_tokens(batch, per_sequence)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: sum over a sequence's tokens by the constant, mean over the minibatch's sequences."""
        length = self.config.loss_fn.length_normalizer
        assert length is not None
        return ops.constant_weights(minibatch, length=length)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Clipped surrogate per token [N]."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.bounded_exp(out.logprobs - old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        weight, observed = correction.weigh(batch, old, chosen)
        loss = weight * ops.clipped_surrogate(ratio, batch.advantages, low=low, high=high, dual=None)
        return torch.where(batch.mask, loss, 0.0), ops.ratio_metrics(ratio, low=low, high=high) | observed
