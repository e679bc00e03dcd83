"""What the resharding tests run inside their processes: every target of a world in one start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlctl.checkpoint import train_state
from rlctl.config import Checkpointing
from rlctl.parallel import Layout
from rlctl.policy import dtensor, megatron
from tests.parity import dtensor_steps, megatron_steps

CHUNK_BYTES = 1 << 14  # several files a quantity


class Place(NamedTuple):
    """Where a policy lives."""

    backend: str
    layout: Layout


class Move(NamedTuple):
    """A model, the place it is saved in, and a place to go on in."""

    model: str
    precision: str
    origin: Place
    target: Place


def policy(place: Place, folder: Path, precision: str) -> Any:
    if place.backend == "megatron":
        return megatron.Policy(megatron_steps.recipe(place.layout, precision=precision), folder)
    return dtensor.Policy(dtensor_steps.recipe(tp=place.layout.tp, precision=precision), folder)


def weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for bucket in learner.weights().whole(bucket_bytes=1 << 16) for name, t in bucket}


def save(learner: Any, run_dir: Path, *, form: str = "whole") -> Path:
    local = {} if form == "whole" else dict(learner.state().local)
    whole = learner.whole_state(CHUNK_BYTES) if form == "whole" else ()
    trainer = {"updates": learner.num_updates, "metrics": {}}
    return train_state.save(run_dir, step=1, local=local, trainer=trainer, options=Checkpointing(), whole=whole)


def after(learner: Any, steps: int) -> dict[str, torch.Tensor]:
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()
    for _ in range(steps):
        learner.train_step(batch, algorithm)
    return weights(learner)


def origins(folders: dict[str, Path], moves: list[Move], root: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Save each origin after one update; what it has after two more, and what one has that was never saved."""
    found = {}
    for model, precision, origin in dict.fromkeys((m.model, m.precision, m.origin) for m in moves):
        learner = policy(origin, folders[model], precision)
        after(learner, 1)
        name = f"{model} {precision} {origin}"
        save(learner, root / name)
        dict(learner.gradients()) if hasattr(learner, "_share_gradients") else None  # neither may it disturb a policy
        found[name] = after(learner, 2)
        found[f"unsaved {name}"] = after(policy(origin, folders[model], precision), 3)
    return found


def targets(folders: dict[str, Path], moves: list[Move], root: Path) -> list[dict[str, Any]]:
    """Go on from each origin in each target: what it saves at once, and what it has after two updates."""
    found = []
    for i, move in enumerate(moves):
        run_dir = root / f"{move.model} {move.precision} {move.origin}"
        checkpoint = train_state.complete(run_dir)[-1]
        learner = policy(move.target, folders[move.model], move.precision)
        learner.load_whole_state(
            train_state.reader(checkpoint), updates=train_state.read_trainer(checkpoint)["updates"]
        )
        again = save(learner, root / f"again {i} {learner.layout.world}")
        found.append({"from": checkpoint, "again": again, "weights": after(learner, 2)})
    return found
