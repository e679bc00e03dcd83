"""Training checkpoints: a directory that appears whole, by one rename, after its manifest is written.

`checkpoints/step_000010/` holds `policy/rank_N.pt` (each rank's part, in the run's layout), `trainer.json` (counters)
and `manifest.json` (every file with its size and hash, written last).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from rlctl.errors import CHECK_FAILED, RlctlError

MANIFEST = "manifest.json"


def save(run_dir: Path, *, step: int, local: dict[str, Any], trainer: dict[str, Any]) -> Path:
    """Write the checkpoint of a step and remove older ones. Collective.

    Args:
        run_dir: of the run; must be one file system for all ranks.
        step: steps completed.
        local: this rank's state (policy/base.py `TrainState`).
        trainer: counters, the same on every rank.
    """
    final = run_dir / "checkpoints" / f"step_{step:06d}"
    partial = final.with_suffix(".partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "policy").mkdir(parents=True)
    dist.barrier()
    path = partial / "policy" / f"rank_{rank}.pt"
    with path.open("wb") as file:
        torch.save(local, file)
        file.flush()
        os.fsync(file.fileno())
    sums: list[tuple[str, int, str]] = [("", 0, "")] * dist.get_world_size()
    dist.all_gather_object(sums, (f"policy/{path.name}", path.stat().st_size, _hash(path)))
    if rank == 0:
        _write_json(partial / "trainer.json", {"step": step, **trainer})
        trainer_file = partial / "trainer.json"
        files = [*sums, ("trainer.json", trainer_file.stat().st_size, _hash(trainer_file))]
        _write_json(partial / MANIFEST, {"step": step, "files": {n: {"bytes": b, "xxh3_128": h} for n, b, h in files}})
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_folder(final.parent)
        for old in complete(run_dir)[:-1]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def complete(run_dir: Path) -> list[Path]:
    """The complete checkpoints, oldest first, by step number."""
    found = (run_dir / "checkpoints").glob("step_*")
    named = [
        (int(m.group(1)), p) for p in found if (m := re.fullmatch(r"step_(\d+)", p.name)) and (p / MANIFEST).exists()
    ]
    return [path for _, path in sorted(named)]


def load(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's state and the counters.

    Raises:
        RlctlError: a file is missing, has another size or another hash than the manifest says.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    mine = f"policy/rank_{dist.get_rank()}.pt"
    if mine not in manifest["files"]:
        raise RlctlError(
            f"`{checkpoint}` has no {mine}: it was saved by {len(manifest['files']) - 1} processes",
            "resume with as many processes as the checkpoint was saved by",
        )
    for name in (mine, "trainer.json"):
        path, stated = checkpoint / name, manifest["files"][name]
        if not path.exists() or path.stat().st_size != stated["bytes"] or _hash(path) != stated["xxh3_128"]:
            raise RlctlError(
                f"`{path}` is not what its manifest says", "use an older checkpoint", exit_status=CHECK_FAILED
            )
    local = torch.load(
        checkpoint / mine, weights_only=False
    )  # our own file, its hash checked: optimizer state has objects
    return local, json.loads((checkpoint / "trainer.json").read_text())


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
