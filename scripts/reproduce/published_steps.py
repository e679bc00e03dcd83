"""Published, predicted and measured seconds of a row's runs, by phase. Usage: ROW RUNS_FOLDER."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from rlctl.plan import published
from rlctl.plan.steptime import constants

MEASURED = {
    "generation": ("generate",),
    "logprobs": ("old_logprobs", "ref_logprobs"),
    "training": ("train",),
    "weight sync": ("weight_sync",),
    "step": ("step",),
}
FIRST, LAST = 22, 29  # of the published mean


def measured(folder: Path) -> dict[str, float]:
    """Mean seconds by phase of the published steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if FIRST <= line["step"] <= LAST]
    if len(taken) != LAST - FIRST + 1:
        sys.exit(f"{folder} has {len(lines)} steps; {LAST} are needed")
    return {
        phase: statistics.mean(sum(line.get(f"time/{name}_seconds", 0.0) for name in names) for line in taken)
        for phase, names in MEASURED.items()
    }


def main(row: str, runs: Path) -> None:
    """Print the table."""
    print("| backend | phase | published | predicted | measured |\n| --- | --- | --- | --- | --- |")
    for step in (s for s in published.steps() if s.script == row):
        predicted = published.predicted(step, constants()).step
        assert predicted is not None, "the table's engines hold their models"
        own, ours = published.seconds(predicted), measured(runs / step.backend)
        for phase in published.PHASES:
            print(f"| {step.backend} | {phase} | {step.seconds[phase]:.0f} | {own[phase]:.0f} | {ours[phase]:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
