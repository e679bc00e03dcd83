"""`rlctl bench`: training backends on the same recorded tokens. `bench A=B ...` means `bench run A=B ...`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli import options, output, simulate
from rlctl.errors import CHECK_FAILED, RlctlError

if TYPE_CHECKING:
    from rlctl.cli.job import Request
    from rlctl.launch.bench import Settings
    from rlctl.recipe.derive import Resolved

EXAMPLES = """[bold]Examples[/bold]
rlctl bench --compare dtensor,megatron --recipe smoke-tiny --parity-only
rlctl bench --compare dtensor,megatron --recipe smoke-tiny --steps 5 --repeats 3
rlctl bench --compare megatron --sweep recompute,packing --recipe smoke-tiny
rlctl bench --simulate --compare dtensor,megatron --model llama-3.1-70b --gpus 64 --gpu h100
rlctl bench compare before/report.json after/report.json --fail-over 5%"""
BACKENDS = ("dtensor", "megatron")
KNOBS = ("packing", "recompute", "tp", "micro_batch")

_JOB, _OUTPUT = "Job", "Output"
Compare = Annotated[str, typer.Option(metavar="A,B", rich_help_panel=_JOB, help="Backends: dtensor, megatron.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SIDE:key=value", rich_help_panel=_JOB, help="A recipe key of one side.", show_default=False
    ),
]
NumSteps = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=_JOB, help="Steps of each start.")]
NumRepeats = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=_JOB, help="Starts of each side.")]
Warmup = Annotated[int, typer.Option(min=0, metavar="N", rich_help_panel=_JOB, help="Steps dropped at each start.")]
ParityOnly = Annotated[
    bool, typer.Option("--parity-only", metavar=options.FLAG, rich_help_panel=_JOB, help="Stop after parity.")
]
TrainSteps = Annotated[
    int, typer.Option(min=0, metavar="N", rich_help_panel=_JOB, help="Also train so long, and compare the curves.")
]
Sweep = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", rich_help_panel=_JOB, help="What knobs cost one backend: packing, recompute, tp, micro_batch."
    ),
]
RolloutFile = Annotated[
    Path | None, typer.Option(metavar="FILE", rich_help_panel=_JOB, help="Replay these: rollouts.safetensors.")
]
LengthsFrom = Annotated[
    str | None,
    typer.Option(
        metavar="lognormal:M,S,CAP", rich_help_panel=_JOB, help="Random tokens, with response lengths drawn so."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", rich_help_panel=_OUTPUT, help="A new directory. Default: runs/bench-MODEL-TIME."),
]
KeepRecords = Annotated[
    bool,
    typer.Option(
        "--keep-records", metavar=options.FLAG, rich_help_panel=_OUTPUT, help="Keep each side's gradients and weights."
    ),
]

app = typer.Typer(no_args_is_help=True, help="Compare training backends on the same tokens.", epilog=EXAMPLES)


def normalized(arguments: Sequence[str]) -> list[str]:
    """`bench` without a verb is `bench run`."""
    if len(arguments) > 1 and arguments[0] == "bench" and arguments[1] not in ("run", "compare", "-h", "--help"):
        return ["bench", "run", *arguments[1:]]
    return list(arguments)


@app.command("run", epilog=EXAMPLES, no_args_is_help=True)
def run(  # noqa: PLR0913, PLR0917  one parameter an option
    context: typer.Context,
    overrides: options.Overrides = None,
    compare: Compare = "dtensor,megatron",
    recipe: options.Recipe = None,
    model: options.Model = None,
    set_: Set = None,
    steps: NumSteps = 5,
    repeats: NumRepeats = 3,
    warmup: Warmup = 1,
    parity_only: ParityOnly = False,
    train_steps: TrainSteps = 0,
    sweep: Sweep = None,
    rollouts: RolloutFile = None,
    lengths: LengthsFrom = None,
    recipe_dir: options.RecipeDir = None,
    procs: options.Procs = None,
    gpus_per_node: options.GpusPerNode = None,
    out: Out = None,
    keep_records: KeepRecords = False,
    simulate_: simulate.Simulate = False,
    gpus: simulate.Gpus = None,
    gpu: simulate.Gpu = None,
    response_tokens: simulate.ResponseTokens = None,
    prompt_tokens: simulate.PromptTokens = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Record rollouts once, check that backends agree on them, then time each; or predict it (`--simulate`)."""
    if simulate.check(context):
        return simulate.run(context.params, _backends(compare, None))
    from rlctl import device  # see cli/train.py
    from rlctl.cli import job
    from rlctl.launch import bench

    backends = _backends(compare, sweep)
    if rollouts is not None and lengths is not None:
        raise RlctlError("`--rollouts` and `--lengths` are both given", "keep one of them")
    request = job.Request(
        algorithm="", overrides=overrides or (), recipe=recipe, model=model, recipe_dirs=recipe_dir or (),
        procs=procs, gpus_per_node=gpus_per_node,
    )  # fmt: skip
    sides = _sides(request, backends, set_ or [])
    if sweep is not None:
        sides = _swept(request, backends[0], set_ or [], sweep, sides[backends[0]])
    name = str(next(iter(sides.values())).recipe.policy.model_name)
    settings = bench.Settings(
        out=out or Path("runs") / f"bench-{Path(name).name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}",
        steps=steps, repeats=repeats, warmup=warmup, parity_only=parity_only, train_steps=train_steps,
        rollouts=rollouts, lengths=lengths, judge_fairness=sweep is None, keep_records=keep_records,
        command=["rlctl", *context.obj],
    )  # fmt: skip
    _check_task(settings, next(iter(sides.values())))
    report = bench.Bench(sides, settings, device.probe(), output.note).run()
    return _finish(report, settings.out, as_json=json)


