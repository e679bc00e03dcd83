"""RLOO: REINFORCE on whole responses, each measured against the mean of its prompt's other responses.

Paper: https://arxiv.org/abs/2402.14740. No clip, no ratio, no deviation: the plain policy gradient, without bias. The
KL penalty is part of the reward, -beta log(pi_old / pi_ref) of the response, and so of the baseline; its gradient is
exactly beta times that of KL(pi || ref) over responses. Not for several updates on one batch, for which it would need
a ratio (refused), nor for responses of very different lengths, since a response's loss is a sum over its tokens. The
paper's settings: grpo.num_generations_per_prompt=2 or 4, grpo.reference_policy_kl_penalty=0.03 ... 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.algorithms import correction, ops, options
from rlctl.algorithms.base import Need
from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.lazy import torch
from rlctl.types import Batch, Metric, TokenOutputs


@dataclass(kw_only=True)
class Advantage:
    """RLOO's part of `grpo.*`."""

    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to the reference policy in the reward; a reference copy is held only above 0."""


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """RLOO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        options.compares_samples(recipe)
        options.not_negative("grpo.reference_policy_kl_penalty", self.grpo.reference_policy_kl_penalty)
        correction.complete(self.loss_fn)
        step = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
        update = recipe.policy.train_global_batch_size
        if update is not None and update < step:
            raise RlctlError(
                f"rloo makes one update a step; policy.train_global_batch_size {update} cuts {step} sequences in more",
                f"set it to {step}, or use an algorithm with a ratio, such as grpo",
            )


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[Need] = frozenset(
            {"old", "ref"} if config.grpo.reference_policy_kl_penalty > 0 else set()
        )

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: reward less KL, minus the mean of the others', at each token of the mask."""
        rewards = batch.rewards
        if self.config.grpo.reference_policy_kl_penalty > 0:
            rewards = rewards - self.config.grpo.reference_policy_kl_penalty * batch.sequence_sum(ops.log_odds(batch))
        per_sequence = ops.group_advantages(rewards, batch.group, batch.valid, leave_one_out=True, normalize=False)
        return ops.to_tokens(batch, per_sequence)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: sum over a sequence's tokens, mean over the minibatch's sequences."""
        return ops.constant_weights(minibatch, length=1)

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """-A log pi per token [N]."""
        assert batch.advantages is not None
        weight, observed = correction.weigh(batch, ops.old_logprobs(batch, out), self.config.loss_fn)
        metrics = observed
        if batch.ref_logprobs is not None:
            metrics = observed | {"kl": Metric(values=ops.kl_k3(out.logprobs.detach(), batch.ref_logprobs))}
        return torch.where(batch.mask, -weight * batch.advantages * out.logprobs, 0.0), metrics
