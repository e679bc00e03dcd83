"""From Hugging Face's format to Megatron's and back, one weight rule at a time, in bounded memory.

1. Everything that headers and config can say is checked, and sizes are compared with memory and disk.
2. DST.partial gets each rule's tensors; the journal gets one line a rule, with the hash of each tensor.
3. The config, byte for byte, and the tokenizer's files are copied; the result is read back and compared.
4. The manifest is written, the journal removed, and DST.partial renamed to DST.

A conversion that was killed leaves DST.partial, which `resume` goes on with. Nothing half-written is ever called DST.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from rlctl.checkpoint import safetensors, targets, torch_dist
from rlctl.checkpoint.targets import HfTarget, Journal, McoreTarget, Target, written_rules
from rlctl.checkpoint.verify import Described, Progress, compare, num_bytes, silent, tensors_of
from rlctl.checkpoint.views import (
    MANIFEST,
    McoreView,
    View,
    cast,
    described,
    fingerprint,
    open_view,
    read_manifest,
)
from rlctl.errors import ENVIRONMENT, FAILED, RlctlError
from rlctl.models.base import Copy, WeightRule

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMAT = 1
_FIXED_BYTES = 64 << 20  # allocator slack and file buffers beside the tensors
_PACKAGES = ("rlctl", "torch", "megatron-core")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a conversion is asked to do."""

    to: Literal["mcore", "hf"]
    dtype: str | None = None
    """float32, bfloat16 or float16; None keeps what the source has."""
    like: Path | None = None
    """Directory with config.json and tokenizer, for a Megatron checkpoint that has none."""
    resume: bool = False
    verify: Literal["none", "tensors"] = "tensors"
    max_memory_bytes: int | None = None
    """Of the whole process."""
    shard_bytes: int = safetensors.SHARD_BYTES


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
class Report:
    """What was done."""

    plan: Plan
    fingerprint: str
    resumed_tensors: int
    verified: bool
    up_to_date: bool = False
    casts: int = 0
    cast_error: float = 0.0
    """Largest absolute change of an element by a cast."""