def _check_task(settings: Settings, resolved: Resolved) -> None:
    from rlctl.launch.task_check import check_task  # see cli/train.py

    if settings.lengths is not None:
        from rlctl.bench import replay  # torch

        replay.parse_lengths(settings.lengths)
    elif settings.rollouts is None:
        check_task(resolved.recipe)
    elif not settings.rollouts.is_file():
        raise RlctlError(f"there is no file `{settings.rollouts}`", "give a rollouts.safetensors of a benchmark")


def _finish(report: dict[str, Any], out: Path, *, as_json: bool) -> int:
    """Write and show the report; the exit status."""
    import json as json_

    from rlctl.bench import report as pages  # see cli/train.py

    (out / "report.json").write_text(json_.dumps(report, indent=2) + "\n")
    pages.write(report, out)
    if as_json:
        output.document(report | {"out": str(out)})
    else:
        _show(report, out)
    diverged = report["convergence"] is not None and report["convergence"]["diverged_at"] is not None
    return CHECK_FAILED if report["verdict"] != "COMPARABLE" or diverged else 0


def _show(report: dict[str, Any], out: Path) -> None:
    from rich.console import Console  # see cli/train.py
    from rich.markup import escape
    from rich.table import Table

    from rlctl.bench import report as pages

    console = Console(soft_wrap=True)
    for line in pages.head(report):
        console.print(line, markup=False, highlight=False)
    for one in pages.tables(report):
        table = Table(title=one.title, title_justify="left", caption=one.note or None, caption_justify="left")
        for i, column in enumerate(one.head):
            table.add_column(column, justify="left" if i == 0 or column in ("worst", "", "curves") else "right")
        for row in one.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    console.print(pages.verdict(report), markup=False, highlight=False, style="bold")
    output.note(f"report   {out / 'report.html'}")


def _backends(text: str, sweep: str | None) -> list[str]:
    """The sides that are asked for.

    Raises:
        RlctlError: an unknown one, one twice, or a number that makes no comparison.
    """
    named = [name.strip() for name in text.split(",")]
    for name in named:
        if name not in BACKENDS:
            raise RlctlError(f"`--compare {text}`: `{name}` is no backend", f"choose from {', '.join(BACKENDS)}")
    if len(set(named)) != len(named):
        raise RlctlError(f"`--compare {text}` names a backend twice", "name each once")
    if sweep is None and len(named) < 2:
        raise RlctlError(f"`--compare {text}` is one side", "name two, or ask for `--sweep` of one")
    if sweep is not None and len(named) != 1:
        raise RlctlError(f"`--sweep` is of one backend, `--compare {text}` names {len(named)}", "name one")
    return named


