"""TensorBoard events in the run directory; what an earlier start wrote after the step of the resume is purged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Sink:
    """Writes to `folder`."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, done: int) -> None:
        """See base.py."""
        from torch.utils.tensorboard import SummaryWriter  # seconds to import; only rank 0 needs it

        self._writer = SummaryWriter(str(self._folder), purge_step=done + 1 if done else None)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See base.py."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run that dies has what metrics.jsonl has

    def close(self) -> None:
        """See base.py."""
        self._writer.close()
