"""What an algorithm is: advantages, loss weights and a token loss. It never mentions a rank, a microbatch or padding.

An algorithm's file defines `Algorithm` and `Config` (these protocols). Options are those that have an effect in that
algorithm, and no others; their defaults live in its file and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlctl import plugins
from rlctl.config import Recipe
from rlctl.lazy import torch
from rlctl.types import Batch, Metric, TokenOutputs

Need = Literal["old", "ref", "entropy", "values"]
Source = Literal["rollouts", "conversations", "preferences"]
GROUP_SIZES: dict[Source, int] = {"conversations": 1, "preferences": 2}
"""Sequences of one data row, where nothing is generated."""


def source(algorithm: str) -> Source:
    """What an algorithm learns from: rollouts, unless its file says otherwise by `SOURCE`."""
    return getattr(plugins.load("algorithm", algorithm), "SOURCE", "rollouts")


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Dynamic sampling: groups that teach nothing are dropped, and more prompts are drawn in their place."""

    teaches: Callable[[Batch], torch.Tensor]
    """Batch -> [B] bool, the same for all of a group."""
    max_rounds: int
    """Of generation in a step."""
    batch_multiplier: float
    """Prompts of a round, as a multiple of those of a step."""


def refill(algorithm: AlgorithmProtocol) -> Refill | None:
    """How an algorithm wants groups without signal replaced: not at all, unless it says otherwise by `refill`."""
    return getattr(algorithm, "refill", None)


class ConfigProtocol(Protocol):
    """An algorithm's options: two dataclasses."""

    grpo: Any
    """Its part of the recipe's `grpo.*`, such as the baseline."""
    loss_fn: Any
    """All of the recipe's `loss_fn.*`."""

    def complete(self, recipe: Recipe) -> None:
        """Fill in options that are None from the recipe, whose own lengths and batch sizes are filled in.

        Raises:
            RlctlError: a value that cannot be, or an option without effect.
        """
        ...


class AlgorithmProtocol(Protocol):
    """One RL algorithm, built as `Algorithm(config)`."""

    needs: frozenset[Need]
    """What must be computed before the loss: old or ref logprobs; or with it: entropy, values."""
    unit: Literal["sequence", "group"]
    """What is never split over microbatches."""

    def advantages(self, batch: Batch) -> torch.Tensor:
        """[N] f32; zero outside the mask."""
        ...

    def loss_weights(self, minibatch: Batch) -> torch.Tensor:
        """[N] f32, once per optimizer step over the global minibatch; the loss is sum(loss_weights * token_loss)."""
        ...

    def loss(self, batch: Batch, out: TokenOutputs) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The token loss [N], differentiable in `out.logprobs`, and metrics; `batch` is any whole sequences."""
        ...
