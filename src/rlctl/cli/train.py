"""`rlctl train`: resolve, say what was resolved, and run or say why not."""

from __future__ import annotations

import json as json_
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli import options, output
from rlctl.errors import INTERRUPTED

if TYPE_CHECKING:
    from rlctl.cli.job import Job

EXAMPLES = """[bold]Examples[/bold]
rlctl train grpo --recipe smoke-tiny
rlctl train grpo --model smollm2-135m --backend megatron grpo.max_num_steps=5
rlctl train grpo --model llama-3.1-70b --backend megatron --dry-run
rlctl train grpo --recipe smoke-tiny --run-dir runs/my --resume auto
rlctl train grpo --model llama-3.1-70b --backend megatron --launcher slurm
rlctl train sft --model DIR data.train_path=conversations.jsonl
rlctl train grpo --model DIR data.train_path=my.jsonl env.reward=my_file.py:score"""


def train(  # noqa: PLR0913, PLR0917  one parameter an option
    context: typer.Context,
    algorithm: Annotated[
        str,
        typer.Argument(
            metavar="ALGORITHM", show_default=False, help="grpo, dapo, gspo, ...; sft and dpo learn from data."
        ),
    ],
    overrides: options.Overrides = None,
    recipe: options.Recipe = None,
    model: options.Model = None,
    backend: options.Backend = None,
    recipe_dir: options.RecipeDir = None,
    procs: options.Procs = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    launcher: options.Launcher = None,
    run_dir: options.RunDir = None,
    resume: options.Resume = "never",
    no_checks: Annotated[
        bool,
        typer.Option("--no-checks", metavar=options.FLAG, rich_help_panel="Job", help="Skip the start-up self-checks."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", metavar=options.FLAG, rich_help_panel="Job", help="Go on although the plan says: out of memory."
        ),
    ] = False,
    dry_run: Annotated[
        Literal["plan", "build"] | None,
        typer.Option(
            metavar="[=build]",
            rich_help_panel="Output",
            show_default=False,
            help="Print what it resolves to; start nothing. =build: also build ranks at true size.",
        ),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Train a model by reinforcement learning."""
    from rlctl.cli import job  # hydra takes a third of the time that `--help` may take

    request = job.Request(
        algorithm=algorithm, overrides=overrides or (), recipe=recipe, model=model, backend=backend,
        recipe_dirs=recipe_dir or (), procs=procs, nodes=nodes, gpus_per_node=gpus_per_node, launcher=launcher,
        run_dir=run_dir, resume=resume, checks=False if no_checks else None, force=force,
    )  # fmt: skip
    prepared = job.prepare(request, arguments=context.obj)
    if dry_run:
        return _dry(prepared, json, build=dry_run == "build")
    return _run(prepared, json)


def _dry(job: Job, as_json: bool, *, build: bool) -> int:
    """Print the plan, and what was built; start nothing."""
    from rlctl.cli import report  # see `train`
    from rlctl.launch.task_check import check_task

    recipe = job.resolved.recipe
    if recipe.data.train_path is not None or recipe.env.reward is not None:
        check_task(recipe)

    ranks: list[dict[str, Any]] = []
    if build:
        from rlctl.plan.build import dry_build  # only here: its child process imports Megatron

        ranks = [vars(rank) for rank in dry_build(recipe)]
    if as_json:
        output.document(job.plan | ({"built": ranks} if build else {}))
    else:
        refused = ["", f"refused here: {job.refused.message}"] if job.refused else []
        theirs = [f"note     {line}" for line in job.plan.get("nemo_rl", [])]
        output.data(
            "\n".join([report.text(job.plan), *theirs, *report.derived(job.plan), *report.built(ranks), *refused])
        )
    return 0


def _run(job: Job, as_json: bool) -> int:
    """Start the job here, or say why not."""
    from rlctl import console  # see `train`
    from rlctl.cli import report
    from rlctl.launch import commands, env, local, slurm
    from rlctl.launch.task_check import check_task

    if job.refused is not None:
        if not as_json:
            output.note(report.text(job.plan) + "\n")
        raise output.Refusal(job.refused, job.plan)
    if job.start is not None and job.start.finished:
        return _finished(job, job.start.step, as_json)
    cluster = job.resolved.recipe.cluster

    def create() -> None:
        check_task(job.resolved.recipe)
        job.create()
        for line in job.plan.get("nemo_rl", []):
            output.note(f"note     {line}")
        resumes = f", which has {job.start.step} steps" if job.start else ""
        output.note(f"{report.summary(job.plan)}\n{'run':<9}{job.run_dir}{resumes}")

    if cluster.launcher == "env":
        env.run(job.run_dir, create=create)
    if cluster.launcher == "slurm":
        slurm.check(job.resolved.recipe)
        if not slurm.in_allocation():
            return _submit(job, create, as_json)
    create()
    if cluster.launcher == "slurm":
        status = slurm.run(job.run_dir, job.resolved.recipe)
    else:
        processes = cluster.gpus_per_node or cluster.procs
        assert processes is not None
        status = local.run(
            job.run_dir,
            processes=processes,
            has_gpus=cluster.gpus_per_node is not None,
            stall_seconds=cluster.stall_timeout_seconds,
            live=console.wanted(job.resolved.recipe.logger.console),
        )
    if as_json:
        output.document({"run_dir": str(job.run_dir), "exit_status": status, "last_step": _last_step(job.run_dir)})
    elif status == INTERRUPTED:
        output.note(f"to go on: {commands.resume(job.run_dir, job.arguments)}")
    return status


def _submit(job: Job, create: Callable[[], None], as_json: bool) -> int:
    """Hand the job to Slurm, and say how to watch it."""
    from rlctl.launch import commands, slurm  # see `train`

    slurm.test_submission(job.resolved.recipe, job.run_dir)
    create()
    number = slurm.submit(job.resolved.recipe, job.run_dir, commands.job(job.run_dir, job.arguments))
    if as_json:
        output.document({"run_dir": str(job.run_dir), "exit_status": 0, "slurm_job_id": number})
    else:
        log = job.run_dir / "logs" / f"slurm-{number}.out"
        output.data(number)
        output.note(f"job {number} is submitted; watch it: squeue --jobs={number}, tail -f {log}")
    return 0


def _finished(job: Job, steps: int, as_json: bool) -> int:
    if as_json:
        output.document({"run_dir": str(job.run_dir), "exit_status": 0, "last_step": _last_step(job.run_dir)})
    else:
        output.note(f"the run in {job.run_dir} is finished: {steps} steps; to go on, raise grpo.max_num_steps")
    return 0


def _last_step(run_dir: Path) -> dict[str, Any] | None:
    """The last line of metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return json_.loads(lines[-1]) if lines else None