def _sides(request: Request, backends: Sequence[str], settings: Sequence[str]) -> dict[str, Resolved]:
    """Each backend's resolved job. A key of a backend's own section goes to its side only.

    Raises:
        RlctlError: something is wrong with a side, or it does not fit this machine.
    """
    own: dict[str, list[str]] = {name: [] for name in backends}
    for setting in settings:
        side, _, override = setting.partition(":")
        if side not in own or "=" not in override:
            raise RlctlError(
                f"`--set {setting}` is no setting of a side", f"write SIDE:key=value with SIDE {' or '.join(backends)}"
            )
        own[side].append(override)
    return {name: _resolve(request, name, own[name]) for name in backends}


def _resolve(request: Request, backend: str, more: Sequence[str]) -> Resolved:
    from dataclasses import replace

    from rlctl import device  # see cli/train.py
    from rlctl.cli import job
    from rlctl.launch import needs
    from rlctl.recipe import compose, derive, find

    other = "dtensor" if backend == "megatron" else "megatron"
    shared = [o for o in request.overrides if not re.match(rf"\+{{0,2}}policy\.{other}_cfg\.", o)]
    folders = find.directories(request.recipe_dirs)
    algorithm = "grpo" if request.recipe is None else compose.algorithm_of(request.recipe, folders)
    chosen = replace(request, algorithm=algorithm, backend=backend, overrides=[*shared, *more])
    hardware = device.probe()
    resolved = derive.derive(job.compose_request(chosen), hardware)
    refused = needs.refuse(resolved, needs.needs(resolved), hardware)
    if refused is not None:
        raise refused
    return resolved


def _swept(request: Request, backend: str, settings: Sequence[str], sweep: str, base: Resolved) -> dict[str, Resolved]:
    """The base, and a side for each knob that is turned."""
    own = [setting.partition(":")[2] for setting in settings]
    sides = {backend: base}
    for knob in (name.strip() for name in sweep.split(",")):
        override = _turned(knob, backend, base)
        value = override.partition("=")[2]
        sides[f"{backend} {knob}={value}"] = _resolve(request, backend, [*own, override])
    return sides


def _turned(knob: str, backend: str, base: Resolved) -> str:
    policy = base.recipe.policy
    degree = "tensor_model_parallel_size" if backend == "megatron" else "tensor_parallel_size"
    turned = {
        "packing": f"policy.sequence_packing.enabled={str(not policy.sequence_packing.enabled).lower()}",
        "recompute": f"policy.activation_checkpointing={str(not policy.activation_checkpointing).lower()}",
        "tp": f"policy.{backend}_cfg.{degree}={2 * base.layout.tp}",
        "micro_batch": f"policy.train_micro_batch_size={2 * policy.train_micro_batch_size}",
    }
    if knob not in turned:
        raise RlctlError(f"`--sweep`: `{knob}` is no knob", f"choose from {', '.join(KNOBS)}")
    return turned[knob]


@app.command(
    "compare", no_args_is_help=True, epilog="Example: rlctl bench compare before.json after.json --fail-over 5%"
)
def compare_reports(
    before: Annotated[Path, typer.Argument(metavar="A.json", show_default=False, help="The earlier report.json.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", show_default=False, help="The later one.")],
    fail_over: Annotated[
        str, typer.Option(metavar="SHARE", help="Growth of a median step that is a regression, e.g. 5% or 0.05.")
    ] = "5%",
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Compare a report with an earlier one; exit 4 if a side became slower."""
    from rlctl.bench import compare  # see cli/train.py

    share = _share(fail_over)
    found = compare.against(compare.load(before), compare.load(after), fail_over=share)
    if json:
        output.document(found)
    else:
        for name, one in found["sides"].items():
            mark = "SLOWER" if name in found["slower"] else "ok"
            output.data(f"{name:<10}{one['value']:.3f}   95 % [{one['low']:.3f}, {one['high']:.3f}]   {mark}")
        if found["not_comparable"]:
            output.data(f"NOT COMPARABLE: the reports differ in {', '.join(found['not_comparable'])}")
    return CHECK_FAILED if found["slower"] or found["not_comparable"] else 0


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text)
    if match is None:
        raise RlctlError(f"`--fail-over {text}` is no share", "write e.g. 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)
