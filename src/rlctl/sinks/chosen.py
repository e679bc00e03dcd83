"""The sinks that a recipe asks for besides TensorBoard."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl import config
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.sinks import mlflow, wandb
from rlctl.sinks.base import SinkProtocol


def sinks(logger: config.Logger, run_dir: Path, *, recipe: Mapping[str, Any]) -> list[SinkProtocol]:
    """Unopened sinks; imports none of their packages.

    Args:
        logger: what is asked for.
        run_dir: of the run.
        recipe: all of it, as plain values, for those that store it.
    """
    found: list[SinkProtocol] = []
    if logger.wandb_enabled:
        found.append(wandb.Sink(run_dir, options=logger.wandb, recipe=recipe))
    if logger.mlflow_enabled:
        found.append(mlflow.Sink(run_dir, options=logger.mlflow, recipe=recipe))
    return found


def check(logger: config.Logger) -> None:
    """Refuse options of a sink that is off.

    Raises:
        RlctlError: names the key.
    """
    parts = (("wandb", logger.wandb_enabled, logger.wandb, config.Wandb()),
             ("mlflow", logger.mlflow_enabled, logger.mlflow, config.Mlflow()))  # fmt: skip
    for name, enabled, options, default in parts:
        if not enabled and options != default:
            raise RlctlError(
                f"`logger.{name}` is set, and has no effect: `logger.{name}_enabled` is false",
                f"set logger.{name}_enabled=true, or leave logger.{name} out",
            )


def missing_package(logger: config.Logger) -> RlctlError | None:
    """Which package of a sink is not installed here; None when all are."""
    for name, enabled, package in (("wandb", logger.wandb_enabled, "wandb"),
                                   ("mlflow", logger.mlflow_enabled, "mlflow-skinny")):  # fmt: skip
        if enabled and importlib.util.find_spec(name) is None:
            return RlctlError(
                f"{package} is not installed, and logger.{name}_enabled is true",
                f"pip install {package}, or leave logger.{name}_enabled out",
                exit_status=ENVIRONMENT,
            )
    return None
