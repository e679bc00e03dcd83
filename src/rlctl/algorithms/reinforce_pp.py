"""REINFORCE++: PPO's clip without a critic; the baseline is the whole batch, so one sample a prompt is enough.

Paper: https://arxiv.org/abs/2501.03262. A token's return is the reward less beta times the KL estimates log(pi_old /
pi_ref) of this and the later tokens; returns are whitened over all tokens of the batch. The KL's gradient is exactly
beta times that of KL(pi || ref) over responses, up to the whitening's scale. Not where prompts differ much in
difficulty: an easy prompt's average sample then looks good; reinforce_pp_baseline is for that. Defaults are the
paper's, but the KL is off (grpo.reference_policy_kl_penalty=0.01 and the like switch it on), and loss is the mean
over tokens, not over sequences.
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
    """REINFORCE++'s part of `grpo.*`."""

    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to the reference policy in the reward; a reference copy is held only above 0."""
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """REINFORCE++'s options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:  # noqa: ARG002  same call for every algorithm
        """Fill in what is open; refuse what cannot be."""
        options.advantage_clip(self.grpo.advantage_clip_low, self.grpo.advantage_clip_high)
        options.not_negative("grpo.reference_policy_kl_penalty", self.grpo.reference_policy_kl_penalty)
        options.clip_range(self.loss_fn.ratio_clip_min, self.loss_fn.ratio_clip_max)
        correction.complete(self.loss_fn)


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[Need] = frozenset(
            {"old", "ref"} if config.grpo.reference_policy_kl_penalty > 0 else set()
        )

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: the token's return, whitened over the batch."""
        chosen = self.config.grpo
        returns = ops.to_tokens(batch, batch.rewards)
        if chosen.reference_policy_kl_penalty > 0:
            returns = returns - chosen.reference_policy_kl_penalty * ops.sum_from_here(batch, ops.log_odds(batch))
        white = ops.whiten(batch, returns)
        return ops.clip_advantages(white, low=chosen.advantage_clip_low, high=chosen.advantage_clip_high)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: token mean over the whole minibatch."""
        return ops.token_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Clipped surrogate per token [N]."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.bounded_exp(out.logprobs - old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        weight, observed = correction.weigh(batch, old, chosen)
        loss = weight * ops.clipped_surrogate(ratio, batch.advantages, low=low, high=high, dual=None)
        metrics = ops.ratio_metrics(ratio, low=low, high=high) | observed
        if batch.ref_logprobs is not None:
            metrics["kl"] = Metric(values=ops.kl_k3(out.logprobs.detach(), batch.ref_logprobs))
        return torch.where(batch.mask, loss, 0.0), metrics
