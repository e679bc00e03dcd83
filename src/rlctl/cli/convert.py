"""`rlctl convert`: Hugging Face to Megatron and back, verification and inspection, on any CPU host."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli import options, output
from rlctl.errors import RlctlError

if TYPE_CHECKING:
    from rlctl.checkpoint.convert import Conversion, Options
    from rlctl.checkpoint.fit import Plan
    from rlctl.checkpoint.logits import Logits

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Convert models between Hugging Face and Megatron.",
    epilog="""[bold]Examples[/bold]
rlctl convert hf-to-mcore smollm2-135m smollm2-megatron
rlctl convert mcore-to-hf smollm2-megatron smollm2-hf
rlctl convert verify smollm2-megatron smollm2-hf
rlctl convert inspect smollm2-megatron""",
)  # fmt: skip
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_LINE_SECONDS = 10.0  # between two lines of progress, where there is no terminal

Source = Annotated[str, typer.Argument(metavar="SRC", show_default=False, help="The model; a directory, or a name.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="SRC", show_default=False, help="A Megatron checkpoint.")]
Target = Annotated[Path, typer.Argument(metavar="DST", show_default=False, help="A directory that is new or empty.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(rich_help_panel="Conversion", help="Cast weights. Default: as they are."),
]
GoOn = Annotated[
    bool, typer.Option("--resume", metavar=options.FLAG, rich_help_panel="Conversion", help="Go on with DST.partial.")
]
Verify = Annotated[
    Literal["none", "tensors", "logits"],
    typer.Option(
        rich_help_panel="Conversion",
        help="tensors: read the result back and compare every bit; logits: also run both models.",
    ),
]
Workers = Annotated[
    int,
    typer.Option(min=1, rich_help_panel="Conversion", help="Tensors in memory at once: one is written, others read."),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", rich_help_panel="Conversion", show_default=False, help="Refuse what needs more, e.g. 4GB."
    ),
]  # fmt: skip
DryRun = Annotated[
    Literal["plan"] | None,
    typer.Option(
        "--dry-run", metavar=options.FLAG, rich_help_panel="Conversion", help="Say what it needs; write nothing."
    ),
]  # fmt: skip


@app.command(epilog="Example: [bold]rlctl convert hf-to-mcore smollm2-135m smollm2-megatron[/bold]")
def hf_to_mcore(  # noqa: PLR0913, PLR0917  one parameter an option
    source: Source,
    target: Target,
    dtype: Dtype = None,
    resume: GoOn = False,
    verify: Verify = "tensors",
    workers: Workers = 2,
    max_memory: MaxMemory = None,
    dry_run: DryRun = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Write a model as a Megatron checkpoint, loadable at any layout."""
    # deferred, here and below: what loads torch
    from rlctl.checkpoint.convert import Options
    from rlctl.models.materialize import materialize
    from rlctl.models.resolve import resolve

    asked = Options(
        to="mcore", dtype=dtype, resume=resume, verify=verify, workers=workers, max_memory_bytes=_size(max_memory)
    )
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = materialize(resolve(source), progress=output.note)
    return _convert(folder, target, asked, dry_run=dry_run is not None, as_json=json)


@app.command(epilog="Example: [bold]rlctl convert mcore-to-hf smollm2-megatron smollm2-hf[/bold]")
def mcore_to_hf(  # noqa: PLR0913, PLR0917  one parameter an option
    source: Checkpoint,
    target: Target,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel="Conversion", show_default=False,
            help="Directory with config.json and tokenizer, for a checkpoint that `convert` did not make.",
        ),
    ] = None,
    dtype: Dtype = None,
    resume: GoOn = False,
    verify: Verify = "tensors",
    workers: Workers = 2,
    max_memory: MaxMemory = None,
    dry_run: DryRun = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:  # fmt: skip
    """Write a Megatron checkpoint as a Hugging Face model."""
    from rlctl.checkpoint.convert import Options

    asked = Options(
        to="hf", dtype=dtype, like=like, resume=resume, verify=verify, workers=workers,
        max_memory_bytes=_size(max_memory),
    )  # fmt: skip
    return _convert(source, target, asked, dry_run=dry_run is not None, as_json=json)


