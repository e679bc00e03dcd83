"""The scalar that a backend differentiates: sum(loss_weights * token_loss) of one microbatch, with no other scaling."""

from __future__ import annotations

import torch

from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.policy.logprobs import scatter_to_stream
from rlctl.policy.metrics import MetricSums
from rlctl.policy.packing import Microbatch
from rlctl.types import Declared, Metric, TokenOutputs

METRICS = {
    "train/loss": Declared(
        meaning="what is differentiated; in RL no measure of progress",
        formula="sum of loss_weights * token_loss (docs/algorithms.md)",
        reduce="sum",
        over="tokens",
        healthy="sft and dpo: falls; RL: near 0, of either sign",
    ),
    "train/entropy": Declared(
        meaning="how undecided the policy is, over the whole vocabulary",
        formula="-sum over v of pi(v) log pi(v), in nats",
        reduce="mean",
        over="tokens",
        healthy="falls slowly; near 0 the policy stops exploring; a rise with falling reward is a collapse",
    ),
    "mismatch/token_mult_prob_error": Declared(
        meaning="by what factor engine and trainer differ on a token, on average, on unchanged weights",
        formula="exp|log(pi / rollout)|",
        reduce="mean",
        over="tokens",
        healthy="below 1.0001 in float32, below 1.02 in bfloat16; above 1.05 the run warns",
    ),
    "mismatch/max_logprob_error": Declared(
        meaning="the token on which they differ most",
        formula="|log(pi / rollout)|",
        reduce="max",
        over="tokens",
        healthy="below 1e-3 in float32, below 1 in bfloat16",
    ),
}


def weighted_loss(
    micro: Microbatch,
    algorithm: AlgorithmProtocol,
    *,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    sums: MetricSums,
) -> torch.Tensor:
    """The loss of a microbatch; its metrics, the loss and the entropy are added to `sums`.

    Args:
        micro: whose `batch` has `advantages` and `loss_weights`.
        algorithm: sees whole sequences, on the host, where the batch is.
        logprobs: [n] of the microbatch's targets, with gradient.
        entropy: [n].
        sums: of this rank.

    Returns:
        A scalar with gradient; for a dummy, 0 that still reaches every parameter.
    """
    batch = micro.batch
    if not len(batch):
        return logprobs.sum()
    assert batch.loss_weights is not None
    index, length = micro.target_index, len(batch.tokens)
    out = TokenOutputs(
        logprobs=scatter_to_stream(logprobs.to(index.device), index=index, length=length),
        entropy=scatter_to_stream(entropy.to(index.device), index=index, length=length),
    )
    token_loss, metrics = algorithm.loss(batch, out)
    weighted = batch.loss_weights * token_loss
    assert out.entropy is not None
    apart = (out.logprobs.detach() - batch.rollout_logprobs).abs()
    shared = {
        "loss": Metric(values=weighted.detach(), reduce="sum"),
        "entropy": Metric(values=out.entropy),
        "mismatch/token_mult_prob_error": Metric(values=apart.exp()),
        "mismatch/max_logprob_error": Metric(values=apart, reduce="max"),
    }
    sums.add(batch, {**metrics, **shared})
    return weighted.sum()
