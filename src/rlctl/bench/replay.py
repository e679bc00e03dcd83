"""Rollouts that are recorded once and replayed: a file, its hash, or lengths drawn from a stated distribution.

A file is safetensors: `step_N/FIELD` for each field of a Batch as an engine and a reward leave it. The hash is xxh3_128
over every name, shape, type and byte, so that two sides that state the same hash worked on the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlctl.errors import RlctlError
from rlctl.types import Batch

FIELDS = ("tokens", "offsets", "mask", "rewards", "group", "valid", "truncated", "rollout_logprobs", "version")
NOISE = 0.1  # nats; see `with_given_logprobs`


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Response lengths, e.g. Lengths(mean=3.0, sigma=0.5, cap=64): exp of a normal draw, at most `cap`."""

    mean: float
    """Of the logarithm."""
    sigma: float
    cap: int


def parse_lengths(text: str) -> Lengths:
    """`lognormal:mean,sigma,cap`.

    Raises:
        RlctlError: another form, or values that give no length.
    """
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"lognormal:{number},{number},(\d+)", text)
    if found is None or int(found[3]) < 1:
        raise RlctlError(
            f"`--lengths {text}` is no distribution of lengths",
            "write lognormal:mean,sigma,cap with mean and sigma of the logarithm, e.g. lognormal:3.5,0.6,128",
        )
    return Lengths(mean=float(found[1]), sigma=float(found[2]), cap=int(found[3]))


def draw(lengths: Lengths, *, prompts: int, group_size: int, longest: int, vocabulary: int, seed: int) -> Batch:
    """Random tokens, logprobs and rewards, with response lengths of a distribution.

    Args:
        lengths: of responses.
        prompts: P.
        group_size: G; the batch has P * G sequences.
        longest: tokens of prompt and response together, at least 2.
        vocabulary: tokens are drawn below it.
        seed: of everything drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    count = prompts * group_size
    drawn = torch.exp(lengths.mean + lengths.sigma * torch.randn(count, generator=generator)).round().long()
    response = drawn.clamp(1, min(lengths.cap, longest - 1))
    prompt = torch.randint(1, max(2, min(16, longest - int(response.max()) + 1)), (prompts,), generator=generator)
    prompt = torch.minimum(prompt.repeat_interleave(group_size), longest - response)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (prompt + response).cumsum(0)])
    total = int(offsets[-1])
    within = torch.arange(total) - torch.repeat_interleave(offsets[:-1], prompt + response)
    mask = within >= torch.repeat_interleave(prompt, prompt + response)
    logprobs = -torch.rand(total, generator=generator) * 5.0
    return Batch(
        tokens=torch.randint(0, vocabulary, (total,), generator=generator),
        offsets=offsets,
        mask=mask,
        rewards=torch.randint(0, 2, (count,), generator=generator).float(),
        group=torch.arange(prompts).repeat_interleave(group_size),
        valid=torch.ones(count, dtype=torch.bool),
        truncated=drawn > response,
        rollout_logprobs=torch.where(mask, logprobs, torch.zeros(())),
        version=torch.zeros(total, dtype=torch.int32),
    )


def save(batches: Sequence[Batch], path: Path) -> None:
    """Write the rollouts of some steps."""
    tensors = {
        f"step_{i}/{name}": getattr(batch, name).contiguous() for i, batch in enumerate(batches, 1) for name in FIELDS
    }
    save_file(tensors, path)


def load(path: Path) -> list[Batch]:
    """The rollouts of a file, in order.

    Raises:
        RlctlError: it is not there, or no file of rollouts.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            count = len({name.split("/")[0] for name in names})
            wanted = {f"step_{i}/{field}" for i in range(1, count + 1) for field in FIELDS}
            if not names or names != wanted:
                raise RlctlError(f"`{path}` holds no rollouts", "give a rollouts.safetensors that `rlctl bench` wrote")
            return [
                Batch(**{field: file.get_tensor(f"step_{i}/{field}") for field in FIELDS}) for i in range(1, count + 1)
            ]
    except (OSError, SafetensorError) as error:
        raise RlctlError(
            f"cannot read rollouts `{path}`: {error}", "give a rollouts.safetensors that `rlctl bench` wrote"
        ) from error


def digest(batches: Sequence[Batch]) -> str:
    """Of everything in the batches, in order."""
    state = xxhash.xxh3_128()
    for i, batch in enumerate(batches, 1):
        for name in FIELDS:
            value = getattr(batch, name).contiguous()
            state.update(f"{i} {name} {value.dtype} {tuple(value.shape)}\n".encode())
            state.update(value.view(torch.uint8).numpy().data)
    return state.hexdigest()


def with_given_logprobs(batch: Batch, *, seed: int = 0) -> Batch:
    """Old and reference logprobs near the recorded ones, the same for every side.

    Each is the recorded logprob plus a normal draw of NOISE: with the side's own, the ratio would be 1 and the KL 0,
    and a wrong derivative of either would not show.
    """
    generator = torch.Generator().manual_seed(seed)

    def near() -> torch.Tensor:
        noise: Any = NOISE * torch.randn(len(batch.tokens), generator=generator)
        return torch.where(batch.mask, batch.rollout_logprobs + noise, torch.zeros(()))

    return batch.replace(old_logprobs=near(), ref_logprobs=near())
