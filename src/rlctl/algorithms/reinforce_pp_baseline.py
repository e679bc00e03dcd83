"""REINFORCE++-baseline: reward minus its group's mean, then whitened over the whole batch instead of by group.

Paper: https://arxiv.org/abs/2501.03262 (its form for several samples a prompt). A group with little spread is not
blown up, since the deviation is the batch's. Not with one sample a prompt: that is reinforce_pp. Defaults are the
paper's, but the KL, which here is in the loss, is off (loss_fn.reference_policy_kl_penalty switches it on), and the
loss is the mean over tokens. The paper's KL term is k2; ours, `ops.kl_loss`, has the same expected gradient on the
sampling policy and stays exact off it.
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
    """REINFORCE++-baseline's part of `grpo.*`."""

    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to the reference policy; a reference copy is held only above 0."""
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """REINFORCE++-baseline's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        options.compares_samples(recipe)
        options.advantage_clip(self.grpo.advantage_clip_low, self.grpo.advantage_clip_high)
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
        """[N]: reward minus group mean at each token, whitened over all tokens of the batch."""
        chosen = self.config.grpo
        centred = ops.group_advantages(batch.rewards, batch.group, batch.valid, leave_one_out=False, normalize=False)
        white = ops.whiten(batch, ops.to_tokens(batch, centred))
        return ops.clip_advantages(white, low=chosen.advantage_clip_low, high=chosen.advantage_clip_high)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: token mean over the whole minibatch."""
        return ops.token_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Clipped surrogate plus KL, per token [N]."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.bounded_exp(out.logprobs - old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        weight, observed = correction.weigh(batch, old, chosen)
        loss = weight * ops.clipped_surrogate(ratio, batch.advantages, low=low, high=high, dual=None)
        loss, kl = ops.with_kl(loss, batch, out, penalty=chosen.reference_policy_kl_penalty, old=old)
        return torch.where(batch.mask, loss, 0.0), ops.ratio_metrics(ratio, low=low, high=high) | observed | kl