class Conversion:
    """One conversion, checked and planned; nothing is written before `run`.

    Args:
        source: a directory in the other format.
        target: must not exist, or be empty, or be a complete conversion of the same tensors.
        options: see Options.

    Raises:
        RlctlError: exit status 2 for a source that is not understood or not whole.
    """

    def __init__(self, source: Path, target: Path, options: Options) -> None:
        self.view: View = open_view(source, like=options.like)
        if self.view.kind == options.to:
            raise RlctlError(
                f"`{source}` is in {'Megatron' if options.to == 'mcore' else 'Hugging Face'} format already",
                "swap source and target, or use the other direction",
            )
        self.target_dir, self.options = target, options
        self.partial = target.with_name(target.name + ".partial")
        self.dtype = None if options.dtype is None else DTYPES[options.dtype]
        self.dtypes = {
            name: self._written_dtype(name, rule) for rule in self.view.rules for name in rule.sources
        }  # fmt: skip
        self.target = self._target()
        self.plan = self._plan(source)
        self.casts, self.cast_error = 0, 0.0

    def _written_dtype(self, name: str, rule: WeightRule) -> torch.dtype:
        stored = self.view.dtype(name, rule)
        return stored if self.dtype is None or not stored.is_floating_point else self.dtype

    def _target(self) -> Target:
        if self.options.to == "mcore":
            return McoreTarget(self.partial, self.view.rules, self.dtypes, self.view.config["num_hidden_layers"])
        return HfTarget(self.partial, self.view.rules, self.dtypes, self.view.repeated, self.options.shard_bytes)

    # --- what it needs ---

    def _plan(self, source: Path) -> Plan:
        view, rules = self.view, self.view.rules
        read = sum(_bytes(r, {n: view.dtype(n, r) for n in r.sources}) for r in rules)
        write = sum(_bytes(r, self.dtypes) for r in rules)
        largest = max(rules, key=self._working_bytes)
        return Plan(
            source=str(source),
            target=str(self.target_dir),
            to=self.options.to,
            model_type=view.config["model_type"],
            num_tensors=len(self.dtypes),
            read_bytes=read,
            write_bytes=write + len(rules) * torch_dist.RECORD_OVERHEAD_BYTES,
            peak_memory_bytes=_resident_bytes() + _FIXED_BYTES + self._working_bytes(largest),
            largest=largest.key,
            free_memory_bytes=_meminfo("MemAvailable"),
            free_disk_bytes=shutil.disk_usage(_existing(self.target_dir)).free,
            special=tuple(self._special()),
        )

    def _working_bytes(self, rule: WeightRule) -> int:
        """Held at once: the tensors read, their casts, and what they are rearranged into."""
        stored = {name: self.view.dtype(name, rule) for name in rule.sources}
        read, written = _bytes(rule, stored), _bytes(rule, self.dtypes)
        copies = 0 if isinstance(rule.operation, Copy) and self.view.kind == "hf" else 1
        return read + copies * max(read, written) + (written if stored != {n: self.dtypes[n] for n in stored} else 0)

    def _special(self) -> Iterator[str]:
        view = self.view
        if not any(rule.key == "output_layer.weight" for rule in view.rules):
            yield "tied embeddings: the output layer is not stored"
        for name, of in view.repeated.items():
            yield f"`{name}` repeats `{of}`"
        for name in view.dropped:
            yield f"`{name}` is not read: it follows from the config"
        cast_count = sum(self.dtypes[n] != view.dtype(n, r) for r in view.rules for n in r.sources)
        if cast_count:
            yield f"{cast_count} tensors are cast to {self.options.dtype}"
        if isinstance(view, McoreView):
            for key, rows, wanted in view.padded():
                yield f"`{key}` has {rows} rows, {wanted} are tokens: the rest is left out"

    def check_fit(self) -> None:
        """Compare the plan with this machine.

        Raises:
            RlctlError: exit status 3.
        """
        plan, limit = self.plan, self.options.max_memory_bytes
        available = plan.free_memory_bytes + _resident_bytes()
        if limit is not None and plan.peak_memory_bytes > limit:
            raise RlctlError(
                f"converting needs up to {plan.peak_memory_bytes:,} bytes of memory, for `{plan.largest}`; "
                f"`--max-memory` is {limit:,}",
                f"raise it to {plan.peak_memory_bytes:,}",
                exit_status=ENVIRONMENT,
            )
        if plan.peak_memory_bytes > available:
            raise RlctlError(
                f"converting needs up to {plan.peak_memory_bytes:,} bytes of memory, for `{plan.largest}`; "
                f"{available:,} are available",
                "free memory, or convert on another machine",
                exit_status=ENVIRONMENT,
            )
        needed = plan.write_bytes - _written_bytes(self.partial)
        if needed > plan.free_disk_bytes:
            raise RlctlError(
                f"`{self.target_dir}` needs {needed:,} bytes of disk, {plan.free_disk_bytes:,} are free",
                "free space there, or choose another target",
                exit_status=ENVIRONMENT,
            )

    # --- doing it ---

    def run(self, progress: Progress = silent) -> Report:
        """Convert.

        Args:
            progress: is told of each rule.

        Raises:
            RlctlError: exit status 1 for a target that cannot be written, 2 for one that is taken, 3 for what does not
                fit, 4 if what was read back is not what was written.
        """
        done = self._up_to_date(progress)
        if done is not None:
            return done
        self.check_fit()
        self.view.check_repeated()
        with _disk_errors(self.partial):
            self._begin()
            journal = Journal(self.partial / targets.JOURNAL)
            lines = self._resumed(journal)
            resumed = sum(len(line["tensors"]) for line in lines)
            self.target.prepare([line["place"] for line in lines])
            for line in lines:
                progress("converting", sum(map(num_bytes, line["tensors"].values())))
            lines += self._write(len(lines), journal, progress)
            tensors = {name: value for line in lines for name, value in line["tensors"].items()}
            assert len(tensors) == len(self.dtypes)
            self.target.finish({(line["key"], tuple(line["index"])): line["place"] for line in lines})
            files = _copy_assets(self.view.folder, self.partial)
            if self.options.verify == "tensors":
                self._verify(tensors, progress)
            self._publish(journal, tensors, files)
        return Report(
            plan=self.plan,
            fingerprint=fingerprint(tensors),
            resumed_tensors=resumed,
            verified=self.options.verify == "tensors",
            casts=self.casts,
            cast_error=self.cast_error,
        )

    def _up_to_date(self, progress: Progress) -> Report | None:
        """Whether the target is there already; exact: the source is read and hashed."""
        target = self.target_dir
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return None
        manifest = read_manifest(target) if target.is_dir() else None
        if manifest is None:
            raise RlctlError(f"`{target}` exists, and is no conversion", "choose another target, or remove it")
        open_view(target)  # whole, as far as headers say
        found: Described = {}
        for rule in self.view.rules:
            tensors = [cast(t, self._cast_to(t)) for t in self.view.read(rule)]
            found |= {name: described(t) for name, t in zip(rule.sources, tensors, strict=True)}
            progress("comparing", sum(num_bytes(found[name]) for name in rule.sources))
        if (
            found != manifest["tensors"]
            or (self.view.folder / "config.json").read_bytes() != (target / "config.json").read_bytes()
        ):
            raise RlctlError(
                f"`{target}` is a conversion of something else", "choose another target, or remove it"
            )  # fmt: skip
        return Report(
            plan=self.plan, fingerprint=manifest["fingerprint"], resumed_tensors=0, verified=False, up_to_date=True
        )

    def _begin(self) -> None:
        if self.partial.exists() and not self.options.resume:
            raise RlctlError(
                f"`{self.partial}` is left from a conversion that did not end",
                "go on with `--resume`, or remove it",
            )
        if self.target_dir.exists():
            self.target_dir.rmdir()  # empty: `_up_to_date` saw to it
        self.partial.mkdir(parents=True, exist_ok=True)

    def _resumed(self, journal: Journal) -> list[dict[str, Any]]:
        """The journal's lines that hold, after its head is set to this conversion's."""
        head, lines = self._identity(), journal.read()
        if lines and lines[0] != head:
            changed = ", ".join(k for k in head if lines[0].get(k) != head[k])
            raise RlctlError(
                f"`{self.partial}` was begun with another {changed}", f"remove it, or restore the {changed}"
            )
        good = [dict(line) for line in written_rules(self.target, self.view.rules, lines[1:])]
        journal.rewrite([head, *good])
        return good

    def _identity(self) -> dict[str, Any]:
        """What must not change between a start and a resume."""
        view = self.view
        files = sorted(f for f in view.iteration.iterdir() if f.suffix in (".safetensors", ".distcp"))
        return {
            "format": FORMAT,
            "direction": self.options.to,
            "dtype": self.options.dtype,
            "shard size": self.options.shard_bytes,
            "config": _hash(view.folder / "config.json"),
            "source": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files],
        }

    def _write(self, start: int, journal: Journal, progress: Progress) -> list[dict[str, Any]]:
        lines = []
        for rule in self.view.rules[start:]:
            tensors = [self._cast(t) for t in self.view.read(rule)]
            found = {name: described(t) for name, t in zip(rule.sources, tensors, strict=True)}
            line = {
                "key": rule.key, "index": list(rule.index), "place": self.target.write(rule, tensors), "tensors": found
            }  # fmt: skip
            journal.append(line)
            lines.append(line)
            progress("converting", sum(map(num_bytes, found.values())))
        return lines

    def _cast_to(self, tensor: torch.Tensor) -> torch.dtype | None:
        return self.dtype if tensor.dtype.is_floating_point else None

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        made = cast(tensor, self._cast_to(tensor))
        if made.dtype != tensor.dtype:
            self.casts += 1
            for before, after in zip(tensor.reshape(-1).split(1 << 22), made.reshape(-1).split(1 << 22), strict=True):
                self.cast_error = max(self.cast_error, float((before.double() - after.double()).abs().max()))
        return made

    def _verify(self, tensors: Described, progress: Progress) -> None:
        written = open_view(self.partial)
        written.check_repeated()
        found = tensors_of(written, lambda _, n: progress("verifying", n))
        compare(found, tensors, here=str(self.partial), there=str(self.view.folder))

    def _publish(self, journal: Journal, tensors: Described, files: dict[str, str]) -> None:
        manifest = {
            "format": FORMAT,
            "kind": self.options.to,
            "fingerprint": fingerprint(tensors),
            "source": Path(self.plan.source).name,
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            "dtype": self.options.dtype,
            "casts": {"count": self.casts, "max_abs_error": self.cast_error},
            "repeated": self.view.repeated,
            "dropped": self.view.dropped,
            "vocabulary": {"size": self.view.config["vocab_size"], "stored": self.view.config["vocab_size"]},
            "files": files,
            "tensors": tensors,
        }
        path = self.partial / MANIFEST
        with path.open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        journal.remove()
        _sync_folder(self.partial)
        self.partial.rename(self.target_dir)
        _sync_folder(self.target_dir.parent)


