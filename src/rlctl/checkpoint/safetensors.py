"""Hugging Face directories: a lazy reader, and streaming writers that publish whole or not at all.

The reader takes tensors from files by `read`, not by memory map: pages of a map count as the process's memory, and a
conversion must stay small. Every header is checked against its file's size before the first tensor is read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlctl.errors import RlctlError
from rlctl.models.base import Shape, Stacked

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 << 30  # transformers' own default
ASSETS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # the format's own
_WRITE_BYTES = 1 << 28  # of one system call

Spec = tuple[Shape, torch.dtype]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies."""

    file: Path
    start: int
    """In bytes from the start of the file."""
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return math.prod(self.shape) * self.dtype.itemsize


class Reader:
    """The tensors of a directory by name; one is read when asked for.

    Raises:
        RlctlError: no weights; an index that does not say what the files hold; a tensor in two files; a header that is
            damaged or does not fit its file's size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else _files(folder)
        if not names:
            raise RlctlError(f"`{folder}` has no safetensors weights", "give a directory with model.safetensors")
        self.entries: dict[str, Entry] = {}
        for name in names:
            if not (folder / name).is_file():
                raise RlctlError(f"`{folder / name}` is missing, but {INDEX} names it", "download the model again")
            for tensor, entry in read_header(folder / name).items():
                if tensor in self.entries:
                    raise RlctlError(
                        f"tensor `{tensor}` is in two files: `{self.entries[tensor].file}` and `{entry.file}`",
                        "keep the files of one save only",
                    )
                self.entries[tensor] = entry
        if index is not None:
            _check_index(folder, index, self.entries)

    def names(self) -> list[str]:
        """All tensors."""
        return list(self.entries)

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, as stored.

        Raises:
            RlctlError: the directory has no such tensor, or the file became shorter.
        """
        if name not in self.entries:
            raise RlctlError(
                f"`{self.folder}` has no tensor `{name}`", "its config.json and its weights are not of one model"
            )
        return read(name, self.entries[name])


def unstack(entries: dict[str, Entry], stacked: Mapping[str, Stacked], shapes: Mapping[str, Shape]) -> dict[str, Entry]:
    """Entries in which each stacked tensor is replaced by its parts, which lie one behind the other in it.

    Args:
        entries: of files, by name.
        stacked: declared ones, by name; those that are not in `entries` say nothing.
        shapes: of the parts.

    Raises:
        RlctlError: a stacked tensor has another shape, or a part of it is stored a second time.
    """
    found = {name: entry for name, entry in entries.items() if name not in stacked}
    for name, declared in stacked.items():
        if name not in entries:
            continue
        whole, start = entries[name], entries[name].start
        if whole.shape != declared.shape:
            raise RlctlError(
                f"`{whole.file}`: tensor `{name}` has shape {whole.shape}, config.json asks for {declared.shape}",
                "its config.json and its weights are not of one model",
            )
        for part in declared.parts:
            if part in found:
                raise RlctlError(
                    f"`{found[part].file}` holds `{part}`, and `{name}` holds it too", "keep the files of one save only"
                )
            found[part] = Entry(file=whole.file, start=start, shape=shapes[part], dtype=whole.dtype)
            start += found[part].num_bytes
        assert start == whole.start + whole.num_bytes, name
    return found


