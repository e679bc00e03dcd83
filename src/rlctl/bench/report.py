"""A benchmark's report for people: one set of tables, as text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rlctl.bench.compare import UNACCOUNTED
from rlctl.report import charts, markup


@dataclass(frozen=True, kw_only=True)
class Table:
    """E.g. Table(title="Parity", head=("check", "error"), rows=[("loss", "1e-7")])."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def verdict(report: Mapping[str, Any]) -> str:
    """In one line, with what differs."""
    failed = [
        f"{pair}: {check['name']} apart by {check['error']:.1e}, limit {check['tolerance']:.0e}"
        + (f" ({check['worst']})" if check["worst"] else "")
        for pair, checks in report["parity"].items()
        for check in checks
        if not check["ok"]
    ]
    reasons = [_said(difference) for difference in report["fairness"]] + failed
    return report["verdict"] + (f": {'; '.join(reasons)}" if reasons else "")


def _said(difference: Mapping[str, Any]) -> str:
    return f"{difference['what']}: " + ", ".join(f"{side} {value}" for side, value in difference["values"].items())


def head(report: Mapping[str, Any]) -> list[str]:
    """What was measured, where, on which tokens."""
    size, machine = report["rollouts_size"], report["machine"]
    lines = [
        f"{report['model']}, {report['algorithm']}, {report['precision']}, on {report['where']}",
        f"machine {machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_bytes'] / 1e9:.0f} GB"
        + (f", {machine['gpus']} x {machine['gpu_name']}" if machine["gpus"] else ""),
        f"rollouts {report['rollouts']}: {size['sequences']} sequences, {size['tokens']} tokens, "
        f"{size['scored_tokens']} scored, {report['rollouts_source']}",
        f"recipe {report['recipe_hash']}",
    ]
    seconds = report["generation_and_reward_seconds"]
    if seconds:
        lines.append(f"generation and reward, recorded once: {', '.join(f'{s:.2f}' for s in seconds)} s a step")
    return lines


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Parity, phases, rates, ratios, convergence; what was not measured is left out."""
    timing = {name: side["timing"] for name, side in report["sides"].items() if side["timing"]}
    made = [
        Table(
            title=f"Parity: {pair}",
            head=("check", "error", "limit", "worst", ""),
            rows=[
                (c["name"], f"{c['error']:.1e}", f"{c['tolerance']:.0e}", c["worst"], "ok" if c["ok"] else "FAILED")
                for c in checks
            ],
            note="max|a-b| / max|b|; the loss over sum(w |token loss|)",
        )
        for pair, checks in report["parity"].items()
    ]
    made += [_phases(name, one) for name, one in timing.items()]
    if timing:
        made.append(_rates(timing))
    if report["ratios"]:
        rows = [(n, f"{r['value']:.3f}", f"{r['low']:.3f} ... {r['high']:.3f}") for n, r in report["ratios"].items()]
        method = next(iter(report["ratios"].values()))["method"]
        made.append(Table(title="Step time", head=("ratio", "of medians", "interval"), rows=rows, note=method))
    if report["convergence"]:
        made.append(_convergence(report["convergence"]))
    return made


def _phases(name: str, timing: Mapping[str, Any]) -> Table:
    rows = [
        (phase.replace("_", " "), *(f"{figures[k]:.4f}" for k in ("median", "p10", "p90")), str(figures["n"]))
        for phase, figures in timing["phases"].items()
    ]
    missing = timing["unaccounted_share"]
    note = f"phases leave out {missing:.2%} of the step" + (", MORE THAN 2 %" if missing > UNACCOUNTED else "")
    return Table(title=f"Seconds: {name}", head=("phase", "median", "p10", "p90", "n"), rows=rows, note=note)


def _rates(timing: Mapping[str, Mapping[str, Any]]) -> Table:
    shown: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("tokens / s", lambda t: f"{t['tokens_per_second']:.0f}"),
        ("padding", lambda t: f"{t['padding_share']:.1%}"),
        ("model GFLOP/s", lambda t: f"{t['flops_per_second'] / 1e9:.1f}"),
        ("MFU", lambda t: f"{t['mfu']:.1%}"),
        ("peak memory of a process, MB", lambda t: f"{t['peak_memory_bytes'] / 1e6:.0f}"),
        ("weight gather, MB/s", lambda t: f"{t['weight_gather_bytes_per_second'] / 1e6:.0f}"),
        ("  a copy of as many bytes, MB/s", lambda t: f"{t['memcpy_bytes_per_second'] / 1e6:.0f}"),
    ]
    return Table(
        title="Rates",
        head=("", *timing),
        rows=[(label, *(form(one) for one in timing.values())) for label, form in shown],
        note="MFU: model FLOPs of a step on real tokens (docs/bench.md) over its seconds, over the fp32 matrix product "
        "that all processes reached together just before, "
        + ", ".join(f"{t['matmul_flops_per_second'] / 1e9:.1f}" for t in timing.values())
        + " GFLOP/s",
    )


def _convergence(found: Mapping[str, Any]) -> Table:
    first, second = found["sides"]
    if found["diverged_at"] is None:
        text = (
            f"{found['steps']} replayed steps equal within {found['tolerance']:.0e}; "
            f"largest difference {found['error']:.1e}"
        )
    else:
        text = (
            f"DIVERGED AT STEP {found['diverged_at']}: {found['figure']} apart by {found['error']:.1e}; "
            f"first tensor {found['first_tensor']}"
        )
    return Table(title=f"Convergence: {first} and {second}", head=("curves",), rows=[(text,)])


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = ["# rlctl bench", f"**{verdict(report)}**", "\n".join(f"- {line}" for line in head(report))]
    for table in tables(report):
        rows = [table.head, ["---"] * len(table.head), *table.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
        parts.append(f"## {table.title}\n\n{body}" + (f"\n\n{table.note}" if table.note else ""))
    return "\n\n".join(parts) + "\n"


def html(report: Mapping[str, Any]) -> str:
    """report.html; refers to nothing outside it."""
    good = report["verdict"] == "COMPARABLE"
    lead = (
        f"<header><h1>rlctl bench <em class='{'finished' if good else 'failed'}'>{report['verdict'].lower()}</em></h1>"
    )
    lead += "".join(f"<p>{escape(line)}</p>" for line in head(report)) + "</header>"
    told = "" if good else f"<div class='answers'><div class='bad'><h3>{escape(verdict(report))}</h3></div></div>"
    sections = [
        markup.section(
            table.title,
            markup.table(list(map(escape, table.head)), [list(map(escape, row)) for row in table.rows]),
            f"<p class='soft'>{escape(table.note)}</p>" if table.note else "",
        )
        for table in tables(report)
    ]
    return markup.document("rlctl bench", lead, told, _charts(report), *sections)


def _charts(report: Mapping[str, Any]) -> str:
    timed = [(name, side["timing"]) for name, side in report["sides"].items() if side["timing"]]
    seconds = [
        charts.Series(
            label=name, colour=i, marked=True,
            points=[(float(n), s) for n, s in enumerate((s for r in t["step_seconds"] for s in r), 1)],
        )
        for i, (name, t) in enumerate(timed)
    ]  # fmt: skip
    found = report["convergence"]
    losses = [
        charts.Series(label=name, colour=i, points=[(float(n), one["loss"]) for n, one in enumerate(curve, 1)])
        for i, (name, curve) in enumerate(found["curves"].items() if found else ())
    ]
    note = f"{report['repeats']} repeats in a row; {report['where']}"
    return markup.figures(
        [
            ("Seconds a step", note, charts.lines(seconds, low=0.0, unit=" s")),
            ("Loss of replayed training", report["where"], charts.lines(losses)),
        ]
    )


def write(report: Mapping[str, Any], folder: Path) -> None:
    """report.md and report.html."""
    (folder / "report.md").write_text(markdown(report))
    (folder / "report.html").write_text(html(report))
