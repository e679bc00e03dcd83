"""`rlctl plan`: memory and seconds of a job on GPUs that need not be here, and the best layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.cli import options, output
from rlctl.errors import ENVIRONMENT, RlctlError

EXAMPLES = """[bold]Examples[/bold]
rlctl plan --model llama-3.1-70b --gpus 64 --gpu h100
rlctl plan --model qwen3-30b-a3b --gpus 32 --gpu h100 policy.max_total_sequence_length=8192
rlctl plan --calibrate runs/bench-llama/report.json --write h100.yaml
rlctl plan --rows measured.csv --json"""


def plan(  # noqa: PLR0913, PLR0917  one parameter an option
    overrides: options.Overrides = None,
    model: options.Model = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel="Where it runs", help="GPUs, all together.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="KIND", rich_help_panel="Where it runs", help="a100-80gb, h100, h200, b200, gb200, ..."),
    ] = None,
    recipe: options.Recipe = None,
    backend: options.Backend = None,
    recipe_dir: options.RecipeDir = None,
    response_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel="Job", help="Mean response. Default: half of its limit."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel="Job", help="Mean prompt. Default: an eighth of the length."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel="Job", help="Predict every row of a CSV file of measurements."),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="REPORT",
            rich_help_panel="Own measurements",
            show_default=False,
            help="report.json of rlctl bench on GPUs, once or more: refine the constants.",
        ),
    ] = None,
    write: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            rich_help_panel="Own measurements",
            help="With --calibrate: the new profile. RLCTL_PLAN_PROFILE=FILE puts it to use.",
        ),
    ] = Path("plan-profile.yaml"),
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Predict memory and seconds of a job; start nothing."""
    if calibrate:
        if model or gpus or gpu or recipe or backend or overrides or rows:
            raise RlctlError("`--calibrate` takes everything from the reports", "leave the other options out")
        return _calibrate(calibrate, write, as_json=json)
    if rows is not None:
        if model or gpus or gpu or recipe or backend or overrides:
            raise RlctlError("`--rows` takes everything from the file", "leave the other options out")
        return _rows(rows, json)
    from rlctl.cli import plan_job  # hydra, see cli/train.py

    if gpu is None or gpus is None:
        absent = "--gpu" if gpu is None else "--gpus"
        raise RlctlError(f"`{absent}` is not given", "say what it runs on, e.g. `--gpus 64 --gpu h100`")
    answer = plan_job.answer(
        plan_job.Request(
            model=model, gpus=gpus, gpu=gpu, recipe=recipe, backend=backend, recipe_dirs=tuple(recipe_dir or ()),
            overrides=tuple(overrides or ()), response_tokens=response_tokens, prompt_tokens=prompt_tokens,
        )
    )  # fmt: skip
    fits = answer["given"]["fits"] if answer["given"] else bool(answer["best"])
    if json:
        output.document(answer)
    else:
        output.data(plan_job.text(answer))
    return 0 if fits else ENVIRONMENT


def _calibrate(reports: list[Path], file: Path, *, as_json: bool) -> int:
    from rlctl.bench import compare  # numpy
    from rlctl.plan import calibrate, profile
    from rlctl.plan.steptime import constants

    seen = [o for report in reports for o in calibrate.observations(compare.load(report), str(report))]
    refined = calibrate.refine(seen, constants())
    profile.write(
        file, refined, gpus=sorted({o.job.gpu.name for o in seen}), reports={str(r): r.read_bytes() for r in reports}
    )
    before, after = (calibrate.errors(seen, c) for c in (constants(), refined))
    rows = [
        {"what": o.what, "measured_seconds": o.seconds, "error_before": b, "error_after": a}
        for o, b, a in zip(seen, before, after, strict=True)
    ]
    if as_json:
        output.document({"profile": str(file), "observations": rows, "constants": vars(refined)})
        return 0
    output.data(f"{'phase':<32} {'measured':>10} {'shipped':>9} {'refined':>9}")
    for o, b, a in zip(seen, before, after, strict=True):
        output.data(f"{o.what:<32} {o.seconds:>8.3f} s {b:>+9.0%} {a:>+9.0%}")
    output.note(f"profile  {file}; put it to use with RLCTL_PLAN_PROFILE={file}")
    return 0


def _rows(file: Path, as_json: bool) -> int:
    from rlctl.plan import predict_rows  # YAML and CSV files that `--help` need not read

    answers = predict_rows.predict_file(file)
    if as_json:
        output.document(answers)
        return 0
    width = max(len(a["row_id"]) for a in answers)
    output.data(f"{'row':<{width}} {'seconds':>10} {'tokens/s/GPU':>13} {'GB/GPU':>8} {'low':>10} {'high':>10}")
    for answer in answers:
        output.data(f"{answer['row_id']:<{width}} {_line(answer)}")
    return 0


def _line(answer: dict[str, Any]) -> str:
    if answer["reason"]:
        return answer["reason"]
    columns = (("step_time_s", 10, "4g"), ("tokens_per_s_per_gpu", 13, "6g"), ("mem_gb_per_gpu", 8, "4g"),
               ("low", 10, "4g"), ("high", 10, "4g"))  # fmt: skip
    return " ".join("-".rjust(w) if answer[n] is None else f"{answer[n]:>{w}.{kind}}" for n, w, kind in columns)
