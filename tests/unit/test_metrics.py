"""docs/metrics.md says of every figure what the code says. RLCTL_UPDATE_GOLDEN=1 writes the page anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rlctl import plugins
from rlctl.types import TokenOutputs
from tests.declared import declared
from tests.numerics import algorithm_cases
from tests.numerics.test_supervised import pairs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

What `metrics.jsonl`, TensorBoard, W&B and MLflow get of each step. This page is generated from the `METRICS` of the
files that log them; tests compare it, and the metrics of tiny runs, with the code.

Means over tokens are over the tokens of the loss mask, in the whole step: they do not depend on microbatches, packing
or ranks. With several updates a step `train/` figures are the mean over them, and `mismatch/` is of the first, on
unchanged weights. Healthy ranges are rules of thumb: look at a curve that leaves them. Figures under `time/`, `perf/`
and `memory/` depend on the machine; all others are reproducible. NaN is written as null, with a warning.
"""


def page() -> str:
    lines, metrics = [HEAD], declared()
    order = ("rollout", "train", "mismatch", "val", "data", "packing", "time", "perf", "memory")
    assert {name.split("/")[0] for name in metrics} == set(order)
    for section in order:
        lines += [f"## {section}/", "", "| metric | what it is | formula | reduction | healthy |", "| --- " * 5 + "|"]
        for name, one in metrics.items():
            if name.startswith(f"{section}/"):
                reduction = "one figure" if one.reduce is None else f"{one.reduce.replace('_', ' ')} over {one.over}"
                cells = (f"`{name}`", one.meaning, one.formula, reduction, one.healthy)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_is_what_the_code_declares():
    if os.environ.get("RLCTL_UPDATE_GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


def test_every_declaration_says_something():
    for name, one in declared().items():
        assert all(len(text) > 0 for text in (one.meaning, one.formula, one.healthy)), name
        assert (one.reduce is None) == (one.over is None), name


def losses():
    """(algorithm, batch, metrics of its loss) with all options on that add a metric."""
    made, logprobs = algorithm_cases.mixed()
    for name in algorithm_cases.ALGORITHMS:
        rule = algorithm_cases.algorithm(name)
        prepared = algorithm_cases.prepared(rule, made)
        yield name, prepared, rule.loss(prepared, TokenOutputs(logprobs=logprobs))[1]
    made, logprobs = pairs()
    for name in ("sft", "dpo"):
        config = plugins.load("algorithm", name).Config()
        if name == "dpo":
            config.loss_fn.sft_loss_weight = 0.5
        rule = plugins.load("algorithm", name).Algorithm(config)
        yield name, made, rule.loss(made, TokenOutputs(logprobs=logprobs))[1]


@pytest.mark.parametrize(("name", "batch", "metrics"), [pytest.param(*case, id=case[0]) for case in losses()])
def test_an_algorithms_metrics_are_reduced_as_declared(name, batch, metrics):
    known = declared()
    for short, metric in metrics.items():
        one = known[short if "/" in short else f"train/{short}"]
        of_sequences = metric.values.shape == torch.Size([len(batch)])
        assert (one.reduce, one.over) == (metric.reduce, "sequences" if of_sequences else "tokens"), short
