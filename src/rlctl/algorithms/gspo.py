"""GSPO: one ratio a sequence, the geometric mean of its tokens' ratios, since rewards are of sequences too.

Paper: https://arxiv.org/abs/2507.18071. Meant for mixture-of-experts models, whose token ratios jump when routing
changes. Not with a single update a step, where every ratio is 1 and grpo with token_level_loss=false is the same. As in
the paper by default: clip 3e-4 and 4e-4 (a mean ratio moves far less than a token's), no KL, sequence mean.
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
    """GSPO's part of `grpo.*`."""

    use_leave_one_out_baseline: bool = False
    normalize_rewards: bool = True
    """Divide by the group's standard deviation."""


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float = 3e-4
    ratio_clip_max: float = 4e-4
    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to the reference policy, token by token; a reference copy is held only above 0."""
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """GSPO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        options.compares_samples(recipe)
        options.clip_range(self.loss_fn.ratio_clip_min, self.loss_fn.ratio_clip_max)
        options.not_negative("loss_fn.reference_policy_kl_penalty", self.loss_fn.reference_policy_kl_penalty)
        correction.complete(self.loss_fn)


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[Need] = frozenset({"ref"} if config.loss_fn.reference_policy_kl_penalty > 0 else set())

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: the sequence's group advantage at each token of the mask."""
        chosen = self.config.grpo
        per_sequence = ops.group_advantages(
            batch.rewards,
            batch.group,
            batch.valid,
            leave_one_out=chosen.use_leave_one_out_baseline,
            normalize=chosen.normalize_rewards,
        )
        return ops.to_tokens(batch, per_sequence)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: the mean over a sequence's tokens, all alike, is the sequence's loss; then the mean over sequences."""
        return ops.sequence_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The sequence's clipped surrogate at each of its tokens [N]; the KL stays token by token."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.sequence_ratio(batch, out.logprobs, old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        weight, observed = correction.weigh(batch, old, chosen)
        loss = weight * ops.clipped_surrogate(ratio, batch.advantages, low=low, high=high, dual=None)
        loss, kl = ops.with_kl(loss, batch, out, penalty=chosen.reference_policy_kl_penalty, old=old)
        return torch.where(batch.mask, loss, 0.0), ops.ratio_metrics(ratio, low=low, high=high) | observed | kl
