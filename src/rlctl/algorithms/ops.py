"""Pieces that RL algorithms share: pure torch on the packed stream [N] or per sequence [B].

Every mean's denominator is decided here, over the whole (mini)batch, before anything is sharded.
"""

from __future__ import annotations

from rlctl.lazy import torch
from rlctl.types import Batch, Declared, Metric, TokenOutputs

ROUNDING = 1e-6  # of the largest reward: a spread below it is what fp32 leaves of equal sums, not a difference
METRICS = {
    "train/ratio": Declared(
        meaning="how far the policy is from the one that the update began with",
        formula="pi / pi_old of each token; gspo: the geometric mean over its sequence",
        reduce="mean",
        over="tokens",
        healthy="1 with one update a step; with several within 0.01 of 1",
    ),
    "train/clipped_share": Declared(
        meaning="share of tokens whose ratio is outside the clip range, whichever side their advantage pulls to",
        formula="[ratio < 1 - ratio_clip_min or ratio > 1 + ratio_clip_max]",
        reduce="mean",
        over="tokens",
        healthy="0 with one update a step; with several below 0.05, for gspo up to 0.3",
    ),
    "train/kl": Declared(
        meaning="distance to the reference policy; only with a KL penalty",
        formula="k3: exp(d) - 1 - d with d = log(ref / pi)",
        reduce="mean",
        over="tokens",
        healthy="rises slowly; below 0.1 for most tasks; a jump is a collapse or a bug",
    ),
}
MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far beyond any clip, and squares and products of a few still fit fp32


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, finite whatever comes in; beyond the bound the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def old_logprobs(batch: Batch, out: TokenOutputs) -> torch.Tensor:
    """[N]: what ratios are taken against; with one update a step the current policy itself, so that the ratio is 1."""
    return out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def sequence_ratio(batch: Batch, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """[N]: at each token the geometric mean of pi / pi_old over its sequence's mask, differentiable in all of them.

    Source: GSPO https://arxiv.org/abs/2507.18071 eq. 7.
    """
    total = batch.sequence_sum(torch.where(batch.mask, logprobs - old, 0.0))
    return bounded_exp(total / batch.sequence_sum(batch.mask.float()).clamp(min=1))[batch.sequence]


def ratio_metrics(ratio: torch.Tensor, *, low: float | None, high: float) -> dict[str, Metric]:
    """The mean ratio [N], and how often it is outside 1 - low ... 1 + high."""
    clipped = ratio > 1 + high
    if low is not None:
        clipped = clipped | (ratio < 1 - low)
    return {"ratio": Metric(values=ratio.detach()), "clipped_share": Metric(values=clipped.float())}


def group_advantages(
    rewards: torch.Tensor,
    group: torch.Tensor,
    valid: torch.Tensor,
    *,
    leave_one_out: bool,
    normalize: bool,
) -> torch.Tensor:
    """Reward minus its group's baseline, optionally divided by the group's spread.

    Statistics are two-pass in fp64 over valid members only. A group whose valid rewards are all equal up to rounding,
    or with fewer than two valid members, gives 0. With `leave_one_out` the baseline of a member is the mean of the
    others (REINFORCE leave-one-out, Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE); else of the whole
    group (GRPO, https://arxiv.org/abs/2402.03300). The spread is the whole group's sample standard deviation either
    way: that of the others alone is nearly 0 where one sample stands out, and would make its advantage arbitrarily
    large; by the whole group's, none of n members is beyond sqrt(n).

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
        if n < 2 or equal_up_to_rounding(values):
            continue
        centred = values - values.mean()
        differences = centred * n / (n - 1) if leave_one_out else centred  # r - mean of others = n/(n-1) (r - mean)
        out[members] = differences / values.std(correction=1) if normalize else differences
    return out.float()


def spread_groups(rewards: torch.Tensor, group: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[B] bool: whether the valid rewards of a sequence's group differ by more than rounding.

    Args:
        rewards: [B] f32.
        group: [B] int64.
        valid: [B] bool.
    """
    out = torch.zeros(len(rewards), dtype=torch.bool)
    for g in torch.unique(group).tolist():
        values = rewards[(group == g) & valid].double()
        out[group == g] = len(values) > 1 and not equal_up_to_rounding(values)
    return out


def equal_up_to_rounding(values: torch.Tensor) -> bool:
    """Whether the spread of [n] numbers is no more than what fp32 leaves of equal ones."""
    return bool(values.max() - values.min() <= ROUNDING * values.abs().max())


def whiten(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """[N] -> [N]: minus the mean, over the deviation, both over all tokens of the mask; 0 where all are equal.

    Two-pass in fp64, population deviation: no result is beyond sqrt(tokens - 1). Source: REINFORCE++
    https://arxiv.org/abs/2501.03262.
    """
    chosen = values[batch.mask].double()
    if not len(chosen) or equal_up_to_rounding(chosen):
        return torch.zeros_like(values)
    centred = torch.where(batch.mask, values.double() - chosen.mean(), 0.0)
    return (centred / centred[batch.mask].square().mean().sqrt()).float()


def log_odds(batch: Batch) -> torch.Tensor:
    """[N]: log(pi_old / pi_ref) of the tokens in the mask, 0 elsewhere; on average the KL to the reference."""
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return torch.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0.0)


def sum_from_here(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """[N] -> [N]: at each token the sum over itself and the later ones of its sequence."""
    running = values.double().cumsum(0)
    ends = running[batch.offsets[1:] - 1]  # of each sequence
    return (ends[batch.sequence] - running + values.double()).float()


def to_tokens(batch: Batch, per_sequence: torch.Tensor) -> torch.Tensor:
    """[B] -> [N]: a sequence's value at each token of the mask, 0 elsewhere."""
    return torch.where(batch.mask, per_sequence[batch.sequence], 0.0).float()


def clip_advantages(advantages: torch.Tensor, *, low: float | None, high: float | None) -> torch.Tensor:
    """Bounded from below, above, both or not at all."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


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


def with_kl(
    loss: torch.Tensor, batch: Batch, out: TokenOutputs, *, penalty: float, old: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss [N] plus `penalty` times `kl_loss` to the reference, and the metric `kl`; as it is without a penalty."""
    if penalty == 0:
        return loss, {}
    assert batch.ref_logprobs is not None
    loss = loss + penalty * kl_loss(out.logprobs, batch.ref_logprobs, old)
    return loss, {"kl": Metric(values=kl_k3(out.logprobs.detach(), batch.ref_logprobs))}


def kl_k3(logprobs: torch.Tensor, reference: torch.Tensor, *, clamp: float = MAX_LOG_RATIO) -> torch.Tensor:
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
    return bounded_exp(logprobs - sampler) * kl_k3(logprobs, reference)
