"""The scalar that a backend differentiates: sum(loss_weights * token_loss) of one microbatch, with no other scaling."""

from __future__ import annotations

import torch

from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.policy.logprobs import scatter_to_stream
from rlctl.policy.metrics import MetricSums
from rlctl.policy.packing import Microbatch
from rlctl.types import Metric, TokenOutputs


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
