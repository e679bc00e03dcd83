"""Collect the runs of smollm2-arithmetic.sh into a CSV of curves and a table. Usage: RUNS_FOLDER OUTPUT_STEM."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path

SHOWN = ("rollout/reward", "train/loss", "train/grad_norm", "train/entropy", "mismatch/max_logprob_error")


def read(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main(runs: Path, stem: Path) -> None:
    curves = {folder.name: read(folder) for folder in sorted(runs.iterdir())}
    with stem.with_suffix(".csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *SHOWN])
        for name, lines in curves.items():
            writer.writerows([name, line["step"], *(f"{line[key]:.6g}" for key in SHOWN)] for line in lines)
    table = [
        "| run | step 1 | mean of steps 10-12 | max engine-policy logprob difference | median step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, lines in curves.items():
        last = statistics.mean(line["rollout/reward"] for line in lines[9:12])
        worst = max(line["mismatch/max_logprob_error"] for line in lines)
        seconds = statistics.median(line["time/step_seconds"] for line in lines)
        table.append(f"| {name} | {lines[0]['rollout/reward']:.3f} | {last:.3f} | {worst:.1e} | {seconds:.0f} s |")
    text = stem.with_suffix(".md").read_text() if stem.with_suffix(".md").exists() else "<!-- table -->\n<!-- end -->\n"
    head, rest = text.split("<!-- table -->")
    tail = rest.split("<!-- end -->")[1]
    stem.with_suffix(".md").write_text(head + "<!-- table -->\n" + "\n".join(table) + "\n<!-- end -->" + tail)
    print("\n".join(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
