"""`rlctl eval`: mean reward and pass@k of a model on held-out prompts, with every sample in a file."""

from __future__ import annotations

import json as json_
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli import options, output
from rlctl.errors import RlctlError

if TYPE_CHECKING:
    from rlctl.cli.job import Request
    from rlctl.config import Recipe
    from rlctl.launch.evaluation import Target

EXAMPLES = """[bold]Examples[/bold]
rlctl eval runs/smoke-tiny-20260101-120000
rlctl eval smollm2-135m --tasks arithmetic --samples 8
rlctl eval smollm2-135m --tasks reasoning_gym:chain_sum,arithmetic --procs 2
rlctl eval MY_MODEL --recipe my.yaml data.val_path=held_out.jsonl"""


def evaluate(  # noqa: PLR0913, PLR0917  one parameter an option
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", show_default=False, help="A run directory, or what --model takes.")
    ],
    overrides: options.Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", rich_help_panel="Job", help="Recipe with the task; a run brings its own."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", rich_help_panel="Job", help="Tasks, e.g. arithmetic.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="K", rich_help_panel="Job", help="Samples of each prompt.")
    ] = 1,
    pass_reward: Annotated[
        float, typer.Option(metavar="R", rich_help_panel="Job", help="A sample with this reward or more is correct.")
    ] = 1.0,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="last|best|STEP", rich_help_panel="Job", help="Which step of a run that it saved. Default: last."
        ),
    ] = None,
    recipe_dir: options.RecipeDir = None,
    procs: options.Procs = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    launcher: options.Launcher = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel="Output", help="A new directory, or that of an evaluation that shall go on."
        ),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Measure a model on held-out prompts: mean reward and pass@k with 95 % intervals."""
    from rlctl import device  # see cli/train.py
    from rlctl.cli import job
    from rlctl.launch import evaluation

    found = evaluation.find_target(target, checkpoint)
    chosen = [t.strip() for t in tasks.split(",")] if tasks is not None else []
    if not chosen and recipe is None and found.recipe is None and not _names_task(overrides or []):
        raise RlctlError(
            f"`{target}` is a model, and no task is named",
            f"give `--tasks` ({evaluation.known_tasks()}), or `--recipe`",
        )
    if found.step is not None:
        output.note(f"step     {found.step}, {found.why}")
        evaluation.export(found, device.probe(), launcher=launcher or "local")
    parent = run_dir or _default_directory(found)
    here = [] if gpus_per_node is not None else ["cluster.gpus_per_node=null"]  # where it trained is no matter
    results: list[dict[str, Any]] = []
    for task in chosen or (None,):
        request = job.Request(
            algorithm="", overrides=[*(overrides or ()), *evaluation.OVERRIDES, *here, *_settings(task)],
            recipe=recipe or found.recipe, model=found.model, recipe_dirs=recipe_dir or (),
            procs=procs, nodes=nodes or 1, gpus_per_node=gpus_per_node, launcher=launcher or "local",
            run_dir=parent / task.replace(":", "-") if task is not None and len(chosen) > 1 else parent,
        )  # fmt: skip
        settings = {"target": target, "samples": samples, "pass_reward": pass_reward, "step": found.step}
        results.append(_one(request, settings, arguments=context.obj))
        if not json:
            output.data(text(results[-1]))
    if json:
        output.document({"run_dir": str(parent), "results": results})
    return 0


def _settings(task: str | None) -> list[str]:
    from rlctl.launch import evaluation  # see cli/train.py

    return [] if task is None else evaluation.task_overrides(task)


def _names_task(overrides: list[str]) -> bool:
    return any(o.lstrip("+").startswith(("env.name=", "env.reward=")) for o in overrides)


def _default_directory(target: Target) -> Path:
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return target.run / "eval" / now if target.run else Path("runs") / f"eval-{Path(target.model).name}-{now}"


def _one(request: Request, settings: dict[str, Any], *, arguments: list[str]) -> dict[str, Any]:
    """Evaluate one task, and read its results.

    Raises:
        RlctlError: something is wrong with the request, or the job failed or was stopped.
    """
    from dataclasses import replace

    from rlctl import device  # see cli/train.py
    from rlctl.algorithms.base import source
    from rlctl.cli import job
    from rlctl.eval import RESULTS_FILE, SETTINGS_FILE, Settings
    from rlctl.launch import env, evaluation, slurm
    from rlctl.launch.task_check import check_task
    from rlctl.recipe import compose, derive, find

    folders = find.directories(request.recipe_dirs)
    algorithm = "grpo" if request.recipe is None else compose.algorithm_of(request.recipe, folders)
    if source(algorithm) != "rollouts":
        raise RlctlError(
            f"a recipe of `{algorithm}` has no task to evaluate",
            "give one: `--tasks arithmetic`, or another `--recipe`",
        )
    hardware = device.probe()
    resolved = derive.derive(job.compose_request(replace(request, algorithm=algorithm)), hardware)
    recipe, run_dir = resolved.recipe, request.run_dir
    assert recipe.env.name is not None
    assert run_dir is not None
    refused = evaluation.refuse(resolved, hardware)
    if refused is not None:
        raise refused
    if recipe.cluster.launcher == "slurm":
        slurm.check(recipe)
        slurm.need_allocation("eval")
    check_task(recipe)
    made = Settings(task=_task_name(recipe.env.name, recipe.env.options), **settings)

    def create() -> bool:
        return evaluation.open_directory(run_dir, resolved, made, hardware=hardware, command=["rlctl", *arguments])

    if recipe.cluster.launcher == "env":
        env.run(run_dir, create=create, last_file=SETTINGS_FILE)
    if not create():
        output.note(f"samples  {run_dir / 'samples.jsonl'}")
        status = _start(recipe, run_dir)
        if status:
            raise RlctlError("interrupted", f"go on with the same line and `--run-dir {run_dir}`", exit_status=status)
    return json_.loads((run_dir / RESULTS_FILE).read_text()) | {"run_dir": str(run_dir)}


def _start(recipe: Recipe, run_dir: Path) -> int:
    """Run the workers; their exit status."""
    from rlctl.launch import local, slurm  # see cli/train.py

    if recipe.cluster.launcher == "slurm":
        return slurm.run(run_dir, recipe)
    processes = recipe.cluster.gpus_per_node or recipe.cluster.procs
    assert processes is not None
    return local.run(
        run_dir,
        processes=processes,
        has_gpus=recipe.cluster.gpus_per_node is not None,
        stall_seconds=recipe.cluster.stall_timeout_seconds,
    )


def _task_name(environment: str, options_: Any) -> str:
    task = getattr(options_, "task", None)
    return f"{environment}:{task}" if task else environment


def text(results: dict[str, Any]) -> str:
    """The results for people."""
    rows = [
        ("model", results["target"] + ("" if results["step"] is None else f", step {results['step']}")),
        ("task", results["task"]),
        ("samples", f"{results['samples']} of each of {results['prompts']} held-out prompts"),
        ("reward", _interval(results["reward"])),
    ]
    parts = results["reward_parts"]
    rows += [(f"  {name}", f"{value:.4f}") for name, value in parts.items() if len(parts) > 1]
    correct = f"   correct: reward at least {results['pass_reward']:g}"
    rows += [(f"pass@{k}", _interval(e) + (correct if k == "1" else "")) for k, e in results["pass_at_k"].items()]
    rows.append(("length", f"{results['response_tokens']:.0f} tokens, {results['truncated_share']:.0%} cut"))
    if results["invalid"]:
        rows.append(("invalid", f"{results['invalid']} samples without a reward, left out"))
    rows.append(("files", results["run_dir"]))
    return "\n".join(f"{label:<9}{value}" for label, value in rows)


def _interval(estimate: dict[str, Any]) -> str:
    return f"{estimate['value']:.4f}   95 % [{estimate['low']:.4f}, {estimate['high']:.4f}], {estimate['method']}"
