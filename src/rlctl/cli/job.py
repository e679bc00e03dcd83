"""From parsed options to a resolved job; shared by the commands that start or judge one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import config, device
from rlctl.cli import foreign, output, report
from rlctl.errors import RlctlError
from rlctl.launch import needs, preflight, resume, run_directory
from rlctl.launch.stop import deadline_seconds
from rlctl.models import resolve
from rlctl.recipe import compose, derive, find, overrides
from rlctl.recipe.overrides import Override
from rlctl.sinks.chosen import check as check_sinks


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line said about a job; None is not said."""

    algorithm: str
    overrides: Sequence[str] = ()
    recipe: str | None = None
    model: str | None = None
    backend: str | None = None
    recipe_dirs: Sequence[Path] = ()
    procs: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    launcher: str | None = None
    run_dir: Path | None = None
    resume: resume.Mode = "never"
    checks: bool | None = None
    force: bool = False
    """Memory that the plan finds too small does not stop it."""

    def flags(self) -> list[Override]:
        """The options as settings."""
        settings: list[tuple[str, Any, str]] = [
            ("policy.model_name", self.model, f"--model {self.model}"),
            ("cluster.procs", self.procs, f"--procs {self.procs}"),
            ("cluster.num_nodes", self.nodes, f"--nodes {self.nodes}"),
            ("cluster.gpus_per_node", self.gpus_per_node, f"--gpus-per-node {self.gpus_per_node}"),
            ("cluster.launcher", self.launcher, f"--launcher {self.launcher}"),
            ("checks.enabled", self.checks, "--no-checks"),
            ("run_dir", None if self.run_dir is None else str(self.run_dir), f"--run-dir {self.run_dir}"),
        ]
        if self.backend is not None:
            text = f"--backend {self.backend}"
            settings.append(("policy.megatron_cfg.enabled", self.backend == "megatron", text))
            settings.append(("policy.dtensor_cfg.enabled", self.backend == "dtensor", text))
        return [Override(key=key, value=value, text=text) for key, value, text in settings if value is not None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request, resolved and measured against this machine."""

    resolved: derive.Resolved
    hardware: device.Hardware
    refused: RlctlError | None
    """Why it cannot run here."""
    run_dir: Path
    start: resume.Start | None
    """Where a run that was there before goes on; None: a new one."""
    arguments: Sequence[str]
    """The command line after `rlctl`."""
    plan: dict[str, Any]
    """All of it as plain data (report.plan)."""

    def create(self) -> None:
        """Make the run directory, or make it ready to go on."""
        make = run_directory.create if self.start is None else run_directory.reopen
        make(self.run_dir, self.resolved, hardware=self.hardware, command=["rlctl", *self.arguments])


def prepare(request: Request, *, arguments: Sequence[str]) -> Job:
    """Compose the recipe, fill in what it leaves open, and measure it.

    Raises:
        RlctlError: whatever is wrong with it; that it does not fit this machine is not judged here.
    """
    composed = compose_request(request)
    hardware = device.probe()
    resolved = derive.derive(composed, hardware)
    recipe = resolved.recipe
    if recipe.run_dir is None and recipe.cluster.launcher == "env":
        raise RlctlError("`--launcher env` needs `--run-dir`", "give a directory on storage that all ranks share")
    if recipe.run_dir is None and request.resume != "never":
        raise RlctlError(
            f"`--resume {request.resume}` needs `--run-dir`", "give the directory of the run to go on with"
        )
    _check_checkpointing(recipe.checkpointing)
    check_sinks(recipe.logger)
    run_dir = run_directory.default(composed.source.name) if recipe.run_dir is None else Path(recipe.run_dir)
    start = _start(run_dir, resolved, request.resume)
    recipe.run_dir = str(run_dir)
    need = needs.needs(resolved)
    refused = needs.refuse(resolved, need, hardware)
    too_small = preflight.refuse(resolved, need)
    if too_small is not None and request.force:
        output.note(f"--force: {too_small.message}")
        too_small = None
    refused = too_small or refused
    plan = report.plan(composed, resolved, need, here=hardware, refused=refused, arguments=arguments)
    if composed.translation is not None:
        plan["nemo_rl"] = foreign.summary(composed.translation)
    return Job(
        resolved=resolved, hardware=hardware, refused=refused, run_dir=run_dir, start=start, arguments=arguments,
        plan=plan,
    )  # fmt: skip


def _start(run_dir: Path, resolved: derive.Resolved, mode: resume.Mode) -> resume.Start | None:
    new_elsewhere = resolved.recipe.cluster.launcher == "env" and os.environ.get("RANK", "0") != "0"
    if mode == "never" and new_elsewhere:
        return None  # rank 0 judges the directory, and may have made it already
    return resume.find(run_dir, resolved, mode=mode)


def _check_checkpointing(options: config.Checkpointing) -> None:
    deadline_seconds(options.checkpoint_must_save_by)
    if options.keep_top_k < 1:
        raise RlctlError(f"`checkpointing.keep_top_k` is {options.keep_top_k}, it must be at least 1", "raise it")


def compose_request(request: Request) -> compose.Composed:
    """The recipe of a request, with what is open left open."""
    said = {o.key: o.value for o in [*overrides.parse(request.overrides), *request.flags()]}
    model = said.get("policy.model_name")
    if model is not None:
        resolve.resolve(str(model))  # a misspelt name is told before a missing task, which may follow from it
    return compose.compose(
        request.algorithm,
        request.recipe,
        request.overrides,
        flags=request.flags(),
        folders=find.directories(request.recipe_dirs),
        model=_short_name(model),
        backend=_backend(said),
    )


def _short_name(model: Any) -> str | None:
    """The catalogue's name, by which recipes are named, of a short name or a Hugging Face id."""
    ids = {entry["hf"]: short for short, entry in resolve.catalogue().items()}
    return ids[model] if model is not None and model in ids else model


def _backend(said: dict[str, Any]) -> str | None:
    for backend in ("megatron", "dtensor"):
        key = f"policy.{backend}_cfg.enabled"
        if key in said and said[key] is True:
            return backend
    return None
