"""MLflow, by its client and an explicit run id, which is kept in the run directory for a resume.

MLflow keeps every value that a step was given: steps that a resumed run does again are not sent again. Without
`tracking_uri` and MLFLOW_TRACKING_URI, a file store in the run directory takes it all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl import config
from rlctl.sinks.base import Sent

_PARAMETERS_A_CALL = 100  # mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH
_PARAMETER_CHARACTERS = 6000  # mlflow.utils.validation.MAX_PARAM_VAL_LENGTH


class Sink:
    """Writes to the experiment of `options`.

    Args:
        run_dir: its name is the run's, unless `options` names one.
        options: `logger.mlflow`.
        recipe: resolved, as plain values.
    """

    name = "MLflow"

    def __init__(self, run_dir: Path, *, options: config.Mlflow, recipe: Mapping[str, Any]) -> None:
        self._run_dir, self._options, self._recipe = run_dir, options, recipe
        self._sent = Sent(run_dir / "logs" / "mlflow.json")
        self._client: Any = None

    def open(self, done: int) -> None:
        """See base.py."""
        uri = self._options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str(self._run_dir / "mlflow")
        if "://" not in uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer clients refuse a folder without it
            uri = Path(uri.removeprefix("file:")).absolute().as_uri()
        from mlflow.entities import Param  # an extra: imported only where it is asked for
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        if self._sent.id is not None:
            self._client.update_run(self._sent.id, status="RUNNING")
            return
        name = self._options.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=self._options.run_name or self._run_dir.name)
        self._sent.save(run_id=run.info.run_id, step=-1)
        parameters = [Param(key, str(value)[:_PARAMETER_CHARACTERS]) for key, value in _leaves(self._recipe)]
        for start in range(0, len(parameters), _PARAMETERS_A_CALL):
            self._client.log_batch(run.info.run_id, params=parameters[start : start + _PARAMETERS_A_CALL])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See base.py."""
        from mlflow.entities import Metric  # see `open`

        if step > self._sent.step:
            now = int(time.time() * 1000)
            self._client.log_batch(
                self._sent.id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()]
            )
            assert self._sent.id is not None
            self._sent.save(run_id=self._sent.id, step=step)

    def close(self) -> None:
        """See base.py."""
        self._client.set_terminated(self._sent.id)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
