"""GRPO: a prompt's samples are each other's baseline, so no critic is trained.

Paper: https://arxiv.org/abs/2402.03300 (section 4.1.2). Clipped ratios per token, an optional KL penalty to the
reference policy in the loss. Not for tasks where all samples of a prompt score alike: such a group gives no gradient.
As in the paper: use_leave_one_out_baseline=false, token_level_loss=false, reference_policy_kl_penalty=0.04; its KL term
is k3, whose gradient is not that of the KL, ours is `ops.kl_loss`, whose gradient is.
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
    """GRPO's part of `grpo.*`."""

    use_leave_one_out_baseline: bool = True
    normalize_rewards: bool = True
    """Divide by the group's standard deviation."""
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    """Dual clip: a bound above 1 for negative advantages."""
    token_level_loss: bool = True
    """Mean over tokens; false: mean over each sequence, then over sequences."""
    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to the reference policy; a reference copy is held only above 0."""
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """GRPO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        loss = self.loss_fn
        options.compares_samples(recipe)
        options.advantage_clip(self.grpo.advantage_clip_low, self.grpo.advantage_clip_high)
        options.clip_range(loss.ratio_clip_min, loss.ratio_clip_max)
        options.within("loss_fn.ratio_clip_c", loss.ratio_clip_c, above=1.0)
        options.not_negative("loss_fn.reference_policy_kl_penalty", loss.reference_policy_kl_penalty)
        correction.complete(loss)


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
        clipped = ops.clip_advantages(per_sequence, low=chosen.advantage_clip_low, high=chosen.advantage_clip_high)
        return ops.to_tokens(batch, clipped)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: token mean or sequence mean over the whole minibatch."""
        if self.config.loss_fn.token_level_loss:
            return ops.token_mean_weights(minibatch)
        return ops.sequence_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Clipped surrogate plus KL, per token [N]. With one update a step, old is the current policy: ratio 1."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.bounded_exp(out.logprobs - old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        loss = ops.clipped_surrogate(ratio, batch.advantages, low=low, high=high, dual=chosen.ratio_clip_c)
        weight, observed = correction.weigh(batch, old, chosen)
        loss, kl = ops.with_kl(weight * loss, batch, out, penalty=chosen.reference_policy_kl_penalty, old=old)
        return torch.where(batch.mask, loss, 0.0), ops.ratio_metrics(ratio, low=low, high=high) | observed | kl
