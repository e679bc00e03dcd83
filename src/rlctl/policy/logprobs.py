"""Log-probabilities of given tokens, with the vocabulary whole or split over a tensor-parallel group.

1. Every logprob of this project (policy, old, reference) comes from here; temperature is required, so never forgotten.
2. The arithmetic is fp32 (fp64 for fp64 logits), whatever the logits are.
3. Backward keeps the logits and two numbers per row; probabilities are computed again, a few rows at a time.

It does not know sequences, masks or packing: rows come in, a number per row goes out.
Legend: n rows, v columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 24  # of an fp32 temporary: 64 MiB
NO_PROBABILITY = -1e4  # exp of it is 0 in fp32 and fp64


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of logits / temperature at the targets, and the entropy of that distribution.

    Args:
        logits: [n, v], this rank's columns.
        targets: [n] int64, ids of the whole vocabulary; the same on every rank of the group.
        temperature: above 0, the one the tokens were sampled with.
        group: ranks that hold the other columns; None when this rank holds all.
        vocab_start: id of the first local column.
        vocab_valid: true vocabulary size; columns from it on are padding, and get neither probability nor gradient.

    Returns:
        logprobs [n], differentiable in the logits, and entropy [n] in nats, without gradient.
        Backward does not communicate: the upstream gradient must be the same on every rank of the group, as it is for
        a loss that every rank computes from these logprobs.
    """
    assert temperature > 0, temperature
    assert logits.shape[:1] == targets.shape, (logits.shape, targets.shape)
    valid = logits.shape[1] if vocab_valid is None else min(max(vocab_valid - vocab_start, 0), logits.shape[1])
    logprobs, entropy = _TokenLogprobs.apply(logits, targets - vocab_start, temperature, group, valid)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, local: torch.Tensor, temperature: float, group: Any, valid: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        peak = _peak(logits[:, :valid], temperature, group)
        held = (local >= 0) & (local < valid)
        column = local.where(held, 0)
        sums = peak.new_zeros(3, len(logits))  # sum(exp), sum(exp * shifted), shifted logit of the target
        for rows, shifted in _shifted(logits[:, :valid], peak, temperature):
            if valid:
                sums[2, rows] = shifted.gather(1, column[rows, None])[:, 0].where(held[rows], 0)
            weights = shifted.clamp_(min=NO_PROBABILITY).exp()  # 0 * -inf would make the entropy nan
            sums[0, rows] = weights.sum(-1)
            sums[1, rows] = weights.mul_(shifted).sum(-1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, peak, sums[0], column, held)
        ctx.temperature, ctx.valid = temperature, valid
        ctx.mark_non_differentiable(entropy)
        return sums[2] - log_total, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _entropy: Any) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        logits, peak, total, column, held = ctx.saved_tensors
        out = torch.zeros_like(logits)
        scale = grad / ctx.temperature
        for rows, shifted in _shifted(logits[:, : ctx.valid], peak, ctx.temperature):
            local = shifted.exp_().mul_(
                -(scale / total)[rows, None]
            )  # d logprob / d logit = (1[target] - p) / temperature
            if ctx.valid:
                local.scatter_add_(1, column[rows, None], (scale * held)[rows, None])
            out[rows, : ctx.valid] = local
        return out, None, None, None, None


def _peak(logits: torch.Tensor, temperature: float, group: Any) -> torch.Tensor:
    """The largest logit of each row, over all ranks, divided by the temperature: [n]."""
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if logits.shape[1]:
        peak = logits.detach().amax(-1).to(kind) / temperature
    else:
        peak = torch.full(logits.shape[:1], -torch.inf, dtype=kind, device=logits.device)
    if group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return peak


def _shifted(logits: torch.Tensor, shift: torch.Tensor, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield logits / temperature - shift, a chunk of rows at a time, in the shift's dtype."""
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        chunk = logits[rows].to(shift.dtype, copy=True)
        yield rows, chunk.div_(temperature).sub_(shift[rows, None])


def scatter_to_stream(values: torch.Tensor, *, index: torch.Tensor, length: int) -> torch.Tensor:
    """[n] numbers to their places in a stream [length], zero elsewhere; differentiable.

    Args:
        values: [n].
        index: [n] int64, distinct.
        length: of the stream.
    """
    return values.new_zeros(length).index_copy(0, index, values)
