"""Rollouts on the page: the best and the worst of the last step that has samples, and of the first to compare."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rlctl.report.findings import number_3
from rlctl.report.run import Run, read_samples
from rlctl.report.text import printable

_BEST, _MOST_CHARACTERS = 3, 1500


def samples(run: Run) -> str:
    """Html of the chosen samples; of a run without dumps none."""
    dumps = run.dumps()
    chosen = dict.fromkeys([*list(dumps)[-1:], *list(dumps)[:1]])
    return "".join(_of_step(step, *_read(run, step)) for step in chosen)


def _read(run: Run, step: int) -> tuple[list[dict[str, Any]], list[str]]:
    lines = read_samples(run.dumps()[step])
    return lines.rows, lines.damaged


def _of_step(step: int, rows: Sequence[dict[str, Any]], damaged: Sequence[str]) -> str:
    voted = sorted((s for s in rows if s["valid"]), key=lambda s: s["reward"], reverse=True)
    failed = [s for s in rows if not s["valid"]]
    worst = voted[_BEST:][-_BEST:]
    groups = (("best", voted[:_BEST]), ("worst", worst[::-1]), ("without a reward", failed[:_BEST]))
    shown = "".join(
        f"<h3>Step {step}, {title}</h3><div class='samples'>{''.join(map(_sample, group))}</div>"
        for title, group in groups
        if group
    )
    left = f"<p class='soft'>Left out: {escape('; '.join(damaged[:3]))}{' …' * (len(damaged) > 3)}</p>"
    return shown + left * bool(damaged)


def _sample(sample: dict[str, Any]) -> str:
    parts = " · ".join(f"{escape(k)} {number_3(v)}" for k, v in sample["reward_parts"].items())
    flags = [parts, f"{sample['response_tokens']} tokens", *(["cut off"] if sample["truncated"] else [])]
    reward = f"reward {number_3(sample['reward'])}" if sample["valid"] else _shown(f"no reward: {sample['error']}")
    prompt = "\n".join(f"{m['role']}: {m['content']}" for m in sample["prompt"])
    facts = " · ".join(f for f in flags if f)
    return (
        f"<article><p><b>{reward}</b> <small>{facts}</small></p>"
        f"<pre class='prompt'>{_shown(prompt)}</pre><pre>{_shown(sample['response'])}</pre></article>"
    )


def _shown(text: str) -> str:
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} … ({len(text)} characters)"
    return escape(printable(cut)) or "&nbsp;"