def read(name: str, entry: Entry) -> torch.Tensor:
    """The whole tensor, as stored.

    Raises:
        RlctlError: the file ends before it.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        view = raw(tensor)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise RlctlError(
                    f"`{entry.file}` ended inside tensor `{name}`: {done:,} of {len(view):,} bytes",
                    "do not change the model while it is read",
                )
            done += count
    return tensor


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file by name, in the order of their bytes.

    Raises:
        RlctlError: the header is damaged, or does not describe exactly the bytes that the file has.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise _damaged(path, f"its header of {length:,} bytes does not fit in {size:,} bytes")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        described = {k: v for k, v in header.items() if k != "__metadata__"}
        entries = {name: _entry(path, 8 + length, value) for name, value in described.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is not understood: {type(error).__name__}: {error}") from error
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.start != end:
            raise _damaged(path, f"tensor `{name}` starts at byte {entry.start:,}, expected {end:,}")
        end += entry.num_bytes
    if end != size:
        raise _damaged(path, f"its header describes {end:,} bytes, the file has {size:,}")
    return ordered


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names


def _entry(path: Path, base: int, value: dict[str, Any]) -> Entry:
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes must be whole numbers, not negative")
    entry = Entry(file=path, start=base + begin, shape=shape, dtype=DTYPES[value["dtype"]])
    if entry.num_bytes != end - begin:
        raise ValueError(f"shape {shape} of {value['dtype']} needs {entry.num_bytes} bytes, offsets say {end - begin}")
    return entry


def _damaged(path: Path, what: str) -> RlctlError:
    return RlctlError(f"`{path}` cannot be read: {what}", "it may be cut short; download it again")


def _files(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():  # others beside it are other formats of the same weights
        return [SINGLE]
    return sorted(f.name for f in folder.glob("*.safetensors"))


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_text())["weight_map"]
        plain = all(isinstance(n, str) and Path(f).name == f and f not in ("", ".", "..") for n, f in index.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RlctlError(f"`{path}` is not understood: {error!r}", "download the model again") from error
    if not plain or not index:
        raise RlctlError(f"`{path}` does not map tensors to file names", "download the model again")
    return index


def _check_index(folder: Path, index: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for name in sorted(index.keys() | entries.keys()):
        found = entries[name].file.name if name in entries else None
        stated = index.get(name)
        if found != stated:
            raise RlctlError(
                f"`{folder / INDEX}` says that tensor `{name}` is in {stated or 'no file'}, "
                f"the headers say {found or 'no file'}",
                "download the model again",
            )


class Writer:
    """Weight files written tensor by tensor, in any order, at places that are known before the first byte.

    Args:
        folder: exists; the files are made by `create`.
        specs: shape and dtype of every tensor by name, in the order of the files.
        shard_bytes: limit of one file, or one tensor.
        stacked: tensors to store as one.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, Spec],
        *,
        shard_bytes: int = SHARD_BYTES,
        stacked: Mapping[str, Stacked] | None = None,
    ) -> None:
        self.folder = folder
        shapes = {name: shape for name, (shape, _) in specs.items()}
        specs = _stacked_specs(specs, stacked or {})
        groups: list[dict[str, Spec]] = [{}]
        size = 0
        for name, spec in specs.items():
            nbytes = math.prod(spec[0]) * spec[1].itemsize
            if groups[-1] and size + nbytes > shard_bytes:
                groups.append({})
                size = 0
            groups[-1][name] = spec
            size += nbytes
        count = len(groups)
        self.files = [
            SINGLE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
        ]
        self._headers = [_header(group) for group in groups]
        self.stored = {
            name: entry
            for file, group, header in zip(self.files, groups, self._headers, strict=True)
            for name, entry in _places(folder / file, group, len(header)).items()
        }
        self.entries = unstack(self.stored, stacked or {}, shapes)

    def create(self) -> None:
        """Make the files at full size, with their headers."""
        for name, header in zip(self.files, self._headers, strict=True):
            path = self.folder / name
            ends = [e.start + e.num_bytes for e in self.stored.values() if e.file == path]
            with path.open("wb") as file:
                file.write(header)
                file.truncate(max(ends))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor, at its place."""
        entry = self.entries[name]
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), (name, tensor.shape, tensor.dtype)
        view = raw(tensor.contiguous())
        with entry.file.open("r+b", buffering=0) as file:
            file.seek(entry.start)
            for start in range(0, len(view), _WRITE_BYTES):
                rest = view[start : start + _WRITE_BYTES]
                while rest:
                    rest = rest[file.write(rest) :]

    def finish(self) -> None:
        """Write the index, where there are several files, and bring all to the disk."""
        if len(self.files) > 1:
            total = sum(entry.num_bytes for entry in self.stored.values())
            weight_map = {name: entry.file.name for name, entry in self.stored.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name in self.files:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())


def _stacked_specs(specs: Mapping[str, Spec], stacked: Mapping[str, Stacked]) -> dict[str, Spec]:
    """The tensors to store, each stacked one at its first part's place."""
    whole_of = {part: name for name, declared in stacked.items() for part in declared.parts}
    found: dict[str, Spec] = {}
    for name, (shape, dtype) in specs.items():
        whole = whole_of.get(name)
        if whole is None:
            found[name] = (shape, dtype)
        elif found.setdefault(whole, (stacked[whole].shape, dtype))[1] != dtype:
            raise RlctlError(
                f"`{whole}` is one tensor, but its parts have two dtypes",
                "convert with `--dtype`, which makes them one",
            )
    return found


def _header(group: Mapping[str, Spec]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, dtype) in group.items():
        end = at + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    return len(text).to_bytes(8, "little") + text


def _places(path: Path, group: Mapping[str, Spec], start: int) -> dict[str, Entry]:
    places = {}
    for name, (shape, dtype) in group.items():
        places[name] = Entry(file=path, start=start, shape=shape, dtype=dtype)
        start += places[name].num_bytes
    return places


def write_model(
    folder: Path, buckets: Iterable[list[tuple[str, torch.Tensor]]], *, source: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a model directory that transformers and vLLM load. It appears whole, by one rename, or not at all.

    Args:
        folder: must not exist.
        buckets: (name, whole tensor) in the order to store.
        source: the directory whose config and tokenizer files are taken.
        shard_bytes: limit of one weight file.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = _write_weights(partial, buckets, shard_bytes)
    config = json.loads((source / "config.json").read_text())
    stated = "dtype" if "dtype" in config else "torch_dtype"
    config[stated] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in ASSETS:
        for asset in source.glob(pattern):
            shutil.copy2(asset, partial / asset.name)
    partial.rename(folder)


def _write_weights(folder: Path, buckets: Iterable[list[tuple[str, torch.Tensor]]], limit: int) -> torch.dtype:
    """Weight files of at most `limit` bytes (or one tensor), and the index if there are several."""
    pending: dict[str, torch.Tensor] = {}
    files: list[tuple[Path, dict[str, int]]] = []
    dtype = torch.float32

    def flush() -> None:
        path = folder / f"part-{len(files)}"
        save_file(pending, path, metadata={"format": "pt"})
        files.append((path, {n: t.nbytes for n, t in pending.items()}))
        pending.clear()

    for bucket in buckets:
        for name, tensor in bucket:
            if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > limit:
                flush()
            pending[name] = tensor.detach().to("cpu").contiguous().clone()
            dtype = tensor.dtype
    if pending:
        flush()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for i, (path, sizes) in enumerate(files, start=1):
        final = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(sizes, final)
    total = sum(n for _, sizes in files for n in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype
