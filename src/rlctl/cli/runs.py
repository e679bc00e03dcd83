"""`rlctl runs`: list run directories, show one, make a report, page through its samples; without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli import options, output
from rlctl.errors import RlctlError
from rlctl.report.text import printable

if TYPE_CHECKING:
    from rlctl.report.run import Run

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="List, show and report runs; read their samples.",
    epilog="Example: [bold]rlctl runs report runs/smoke-tiny-20260101-120000[/bold]",
)  # fmt: skip
RunDir = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="A run directory.")]
_SUMMARY = ("rollout/reward", "val/reward", "train/loss", "train/grad_norm", "train/kl", "train/entropy",
            "mismatch/token_mult_prob_error", "rollout/response_length", "time/step_seconds")  # fmt: skip


@app.command("list", epilog="Example: [bold]rlctl runs list[/bold]")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs"),
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """List the runs below a directory, newest first."""
    from rlctl.report import run as runs  # see cli/train.py

    if not folder.is_dir():
        raise RlctlError(f"no directory `{folder}`", "runs are made there by `rlctl train`; or name another directory")
    rows, unreadable = [], []
    for run in runs.find_runs(folder):
        try:
            rows.append(_row(run, folder))
        except RlctlError as error:
            unreadable.append(error.message)
    for message in unreadable:
        output.note(f"left out: {message}")
    if json:
        output.document(rows)
    elif rows:
        output.data(_table(rows))
    else:
        output.note(f"no runs in {folder}")
    return 0


def _row(run: Run, folder: Path) -> dict[str, Any]:
    newest = run.newest(["step", "rollout/reward", "val/reward"])
    return {
        "run": str(run.path.relative_to(folder)),
        "status": run.status,
        "steps": round(newest["step"] or 0),
        "reward": newest["rollout/reward"],
        "validation": newest["val/reward"],
        "model": run.recipe["policy"]["model_name"],
        "task": run.recipe["env"]["name"],
        "started": time.strftime("%Y-%m-%d %H:%M", time.gmtime((run.path / "recipe.yaml").stat().st_mtime)),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [list(rows[0]), *([_cell(v) for v in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command(epilog="Example: [bold]rlctl runs show runs/smoke-tiny-20260101-120000[/bold]")
def show(run_dir: RunDir, json: options.Json = False, debug: options.Debug = False) -> int:
    """Say how a run stands: did it learn, is it healthy, what is slow."""
    from rlctl.report import findings, page  # see cli/train.py
    from rlctl.report.run import open_run

    run = open_run(run_dir)
    answers = [findings.learned(run), findings.healthy(run), findings.mismatch(run), findings.slow(run)]
    last = {name: run.last(name) for name in _SUMMARY if run.last(name) is not None}
    if json:
        output.document({
            "run": str(run.path), "status": run.status, "steps": run.steps, "planned_steps": run.planned_steps,
            "error": run.error, "damaged": run.damaged, "last": last,
            "answers": {a.question: a.text for a in answers},
            "checks": [vars(c) for c in findings.checks(run)], "start_checks": run.start_checks,
            "commands": run.commands,
            "changed": {key: value for key, value, _ in run.changed},
        })  # fmt: skip
        return 0
    lines = [f"{'run':<10}{run.path}", f"{'status':<10}{run.status}, {run.steps} of {run.planned_steps} steps"]
    lines += [f"{'command' if i == 0 else 'then':<10}{c}" for i, c in enumerate(run.commands)]
    lines += ["", *(f"{a.question} {a.text}" for a in answers)]
    lines += ["", *(f"  {name:<32}{_cell(value)}" for name, value in last.items())]
    lines += [f"  left out: {line}" for line in _few(run.damaged)]
    lines += ["", f"{'again':<10}{page.rerun_line(run)}", f"{'report':<10}rlctl runs report {run.path}"]
    output.data("\n".join(lines))
    return 0


@app.command(epilog="Example: [bold]rlctl runs report runs/first runs/second --out both.html[/bold]")
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN...", show_default=False, help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: report.html of the run; comparison.html here for several."),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Write one HTML page on a run, or one that lays several over each other; prints its path."""
    from rlctl.report import compare, page  # see cli/train.py
    from rlctl.report.run import open_run

    runs = [open_run(path) for path in run_dirs]
    try:
        if len(runs) == 1:
            written = page.write(runs[0], out)
        else:
            written = compare.write_comparison(runs, out or Path("comparison.html"))
    except OSError as error:
        raise RlctlError(
            f"cannot write the report: {error}", "give another file with `--out`", exit_status=1
        ) from error
    if json:
        output.document({"report": str(written), "runs": [str(run.path) for run in runs]})
    else:
        output.data(str(written))
    return 0


