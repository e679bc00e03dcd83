"""Drawing tokens: the distribution after temperature and filters, and a draw that depends on the request's seed only.

Legend: b requests of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.lazy import torch
from rlctl.types import Sampling


def log_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities that tokens are drawn from; -inf where a filter forbids one.

    The order is temperature, top-k, then top-p over what top-k left, renormalised. Temperature 0 is greedy.

    Args:
        logits: [b, V].
        sampling: the same for all of the batch.

    Returns:
        [b, V] float32.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        best = torch.full_like(logits, -torch.inf)
        return best.scatter(1, logits.argmax(1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        weakest = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = logits.sort(dim=1)
        outside = ascending.softmax(1).cumsum(1) <= 1 - sampling.top_p
        outside[:, -1] = False  # the likeliest token always stays
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    return logits.log_softmax(1)


def draw(log_distribution: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """One token a request, by the exponential race: argmax of p / noise.

    Unlike inverting the cumulative distribution, a rounding difference in the logits (another batch size) changes the
    token only where the two leaders are that close.

    Args:
        log_distribution: [b, V].
        generators: one a request; each advances by V draws.

    Returns:
        [b] int64.
    """
    noise = torch.empty_like(log_distribution)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    smallest = torch.finfo(noise.dtype).tiny  # log(0) would win against a forbidden token's -inf
    return (log_distribution - noise.clamp_min_(smallest).log_()).argmax(1)
