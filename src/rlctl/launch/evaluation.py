"""`rlctl eval` until workers start: what is evaluated, on which task, where the samples go.

1. A target is a run (its exported model, its recipe), or a model by name or directory.
2. Each task becomes a resolved job of its own. No policy is built, so the training layout of the recipe is set aside.
3. The directory gets recipe.yaml and eval.json, or is an earlier evaluation that is the same and goes on.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlctl import plugins
from rlctl.device import Hardware
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.eval import RESULTS_FILE, SETTINGS_FILE, Settings, write_whole
from rlctl.launch import failure, needs, run_directory
from rlctl.recipe import compose
from rlctl.recipe.derive import Resolved

OVERRIDES = (  # of every evaluation: nothing is trained, and held-out prompts are asked for
    "policy.megatron_cfg.enabled=false",
    "policy.dtensor_cfg.enabled=true",
    "policy.dtensor_cfg.tensor_parallel_size=1",
    "policy.dtensor_cfg.context_parallel_size=1",
    "policy.train_global_batch_size=null",
    "checkpointing.enabled=false",
    "logger.tensorboard=false",
    "grpo.val_at_end=true",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is evaluated, e.g. Target(model="runs/a/hf", recipe="runs/a/recipe.yaml", run=Path("runs/a"))."""

    model: str
    recipe: str | None
    """The run's own."""
    run: Path | None


def find_target(text: str, checkpoint: str | None) -> Target:
    """The model behind MODEL_OR_RUN.

    Args:
        text: a run directory, else what `--model` takes.
        checkpoint: of a run: `last`, `best` or a step; None = last.

    Raises:
        RlctlError: the run has no such export, or a model is asked for a checkpoint.
    """
    run = Path(text)
    if not (run / "recipe.yaml").is_file():
        if checkpoint is not None:
            raise RlctlError(
                f"`--checkpoint {checkpoint}` is for runs, and `{text}` is none",
                "leave it out, or give a run directory",
            )
        return Target(model=text, recipe=None, run=None)
    if (run / SETTINGS_FILE).is_file():
        raise RlctlError(f"`{text}` is an evaluation, not a run", f"evaluate what it did: {_target_of(run)}")
    exports = _exports(run)
    if not exports:
        raise RlctlError(
            f"run `{text}` has no exported model",
            "let it end with checkpointing.save_hf on; an export is written at the end of a run",
        )
    return Target(model=str(_chosen(run, exports, checkpoint or "last")), recipe=str(run / "recipe.yaml"), run=run)


def _target_of(folder: Path) -> str:
    return json.loads((folder / SETTINGS_FILE).read_text())["target"]


def _exports(run: Path) -> dict[int, Path]:
    """Step -> Hugging Face directory."""
    found = {int(p.parent.name[5:]): p for p in run.glob("checkpoints/step_*/hf") if (p / "config.json").is_file()}
    if (run / "hf" / "config.json").is_file():
        found[max(run_metrics(run), default=0)] = run / "hf"
    return found


def run_metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Step -> its line of metrics.jsonl, in order."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return {row["step"]: row for row in map(json.loads, lines)}


def _chosen(run: Path, exports: dict[int, Path], checkpoint: str) -> Path:
    if checkpoint == "last":
        return exports[max(exports)]
    if checkpoint == "best":
        metrics = run_metrics(run)
        scored = {s: metrics[s].get("val/reward", metrics[s].get("rollout/reward")) for s in exports if s in metrics}
        return exports[max(scored, key=lambda s: (scored[s] is not None, scored[s], s))]
    if not re.fullmatch(r"\d+", checkpoint):
        raise RlctlError(f"`--checkpoint {checkpoint}` is no step", "give `last`, `best` or a number")
    if int(checkpoint) not in exports:
        raise RlctlError(
            f"run `{run}` has no exported model of step {checkpoint}",
            f"exported steps: {', '.join(map(str, sorted(exports)))}",
        )
    return exports[int(checkpoint)]


def task_overrides(task: str) -> list[str]:
    """`arithmetic`, or `reasoning_gym:chain_sum`, as settings.

    Raises:
        RlctlError: no such task.
    """
    name, _, detail = task.partition(":")
    plugins.load("environment", name)
    if not detail:
        return [f"env.name={name}"]
    if name != "reasoning_gym":
        raise RlctlError(f"task `{task}`: `{name}` has no tasks of its own", f"write `--tasks {name}`")
    return [f"env.name={name}", f"env.{name}.task={detail}"]


def known_tasks() -> str:
    """For hints."""
    return ", ".join(
        f"{n}:TASK" if n == "reasoning_gym" else n for n in plugins.names("environment") if n != "function"
    )


def refuse(resolved: Resolved, hardware: Hardware) -> RlctlError | None:
    """Why this machine cannot evaluate: only the engine counts."""
    generation, world = resolved.recipe.policy.generation, resolved.layout.world
    size = generation.vllm_cfg.tensor_parallel_size if generation.backend == "vllm" else 1
    if world % size:
        return RlctlError(
            f"engines of {size} processes (policy.generation.vllm_cfg.tensor_parallel_size) do not divide {world}",
            f"set it to 1, or use {size} processes",
            exit_status=ENVIRONMENT,
        )
    full = needs.needs(resolved)
    each = full.memory.engine_weights + full.cache_bytes + needs.HOST_PROCESS_BYTES
    procs = resolved.recipe.cluster.procs
    return needs.refuse(resolved, replace(full, rank_bytes=each, node_bytes=each * (procs or 0)), hardware)


def open_directory(
    path: Path, resolved: Resolved, settings: Settings, *, hardware: Hardware, command: Sequence[str]
) -> bool:
    """Make the evaluation's directory, or take up an earlier one.

    Returns:
        Whether it holds results already.

    Raises:
        RlctlError: the directory is of something else, or of another evaluation; the first difference is named.
    """
    if not (path / SETTINGS_FILE).is_file():
        run_directory.create(path, resolved, hardware=hardware, command=command)
        write_whole(path / SETTINGS_FILE, json.dumps(asdict(settings), indent=2) + "\n")
        return False
    before = json.loads((path / SETTINGS_FILE).read_text()) | _flat(yaml.safe_load((path / "recipe.yaml").read_text()))
    now = asdict(settings) | _flat(compose.as_values(resolved.recipe))
    changed = [k for k in now if k not in before or (before[k] != now[k] and not k.startswith(("cluster.", "run_dir")))]
    if changed:
        key = changed[0]
        raise RlctlError(
            f"`{path}` holds an evaluation with {key} {before.get(key, 'unset')}, not {now[key]}",
            "repeat its command to go on, or give a new directory with `--run-dir`",
        )
    failure.clear(path / "logs")
    with (path / "command.txt").open("a") as commands:
        commands.write(shlex.join(command) + "\n")
    return (path / RESULTS_FILE).is_file()


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {k: v for name, part in values.items() for k, v in _flat(part, f"{prefix}{name}.").items()}
