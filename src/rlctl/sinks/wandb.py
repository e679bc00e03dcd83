"""Weights & Biases. The run's id is kept in the run directory, so that a resumed run goes on in the same one.

W&B takes no step twice: steps that a resumed run does again are not sent again. WANDB_MODE, WANDB_ENTITY and the other
variables of W&B are read by it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl import config
from rlctl.sinks.base import Sent


class Sink:
    """Writes to the project of `options`.

    Args:
        run_dir: its name is the run's, unless `options` names one.
        options: `logger.wandb`.
        recipe: resolved, as plain values.
    """

    name = "W&B"

    def __init__(self, run_dir: Path, *, options: config.Wandb, recipe: Mapping[str, Any]) -> None:
        self._run_dir, self._options, self._recipe = run_dir, options, recipe
        self._sent = Sent(run_dir / "logs" / "wandb.json")
        self._run: Any = None

    def open(self, done: int) -> None:
        """See base.py."""
        import wandb  # an extra: imported only where it is asked for

        run_id = self._sent.id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=self._options.project,
            name=self._options.name or self._run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(self._run_dir),
            config=dict(self._recipe),
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        )
        self._sent.save(run_id=run_id, step=self._sent.step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See base.py."""
        if step > self._sent.step:
            self._run.log(dict(metrics), step=step)
            assert self._sent.id is not None
            self._sent.save(run_id=self._sent.id, step=step)

    def close(self) -> None:
        """See base.py."""
        self._run.finish()
