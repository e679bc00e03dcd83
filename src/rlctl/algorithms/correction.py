"""The engine's probabilities are not quite the trainer's: how large the gap is, and what to do about it.

Kernels, precision and stale weights make the engine draw from another distribution than the trainer computes. The
ratio of a token is w = exp(old - rollout), old being the trainer's logprobs of the weights that the engine had. A
preset of `loss_fn.correction` says which ratio is looked at and what becomes of the policy loss; `correction_min` and
`correction_max` are its bounds.

| preset    | ratio looked at                   | weight of the policy loss                       |
| off       | none                              | 1, nothing is measured                          |
| observe   | w of each token                   | 1                                               |
| token_tis | w of each token                   | w, truncated to the bounds                      |
| seq_tis   | product of w over the sequence    | that product, truncated to the bounds           |
| icepop    | w of each token                   | w inside the bounds, 0 outside                  |
| seq_mask  | product of w over the sequence    | that product inside the bounds, 0 outside       |
| geo_mask  | geometric mean over the sequence  | w of each token; 0 where the mean is outside    |

Weights are constants to the gradient. Denominators stay as they were: what is dropped makes the loss smaller, not the
rest larger. The KL penalty is not weighted: its sampler is the old policy.

Sources: truncation https://fengyao.notion.site/off-policy-rl; masking both tails https://arxiv.org/abs/2510.18855;
sequences https://richardli.xyz/rl-collapse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rlctl.algorithms import ops
from rlctl.errors import RlctlError
from rlctl.lazy import torch
from rlctl.types import Batch, Declared, Metric

Preset = Literal["off", "observe", "token_tis", "seq_tis", "icepop", "seq_mask", "geo_mask"]


class Options(Protocol):
    """The part of `loss_fn.*` that is about the mismatch."""

    correction: Preset
    correction_min: float | None
    correction_max: float | None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a preset stands for."""

    level: Literal["token", "product", "mean"]
    """Of the ratio that is compared with the bounds; the latter two are of a sequence."""
    action: Literal["none", "truncate", "mask"]
    low: float | None
    high: float


RULES: dict[str, Rule] = {
    "observe": Rule(level="token", action="none", low=0.5, high=2.0),
    "token_tis": Rule(level="token", action="truncate", low=None, high=2.0),
    "seq_tis": Rule(level="product", action="truncate", low=None, high=2.0),
    "icepop": Rule(level="token", action="mask", low=0.5, high=5.0),
    "seq_mask": Rule(level="product", action="mask", low=None, high=2.0),
    "geo_mask": Rule(level="mean", action="mask", low=0.999, high=1.001),
}

METRICS = {
    "mismatch/kl_rollout_old": Declared(
        meaning="divergence of the trainer's probabilities from the engine's",
        formula="w - 1 - log w with w = old / rollout",
        reduce="mean",
        over="tokens",
        healthy="below 1e-6 in float32, below 1e-3 in bfloat16",
    ),
    "mismatch/kl_old_rollout": Declared(
        meaning="the same in the other direction; much larger than it: the engine misses what the trainer finds likely",
        formula="w log w - w + 1",
        reduce="mean",
        over="tokens",
        healthy="near mismatch/kl_rollout_old",
    ),
    "mismatch/ratio_mean": Declared(
        meaning="whether engine and trainer agree on average; 1 in expectation whatever the mismatch",
        formula="w",
        reduce="mean",
        over="tokens",
        healthy="within 0.01 of 1; else the tokens are not drawn from what the engine reports",
    ),
    "mismatch/ratio_max": Declared(
        meaning="the token on which they disagree most",
        formula="w",
        reduce="max",
        over="tokens",
        healthy="below 2; far above it the engine samples tokens that the trainer holds likely far too rarely",
    ),
    "mismatch/effective_sample_share": Declared(
        meaning="share of samples that would count as much if all weighed alike",
        formula="(sum of w)^2 / (n sum of w^2), w being the ratio that loss_fn.correction judges",
        reduce="effective_share",
        over="tokens",
        healthy="above 0.9; seq_tis and seq_mask: per sequence, above 0.5",
    ),
    "mismatch/out_of_bounds_share": Declared(
        meaning="how often the judged ratio is outside correction_min ... correction_max",
        formula="[w < correction_min or w > correction_max]",
        reduce="mean",
        over="tokens",
        healthy="below 0.01; of geo_mask, whose bounds are narrow, below 0.5",
    ),
}


