"""CISPO: clip the importance weight, not the update, so that every token keeps its gradient.

Paper: MiniMax-M1, https://arxiv.org/abs/2506.13585. The loss is -sg(min(ratio, 1 + ratio_clip_max)) A log pi. Not
with a single update a step, where every ratio is 1 and grpo is the same; and not where updates go far from the
sampling policy: nothing stops them. As in the paper by default: no lower bound, no KL, mean and deviation of the
group, token mean. The paper tunes the upper bound and gives no figure; 4 (ratios up to 5) is a middle of the range 4
... 8 in which https://arxiv.org/abs/2510.13786 saw little difference.
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
    """CISPO's part of `grpo.*`."""

    use_leave_one_out_baseline: bool = False
    normalize_rewards: bool = True
    """Divide by the group's standard deviation."""


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float | None = None
    """Weights are at least 1 minus this; null = no lower bound."""
    ratio_clip_max: float = 4.0
    """Weights are at most 1 plus this."""
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """CISPO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        options.compares_samples(recipe)
        options.clip_range(self.loss_fn.ratio_clip_min, self.loss_fn.ratio_clip_max)
        correction.complete(self.loss_fn)


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"
    needs: frozenset[Need] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config

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
        """[N]: token mean over the whole minibatch."""
        return ops.token_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """REINFORCE with a clipped weight, per token [N]."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.bounded_exp(out.logprobs.detach() - old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        clipped = ratio.clamp(0.0 if low is None else 1 - low, 1 + high)
        weight, observed = correction.weigh(batch, old, chosen)
        loss = -weight * clipped * batch.advantages * out.logprobs
        return torch.where(batch.mask, loss, 0.0), ops.ratio_metrics(ratio, low=low, high=high) | observed
