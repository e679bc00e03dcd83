"""Checks of an update and of the weights' way to the engine. All is put back after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from rlctl.checks import logprobs, probes
from rlctl.checks.base import LOGPROB_LIMITS, SPLIT_LIMITS, Result, Sampler, Subject, snapshot
from rlctl.lazy import torch
from rlctl.policy.base import TrainState
from rlctl.types import Batch

PROBE_LR = 1e-3  # Adam's first update moves each weight by this: enough to show a tensor that stayed behind
MAX_REPEATS = 256


def update(subject: Subject, batch: Batch) -> list[Result]:
    """What an update shows: its gradient under another split, and that the engine follows. All is put back after."""
    policy, algorithm = subject.policy, subject.algorithm
    if "old" in algorithm.needs:
        batch = batch.replace(old_logprobs=policy.forward(batch).logprobs)
    if "ref" in algorithm.needs:
        batch = batch.replace(ref_logprobs=policy.forward(batch, weights="reference").logprobs)
    batch = batch.replace(advantages=algorithm.advantages(batch))
    batch = batch.replace(loss_weights=algorithm.loss_weights(batch))
    before = policy.forward(batch).logprobs
    kept = snapshot(policy.state().local)
    policy.set_lr(0.0)
    whole = policy.train_step(batch, algorithm)
    policy.load_state(TrainState(local=snapshot(kept)))
    policy.set_lr(PROBE_LR)
    parts = policy.train_step(_repeated(batch, _repeats(subject, batch)), algorithm)
    results = [_split(subject, whole, parts)]
    if isinstance(subject.source, Sampler):
        results.append(_synced(subject, batch, before))
    policy.load_state(TrainState(local=kept))
    if isinstance(subject.source, Sampler):
        subject.source.publish()
    return results


def _synced(subject: Subject, batch: Batch, before: torch.Tensor) -> Result:
    """Whether the engine follows an update that changed the logprobs [N] of a batch."""
    moved = float((subject.policy.forward(batch).logprobs - before)[batch.mask].abs().max())
    subject.sampler.publish()
    found = logprobs.synced(subject, probes.sampled(subject, draw=1))
    _, limit = LOGPROB_LIMITS[subject.recipe.policy.precision]
    blind = f"the update moved logprobs by {moved:.2g} only" if moved < 10 * limit else ""
    return Result(**(asdict(found) | {"detail": found.detail or blind}))


def _split(subject: Subject, whole: Mapping[str, float], parts: Mapping[str, float]) -> Result:
    limit = SPLIT_LIMITS[subject.recipe.policy.precision]
    gaps = {name: abs(parts[name] - whole[name]) for name in ("loss", "grad_norm")}
    scale = {"loss": max(abs(whole["loss"]), 1.0), "grad_norm": max(whole["grad_norm"], 1e-12)}
    wrong = [name for name in gaps if not gaps[name] <= limit * scale[name]]
    return Result(
        name="split",
        ok=not wrong,
        expected=f"loss and gradient norm that do not depend on microbatches, within {limit:g}",
        found=f"gradient norm {whole['grad_norm']:.6g} and {parts['grad_norm']:.6g}, loss {whole['loss']:.6g} and "
        f"{parts['loss']:.6g}",
        detail="gradients are scaled by the number of microbatches, or reduced twice" if wrong else "",
    )


def _repeats(subject: Subject, batch: Batch) -> int:
    """How often the batch makes a microbatch more on each data-parallel rank than it takes once."""
    policy, dp = subject.recipe.policy, subject.policy.layout.dp
    if policy.sequence_packing.enabled:
        assert policy.sequence_packing.train_mb_tokens is not None
        needed = dp * policy.sequence_packing.train_mb_tokens / len(batch.tokens)
    else:
        needed = dp * policy.train_micro_batch_size / len(batch)
    return min(math.ceil(needed) + 1, MAX_REPEATS)


def _repeated(batch: Batch, times: int) -> Batch:
    """The same loss and gradient from `times` copies: each token weighs that much less."""
    chosen = torch.arange(len(batch)).repeat(times)
    made = batch.select(chosen)
    copies = torch.arange(times).repeat_interleave(len(batch))
    assert made.loss_weights is not None
    return made.replace(
        group=made.group + copies * (int(batch.group.max()) + 1), loss_weights=made.loss_weights / times
    )
