"""The report of a run as one HTML page that needs nothing else.

It answers: did it learn, is it healthy, what is slow, what was run, how to run it again.

`write` makes report.html of one run; `comparison` lays several over each other.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlctl.report import charts, findings
from rlctl.report.charts import Series
from rlctl.report.run import Run, differences, read_samples
from rlctl.report.style import STYLE

_BEST, _SHOWN_CHARACTERS = 3, 1500
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
    return _publish(path or run.path / "report.html", page(run))


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write the report of several runs."""
    return _publish(path, comparison(runs))


def _publish(path: Path, text: str) -> Path:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path


def page(run: Run) -> str:
    """The whole page of one run."""
    answers = [findings.learned(run), findings.healthy(run), findings.slow(run)]
    return _document(
        run.name,
        f"<header><h1>{escape(run.name)} <em class='{run.status}'>{run.status}</em></h1>",
        f"<p>{_subtitle(run)}</p></header>",
        f"<div class='answers'>{''.join(_answer(a) for a in answers)}{_rerun_card(run)}</div>",
        _section("Did it learn?", _learning([run])),
        _section("Is it healthy?", _checks(run), _health([run])),
        _section("What is slow?", _speed(run)),
        _section("Samples", _samples(run)),
        _section("What was run?", _what(run)),
    )


def comparison(runs: Sequence[Run]) -> str:
    """The page of several runs: a table, their differences, and the same charts laid over each other."""
    rows = []
    for i, run in enumerate(runs):
        reward, seconds = run.series("rollout/reward"), run.series("time/step_seconds")
        ends = findings.ends(reward) if reward else None
        validation = max((y for _, y in run.series("val/reward")), default=None)
        checks = findings.checks(run)
        rows.append([
            f"<i class='k{i % charts.COLOURS}'></i> {escape(run.name)}", run.status, str(run.steps),
            *(["", ""] if ends is None else [findings.number_3(ends[0]), findings.number_3(ends[1])]),
            "" if validation is None else findings.number_3(validation),
            "" if not seconds else f"{sorted(y for _, y in seconds)[len(seconds) // 2]:.2f} s",
            ", ".join(escape(c.name) for c in checks if not c.ok) or "nothing",
        ])  # fmt: skip
    head = ["run", "status", "steps", "first reward", "last reward", "best validation", "median step", "stands out"]
    names = [run.name for run in runs]
    differs = [[escape(key), *(_value(v) for v in values)] for key, values in differences(runs)]
    nothing = "<p>The recipes are the same.</p>"
    return _document(
        f"{len(runs)} runs",
        f"<header><h1>{len(runs)} runs</h1><p>{escape(', '.join(names))}</p></header>",
        _table(head, rows),
        _section("What differs?", _table(["key", *map(escape, names)], differs) if differs else nothing),
        _section("Did they learn?", _learning(runs)),
        _section("Are they healthy?", _health(runs)),
        _section("What is slow?", _figures([(
            "Seconds a step", "", charts.lines(_over(runs, "time/step_seconds"), low=0, unit=" s"))])),
    )  # fmt: skip


def _document(title: str, *parts: str) -> str:
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


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


def _rerun_card(run: Run) -> str:
    return f"<div class='open'><h3>How to run it again?</h3><p><code>{escape(rerun_line(run))}</code></p></div>"


def _over(runs: Sequence[Run], metric: str) -> list[Series]:
    """One line a run."""
    names = [run.name for run in runs] if len(runs) > 1 else [metric.rsplit("/", maxsplit=1)[-1].replace("_", " ")]
    return [
        Series(label=n, points=r.series(metric), colour=i) for i, (n, r) in enumerate(zip(names, runs, strict=True))
    ]


def _learning(runs: Sequence[Run]) -> str:
    validation = [
        Series(label=s.label, points=s.points, colour=s.colour, marked=True) for s in _over(runs, "val/reward")
    ]
    note = "Mean of each step's samples; the band is their standard deviation."
    if len(runs) == 1:
        reward = [Series(
            label="training", points=runs[0].series("rollout/reward"), band=runs[0].series("rollout/reward_std")
        )]  # fmt: skip
        shown = [("Reward", note, charts.lines(reward))]
    else:
        shown = [("Reward", "Mean of each step's samples.", charts.lines(_over(runs, "rollout/reward")))]
    shown.append(("Validation reward", "On held-out prompts.", charts.lines(validation)))
    parts = list(dict.fromkeys(m for run in runs for m in run.metrics("rollout/reward/")))
    if len(runs) == 1 and parts:
        lines = [
            Series(label=m.removeprefix("rollout/reward/"), points=runs[0].series(m), colour=i)
            for i, m in enumerate(parts)
        ]
        shown.append(("Reward parts", "Before weighting.", charts.lines(lines)))
    else:
        shown += [(f"Reward part {m.split('/')[-1]}", "", charts.lines(_over(runs, m))) for m in parts]
    return _figures(shown) + "".join(_evaluations(run) for run in runs)


