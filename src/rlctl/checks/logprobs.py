"""Checks of the probabilities that the policy gives to tokens."""

from __future__ import annotations

from rlctl.checks.base import LEAK_LIMITS, LOGPROB_LIMITS, Result, Subject
from rlctl.lazy import torch
from rlctl.types import Batch


def ratio(subject: Subject, batch: Batch) -> Result:
    """Engine and policy agree on the sampled tokens."""
    return agreement(
        subject, batch, name="ratio",
        cause="a mask that is off by one, another temperature than the engine's, or weights that were not synced",
    )  # fmt: skip


def synced(subject: Subject, batch: Batch) -> Result:
    """The engine samples with the policy's weights."""
    return agreement(
        subject, batch, name="weight sync",
        cause="a weight did not reach the engine: see tied embeddings, the output head, and the loader's names",
    )  # fmt: skip


def agreement(subject: Subject, batch: Batch, *, name: str, cause: str) -> Result:
    """Whether the policy gives sampled tokens the logprobs that the engine reports."""
    which, limit = LOGPROB_LIMITS[subject.recipe.policy.precision]
    gap = (subject.policy.forward(batch).logprobs - batch.rollout_logprobs)[batch.mask].abs()
    found = float(gap.max() if which == "largest" else gap.mean())
    return Result(
        name=name,
        ok=found <= limit,
        expected=f"the {which} difference of logprobs between engine and policy at most {limit:g}",
        found=f"{found:.2g} over {len(gap)} tokens",
        detail=cause if not found <= limit else "",
    )


def packing(subject: Subject, batch: Batch) -> Result:
    """Tokens of one sequence change nothing in another."""
    limit = LEAK_LIMITS[subject.recipe.policy.precision]
    even = batch.sequence % 2 == 0
    vocabulary = int(batch.tokens.max()) + 1
    other = torch.where(even, (batch.tokens + 1) % vocabulary, batch.tokens)
    before, after = (subject.policy.forward(b).logprobs for b in (batch, batch.replace(tokens=other)))
    gap = float((before - after)[batch.mask & ~even].abs().max())
    return Result(
        name="packing",
        ok=gap <= limit,
        expected=f"logprobs that depend on their own sequence alone, within {limit:g}",
        found=f"a change of {gap:.2g} when other sequences change",
        detail="attention or positions cross sequences of a pack: see policy.sequence_packing" if gap > limit else "",
    )


def alignment(subject: Subject, batch: Batch) -> Result:
    """A token's probability depends on itself and on what is before it, and on nothing behind it.

    Each sequence's last token is changed. A mask or label that is off by one shows: the change appears at the token
    before, or not at the last one.
    """
    limit = LEAK_LIMITS[subject.recipe.policy.precision]
    last = batch.offsets[1:] - 1
    tokens = batch.tokens.clone()
    tokens[last] = (tokens[last] + 1) % (int(batch.tokens.max()) + 1)
    learned = batch.mask.clone()
    learned[last] = True  # a template may write behind the answer
    seen = batch.replace(mask=learned)
    gap = (subject.policy.forward(seen).logprobs - subject.policy.forward(seen.replace(tokens=tokens)).logprobs).abs()
    behind = gap.index_fill(0, last, 0.0)
    early, own = float(behind.max()), float(gap[last].max())
    ok = early <= limit < own
    return Result(
        name="alignment",
        ok=ok,
        expected=f"a changed last token changes its own logprob, and those before it by at most {limit:g}",
        found=f"its own by up to {own:.2g}, those before by up to {early:.2g}",
        detail="" if ok else "a mask or label that is off by one, or attention that is not causal",
    )


def reference(subject: Subject, batch: Batch) -> Result:
    """Before the first update the policy is its own reference."""
    which, limit = LOGPROB_LIMITS[subject.recipe.policy.precision]
    policy, other = (subject.policy.forward(batch, weights=w).logprobs for w in ("policy", "reference"))
    gap = (policy - other)[batch.mask].abs()
    found = float(gap.max() if which == "largest" else gap.mean())
    return Result(
        name="reference",
        ok=found <= limit,
        expected=f"the {which} difference of logprobs between policy and reference at most {limit:g}",
        found=f"{found:.2g} over {len(gap)} tokens",
        detail="" if found <= limit else "the reference was loaded from other weights, or is not frozen",
    )
