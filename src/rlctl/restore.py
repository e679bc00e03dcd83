"""A policy's state from a checkpoint, for a run that goes on and for the export of a step. It knows no backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.checkpoint import train_state
from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.policy.base import PolicyProtocol, TrainState

Placement = tuple[str, str]
"""Backend and layout, e.g. ("megatron", "dp2 tp1")."""


def backend_of(recipe: Recipe) -> str:
    """The training backend that a resolved recipe enables."""
    return "megatron" if recipe.policy.megatron_cfg.enabled else "dtensor"


def load(policy: PolicyProtocol, checkpoint: Path, trainer: Mapping[str, Any], *, now: Placement) -> Any:
    """Give a policy the state of a checkpoint. Collective.

    Args:
        policy: built, in the placement `now`.
        checkpoint: complete.
        trainer: its trainer.json.
        now: where the policy lives.

    Returns:
        What belongs to this process in the checkpoint; None where another placement saved it.

    Raises:
        RlctlError: it is damaged, or of another placement and not reshardable.
    """
    before = (trainer["backend"], trainer["layout"])
    if train_state.is_reshardable(checkpoint):
        policy.load_whole_state(train_state.reader(checkpoint), updates=trainer["updates"])
        return train_state.load(checkpoint) if before == now else None
    if before != now:
        raise RlctlError(
            f"`{checkpoint}` was saved as {' '.join(before)}, this is {' '.join(now)}, and it is not reshardable",
            "take a later step, or go on with checkpointing.optimizer_format=reshardable",
        )
    local = train_state.load(checkpoint)
    policy.load_state(TrainState(local=local["policy"]))
    return local
