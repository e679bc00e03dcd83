"""Several runs on one page: final figures with intervals, in which keys they differ, and their curves in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.report import charts, findings, page
from rlctl.report.markup import document, figures, section, table, value
from rlctl.report.run import Run, differences

MOST_RUNS = 16  # a chart with more lines says nothing


def write_comparison(runs: Sequence[Run], path: Path) -> Path:
    """Write the report of several runs; it appears whole.

    Raises:
        RlctlError: there are more than a page can hold.
    """
    if len(runs) > MOST_RUNS:
        raise RlctlError(f"{len(runs)} runs do not fit in one report", f"give at most {MOST_RUNS}")
    return page.publish(path, comparison(runs))


def comparison(runs: Sequence[Run]) -> str:
    """The whole page."""
    names = labels(runs)
    differs = [[f"<code>{escape(key)}</code>", *map(value, values)] for key, values in differences(runs)]
    nothing = "<p>The recipes are the same.</p>"
    step = ("Seconds a step", "", charts.lines(page.over(runs, "time/step_seconds", names=names), low=0, unit=" s"))
    return document(
        f"{len(runs)} runs",
        f"<header><h1>{len(runs)} runs</h1><p>{escape(', '.join(names))}</p></header>",
        _final(runs, names),
        section("What differs?", table(["key", *map(escape, names)], differs) if differs else nothing),
        section("Did they learn?", page.learning(runs, names=names)),
        section("Are they healthy?", page.health(runs, names=names)),
        section("What is slow?", figures([step]), _phases(runs, names)),
        section("How to run them again?", "".join(f"<pre>{escape(page.rerun_line(run))}</pre>" for run in runs)),
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """Each run's name; its path where two have the same."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def _final(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        reward, validation = findings.final_reward(run), findings.final_validation(run)
        seconds = findings.median_step_seconds(run)
        rows.append([
            f"<i class='k{i % charts.COLOURS}'></i> {escape(name)}", run.status, f"{run.steps} of {run.planned_steps}",
            "" if reward is None else f"{reward} <small>{reward.steps}</small>",
            "" if validation is None else f"{validation} <small>{validation.steps}</small>",
            "" if seconds is None else f"{seconds:.2f} s",
            ", ".join(escape(c.name) for c in findings.checks(run) if not c.ok) or "nothing",
        ])  # fmt: skip
    head = ["run", "status", "steps", "reward (95 %)", "validation (95 %)", "median step", "stands out"]
    return table(head, rows)


def _phases(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Median seconds of each phase."""
    found = [{p.name: p.median_seconds for p in findings.phases(run)} for run in runs]
    order = dict.fromkeys(name for one in found for name in one)
    rows = [[phase, *(f"{one[phase]:.3f} s" if phase in one else "" for one in found)] for phase in order]
    return table(["phase, median", *map(escape, names)], rows)
