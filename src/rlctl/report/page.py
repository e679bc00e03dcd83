"""The report of a run as one HTML page that needs nothing else.

It answers: did it learn, is it healthy, what is slow, what was run, how to run it again. For several see compare.py.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlctl.report import charts, findings
from rlctl.report.charts import Series
from rlctl.report.markup import document, figures, mark, section, table, value
from rlctl.report.run import Run
from rlctl.report.samples import samples
from rlctl.report.text import printable

_MOST_PARTS = 24  # reward parts with a line
_MOST_OTHERS, _OTHER_POINTS = 36, 100
_HEALTH = (  # metric, title, what to look for
    ("mismatch/token_mult_prob_error", "Mismatch of engine and trainer", "Mean probability ratio; 1 is exact."),
    ("train/kl", "KL to the reference", "Nats a token; slow growth is normal, a jump is not."),
    ("train/entropy", "Entropy", "Nats a token; falls as the policy gets sure, near 0 it stops exploring."),
    ("train/grad_norm", "Gradient norm", "Before clipping; spikes come before trouble."),
    ("rollout/response_length", "Response length", "Mean tokens of a response."),
    ("rollout/truncated_share", "Cut off by length", "Share of samples that met the length limit."),
    ("rollout/invalid_share", "Without a reward", "Share of samples whose environment failed."),
    ("train/clipped_share", "Clipped ratios", "Share of tokens whose ratio left the clip range."),
    ("train/loss", "Loss", "Not a measure of progress in RL."),
    ("train/lr", "Learning rate", ""),
)  # fmt: skip
_BOUNDS = {  # axes that must not zoom into nothing
    "mismatch/token_mult_prob_error": (1.0, 1.01),
    "rollout/truncated_share": (0.0, 1.0),
    "rollout/invalid_share": (0.0, 1.0),
    "train/clipped_share": (0.0, 1.0),
    "rollout/response_length": (0.0, None),
    "train/lr": (0.0, None),
}


def write(run: Run, path: Path | None = None) -> Path:
    """Write the report of a run; it appears whole.

    Args:
        run: with whatever it has logged so far.
        path: None = report.html of the run.
    """
    return publish(path or run.path / "report.html", page(run))


def publish(path: Path, text: str) -> Path:
    """Write a page that appears whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path


def page(run: Run) -> str:
    """The whole page of one run."""
    answers = [findings.learned(run), findings.healthy(run), findings.mismatch(run), findings.slow(run)]
    return document(
        run.name,
        f"<header><h1>{escape(run.name)} <em class='{run.status}'>{run.status}</em></h1>",
        f"<p>{_subtitle(run)}</p></header>",
        f"<div class='answers'>{''.join(map(_answer, answers))}{_what_card(run)}{_rerun_card(run)}</div>",
        _failure(run),
        section("Did it learn?", learning([run])),
        section("Is it healthy?", _checks(run), health([run]), _others(run), _left_out(run)),
        section("What is slow?", _speed(run)),
        section("Samples", samples(run)),
        section("What was run?", _what(run)),
    )


def _subtitle(run: Run) -> str:
    recipe, grpo = run.recipe, run.recipe["grpo"]
    backend = "megatron" if recipe["policy"]["megatron_cfg"]["enabled"] else "dtensor"
    facts = [
        f"{recipe['algorithm']} on {recipe['policy']['model_name']}", f"task {recipe['env']['name']}",
        f"{backend} backend", f"{recipe['policy']['generation']['backend']} engine",
        f"{grpo['num_prompts_per_step']} prompts × {grpo['num_generations_per_prompt']} samples a step",
        f"{run.steps} of {run.planned_steps} steps",
    ]  # fmt: skip
    return escape(" · ".join(facts))


def _answer(answer: findings.Answer) -> str:
    return f"<div class='{answer.verdict}'><h3>{escape(answer.question)}</h3><p>{escape(answer.text)}</p></div>"


def rerun_line(run: Run) -> str:
    """The line that does the same again, with every value as it was resolved."""
    recipe = shlex.quote(str(run.path / "recipe.yaml"))
    return f"rlctl train {run.recipe['algorithm']} --recipe {recipe} --run-dir {shlex.quote(f'{run.path}-again')}"


def resume_line(run: Run) -> str | None:
    """The line that goes on with a run that is not at its end."""
    if run.status not in ("stopped", "failed") or not run.commands:
        return None
    kept, words = [], shlex.split(run.commands[0])
    while words:
        word = words.pop(0)
        if word in ("--resume", "--run-dir"):
            words = words[1:]
        elif not word.startswith(("--resume=", "--run-dir=")):
            kept.append(word)
    return f"{shlex.join(kept)} --run-dir {shlex.quote(str(run.path))} --resume auto"