def _evaluations(run: Run) -> str:
    rows = []
    for result in run.evaluations:
        at_k = " &nbsp; ".join(f"@{k} {_interval(value)}" for k, value in result["pass_at_k"].items())
        where = f"{run.name}/{Path(result['path']).relative_to(run.path)}"
        rows.append([escape(result["task"]), str(result["samples"]), _interval(result["reward"]), at_k, escape(where)])
    head = ["evaluation", "samples", "reward (95 %)", "pass@k (95 %)", "files"]
    return _table(head, rows) if rows else ""


def _interval(estimate: dict[str, Any]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _checks(run: Run) -> str:
    rows = [
        [f"<b class='{'good' if c.ok else 'bad'}'>{'ok' if c.ok else 'look'}</b>", escape(c.name), escape(c.found),
         escape(c.expected)]
        for c in findings.checks(run)
    ]  # fmt: skip
    return _table(["", "check", "found", "expected"], rows) if run.rows else ""


def _health(runs: Sequence[Run]) -> str:
    shown = []
    for metric, title, note in _HEALTH:
        low, high = _BOUNDS.get(metric, (None, None))
        shown.append((title, note, charts.lines(_over(runs, metric), low=low, high=high)))
    return _figures(shown)


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
        ("Packing efficiency", "Tokens over room in microbatches.", charts.lines(_over([run], "packing/efficiency"))),
        ("Peak memory of rank 0", "GB, since the start.", charts.lines([memory], low=0, unit=" GB")),
    ]
    rows = [
        [escape(p.name), f"{p.share:.1%}", f"{p.median_seconds:.3f} s", f"{p.total_seconds:.1f} s"]
        for p in findings.phases(run)
    ]
    return _figures(shown) + (_table(["phase", "share", "median", "total"], rows) if rows else "")


def _figures(shown: Iterable[tuple[str, str, str]]) -> str:
    figures = [
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{drawing}</figure>"
        for title, note, drawing in shown
        if drawing
    ]
    return f"<div class='figures'>{''.join(figures)}</div>" if figures else ""


def _samples(run: Run) -> str:
    """Best and worst of the last dump, and of the first for comparison."""
    dumps = run.dumps()
    chosen = dict.fromkeys([*list(dumps)[-1:], *list(dumps)[:1]])
    return "".join(_of_step(step, list(read_samples(dumps[step]))) for step in chosen)


def _of_step(step: int, samples: list[dict[str, Any]]) -> str:
    voted = sorted((s for s in samples if s["valid"]), key=lambda s: s["reward"], reverse=True)
    failed = [s for s in samples if not s["valid"]]
    worst = voted[_BEST:][-_BEST:]
    groups = (("best", voted[:_BEST]), ("worst", worst[::-1]), ("without a reward", failed[:_BEST]))
    return "".join(
        f"<h3>Step {step}, {title}</h3><div class='samples'>{''.join(map(_sample, group))}</div>"
        for title, group in groups
        if group
    )


def _sample(sample: dict[str, Any]) -> str:
    parts = " · ".join(f"{escape(k)} {findings.number_3(v)}" for k, v in sample["reward_parts"].items())
    flags = [parts, f"{sample['response_tokens']} tokens", *(["cut off"] if sample["truncated"] else [])]
    reward = f"reward {findings.number_3(sample['reward'])}" if sample["valid"] else escape(str(sample["error"]))
    prompt = "\n".join(f"{m['role']}: {m['content']}" for m in sample["prompt"])
    facts = " · ".join(f for f in flags if f)
    return (
        f"<article><p><b>{reward}</b> <small>{facts}</small></p>"
        f"<pre class='prompt'>{_shown(prompt)}</pre><pre>{_shown(sample['response'])}</pre></article>"
    )


def _shown(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} … ({len(text)} characters)"
    return (
        escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)) or "&nbsp;"
    )


def _what(run: Run) -> str:
    """Commands, recipe changes, versions, hardware."""
    commands = "".join(f"<pre>{escape(c)}</pre>" for c in run.commands)
    changed = [[f"<code>{escape(k)}</code>", _value(v), _value(d)] for k, v, d in run.changed]
    environment = run.environment
    machine = environment["hardware"] if environment else {}
    facts = (
        [["python", escape(environment["python"])], ["platform", escape(environment["platform"])]]
        if environment
        else []
    )
    facts += [[escape(n), escape(v)] for n, v in environment["packages"].items()] if environment else []
    facts += [[escape(n.replace("_", " ")), _value(v)] for n, v in machine.items()]
    return (
        f"<h3>Command</h3>{commands}<h3>Again, with every value as resolved</h3><pre>{escape(rerun_line(run))}</pre>"
        f"<h3>Recipe: what is not default</h3>{_table(['key', 'value', 'default'], changed)}"
        f"<h3>Software and hardware</h3>{_table(['', ''], facts)}"
    )


def _value(value: Any) -> str:
    if value is None:
        return "<i class='none'>not set</i>"
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return escape(shown)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{h}</th>" for h in head) if any(head) else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div class='wide'><table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{body}</tbody></table></div>"
    )
