"""What a conversion will read, write and need, and whether this machine has it. Sizes in bytes."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rlctl.checkpoint import torch_dist
from rlctl.checkpoint.views import View, described
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.models.base import Copy, WeightRule

_FIXED_BYTES = 64 << 20  # allocator slack and file buffers beside the tensors
_SAMPLE_BYTES = 64 << 20  # read, and written, to measure a disk


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion will read, write and need; sizes in bytes."""

    source: str
    target: str
    to: str
    model_type: str
    num_tensors: int
    read_bytes: int
    write_bytes: int
    peak_memory_bytes: int
    """Of the whole process, at most."""
    largest: str
    """The Megatron tensor that decides the peak."""
    free_memory_bytes: int
    free_disk_bytes: int
    special: tuple[str, ...]
    """What is not one plain copy: tied embeddings, casts, dropped or repeated tensors, padding."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of this machine's disks, in bytes a second."""

    read: float
    """With hashing; of a cached file it is memory's."""
    write: float
    """Until the bytes are on the disk."""

    def seconds(self, plan: Plan, *, verify: bool) -> float:
        """That a conversion takes, one thing after the other."""
        read = plan.read_bytes + (plan.write_bytes if verify else 0)
        return read / self.read + plan.write_bytes / self.write


def plan(
    view: View, dtypes: Mapping[str, torch.dtype], *, source: Path, target: Path, workers: int, special: Iterable[str]
) -> Plan:
    """What converting needs.

    Args:
        view: the source.
        dtypes: to write, by tensor.
        source: as the user named it.
        target: need not exist.
        workers: rules in memory at once.
        special: what is not one plain copy.
    """
    rules = view.rules
    working = [_working_bytes(view, rule, dtypes) for rule in rules]
    windows = [sum(working[i : i + workers]) for i in range(len(rules))]
    worst = max(range(len(rules)), key=lambda i: windows[i])
    largest = max(rules[worst : worst + workers], key=lambda rule: _working_bytes(view, rule, dtypes))
    return Plan(
        source=str(source),
        target=str(target),
        to="mcore" if view.kind == "hf" else "hf",
        model_type=view.config["model_type"],
        num_tensors=len(dtypes),
        read_bytes=sum(_bytes(r, {n: view.dtype(n, r) for n in r.sources}) for r in rules),
        write_bytes=sum(_bytes(r, dtypes) for r in rules) + len(rules) * torch_dist.RECORD_OVERHEAD_BYTES,
        peak_memory_bytes=resident_bytes() + _FIXED_BYTES + windows[worst],
        largest=largest.key,
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(_existing(target)).free,
        special=tuple(special),
    )


def check(planned: Plan, *, partial: Path, limit: int | None) -> None:
    """Compare a plan with this machine.

    Args:
        planned: the plan.
        partial: what is there of an earlier start; its blocks are taken already.
        limit: `--max-memory`, of the whole process.

    Raises:
        RlctlError: exit status 3.
    """
    needs = f"converting needs up to {planned.peak_memory_bytes:,} bytes of memory, for `{planned.largest}`"
    if limit is not None and planned.peak_memory_bytes > limit:
        raise RlctlError(
            f"{needs}; `--max-memory` is {limit:,}",
            f"raise it to {planned.peak_memory_bytes:,}, or use `--workers 1`",
            exit_status=ENVIRONMENT,
        )
    available = planned.free_memory_bytes + resident_bytes()
    if planned.peak_memory_bytes > available:
        raise RlctlError(
            f"{needs}; {available:,} are available",
            "free memory, or convert on another machine",
            exit_status=ENVIRONMENT,
        )
    needed = planned.write_bytes - _written_bytes(partial)
    if needed > planned.free_disk_bytes:
        raise RlctlError(
            f"`{planned.target}` needs {needed:,} bytes of disk, {planned.free_disk_bytes:,} are free",
            "free space there, or choose another target",
            exit_status=ENVIRONMENT,
        )


def measure(view: View, target: Path) -> Speed | None:
    """Speed of a sample read from the source and of one written beside the target, which leaves no file.

    None where the target's folder cannot be written.
    """
    start, done = time.monotonic(), 0
    for rule in view.rules:
        for tensor in view.read(rule):
            done += tensor.nbytes
            described(tensor)
        if done >= _SAMPLE_BYTES:
            break
    read = done / (time.monotonic() - start)
    content = os.urandom(1 << 20) * (_SAMPLE_BYTES >> 20)
    try:
        with tempfile.TemporaryFile(dir=_existing(target)) as file:
            start = time.monotonic()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            return Speed(read=read, write=len(content) / (time.monotonic() - start))
    except OSError:
        return None


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_memory_bytes() -> int:
    """That the kernel can give, within this container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _working_bytes(view: View, rule: WeightRule, dtypes: Mapping[str, torch.dtype]) -> int:
    """Held at once: the tensors read, their casts, and what they are rearranged into."""
    stored = {name: view.dtype(name, rule) for name in rule.sources}
    read, written = _bytes(rule, stored), _bytes(rule, dtypes)
    copies = 0 if isinstance(rule.operation, Copy) and view.kind == "hf" else 1
    return read + copies * max(read, written) + (written if stored != {n: dtypes[n] for n in stored} else 0)


def _bytes(rule: WeightRule, dtypes: Mapping[str, torch.dtype]) -> int:
    return sum(math.prod(s) * dtypes[n].itemsize for n, s in zip(rule.sources, rule.source_shapes, strict=True))


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _written_bytes(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())
