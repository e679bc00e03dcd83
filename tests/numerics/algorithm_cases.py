"""Batches for the algorithms' tests, and what each algorithm must give on them, worked out sequence by sequence.

The oracle reads a batch as Python lists and follows the papers' formulas with loops, `statistics` and scalar tensors in
fp64 for autograd. It shares no code with rlctl.algorithms.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from rlctl import plugins
from rlctl.types import Batch

ALGORITHMS = ("cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "reinforce_pp_baseline", "rloo")
LIMIT = 6  # response tokens; dapo's penalty and dr_grpo's constant
BUFFER = 3
BETA = 0.2


def batch(lengths=(4, 6, 3), first=2, **fields):
    """A prompt of `first` tokens and a response each; all in one group, everything zero."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n = int(offsets[-1])
    mask = torch.zeros(n, dtype=torch.bool)
    for start, end in itertools.pairwise(offsets.tolist()):
        mask[start + first : end] = True
    made = Batch(
        tokens=torch.arange(n),
        offsets=offsets,
        mask=mask,
        rewards=torch.zeros(len(lengths)),
        group=torch.zeros(len(lengths), dtype=torch.int64),
        valid=torch.ones(len(lengths), dtype=torch.bool),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        rollout_logprobs=torch.zeros(n),
        version=torch.zeros(n, dtype=torch.int32),
    )
    return made.replace(**fields)


def mixed(*, gap: float = 0.4, seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Ten sequences in three interleaved groups (one without spread, one with an invalid member), and logprobs [N].

    Masks have holes, as after a tool's reply. `gap` is the deviation of old, ref, rollout and current logprobs.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (4, 8, 3, 7, 8, 5, 6, 8, 2, 4)
    made = batch(lengths)
    n = len(made.tokens)
    valid = torch.arange(len(lengths)) != 6
    mask = made.mask & valid[made.sequence] & (torch.arange(n) % 5 != 3)

    def logprobs():
        return torch.where(mask, -4.0 + gap * torch.randn(n, generator=generator), 0.0)

    made = made.replace(
        mask=mask,
        valid=valid,
        group=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0]),
        rewards=torch.tensor([1.0, 0.35, 0.2, 0.0, 0.35, 0.9, 0.0, 0.35, 0.1, 0.4]),
        truncated=torch.tensor([False, True, False, True, False, False, False, True, False, False]),
        rollout_logprobs=logprobs(),
        old_logprobs=logprobs(),
        ref_logprobs=logprobs(),
    )
    return made, logprobs()


def options(name: str, *, beta: float = BETA, **loss_fn: Any) -> Any:
    """An algorithm's Config, with a KL penalty where it has one; `loss_fn` keys as given."""
    made = plugins.load("algorithm", name).Config()
    for section in (made.grpo, made.loss_fn):
        if hasattr(section, "reference_policy_kl_penalty"):
            section.reference_policy_kl_penalty = beta
    if name == "dr_grpo":
        made.loss_fn.length_normalizer = LIMIT
    if name == "dapo":
        made.grpo.reward_shaping.max_response_length = LIMIT
        made.grpo.reward_shaping.overlong_buffer_length = BUFFER
    for key, value in loss_fn.items():
        setattr(made.loss_fn, key, value)
    return made


def algorithm(name: str, config: Any = None) -> Any:
    return plugins.load("algorithm", name).Algorithm(config or options(name))


def prepared(rule: Any, made: Batch) -> Batch:
    """With advantages and loss weights."""
    made = made.replace(advantages=rule.advantages(made))
    return made.replace(loss_weights=rule.loss_weights(made))


@dataclass
class Sequence:
    """One sequence's tokens in the mask, as scalars."""

    group: int
    reward: float
    truncated: bool
    current: list[torch.Tensor] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)

    def ratios(self):
        return [(c - o).exp() for c, o in zip(self.current, self.old, strict=True)]


def sequences(made: Batch, current: torch.Tensor) -> list[Sequence]:
    """Those with a vote; `current` [N] fp64 takes the gradient."""
    found = []
    for i in range(len(made)):
        if not made.valid[i]:
            continue
        one = Sequence(int(made.group[i]), float(made.rewards[i]), bool(made.truncated[i]))
        for t in range(int(made.offsets[i]), int(made.offsets[i + 1])):
            if made.mask[t]:
                one.current.append(current[t])
                one.old.append(float(made.old_logprobs[t]))
                one.ref.append(float(made.ref_logprobs[t]))
        found.append(one)
    return found


