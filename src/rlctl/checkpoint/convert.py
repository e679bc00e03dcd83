"""From Hugging Face's format to Megatron's and back, one weight rule at a time, in bounded memory.

1. Everything that headers and config can say is checked, and sizes are compared with memory and disk.
2. DST.partial gets each rule's tensors; the journal gets one line a rule, with the hash of each tensor.
3. The config, byte for byte, and the tokenizer's files are copied; the result is read back and compared.
4. The manifest is written, the journal removed, and DST.partial renamed to DST.

A conversion that was killed leaves DST.partial, which `resume` goes on with. Nothing half-written is ever called DST.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from rlctl.checkpoint import fit, logits, safetensors, targets
from rlctl.checkpoint.fit import Plan
from rlctl.checkpoint.logits import Logits
from rlctl.checkpoint.pipeline import in_order
from rlctl.checkpoint.prepare import Prepared, prepare
from rlctl.checkpoint.targets import HfTarget, Journal, McoreTarget, Target, written_rules
from rlctl.checkpoint.verify import Described, Progress, compare, num_bytes, silent, tensors_of
from rlctl.checkpoint.views import (
    MANIFEST,
    McoreView,
    View,
    fingerprint,
    open_view,
    read_manifest,
)
from rlctl.errors import CHECK_FAILED, ENVIRONMENT, FAILED, RlctlError
from rlctl.models.base import WeightRule
from rlctl.models.described import rope_is_expressible

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMAT = 1
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
    verify: Literal["none", "tensors", "logits"] = "tensors"
    """logits: the tensors, and what Megatron-Core and transformers compute with them."""
    workers: int = 2
    """Rules in memory at once: one is written while others are read."""
    max_memory_bytes: int | None = None
    """Of the whole process."""
    shard_bytes: int = safetensors.SHARD_BYTES


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done."""

    plan: Plan
    fingerprint: str
    resumed_tensors: int
    verified: bool
    logits: Logits | None = None
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
        self.plan = fit.plan(
            self.view, self.dtypes, source=source, target=target, workers=options.workers, special=self._special()
        )
        self.casts, self.cast_error = 0, 0.0
        self.recorded = read_manifest(self.view.folder)

    def _written_dtype(self, name: str, rule: WeightRule) -> torch.dtype:
        stored = self.view.dtype(name, rule)
        return stored if self.dtype is None or not stored.is_floating_point else self.dtype

    def _target(self) -> Target:
        if self.options.to == "mcore":
            return McoreTarget(self.partial, self.view.rules, self.dtypes, self.view.config)
        view = self.view
        return HfTarget(self.partial, view.rules, self.dtypes, view.repeated, view.stacked, self.options.shard_bytes)

    def _special(self) -> Iterator[str]:
        view = self.view
        if not any(rule.key == "output_layer.weight" for rule in view.rules):
            yield "tied embeddings: the output layer is not stored"
        if view.kind == "hf" and not rope_is_expressible(view.config):
            yield "Megatron-LM's and Megatron-Bridge's options cannot say this rope: they would scale otherwise"
        for name, of in view.repeated.items():
            yield f"`{name}` repeats `{of}`"
        if view.stacked:
            yield f"{len(view.stacked)} tensors hold several others, `{next(iter(view.stacked))}` among them"
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
        fit.check(self.plan, partial=self.partial, limit=self.options.max_memory_bytes)

    def run(self, progress: Progress = silent) -> Report:
        """Convert.

        Args:
            progress: is told of each rule.

        Raises:
            RlctlError: exit status 1 for a target that cannot be written, 2 for one that is taken, 3 for what does not
                fit, 4 if what was read back is not what was written.
        """
        self._check_source_files()
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
            compared = None
            if self.options.verify != "none":
                self._verify(tensors, progress)
            if self.options.verify == "logits":
                compared = self._compare_logits(progress)
            self._publish(journal, tensors, files)
        return Report(
            plan=self.plan,
            fingerprint=fingerprint(tensors),
            resumed_tensors=resumed,
            verified=self.options.verify != "none",
            logits=compared,
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
        for ready in self._prepared(0):
            found |= ready.found
            progress("comparing", sum(map(num_bytes, ready.found.values())))
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
        for rule, ready in zip(self.view.rules[start:], self._prepared(start), strict=True):
            self.casts += ready.casts
            self.cast_error = max(self.cast_error, ready.cast_error)
            place = self.target.write(rule, ready.tensors)
            line = {"key": rule.key, "index": list(rule.index), "place": place, "tensors": ready.found}
            journal.append(line)
            lines.append(line)
            progress("converting", sum(map(num_bytes, ready.found.values())))
        return lines

    def _prepared(self, start: int) -> Iterator[Prepared]:
        recorded = None if self.recorded is None else self.recorded["tensors"]
        one = functools.partial(prepare, self.view, dtype=self.dtype, recorded=recorded)
        return in_order(one, self.view.rules[start:], workers=self.options.workers)

    def _check_source_files(self) -> None:
        """The same for config.json and the tokenizer's files."""
        for name, recorded in (self.recorded["files"] if self.recorded is not None else {}).items():
            path = self.view.folder / name
            if not path.is_file() or _hash(path) != recorded:
                raise RlctlError(
                    f"`{path}` is not the file that `{MANIFEST}` recorded",
                    f"restore it; if the change is meant, remove `{self.view.folder / MANIFEST}`",
                    exit_status=CHECK_FAILED,
                )

    def _verify(self, tensors: Described, progress: Progress) -> None:
        written = open_view(self.partial)
        written.check_repeated()
        found = tensors_of(written, lambda _, n: progress("verifying", n), workers=self.options.workers)
        compare(found, tensors, here=str(self.partial), there=str(self.view.folder))

    def _compare_logits(self, progress: Progress) -> Logits:
        progress("comparing logits", 0)
        folders = {self.view.kind: self.view.folder, self.options.to: self.partial}
        mcore = self.view.iteration if self.view.kind == "mcore" else self.partial
        return logits.check(
            folders["hf"],
            mcore,
            dtype=self.options.dtype,
            available=logits.available_bytes(self.options.max_memory_bytes),
        )

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
            "stacked": list(self.view.stacked),
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
