"""`rlctl bench --simulate`: what plan/ predicts for each backend, beside published steps of the same model and GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlctl.cli import plan_job
from rlctl.plan import interval, profile, published
from rlctl.plan.memory import Backend
from rlctl.plan.predict import Question
from rlctl.plan.profile import constants
from rlctl.plan.search import Found, Pins, search
from rlctl.recipe import auto
from rlctl.recipe.compose import Composed

PREDICTED = "predicted by rlctl plan, not measured"
NOT_MEASURED = "rlctl was not measured on these GPUs"


def answer(request: plan_job.Request, backends: Sequence[Backend]) -> dict[str, Any]:
    """The whole answer, as JSON has it.

    Args:
        request: as for `rlctl plan`; its backend is ignored.
        backends: two or more.

    Raises:
        RlctlError: as plan_job.ask; or a degree of the command line that fits no layout.
    """
    composed, question = plan_job.ask(request)
    found = {name: _search(composed, question, name) for name in backends}
    sides = {name: plan_job.as_data(question, f.best[0]) if f.best else None for name, f in found.items()}
    recipe = composed.recipe
    rows = published.matching(str(recipe.policy.model_name), question.gpus, question.gpu.name)
    rows = sorted((row for row in rows if row.backend in backends), key=lambda row: backends.index(row.backend))
    return {
        "what": PREDICTED,
        "model": recipe.policy.model_name,
        "recipe": composed.source.name,
        "gpus": question.gpus,
        "gpu": question.gpu.name,
        "profile": str(profile.path()) if profile.path() else None,
        "assumed": {
            "sequences": question.sequences, "updates": question.updates, "longest": question.longest,
            "prompt_tokens": question.lengths.prompt, "response_tokens": question.lengths.response,
        },
        "sides": sides,
        "none_fits": {name: _refusal(composed, question, name, f) for name, f in found.items() if not f.best},
        "ratios": _ratios({name: side["seconds"] for name, side in sides.items() if side is not None}),
        "published": [_row(row) for row in rows],
        "measured": None,
    }  # fmt: skip


def _search(composed: Composed, question: Question, backend: Backend) -> Found:
    return search(question, backend, fitted=constants(), pins=_pins(composed, backend))


def _pins(composed: Composed, backend: Backend) -> Pins:
    """Degrees of the command line; a recipe's own are for its own number of GPUs."""
    pins = auto.pins_of(composed.recipe, composed, backend)
    opened: dict[str, Any] = {n: None for n, key in auto.keys(backend).items() if composed.overridden(key) is None}
    return dataclasses.replace(pins, **opened)


def _refusal(composed: Composed, question: Question, backend: Backend, found: Found) -> str:
    return auto.refusal(question, backend, found, _pins(composed, backend)).message


def _ratios(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Of predicted steps, first over each other; the interval takes both errors as independent."""
    names = list(seconds)
    found = {}
    for other in names[1:]:
        first, second = seconds[names[0]], seconds[other]
        low, high = interval.ratio(
            (first["low"] / first["total"], first["high"] / first["total"]),
            (second["low"] / second["total"], second["high"] / second["total"]),
        )
        value = first["total"] / second["total"]
        found[f"{names[0]} / {other}"] = {"value": value, "low": value * low, "high": value * high}
    return found


def _row(row: published.PublishedStep) -> dict[str, Any]:
    own = published.predicted(row, constants())
    assert own.step is not None, "the table's engines hold their models"
    return {
        "source": published.source(),
        "task": published.task(),
        "backend": row.backend,
        "layout": str(own.choice.layout),
        "batching": row.batching,
        "unpublished": row.unpublished,
        "length": row.length,
        "response_tokens": row.response_tokens,
        "seconds": row.seconds,
        "predicted_seconds": published.seconds(own.step),
        "fits_rlctl": own.fits,
        "limit": own.limit,
        "script": f"scripts/reproduce/{row.script}.sh",
    }


def text(found: dict[str, Any]) -> str:
    """The answer for people."""
    assumed = found["assumed"]
    lines = [
        f"{found['model']} on {found['gpus']} x {found['gpu']}: {found['what']}",
        f"{assumed['sequences']} sequences a step in {assumed['updates']} updates, at most {assumed['longest']} tokens;"
        f" prompts of {assumed['prompt_tokens']}, responses of {assumed['response_tokens']} on average",
        *([f"constants of the profile {found['profile']}"] if found["profile"] else []),
        "",
        "the best layout of each backend",
    ]
    for name, side in found["sides"].items():
        if side is None:
            lines.append(f"  {name:<9} {found['none_fits'][name]}")
            continue
        recompute = ", recompute" if side["activation_checkpointing"] else ""
        lines.append(f"  {name:<9} {side['layout']['text']}, engine tp{side['generation_tp']}{recompute}")
    if any(found["sides"].values()):
        lines += ["", *_phases({n: s["seconds"] for n, s in found["sides"].items() if s is not None})]
    for name, ratio in found["ratios"].items():
        lines.append(f"{name}: {ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f} in 8 of 10 cases)")
    return "\n".join([*lines, "", *_published(found), "", f"measured: {NOT_MEASURED}"])


def _phases(sides: dict[str, dict[str, float]]) -> list[str]:
    names = [n for n in published.PHASES if n != "step"]
    lines = ["  seconds     " + "".join(f"{name:>12}" for name in sides)]
    lines += [f"  {phase:<12}" + "".join(f"{side[phase]:>12.1f}" for side in sides.values()) for phase in names]
    return [*lines, "  step        " + "".join(f"{side['total']:>12.1f}" for side in sides.values())]


def _published(found: dict[str, Any]) -> list[str]:
    rows = found["published"]
    if not rows:
        known = ", ".join(dict.fromkeys(f"{s.model} on {s.gpus}" for s in published.steps()))
        return [f"published: nothing for this model on so many of these GPUs; there is {known} (h100)"]
    lines = [f"published: {rows[0]['source']}", f"  {rows[0]['task']}"]
    for row in rows:
        lines.append(
            f"  {row['backend']:<9} {row['layout']}, {row['batching']}, {row['length']} tokens, responses of "
            f"{row['response_tokens']}" + "".join(f"; not published: {u}" for u in row["unpublished"])
        )
        if not row["fits_rlctl"]:
            lines.append(f"            rlctl would not run it so: {row['limit']}")
    lines += ["", "  seconds     " + "".join(f"{row['backend']:>24}" for row in rows)]
    lines.append("              " + "   published   predicted" * len(rows))
    for phase in published.PHASES:
        cells = (f"{row['seconds'][phase]:>12.0f}{row['predicted_seconds'][phase]:>12.0f}" for row in rows)
        lines.append(f"  {phase:<12}" + "".join(cells))
    return [*lines, *([_like(rows)] if len(rows) > 1 else []), f"to measure it: {rows[0]['script']}"]


def _like(rows: Sequence[dict[str, Any]]) -> str:
    first, second = rows[:2]
    differ = [
        f"{name.replace('_', ' ')} ({first[name]} and {second[name]})"
        for name in ("layout", "batching", "response_tokens")
        if first[name] != second[name]
    ]
    ratios = (first[key]["step"] / second[key]["step"] for key in ("seconds", "predicted_seconds"))
    line = "{} / {}: published {:.2f}, predicted {:.2f}".format(first["backend"], second["backend"], *ratios)
    return line + (f"; not like with like: they differ in {', '.join(differ)}" if differ else "")