def _rerun_card(run: Run) -> str:
    onward = resume_line(run)
    again = "It failed; the same would fail again unless its cause is mended:" if run.status == "failed" else ""
    lines = [(again, rerun_line(run)), *([("Or go on where it stopped:", onward)] if onward else [])]
    shown = "".join(f"<p>{label} <code>{escape(line)}</code></p>" for label, line in lines)
    return f"<div class='open'><h3>How to run it again?</h3>{shown}</div>"


def _what_card(run: Run) -> str:
    recipe, machine = run.recipe, run.environment["hardware"] if run.environment else {}
    versions = run.environment["packages"] if run.environment else {}
    shown = [f"{name} {versions[name]}" for name in ("rlctl", "torch", "megatron-core", "vllm") if name in versions]
    gpus = f"{machine['gpus']} × {machine['gpu_name']}" if machine.get("gpus") else "no GPU"
    text = (
        f"{recipe['algorithm']} on {recipe['policy']['model_name']}, task {recipe['env']['name']}; {_processes(recipe)}"
        + (f" on a host with {machine['cpus']} CPU cores, {gpus}" if machine else "")
        + f". Seed {recipe['grpo']['seed']}. "
        f"{sum(default is not None for _, _, default in run.changed)} recipe keys are not default."
        + (f" {', '.join(shown)}." if shown else "")
    )
    return f"<div class='open'><h3>What was run?</h3><p>{escape(text)}</p></div>"


def _processes(recipe: Mapping[str, Any]) -> str:
    cluster = recipe["cluster"]
    each = cluster["gpus_per_node"] or cluster["procs"]
    return f"{cluster['num_nodes']} node{'s' * (cluster['num_nodes'] != 1)} × {each} processes"


def _failure(run: Run) -> str:
    """Why it ended, where it did not end well."""
    if run.failure is None or run.status != "failed":
        return ""
    told = f"{run.failure['error']}\nphase: {run.failure['phase']}\nhint: {run.failure['hint'] or 'see logs/'}"
    return section("Why did it fail?", f"<pre>{escape(printable(told))}</pre>")


def _left_out(run: Run) -> str:
    if not run.damaged:
        return ""
    return f"<p class='soft'>Left out, damaged: {escape('; '.join(run.damaged[:5]))}{' …' * (len(run.damaged) > 5)}</p>"


def over(runs: Sequence[Run], metric: str, *, names: Sequence[str] = ()) -> list[Series]:
    """One line a run; of a single one it is called as the metric is."""
    labels = names or [metric.rsplit("/", maxsplit=1)[-1].replace("_", " ")]
    return [
        Series(label=label, points=run.series(metric), missing=run.not_finite(metric), colour=i)
        for i, (label, run) in enumerate(zip(labels, runs, strict=True))
    ]


def learning(runs: Sequence[Run], *, names: Sequence[str] = ()) -> str:
    """Charts of rewards, and a table of evaluations.

    Args:
        runs: one or several.
        names: labels of several.
    """
    validation = [dataclasses.replace(s, marked=True) for s in over(runs, "val/reward", names=names)]
    reward = over(runs, "rollout/reward", names=names)
    note = "Mean of each step's samples."
    if len(runs) == 1:
        reward = [dataclasses.replace(reward[0], band=runs[0].series("rollout/reward_std"))]
        note = "Mean of each step's samples; the band is their standard deviation."
    shown = [
        ("Reward", note, charts.lines(reward)),
        ("Validation reward", "On held-out prompts.", charts.lines(validation)),
    ]
    parts = list(dict.fromkeys(m for run in runs for m in run.metrics("rollout/reward/")))[:_MOST_PARTS]
    if len(runs) == 1:
        lines = [
            Series(label=m.removeprefix("rollout/reward/"), points=runs[0].series(m), colour=i)
            for i, m in enumerate(parts)
        ]
        shown.append(("Reward parts", "Before weighting.", charts.lines(lines)))
    else:
        shown += [
            (f"Reward part {m.removeprefix('rollout/reward/')}", "", charts.lines(over(runs, m, names=names)))
            for m in parts
        ]
    return figures(shown) + "".join(_evaluations(run) for run in runs)


def _evaluations(run: Run) -> str:
    rows = []
    for result in run.evaluations:
        at_k = " &nbsp; ".join(f"@{k} {_interval(value)}" for k, value in result["pass_at_k"].items())
        where = f"{run.name}/{Path(result['path']).relative_to(run.path)}"
        step = "" if result["step"] is None else str(result["step"])
        rows.append(
            [
                step,
                escape(result["task"]),
                str(result["samples"]),
                _interval(result["reward"]),
                f"reward {result['pass_reward']:g}",
                at_k,
                escape(where),
            ]
        )
    head = ["step", "evaluation", "samples", "reward (95 %)", "correct from", "pass@k (95 %)", "files"]
    if not rows:
        return ""
    note = "Checkpoints measured apart with rlctl eval; the number of prompts and samples is its own."
    return f"<h3>Evaluations of {escape(run.name)}</h3><p class='soft'>{note}</p>{table(head, rows)}"


