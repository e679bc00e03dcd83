"""SFT: the model learns to write the assistant's messages of given conversations, by maximum likelihood.

The loss is the mean cross-entropy of the answers' tokens, their end-of-turn token included. Nothing is generated and
nothing is rewarded, so the model learns what the data say and no more. Not for tasks where only the outcome can be
judged. Settings that are common: policy.optimizer.lr=1e-5, one to three epochs (grpo.max_num_epochs).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.algorithms import ops
from rlctl.algorithms.base import Need, Source
from rlctl.config import Recipe
from rlctl.lazy import torch
from rlctl.types import Batch, Metric, TokenOutputs

SOURCE: Source = "conversations"


@dataclass(kw_only=True)
class Examples:
    """SFT's part of `grpo.*`: none."""


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    token_level_loss: bool = True
    """Mean over tokens; false: mean over each conversation, then over conversations."""


@dataclass(kw_only=True)
class Config:
    """SFT's options."""

    grpo: Examples = field(default_factory=Examples)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Nothing is open."""


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[Need] = frozenset()

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: 1 at each token of the mask: all are to become likelier."""
        return batch.mask.float()

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: token mean or sequence mean over the whole minibatch."""
        if self.config.loss_fn.token_level_loss:
            return ops.token_mean_weights(minibatch)
        return ops.sequence_mean_weights(minibatch)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """-log pi per token [N]."""
        return torch.where(batch.mask, -out.logprobs, 0.0), {}
