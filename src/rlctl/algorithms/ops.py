"""Pieces that RL algorithms share: pure torch on the packed stream [N] or per sequence [B].

Every mean's denominator is decided here, over the whole (mini)batch, before anything is sharded.
"""

from __future__ import annotations

from rlctl.lazy import torch
from rlctl.types import Batch


def group_advantages(
    rewards: torch.Tensor,
    group: torch.Tensor,
    valid: torch.Tensor,
    *,
    leave_one_out: bool,
    normalize: bool,
) -> torch.Tensor:
    """Reward minus its group's baseline, optionally divided by the group's spread.

    Statistics are two-pass in fp64 over valid members only. A group whose valid rewards are all equal (max - min = 0),
    or with fewer than two valid members, gives 0. With `leave_one_out` the baseline and the spread of a member come
    from the others (REINFORCE leave-one-out, Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE); else from
    the whole group (GRPO, https://arxiv.org/abs/2402.03300). The spread is the sample standard deviation; where fewer
    than two others exist, or they are all equal, the difference is left unscaled.

    Args:
        rewards: [B] f32.
        group: [B] int64.
        valid: [B] bool.
        leave_one_out: baseline from the other members.
        normalize: divide by the standard deviation.

    Returns:
        [B] f32; 0 where not valid.
    """
    out = torch.zeros(len(rewards), dtype=torch.float64)
    for g in torch.unique(group).tolist():
        members = ((group == g) & valid).nonzero().flatten()
        values = rewards[members].double()
        n = len(values)
        if n < 2 or values.max() == values.min():
            continue
        if leave_one_out:
            out[members] = _leave_one_out(values, normalize=normalize)
        else:
            centred = values - values.mean()
            out[members] = centred / centred.square().sum().div(n - 1).sqrt() if normalize else centred
    return out.float()


def _leave_one_out(values: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    """[n] fp64 rewards of a group -> [n] advantages against the other members."""
    n = len(values)
    others = values.expand(n, n)[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
    advantages = values - others.mean(1)
    if not normalize or n < 3:
        return advantages
    spread = others.std(1, correction=1)
    flat = others.amax(1) == others.amin(1)
    return torch.where(flat, advantages, advantages / torch.where(flat, 1.0, spread))


def to_tokens(batch: Batch, per_sequence: torch.Tensor) -> torch.Tensor:
    """[B] -> [N]: a sequence's value at each token of the mask, 0 elsewhere."""
    return torch.where(batch.mask, per_sequence[batch.sequence], 0.0).float()


def token_mean_weights(batch: Batch) -> torch.Tensor:
    """[N]: 1 / (tokens in the mask of the whole minibatch): every token counts alike. Zero everywhere if none is."""
    return batch.mask.float() / batch.mask.sum().clamp(min=1)


def sequence_mean_weights(batch: Batch) -> torch.Tensor:
    """[N]: mean over a sequence's tokens, then over the sequences that have any: every sequence counts alike."""
    counts = batch.sequence_sum(batch.mask.float())
    per_sequence = 1.0 / (counts.clamp(min=1) * (counts > 0).sum().clamp(min=1))
    return to_tokens(batch, per_sequence)


def constant_weights(batch: Batch, *, length: int) -> torch.Tensor:
    """[N]: sum over tokens / `length`, mean over sequences (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    counts = batch.sequence_sum(batch.mask.float())
    return batch.mask.float() / (length * (counts > 0).sum().clamp(min=1))


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, dual: float | None
) -> torch.Tensor:
    """PPO's token loss max(-A r, -A clip(r, 1-low, 1+high)), with dual clip for A < 0.

    Sources: PPO https://arxiv.org/abs/1707.06347 eq. 7; dual clip https://arxiv.org/abs/1912.09729 eq. 5.

    Args:
        ratio: [N] pi / pi_old.
        advantages: [N].
        low: lower clip, e.g. 0.2.
        high: upper clip.
        dual: a bound > 1 on the loss of a negative advantage, as a multiple of -A; None for none.

    Returns:
        [N].
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def kl_k3(logprobs: torch.Tensor, reference: torch.Tensor, *, clamp: float = 20.0) -> torch.Tensor:
    """The k3 estimate of KL(pi || reference) per token: exp(d) - 1 - d with d = reference - logprobs.

    Its gradient as a loss, E[1 - exp(d)] on samples of pi, is that of KL(reference || pi), not KL(pi || reference):
    `kl_loss` is what has the right one. Source: http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: [N].
        reference: [N].
        clamp: bound on |d|.
    """
    d = (reference - logprobs).clamp(-clamp, clamp)
    return d.exp() - 1 - d


def kl_loss(logprobs: torch.Tensor, reference: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """A token loss whose value is k3 and whose expected gradient is that of KL(pi || reference), token by token.

    With rho = pi / sampler, E_sampler[rho k3] = KL(pi || reference) for any sampler with full support, so the gradient
    of rho * k3 (rho differentiated as well) is exact; on samples of pi itself rho is 1 in value.

    Args:
        logprobs: [N], differentiable.
        reference: [N].
        sampler: [N] logprobs the tokens were drawn with, detached.
    """
    ratio = (logprobs - sampler).clamp(-20.0, 20.0).exp()
    return ratio * kl_k3(logprobs, reference)