def surrogate(ratio: Any, advantage: float, low: float, high: float) -> Any:
    return -min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def kl(current: Any, old: float, ref: float) -> Any:
    d = ref - current
    return (current - old).exp() * (d.exp() - 1 - d)


def _group(rollouts: list[Sequence], one: Sequence) -> list[Sequence]:
    return [r for r in rollouts if r.group == one.group]


def _standard(rollouts: list[Sequence], one: Sequence, reward=lambda r: r.reward) -> float:
    rewards = [reward(r) for r in _group(rollouts, one)]
    spread = max(rewards) - min(rewards)
    return (reward(one) - statistics.fmean(rewards)) / statistics.stdev(rewards) if spread else 0.0


def _leave_one_out(rollouts: list[Sequence], one: Sequence, *, divide: bool, reward=lambda r: r.reward) -> float:
    everyone = [reward(r) for r in _group(rollouts, one)]
    difference = reward(one) - statistics.fmean(reward(r) for r in _group(rollouts, one) if r is not one)
    return difference / statistics.stdev(everyone) if divide and max(everyone) > min(everyone) else difference


def _whitened(tokens: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(tokens), statistics.pstdev(tokens)
    return [(x - mean) / deviation for x in tokens]


def _token_mean(rollouts: list[Sequence], term: Any) -> Any:
    terms = [x for r in rollouts for x in term(r)]
    return sum(terms) / len(terms)


def grpo(rollouts):
    def term(r):
        a = _leave_one_out(rollouts, r, divide=True)
        return [
            surrogate(x, a, 0.2, 0.2) + BETA * kl(c, o, q)
            for x, c, o, q in zip(r.ratios(), r.current, r.old, r.ref, strict=True)
        ]

    return _token_mean(rollouts, term)


def dr_grpo(rollouts):
    voting = [r for r in rollouts if r.current]
    total = 0.0
    for r in voting:
        a = r.reward - statistics.fmean(x.reward for x in _group(rollouts, r))
        total = total + sum(surrogate(x, a, 0.2, 0.2) for x in r.ratios()) / LIMIT
    return total / len(voting)


def dapo(rollouts):
    def shaped(r):
        length = len(r.current)
        if length <= LIMIT - BUFFER:
            return r.reward
        return r.reward + max(((LIMIT - BUFFER) - length) / BUFFER, -1.0)

    return _token_mean(
        rollouts, lambda r: [surrogate(x, _standard(rollouts, r, shaped), 0.2, 0.28) for x in r.ratios()]
    )


def gspo(rollouts):
    voting, total = [r for r in rollouts if r.current], 0.0
    for r in voting:
        mean = sum(c - o for c, o in zip(r.current, r.old, strict=True)) / len(r.current)
        penalties = [kl(c, o, q) for c, o, q in zip(r.current, r.old, r.ref, strict=True)]
        total = (
            total + surrogate(mean.exp(), _standard(rollouts, r), 3e-4, 4e-4) + BETA * sum(penalties) / len(penalties)
        )
    return total / len(voting)


def cispo(rollouts):
    def term(r):
        weights = [min(float(x.detach()), 5.0) for x in r.ratios()]
        return [-w * _standard(rollouts, r) * c for w, c in zip(weights, r.current, strict=True)]

    return _token_mean(rollouts, term)


def rloo(rollouts):
    def lowered(r):
        return r.reward - BETA * (sum(r.old) - sum(r.ref))

    voting = [r for r in rollouts if r.current]
    return sum(-_leave_one_out(rollouts, r, divide=False, reward=lowered) * sum(r.current) for r in voting) / len(
        voting
    )


def reinforce_pp(rollouts):
    returns = [r.reward - BETA * (sum(r.old[t:]) - sum(r.ref[t:])) for r in rollouts for t in range(len(r.current))]
    white = iter(_whitened(returns))
    return _token_mean(rollouts, lambda r: [surrogate(x, next(white), 0.2, 0.2) for x in r.ratios()])


def reinforce_pp_baseline(rollouts):
    centred = [r.reward - statistics.fmean(x.reward for x in _group(rollouts, r)) for r in rollouts for _ in r.current]
    white = iter(_whitened(centred))

    def term(r):
        return [
            surrogate(x, next(white), 0.2, 0.2) + BETA * kl(c, o, q)
            for x, c, o, q in zip(r.ratios(), r.current, r.old, r.ref, strict=True)
        ]

    return _token_mean(rollouts, term)
