"""DAPO: GRPO for long reasoning; more room upwards than downwards, token mean, care with responses that are cut.

Paper: https://arxiv.org/abs/2503.14476. Not for short answers, where nothing is overlong and grpo does the same. As
in the paper by default: clip 0.2 and 0.28, no KL, mean and deviation of the group, rewards lowered by up to 1 over
the last fifth of the response limit. Its dynamic sampling, which draws new prompts for groups without spread, costs
generation and is off by default: then such groups give no gradient, and count in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.algorithms import correction, ops, options
from rlctl.algorithms.base import Need, Refill
from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.lazy import torch
from rlctl.types import Batch, Metric, TokenOutputs

BUFFER_PART = 5  # of the response limit: the paper's 4,096 of 20,480 tokens
SAMPLING = {"dynamic_sampling_max_gen_batches": 10, "batch_multiplier": 1.0}  # as in NeMo RL; the paper has no cap


@dataclass(kw_only=True)
class Shaping:
    """`grpo.reward_shaping.*`: a penalty that grows over the last tokens before the limit."""

    overlong_buffer_length: int | None = None
    """Tokens before the limit over which the penalty grows; 0 = no penalty; derived: a fifth of the limit."""
    overlong_buffer_penalty: float = 1.0
    """What a response at the limit loses, and never more."""
    max_response_length: int | None = None
    """The limit, in sampled tokens; derived: policy.generation.max_new_tokens."""


@dataclass(kw_only=True)
class Advantage:
    """DAPO's part of `grpo.*`."""

    overlong_filtering: bool = False
    """A response that was cut has no vote: no loss, and no part in its group's statistics."""
    use_dynamic_sampling: bool = False
    """Drop groups whose rewards, before shaping, are all equal, and draw more prompts in their place."""
    dynamic_sampling_max_gen_batches: int | None = None
    """Rounds of generation in a step; what is missing after them is filled with groups without spread; derived: 10."""
    batch_multiplier: float | None = None
    """Prompts of a round, as a multiple of num_prompts_per_step; derived: 1."""
    reward_shaping: Shaping = field(default_factory=Shaping)


@dataclass(kw_only=True)
class Loss:
    """`loss_fn.*`."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.28
    correction: correction.Preset = "observe"
    correction_min: float | None = None
    correction_max: float | None = None


@dataclass(kw_only=True)
class Config:
    """DAPO's options."""

    grpo: Advantage = field(default_factory=Advantage)
    loss_fn: Loss = field(default_factory=Loss)

    def complete(self, recipe: Recipe) -> None:
        """Fill in what is open; refuse what cannot be."""
        options.compares_samples(recipe)
        options.clip_range(self.loss_fn.ratio_clip_min, self.loss_fn.ratio_clip_max)
        correction.complete(self.loss_fn)
        self._complete_sampling()
        shaping = self.grpo.reward_shaping
        if shaping.max_response_length is None:
            shaping.max_response_length = recipe.policy.generation.max_new_tokens
        assert shaping.max_response_length is not None
        if shaping.overlong_buffer_length is None:
            shaping.overlong_buffer_length = shaping.max_response_length // BUFFER_PART
        options.not_negative("grpo.reward_shaping.overlong_buffer_penalty", shaping.overlong_buffer_penalty)
        if not 0 <= shaping.overlong_buffer_length <= shaping.max_response_length:
            raise RlctlError(
                f"grpo.reward_shaping.overlong_buffer_length is {shaping.overlong_buffer_length}, "
                f"a response has at most {shaping.max_response_length} tokens",
                f"set it to 0 ... {shaping.max_response_length}",
            )

    def _complete_sampling(self) -> None:
        chosen = self.grpo
        for name, default in SAMPLING.items():
            value = getattr(chosen, name)
            if not chosen.use_dynamic_sampling:
                if value is not None:
                    raise RlctlError(
                        f"`grpo.{name}` has no effect without dynamic sampling",
                        "leave it out, or set grpo.use_dynamic_sampling=true",
                    )
                continue
            if value is None:
                setattr(chosen, name, default)
            elif value < 1:
                raise RlctlError(f"`grpo.{name}` is {value:g}, it must be 1 or more", f"the default is {default:g}")


class Algorithm:
    """See algorithms/base.py."""

    unit = "sequence"
    needs: frozenset[Need] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        chosen = config.grpo
        self.refill: Refill | None = None
        if chosen.use_dynamic_sampling:
            assert chosen.dynamic_sampling_max_gen_batches is not None
            assert chosen.batch_multiplier is not None
            self.refill = Refill(
                teaches=self._teaches,
                max_rounds=chosen.dynamic_sampling_max_gen_batches,
                batch_multiplier=chosen.batch_multiplier,
            )

    def _teaches(self, batch: Batch) -> torch.Tensor:
        """[B]: whether the rewards of a sequence's group differ, among those that count."""
        return ops.spread_groups(batch.rewards, batch.group, batch.valid & self._kept(batch))

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N]: group advantage of the shaped reward at each token of the mask."""
        rewards = batch.rewards + self._penalty(batch)
        per_sequence = ops.group_advantages(
            rewards, batch.group, batch.valid & self._kept(batch), leave_one_out=False, normalize=True
        )
        return ops.to_tokens(batch, per_sequence)

    def _penalty(self, batch: Batch) -> torch.Tensor:
        """[B]: 0 down to -overlong_buffer_penalty."""
        shaping = self.config.grpo.reward_shaping
        limit, buffer = shaping.max_response_length, shaping.overlong_buffer_length
        assert limit is not None
        assert buffer is not None
        if buffer == 0:
            return torch.zeros(len(batch))
        into = batch.sequence_sum(batch.mask.float()) - (limit - buffer)  # tokens into the buffer
        return -shaping.overlong_buffer_penalty * (into / buffer).clamp(0.0, 1.0)

    def _kept(self, batch: Batch) -> torch.Tensor:
        """[B]: whether a sequence counts."""
        return ~batch.truncated if self.config.grpo.overlong_filtering else torch.ones_like(batch.truncated)

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N]: token mean over the minibatch's sequences that count."""
        kept = self._kept(minibatch)[minibatch.sequence]
        return ops.token_mean_weights(minibatch.replace(mask=minibatch.mask & kept))

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Clipped surrogate per token [N]."""
        chosen = self.config.loss_fn
        assert batch.advantages is not None
        old = ops.old_logprobs(batch, out)
        ratio = ops.bounded_exp(out.logprobs - old)
        low, high = chosen.ratio_clip_min, chosen.ratio_clip_max
        weight, observed = correction.weigh(batch, old, chosen)
        loss = weight * ops.clipped_surrogate(ratio, batch.advantages, low=low, high=high, dual=None)
        return torch.where(batch.mask, loss, 0.0), ops.ratio_metrics(ratio, low=low, high=high) | observed