@app.command(epilog="Example: [bold]rlctl convert verify smollm2-megatron smollm2-hf[/bold]")
def verify(
    first: Annotated[Path, typer.Argument(metavar="A", show_default=False, help="A model in either format.")],
    second: Annotated[
        Path | None,
        typer.Argument(metavar="[B]", show_default=False, help="Another. Default: what the conversion of A recorded."),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Compare two models, or a converted one with its record, tensor by tensor and bit by bit."""
    from rlctl.checkpoint import verify as check
    from rlctl.checkpoint.views import fingerprint, open_view

    view = open_view(first)
    if second is None:
        found = check.against_manifest(view)
    else:
        other = open_view(second)
        found = check.tensors_of(view)
        check.compare(found, check.tensors_of(other), here=str(first), there=str(second))
    value = {"equal": True, "tensors": len(found), "fingerprint": fingerprint(found)}
    if json:
        output.document(value)
    else:
        output.data(f"equal: {len(found)} tensors, fingerprint {value['fingerprint']}")
    return 0


@app.command(epilog="Example: [bold]rlctl convert inspect smollm2-megatron[/bold]")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", show_default=False, help="A model in either format.")],
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Say what a directory holds, from its headers."""
    from rlctl.checkpoint.inspect import describe
    from rlctl.checkpoint.views import open_view

    value = describe(open_view(path))
    if json:
        output.document(value)
    else:
        _table({k: v for k, v in value.items() if k != "tensors"})
    return 0


def _convert(source: Path, target: Path, asked: Options, *, dry_run: bool, as_json: bool) -> int:
    from rlctl.checkpoint.convert import Conversion

    conversion = Conversion(source, target, asked)
    plan = conversion.plan
    if dry_run:
        _tell_plan(conversion, as_json)
        conversion.check_fit()
        return 0
    start = time.monotonic()
    report = _with_progress(conversion, plan)
    seconds = time.monotonic() - start
    value: dict[str, Any] = {
        "target": plan.target, "tensors": plan.num_tensors, "bytes": plan.write_bytes,
        "fingerprint": report.fingerprint,
        "verified": report.verified, "up_to_date": report.up_to_date, "resumed_tensors": report.resumed_tensors,
        "logits": None if report.logits is None else vars(report.logits),
        "casts": report.casts, "cast_error": report.cast_error, "special": list(plan.special), "seconds": seconds,
    }  # fmt: skip
    if as_json:
        output.document(value)
    else:
        rate = f"{seconds:.1f} ({plan.write_bytes / max(seconds, 1e-9) / 1e6:,.0f} MB/s)"
        value |= {"bytes": f"{plan.write_bytes:,}", "seconds": rate, "logits": _logits_line(report.logits)}
        _table({k: v for k, v in value.items() if v not in (0, 0.0, [], False, None)})
    return 0


def _with_progress(conversion: Conversion, plan: Plan) -> Any:
    """A bar on a terminal, else a line from time to time."""
    if not sys.stderr.isatty():
        return conversion.run(_lines(plan.read_bytes))
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, num_bytes: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=plan.write_bytes)
            bar.advance(tasks[what], num_bytes)

        return conversion.run(show)


def _lines(total: int) -> Callable[[str, int], None]:
    done: dict[str, int] = {}
    told = time.monotonic()

    def show(what: str, num_bytes: int) -> None:
        nonlocal told
        done[what] = done.get(what, 0) + num_bytes
        if time.monotonic() - told > _LINE_SECONDS:
            told = time.monotonic()
            output.note(f"{what}: {done[what] / 1e9:.1f} of {total / 1e9:.1f} GB")

    return show


def _tell_plan(conversion: Conversion, as_json: bool) -> None:
    from rlctl.checkpoint import fit

    plan = conversion.plan
    speed = fit.measure(conversion.view, conversion.target_dir)
    seconds = None if speed is None else speed.seconds(plan, verify=conversion.options.verify != "none")
    if as_json:
        measured = None if speed is None else vars(speed)
        output.document(dataclasses.asdict(plan) | {"bytes_per_second": measured, "seconds": seconds})
        return
    _table({
        "source": plan.source, "target": plan.target, "model type": plan.model_type, "tensors": plan.num_tensors,
        "bytes read": f"{plan.read_bytes:,}", "bytes written": f"{plan.write_bytes:,}",
        "disk free": f"{plan.free_disk_bytes:,}", "peak memory": f"{plan.peak_memory_bytes:,} (for {plan.largest})",
        "memory free": f"{plan.free_memory_bytes:,}",
        "time": "unknown: the target's folder cannot be written" if speed is None or seconds is None else
        f"{seconds:,.0f} s (reads {speed.read / 1e6:,.0f} MB/s, writes {speed.write / 1e6:,.0f} MB/s, measured now)",
        "special": "; ".join(plan.special) or "nothing",
    })  # fmt: skip


def _logits_line(found: Logits | None) -> str | None:
    if found is None:
        return None
    which = "whole model" if found.layers == found.of_layers else f"first {found.layers} of {found.of_layers} layers"
    return f"{which}, {found.tokens} tokens: equal within {found.error:.1e}"


def _table(value: dict[str, Any]) -> None:
    width = max(map(len, value))
    for name, shown in value.items():
        text = "; ".join(map(str, shown)) if isinstance(shown, list) else shown
        output.data(f"{name:<{width}}  {text}")


def _size(text: str | None) -> int | None:
    """`4GB`, `500M` or bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise RlctlError(f"`--max-memory {text}` is no size", "write e.g. 4GB, 500MB, or bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])