@app.command(epilog="Example: [bold]rlctl runs rollouts RUN --step 10 --sort -reward --limit 3[/bold]")
def rollouts(  # noqa: PLR0913, PLR0917  one parameter an option
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(metavar="N", help="Default: the last one with samples.")] = None,
    validation: Annotated[bool, typer.Option("--validation", metavar=options.FLAG, help="Held-out samples.")] = False,
    sort: Annotated[
        Literal["reward", "-reward", "tokens", "-tokens", "group"], typer.Option(help="Order; - is descending.")
    ] = "group",
    min_reward: Annotated[float | None, typer.Option(metavar="R", help="At least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(metavar="R", help="At most this reward.")] = None,
    group: Annotated[int | None, typer.Option(metavar="N", help="Of this prompt of the step.")] = None,
    contains: Annotated[str | None, typer.Option(metavar="TEXT", help="In the response or the prompt.")] = None,
    invalid: Annotated[
        bool, typer.Option("--invalid", metavar=options.FLAG, help="Those without a reward, which are else left out.")
    ] = False,
    truncated: Annotated[
        bool, typer.Option("--truncated", metavar=options.FLAG, help="Those that the length limit cut off.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Samples on a page.")] = 5,
    page: Annotated[int, typer.Option(min=1, metavar="N", help="Which page.")] = 1,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Filter, sort and page through the samples of a step, or of an evaluation."""
    from rlctl.report.run import open_run, read_samples  # see cli/train.py

    run = open_run(run_dir)
    at, file = _samples_file(run, step, "validation" if validation else "rollouts")
    read = read_samples(file)
    chosen = [
        s for s in read.rows
        if s["valid"] != invalid
        and (s["truncated"] or not truncated)
        and (min_reward is None or (s["reward"] is not None and s["reward"] >= min_reward))
        and (max_reward is None or (s["reward"] is not None and s["reward"] <= max_reward))
        and (group is None or s["group"] == group)
        and (contains is None or contains in s["response"] or any(contains in m["content"] for m in s["prompt"]))
    ]  # fmt: skip
    key = {"reward": "reward", "tokens": "response_tokens", "group": "group"}[sort.removeprefix("-")]
    chosen.sort(key=lambda s: s[key] if s[key] is not None else 0.0, reverse=sort.startswith("-"))
    shown = chosen[(page - 1) * limit : page * limit]
    if json:
        output.document({
            "step": at, "file": str(file), "matching": len(chosen), "page": page, "samples": shown,
            "damaged": read.damaged,
        })  # fmt: skip
        return 0
    output.data("\n\n".join(_sample(s) for s in shown) if shown else "no sample matches")
    for line in _few(read.damaged):
        output.note(f"left out: {line}")
    output.note(_foot(file, page=page, pages=max(1, -(-len(chosen) // limit)), matching=len(chosen)))
    return 0


def _foot(file: Path, *, page: int, pages: int, matching: int) -> str:
    beyond = page > pages
    following = f"; next: --page {page + 1}" if page < pages else ""
    return f"\n{file}: page {page} of {pages}{' (beyond the last)' * beyond}, {matching} samples match{following}"


def _few(lines: list[str], most: int = 5) -> list[str]:
    """The first ones, and how many more."""
    return lines if len(lines) <= most else [*lines[:most], f"{len(lines) - most} more"]


def _samples_file(run: Run, step: int | None, kind: Literal["rollouts", "validation"]) -> tuple[int | None, Path]:
    """The step and its dump; for an evaluation, its samples.

    Raises:
        RlctlError: there is none.
    """
    if (run.path / "samples.jsonl").is_file():
        return None, run.path / "samples.jsonl"
    dumps = run.dumps(kind)
    if not dumps:
        key = "logger.rollouts_period" if kind == "rollouts" else "grpo.val_period"
        raise RlctlError(f"`{run.path}` has no {kind} samples", f"they are written when {key} is above 0")
    chosen = max(dumps) if step is None else step
    if chosen not in dumps:
        steps = list(dumps)
        few = ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-3:]]))
        raise RlctlError(f"`{run.path}` has no {kind} samples of step {chosen}", f"steps with samples: {few}")
    return chosen, dumps[chosen]


def _sample(sample: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample["reward_parts"].items())
    reward = f"reward {sample['reward']:.4g} ({parts})" if sample["valid"] else f"no reward: {sample['error']}"
    cut = ", cut off" if sample["truncated"] else ""
    head = f"prompt {sample['group']}, sample {sample['sample']}: {reward}, {sample['response_tokens']} tokens{cut}"
    turns = [f"{m['role']}: {m['content']}" for m in sample["prompt"]]
    return "\n".join([output.bold(printable(head)), *map(printable, turns), f"-> {printable(sample['response'])}"])
