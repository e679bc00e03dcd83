"""Whether a run directory goes on, from where, and whether it may: judged before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlctl.checkpoint import identity, train_state
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.launch import run_directory
from rlctl.recipe import compose
from rlctl.recipe.derive import Resolved

Mode = Literal["auto", "never", "must"]
_SHOWN = 3  # differing keys that the message names


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run that was there before goes on."""

    step: int
    """Steps in its newest complete checkpoint; 0 without one."""
    finished: bool
    """All steps are done, and exported where that is asked for."""


def find(run_dir: Path, resolved: Resolved, *, mode: Mode) -> Start | None:
    """What `--resume MODE` does in a directory: a start, or None for a new run.

    Raises:
        RlctlError: the directory is taken (never), has nothing to go on from (must), or is of another run.
    """
    if mode == "never":
        run_directory.check(run_dir)
        return None
    if not (run_dir / run_directory.RECIPE).is_file():
        if mode == "must":
            raise RlctlError(
                f"`{run_dir}` is no run directory: it has no {run_directory.RECIPE}",
                "give the directory of a run with `--run-dir`, or `--resume auto` to start one there",
            )
        run_directory.check(run_dir, leftovers=True)
        return None
    _check_recipe(run_dir, resolved)
    checkpoints = train_state.complete(run_dir)
    if not checkpoints:
        if mode == "must":
            raise RlctlError(
                f"`{run_dir}` has no complete checkpoint", "give `--resume auto` to start it again from step 1"
            )
        return Start(step=0, finished=False)
    return _start(run_dir, checkpoints[-1], resolved)


def _start(run_dir: Path, checkpoint: Path, resolved: Resolved) -> Start:
    saved = train_state.read_trainer(checkpoint)
    before, now = (saved["backend"], saved["layout"]), (resolved.backend, str(resolved.layout))
    if before != now and not train_state.is_reshardable(checkpoint):
        shown = [" ".join(side) if before[0] != now[0] else side[1] for side in (before, now)]
        raise RlctlError(
            f"`{checkpoint}` was saved as {shown[0]}, this job is {shown[1]}",
            "resume with the processes, degrees and backend of the checkpoint; the last one of a run, and all with "
            "checkpointing.optimizer_format=reshardable, go on in any",
            exit_status=ENVIRONMENT,
        )
    last = min(resolved.recipe.grpo.max_num_steps, saved["epoch_steps"])
    exported = (run_dir / "hf").is_dir() or not resolved.recipe.checkpointing.save_hf
    return Start(step=saved["step"], finished=saved["step"] >= last and exported)


def _check_recipe(run_dir: Path, resolved: Resolved) -> None:
    before = compose.as_values(compose.load_resolved(run_dir / run_directory.RECIPE))
    other = identity.differences(before, compose.as_values(resolved.recipe))
    if not other:
        return
    shown = "; ".join(f"`{key}` was {old}, is {new}" for key, old, new in other[:_SHOWN])
    more = f"; and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    raise RlctlError(
        f"the run in `{run_dir}` has other settings: {shown}{more}",
        "a resume may change grpo.max_num_steps, validation, logger, checkpointing and cluster; "
        "for the rest, start a new run in another `--run-dir`",
    )
