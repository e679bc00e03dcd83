"""DPO: of two answers to a prompt, the preferred one becomes likelier than the other, measured against a reference.

Paper: https://arxiv.org/abs/2305.18290 (eq. 7): -log sigmoid(beta * (log pi/ref of chosen - log pi/ref of rejected)),
mean over pairs; beta is `reference_policy_kl_penalty`. The reference is the model at the start, so the first loss is
ln 2. Not where the pairs' answers are far from what the model writes: both may become unlikelier, which
`train/logratio_chosen` shows, and `sft_loss_weight` holds against. The paper's settings: beta 0.1, lr 1e-6 (RMSprop).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.algorithms import ops, options
from rlctl.algorithms.base import Need, Source
from rlctl.config import Recipe
from rlctl.lazy import torch
from rlctl.types import Batch, Declared, Metric, TokenOutputs

SOURCE: Source = "preferences"


@dataclass(kw_only=True)
class Examples:
    """DPO's part of `grpo.*`: none."""


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    reference_policy_kl_penalty: float = 0.1
    """beta: how far the policy may go from the reference; smaller is farther."""
    preference_average_log_probs: bool = False
    """Mean instead of sum of an answer's log ratios: length has no part, and beta must be larger."""
    sft_loss_weight: float = 0.0
    """Weight of the cross-entropy of the chosen answers, each the mean over its tokens, mean over pairs."""


@dataclass(kw_only=True)
class Config:
    """DPO's options."""

    grpo: Examples = field(default_factory=Examples)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Refuse what cannot be."""
        options.within("loss_fn.reference_policy_kl_penalty", self.loss_fn.reference_policy_kl_penalty, above=0.0)
        options.not_negative("loss_fn.sft_loss_weight", self.loss_fn.sft_loss_weight)


class Algorithm:
    """See algorithms/base.py. A group is a pair: the chosen answer, then the rejected one."""

    unit = "group"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs: frozenset[Need] = frozenset({"ref"})

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: 1 at the tokens of chosen answers, -1 at those of rejected ones."""
        return ops.to_tokens(batch, torch.where(_is_chosen(batch), 1.0, -1.0))

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: a pair's tokens share its weight evenly, and every pair weighs alike."""
        counts = minibatch.sequence_sum(minibatch.mask.float())
        pairs = max(len(minibatch) // 2, 1)
        return ops.to_tokens(minibatch, 1.0 / (pairs * _of_pair(minibatch, counts).clamp(min=1)))

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The pair's loss at each of its tokens [N]."""
        assert batch.ref_logprobs is not None
        chosen, tokens = _is_chosen(batch), batch.sequence_sum(batch.mask.float()).clamp(min=1)
        log_ratio = batch.sequence_sum(torch.where(batch.mask, out.logprobs - batch.ref_logprobs, 0.0))
        if self.config.loss_fn.preference_average_log_probs:
            log_ratio = log_ratio / tokens
        margin = self.config.loss_fn.reference_policy_kl_penalty * _of_pair(
            batch, torch.where(chosen, log_ratio, -log_ratio)
        )
        loss = -torch.nn.functional.logsigmoid(margin)
        metrics = {
            "preference_loss": Metric(values=loss.detach()),
            "preference_accuracy": Metric(values=(margin.detach() > 0).float()),
            "preference_margin": Metric(values=margin.detach()),
            "logratio_chosen": Metric(values=_of_pair(batch, torch.where(chosen, log_ratio, 0.0)).detach()),
            "logratio_rejected": Metric(values=_of_pair(batch, torch.where(chosen, 0.0, log_ratio)).detach()),
        }
        if self.config.loss_fn.sft_loss_weight > 0:
            likelihood = batch.sequence_sum(torch.where(batch.mask, out.logprobs, 0.0)) / tokens
            sft = _of_pair(batch, torch.where(chosen, -likelihood, 0.0))
            loss = loss + self.config.loss_fn.sft_loss_weight * sft
            metrics["sft_loss"] = Metric(values=sft.detach())
        return ops.to_tokens(batch, loss), metrics


def _is_chosen(batch: Batch) -> torch.Tensor:
    """[B]: whether a sequence is the first one of its group."""
    before = batch.group.new_full((1,), -1)
    return torch.cat([before, batch.group[:-1]]) != batch.group


def _of_pair(batch: Batch, per_sequence: torch.Tensor) -> torch.Tensor:
    """[B] -> [B]: the sum over a sequence's group."""
    _, place = torch.unique(batch.group, return_inverse=True)
    return torch.zeros(len(batch), dtype=per_sequence.dtype).index_add_(0, place, per_sequence)[place]


METRICS = {
    "train/preference_loss": Declared(
        meaning="the preference part of the loss",
        formula="-log sigmoid(margin)",
        reduce="mean",
        over="sequences",
        healthy="0.693 (ln 2) at the first step, then falls",
    ),
    "train/preference_accuracy": Declared(
        meaning="share of pairs in which the chosen answer gained more than the rejected one",
        formula="[margin > 0]",
        reduce="mean",
        over="sequences",
        healthy="0 at the first step, where margins are 0; then 0.6 to 0.9; 1 at once: data too easy or repeated",
    ),
    "train/preference_margin": Declared(
        meaning="by how much the chosen answer gained more",
        formula="reference_policy_kl_penalty (log(pi / ref) of chosen - of rejected)",
        reduce="mean",
        over="sequences",
        healthy="grows from 0",
    ),
    "train/logratio_chosen": Declared(
        meaning="how much likelier the chosen answer became",
        formula="log(pi / ref), summed over its tokens, or their mean with preference_average_log_probs",
        reduce="mean",
        over="sequences",
        healthy="near 0 or above; a long fall: the policy unlearns good answers too, see sft_loss_weight",
    ),
    "train/logratio_rejected": Declared(
        meaning="how much likelier the rejected answer became",
        formula="log(pi / ref), as above",
        reduce="mean",
        over="sequences",
        healthy="falls, faster than logratio_chosen",
    ),
    "train/sft_loss": Declared(
        meaning="cross-entropy of the chosen answers; only with sft_loss_weight",
        formula="-log pi of the chosen answer, as loss_fn says",
        reduce="mean",
        over="sequences",
        healthy="falls or stays",
    ),
}
