"""RANK and WORLD_SIZE are already set (torchrun, Kubernetes, SkyPilot): this process becomes the worker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rlctl.errors import RlctlError

WAIT_SECONDS = 120.0


def run(run_dir: Path, *, create: Callable[[], object], last_file: str = "recipe.yaml") -> NoReturn:
    """Become `rlctl.launch.worker RUN_DIR`. Rank 0 makes the run directory; the others wait for it.

    Args:
        run_dir: on storage that all ranks share.
        create: makes it.
        last_file: what `create` writes last.

    Raises:
        RlctlError: the directory is taken (rank 0), or did not appear in WAIT_SECONDS (other ranks).
    """
    if os.environ["RANK"] == "0":
        create()
    else:
        _wait_for(run_dir / last_file)
    os.execv(sys.executable, [sys.executable, "-m", "rlctl.launch.worker", str(run_dir)])


def _wait_for(file: Path) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not file.is_file():
        if time.monotonic() > end:
            raise RlctlError(
                f"rank {os.environ['RANK']} waited {WAIT_SECONDS:.0f} s for `{file}`, which rank 0 writes",
                "give a `--run-dir` on storage that all nodes share, and look at rank 0's output",
                exit_status=1,
            )
        time.sleep(0.2)
