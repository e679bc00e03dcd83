"""`rlctl eval` until workers start: what is evaluated, on which task, where the samples go.

1. A target is a run (a checkpoint of it or its exported model, and its recipe), or a model by name or directory.
2. Each task becomes a resolved job of its own. No policy is built, so the training layout of the recipe is set aside.
3. The directory gets recipe.yaml and eval.json, or is an earlier evaluation that is the same and goes on.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlctl import plugins
from rlctl.checkpoint import train_state
from rlctl.device import Hardware
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.eval import EXPORT_FILE, HF, RESULTS_FILE, SETTINGS_FILE, Settings, write_whole
from rlctl.launch import failure, local, needs, run_directory
from rlctl.recipe import compose
from rlctl.recipe.derive import Resolved
from rlctl.report.run import Run

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
    """What is evaluated, e.g. Target(model="runs/a/hf", recipe="runs/a/recipe.yaml", run=Path("runs/a"), step=40)."""

    model: str
    recipe: str | None
    """The run's own."""
    run: Path | None
    step: int | None
    """Of the run."""
    why: str = ""
    """How the step was chosen, for people."""


def find_target(text: str, checkpoint: str | None) -> Target:
    """The model behind MODEL_OR_RUN. A checkpoint's may have to be exported first: see `export`.

    Args:
        text: a run directory, else what `--model` takes.
        checkpoint: of a run: `last`, `best` or a step; None = last.

    Raises:
        RlctlError: the run has no such checkpoint, or a model is asked for one.
    """
    run = Path(text)
    if not (run / "recipe.yaml").is_file():
        if checkpoint is not None:
            raise RlctlError(
                f"`--checkpoint {checkpoint}` is for runs, and `{text}` is none",
                "leave it out, or give a run directory",
            )
        if (inside := re.fullmatch(r"(.+)/checkpoints/step_0*(\d+)/?", text)) and run.is_dir():
            raise RlctlError(f"`{text}` is a checkpoint of a run", f"write `{inside[1]} --checkpoint {inside[2]}`")
        return Target(model=text, recipe=None, run=None, step=None)
    if (run / SETTINGS_FILE).is_file():
        raise RlctlError(f"`{text}` is an evaluation, not a run", f"evaluate what it did: {_target_of(run)}")
    models = _models(run)
    if not models:
        raise RlctlError(
            f"run `{text}` has no checkpoint and no exported model",
            "let it save one (checkpointing.save_period), or let it end with checkpointing.save_hf on",
        )
    step, why = _chosen(run, models, checkpoint or "last")
    return Target(model=str(models[step]), recipe=str(run / "recipe.yaml"), run=run, step=step, why=why)


def _target_of(folder: Path) -> str:
    return json.loads((folder / SETTINGS_FILE).read_text())["target"]


def _models(run: Path) -> dict[int, Path]:
    """Step -> its Hugging Face directory, which for a checkpoint may not be there yet."""
    found = {int(p.name[5:]): p / HF for p in train_state.complete(run)}
    if (run / HF / "config.json").is_file():
        found[Run(run).steps] = run / HF
    return dict(sorted(found.items()))


def _chosen(run: Path, models: dict[int, Path], checkpoint: str) -> tuple[int, str]:
    if checkpoint == "last":
        return max(models), "the last one"
    if checkpoint == "best":
        return _best(Run(run), list(models))
    if not re.fullmatch(r"\d+", checkpoint):
        raise RlctlError(f"`--checkpoint {checkpoint}` is no step", "give `last`, `best` or a number")
    if int(checkpoint) not in models:
        raise RlctlError(
            f"run `{run}` has no checkpoint of step {checkpoint}", f"steps that it has: {', '.join(map(str, models))}"
        )
    return int(checkpoint), "as asked"


def _best(run: Run, steps: Sequence[int]) -> tuple[int, str]:
    """By checkpointing.metric_name, else validation reward, else training reward; never one against the other."""
    options = run.recipe["checkpointing"]
    stated = [options["metric_name"]] if options["metric_name"] else ["val/reward", "rollout/reward"]
    for name in stated:
        sign = -1.0 if options["metric_name"] and not options["higher_is_better"] else 1.0
        scored = {step: value for step, value in run.series(name) if step in steps}
        if scored:
            best = max(scored, key=lambda s: (sign * scored[s], s))
            others = ", ".join(map(str, sorted(scored)))
            return best, f"best {name}: {scored[best]:.4g}, of steps {others}"
    raise RlctlError(
        f"run `{run.path}` logged no {' and no '.join(stated)} at a step that it kept ({', '.join(map(str, steps))})",
        "give a step: `--checkpoint N`",
    )


def export(target: Target, hardware: Hardware, *, launcher: str) -> None:
    """Make sure that a run's model is there: a checkpoint's is written into it, by as many processes as saved it.

    Raises:
        RlctlError: this machine cannot run the checkpoint's layout, or the job failed or was stopped.
    """
    folder = Path(target.model)
    if target.run is None or (folder / "config.json").is_file():
        return
    assert target.recipe is not None
    if launcher != "local":  # each of its processes would export
        raise RlctlError(
            f"step {target.step} of `{target.run}` is not exported, which `--launcher {launcher}` does not do",
            f"first, with the local launcher: rlctl eval {target.run} --checkpoint {target.step}",
        )
    recipe = compose.load_resolved(Path(target.recipe))
    gpus, procs = recipe.cluster.gpus_per_node, recipe.cluster.procs
    if recipe.cluster.num_nodes > 1 or (gpus or 0) > hardware.gpus:
        raise RlctlError(
            f"step {target.step} of `{target.run}` is not exported, and its checkpoint needs "
            f"{recipe.cluster.num_nodes} nodes with {gpus or procs} processes each, as it was saved",
            "evaluate where it was trained, or an exported model: `hf/` of a run that ended",
            exit_status=ENVIRONMENT,
        )
    job = target.run / "eval" / f"export_{folder.parent.name}"
    (job / "logs").mkdir(parents=True, exist_ok=True)
    write_whole(job / run_directory.RECIPE, Path(target.recipe).read_text())
    write_whole(job / EXPORT_FILE, json.dumps({"checkpoint": str(folder.parent)}) + "\n")
    processes = gpus or procs
    assert processes is not None
    status = local.run(job, processes=processes, has_gpus=gpus is not None)
    if status:
        raise RlctlError("interrupted", "give the same line again", exit_status=status)
    shutil.rmtree(job)


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