def complete(options: Options) -> None:
    """Fill in the preset's bounds where they are open.

    Raises:
        RlctlError: bounds without a preset that uses them, or bounds that hold no ratio of 1.
    """
    if options.correction == "off":
        for name in ("correction_min", "correction_max"):
            if getattr(options, name) is not None:
                raise RlctlError(
                    f"`loss_fn.{name}` has no effect with loss_fn.correction `off`",
                    f"leave it out, or choose {', '.join(RULES)}",
                )
        return
    rule = RULES[options.correction]
    options.correction_min = rule.low if options.correction_min is None else options.correction_min
    options.correction_max = rule.high if options.correction_max is None else options.correction_max
    low = 0.0 if options.correction_min is None else options.correction_min
    if not 0 <= low < 1 < options.correction_max:
        raise RlctlError(
            f"loss_fn.correction_min {low} and correction_max {options.correction_max} are not around 1",
            "equal probabilities have ratio 1: set 0 <= correction_min < 1 < correction_max",
        )


def weigh(batch: Batch, old: torch.Tensor, options: Options) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The weight of each token's policy loss, and what is seen of the mismatch.

    Args:
        batch: whole sequences, with `rollout_logprobs`.
        old: [N] logprobs of the trainer, with the weights that the engine had; detached.
        options: of the algorithm.

    Returns:
        [N] without gradient, and `mismatch/...` metrics (none with `off`).
    """
    if options.correction == "off":
        return torch.ones_like(old), {}
    rule = RULES[options.correction]
    log_ratio = torch.where(batch.mask, old - batch.rollout_logprobs, 0.0).detach()
    token = ops.bounded_exp(log_ratio)
    judged = token if rule.level == "token" else ops.bounded_exp(_of_sequence(batch, log_ratio, rule))  # [N] or [B]
    low, high = options.correction_min or 0.0, options.correction_max
    if high is None:  # a Config that no recipe completed
        low, high = rule.low or 0.0, rule.high
    outside = (judged < low) | (judged > high)
    metrics = _observed(log_ratio.double()) | {
        "mismatch/effective_sample_share": Metric(values=judged, reduce="effective_share"),
        "mismatch/out_of_bounds_share": Metric(values=outside.float()),
    }
    if rule.action == "none":
        return torch.ones_like(old), metrics
    if rule.level == "mean":
        return torch.where(outside[batch.sequence], 0.0, token), metrics
    weight = judged.clamp(low, high) if rule.action == "truncate" else torch.where(outside, 0.0, judged)
    return weight if rule.level == "token" else weight[batch.sequence], metrics


def _of_sequence(batch: Batch, log_ratio: torch.Tensor, rule: Rule) -> torch.Tensor:
    """[B]: the log of the sequence's ratio; 0 without tokens."""
    total = batch.sequence_sum(log_ratio)
    return total if rule.level == "product" else total / batch.sequence_sum(batch.mask.float()).clamp(min=1)


def _observed(log_ratio: torch.Tensor) -> dict[str, Metric]:
    """Both divergences per token, estimated on the engine's samples without bias, and the ratio itself.

    KL(rollout || old) = E[w - 1 - log w] and KL(old || rollout) = E[w log w - w + 1]; neither term is ever negative.

    Args:
        log_ratio: [N] log w, in fp64: of a gap of 1e-4 the divergence is 5e-9, which fp32 rounds away beside 1.
    """
    ratio = ops.bounded_exp(log_ratio)
    return {
        "mismatch/kl_rollout_old": Metric(values=ratio - 1 - log_ratio),
        "mismatch/kl_old_rollout": Metric(values=ratio * log_ratio - ratio + 1),
        "mismatch/ratio_mean": Metric(values=ratio),
        "mismatch/ratio_max": Metric(values=ratio, reduce="max"),
    }