def _interval(estimate: dict[str, Any]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _checks(run: Run) -> str:
    """Signs of health, and what the run tested before its first step."""
    rows = [[mark(ok=c.ok), escape(c.name), escape(c.found), escape(c.expected)] for c in findings.checks(run)]
    before = [
        [mark(ok=bool(c["ok"])), *(escape(printable(str(c[key]))) for key in ("name", "found", "expected", "detail"))]
        for c in run.start_checks
    ]
    made = table(["", "check", "found", "expected"], rows) if run.rows else ""
    at_start = table(["", "check", "found", "expected", "detail"], before)
    return made + (f"<h3>Before the first step</h3>{at_start}" if at_start else "")


def health(runs: Sequence[Run], *, names: Sequence[str] = ()) -> str:
    """Charts of what shows that a run goes wrong."""
    shown = []
    for metric, title, note in _HEALTH:
        low, high = _BOUNDS.get(metric, (None, None))
        shown.append((title, note, charts.lines(over(runs, metric, names=names), low=low, high=high)))
    return figures(shown)


def _others(run: Run) -> str:
    """What else was logged, folded away."""
    known = {metric for metric, _, _ in _HEALTH} | set(run.metrics("rollout/reward")) | {"packing/efficiency"}
    found = [m for m in run.metrics() if m not in known and not m.startswith(("time/", "perf/", "memory/", "val/"))]
    shown = [(m, "", charts.lines(over([run], m), most=_OTHER_POINTS)) for m in found[:_MOST_OTHERS]]
    more = f"<p class='soft'>{len(found) - _MOST_OTHERS} more are in metrics.jsonl.</p>" * (len(found) > _MOST_OTHERS)
    drawn = figures(shown)
    return f"<details><summary>Other metrics</summary>{drawn}{more}</details>" if drawn else ""


def _speed(run: Run) -> str:
    rates = [
        Series(label=label, points=points, colour=i)
        for i, (label, points) in enumerate(findings.tokens_per_second(run).items())
    ]
    memory = Series(label="memory", points=[(x, y / 1e9) for x, y in run.series("memory/peak_bytes")])
    order = [p.name for p in findings.phases(run)]
    points = findings.phase_points(run)
    shown = [
        ("Seconds a step, by phase", "", charts.stacked({name: points[name] for name in order}, unit=" s")),
        ("Tokens a second", "", charts.lines(rates, low=0)),
        ("Packing efficiency", "Tokens over room in microbatches.", charts.lines(over([run], "packing/efficiency"))),
        ("Peak memory of rank 0", "GB, since the start.", charts.lines([memory], low=0, unit=" GB")),
    ]
    rows = [
        [escape(p.name), f"{p.share:.1%}", f"{p.median_seconds:.3f} s", f"{p.total_seconds:.1f} s"]
        for p in findings.phases(run)
    ]
    return figures(shown) + table(["phase", "share", "median", "total"], rows)


def _what(run: Run) -> str:
    """Commands, recipe changes, versions, hardware."""
    commands = "".join(f"<pre>{escape(c)}</pre>" for c in run.commands)
    changed = [[f"<code>{escape(k)}</code>", value(v), value(d)] for k, v, d in run.changed if d is not None]
    given = [[f"<code>{escape(k)}</code>", value(v)] for k, v, d in run.changed if d is None]
    environment = run.environment
    machine = environment["hardware"] if environment else {}
    facts = (
        [["python", escape(environment["python"])], ["platform", escape(environment["platform"])]]
        if environment
        else []
    )
    facts += [[escape(n), escape(v)] for n, v in environment["packages"].items()] if environment else []
    facts += [[escape(n.replace("_", " ")), value(v)] for n, v in machine.items()]
    again = (
        "<h3>Again, with every value as resolved</h3>"
        "<p class='soft'>Relative paths are as seen from where the run was started.</p>"
        f"<pre>{escape(rerun_line(run))}</pre>"
    )
    return (
        f"<h3>Command</h3>{commands}{again}"
        f"<h3>Recipe: what is not default</h3>{table(['key', 'value', 'default'], changed)}"
        f"<h3>Recipe: what has no default, given or derived</h3>{table(['key', 'value'], given)}"
        f"<h3>Software and hardware</h3>{table(['', ''], facts)}"
    )
