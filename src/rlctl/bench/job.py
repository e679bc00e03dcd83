"""What a measuring process is asked to do, as `bench.json` in its directory. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

JOB_FILE = "bench.json"
RESULT_FILE = "result.json"
RECORD = "record"
"""The directory of a side's parity record."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of the workers, e.g. Job(kind="time", rollouts="out/rollouts.safetensors", steps=5, warmup=1)."""

    kind: Literal["record", "parity", "time", "train"]
    """record: generate with the initial weights. parity: write what a side computes. time: replay, with seconds by
    phase. train: replay with updates, and write the curve."""
    rollouts: str
    """record writes it; the others replay it."""
    steps: int
    """record: steps of rollouts. time and train: steps that count."""
    warmup: int = 0
    """Steps before those, dropped."""

    def write(self, folder: Path) -> None:
        """Into a run directory."""
        (folder / JOB_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read(folder: Path) -> Job:
    """What `write` wrote."""
    return Job(**json.loads((folder / JOB_FILE).read_text()))