def plan_values(plan: Plan) -> dict[str, Any]:
    """For a JSON reader."""
    return dataclasses.asdict(plan)


def _bytes(rule: WeightRule, dtypes: Mapping[str, torch.dtype]) -> int:
    return sum(
        math.prod(s) * dtypes[n].itemsize for n, s in zip(rule.sources, rule.source_shapes, strict=True)
    )  # fmt: skip


def _copy_assets(source: Path, target: Path) -> dict[str, str]:
    """config.json and the tokenizer's files, byte for byte; their hashes by name."""
    hashes = {}
    for pattern in ("config.json", *safetensors.ASSETS):
        for asset in sorted(source.glob(pattern)):
            if asset.is_file():
                shutil.copyfile(asset, target / asset.name)
                hashes[asset.name] = _hash(target / asset.name)
    return hashes


def _hash(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _written_bytes(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _meminfo(field: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


@contextmanager
def _disk_errors(partial: Path) -> Iterator[None]:
    """A write that fails, told by cause; torch.save hides it behind an error of its own."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise RlctlError(
            f"cannot write `{cause.filename or partial}`: {cause.strerror or cause}",
            "free space there, then run again with `--resume`" if full else "choose a target that is writable",
            exit_status=ENVIRONMENT if full else FAILED,
        ) from error
