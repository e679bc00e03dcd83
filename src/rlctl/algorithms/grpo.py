"""GRPO: a prompt's samples are each other's baseline, so no critic is trained.

Paper: https://arxiv.org/abs/2402.03300 (section 4.1.2). Clipped ratios per token, an optional KL penalty to the
reference policy in the loss. Not for tasks where all samples of a prompt score alike: such a group gives no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.algorithms import ops
from rlctl.algorithms.base import Need
from rlctl.lazy import torch
from rlctl.types import Batch, Metric, TokenOutputs


@dataclass(kw_only=True)
class Advantage:
    """GRPO's part of `grpo.*`."""

    use_leave_one_out_baseline: bool = True
    normalize_rewards: bool = True
    """Divide by the group's standard deviation."""


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


@dataclass(kw_only=True)
class Config:
    """GRPO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[Need] = frozenset({"ref"} if config.loss_fn.reference_policy_kl_penalty > 0 else set())

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: the sequence's group advantage at each token of the mask."""
        options = self.config.grpo
        per_sequence = ops.group_advantages(
            batch.rewards,
            batch.group,
            batch.valid,
            leave_one_out=options.use_leave_one_out_baseline,
            normalize=options.normalize_rewards,
        )
        return ops.to_tokens(batch, per_sequence)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: token mean or sequence mean over the whole minibatch."""
        if self.config.loss_fn.token_level_loss:
            return ops.token_mean_weights(minibatch)
        return ops.sequence_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Clipped surrogate plus KL, per token [N]. With one update a step, old is the current policy: ratio 1."""
        options = self.config.loss_fn
        assert batch.advantages is not None
        old = out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratio = (out.logprobs - old).clamp(-20.0, 20.0).exp()
        loss = ops.clipped_surrogate(
            ratio,
            batch.advantages,
            low=options.ratio_clip_min,
            high=options.ratio_clip_max,
            dual=options.ratio_clip_c,
        )
        clipped = (ratio < 1 - options.ratio_clip_min) | (ratio > 1 + options.ratio_clip_max)
        metrics = {"ratio": Metric(values=ratio.detach()), "clipped_share": Metric(values=clipped.float())}
        if options.reference_policy_kl_penalty > 0:
            assert batch.ref_logprobs is not None
            penalty = ops.kl_loss(out.logprobs, batch.ref_logprobs, old)
            loss = loss + options.reference_policy_kl_penalty * penalty
            metrics["kl"] = Metric(values=ops.kl_k3(out.logprobs.detach(), batch.ref_logprobs))
        return torch.where(batch.mask, loss, 0.0), metrics
