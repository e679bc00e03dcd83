"""Megatron's `torch_dist` checkpoint format, read and written one tensor at a time: no process group, no model.

A checkpoint is a folder of `.distcp` files, each a row of torch.save records, and `.metadata`, a pickle that says which
slice of which global tensor each record holds. Ours hold one logical copy of each global tensor, which Megatron-Core
loads at any layout. Layers are alike, so their number is a leading axis: `decoder.layers.mlp.linear_fc2.weight` is
[layers, ...], with one record a layer (megatron/core/transformer/transformer_block.py, `sharded_state_dict`); experts
are a second one. The reader takes that form, layers by name, and records of any grid.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from rlctl.errors import RlctlError
from rlctl.models.base import Shape, WeightRule

ITERATION = "iter_0000000"
METADATA = ".metadata"
FILE_BYTES = 4 << 30
RECORD_OVERHEAD_BYTES = 2048  # that torch.save adds to a tensor, at most
FORMAT = {  # megatron/core/dist_checkpointing/core.py, `CheckpointingConfig`; the last two are read by older versions
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
}
_COMMON_KEY = "common_state/shard_0_1"  # serialization.py, `load_common_state_dict`
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.+)$")
# Modules that keep an extra state: each linear, and Transformer Engine's attention. Megatron asks for it by name.
_EXTRA_STATES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_ATTENTION = ("self_attention.linear_proj.weight", "self_attention.core_attention")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record lies: file name, first byte, number of bytes."""

    file: str
    start: int
    length: int


def global_position(rule: WeightRule, num_layers: int) -> tuple[str, Shape, Shape]:
    """A rule's tensor in the form with a layer axis: key, position on the leading axes, their sizes but for experts.

    Example: `decoder.layers.3.mlp.router.weight` is `decoder.layers.mlp.router.weight` at (3,) of (num_layers,).
    """
    match = _LAYER.match(rule.key)
    if match is None:
        return rule.key, rule.index, ()
    return f"{match.group(1)}.{match.group(3)}", (int(match.group(2)), *rule.index), (num_layers,)


# --- reading --------------------------------------------------------------------------------------------------------


class Reader:
    """The global tensors of a checkpoint.

    Args:
        folder: holds `.metadata`.

    Raises:
        RlctlError: the metadata is damaged, a file is missing or cut short, or records do not cover a tensor exactly.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = _read_metadata(folder / METADATA)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not key.startswith(("optimizer.", "chained_"))
        }
        self._places = {(i.fqn, tuple(i.offset or ())): info for i, info in metadata.storage_data.items()}
        self._check_files()
        for key, value in self.tensors.items():
            self._check_cover(key, value)

    def keys(self) -> list[str]:
        """Of all global tensors; an optimizer's are left out."""
        return list(self.tensors)

    def locate(self, rule: WeightRule) -> tuple[str, Shape] | None:
        """Key and position on leading axes of a rule's tensor; None if the checkpoint lacks it."""
        if rule.key in self.tensors:
            return rule.key, rule.index
        key, lead, _ = global_position(rule, 0)
        return (key, lead) if key in self.tensors else None

    def shape(self, key: str, lead: Shape) -> Shape:
        """Of the tensor at a position, leading axes left out."""
        return tuple(self.tensors[key].size[len(lead) :])

    def dtype(self, key: str) -> torch.dtype:
        """Of a global tensor."""
        return self.tensors[key].properties.dtype

    def get(self, key: str, lead: Shape) -> torch.Tensor:
        """The whole tensor at a position, put together from its records."""
        wanted = [c for c in self.tensors[key].chunks if _covers(c, lead)]
        shape = self.shape(key, lead)
        depth = len(lead)
        if len(wanted) == 1 and tuple(wanted[0].sizes) == (1,) * depth + shape:
            return self._record(key, wanted[0]).reshape(shape)
        whole = torch.empty(shape, dtype=self.dtype(key))
        for chunk in wanted:
            at = tuple(p - o for p, o in zip(lead, chunk.offsets[:depth], strict=True))
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True))
            whole[region] = self._record(key, chunk)[at]
        return whole

    def _record(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self._places[key, tuple(chunk.offsets)]
        tensor = read_record(self.folder, Place(file=info.relative_path, start=info.offset, length=info.length))
        if tuple(tensor.shape) != tuple(chunk.sizes) or tensor.dtype != self.dtype(key):
            raise RlctlError(
                f"`{self.folder / info.relative_path}`: the record of `{key}` at {tuple(chunk.offsets)} is "
                f"{tensor.dtype} {tuple(tensor.shape)}, expected {self.dtype(key)} {tuple(chunk.sizes)}",
                "the checkpoint is damaged; convert again, or restore it",
            )
        return tensor

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self._places.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() and Path(name).name == name else None
            if size is None or size < end:
                found = "it is missing" if size is None else f"it has {size:,}"
                raise RlctlError(
                    f"`{path}` should have at least {end:,} bytes: {found}",
                    "the checkpoint is not complete; copy it again",
                )

    def _check_cover(self, key: str, value: TensorStorageMetadata) -> None:
        """Records tile the tensor: inside it, all stored, no two at one place, as many elements as it has."""
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in value.chunks]
        inside = all(
            len(o) == len(n) == len(value.size)
            and all(a >= 0 and a + b <= s for a, b, s in zip(o, n, value.size, strict=True))
            for o, n in chunks
        )
        stored = all((key, o) in self._places for o, _ in chunks)
        elements = sum(math.prod(n) for _, n in chunks)
        if not inside or not stored or len({o for o, _ in chunks}) != len(chunks) or elements != math.prod(value.size):
            raise RlctlError(
                f"`{self.folder / METADATA}`: the {len(chunks)} records of `{key}` hold {elements:,} elements "
                f"and do not tile its shape {tuple(value.size)}",
                "the checkpoint is damaged; copy it again",
            )


def _covers(chunk: ChunkStorageMetadata, lead: Shape) -> bool:
    return all(o <= p < o + n for p, o, n in zip(lead, chunk.offsets, chunk.sizes, strict=False))


def read_record(folder: Path, place: Place) -> torch.Tensor:
    """One torch.save record.

    Raises:
        RlctlError: it is damaged.
    """
    path = folder / place.file
    try:
        with path.open("rb") as file:
            view: Any = _create_file_view(file, place.start, place.length)
            loaded = torch.load(view, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, OSError) as error:
        raise RlctlError(
            f"`{path}` cannot be read at byte {place.start:,}: {str(error).splitlines()[0] if str(error) else error!r}",
            "the checkpoint is damaged; convert again, or copy it again",
        ) from error
    if not isinstance(loaded, torch.Tensor):
        raise RlctlError(
            f"`{path}` holds no tensor at byte {place.start:,}", "the checkpoint is damaged; copy it again"
        )
    return loaded


class _Unpickler(pickle.Unpickler):
    """Takes the classes of a checkpoint's metadata only: a pickle can name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(("megatron.", "nvidia_resiliency_ext.")):  # remarks of a saver, not read here
            return type(name, (), {"__setstate__": lambda self, state: None})
        known = module.startswith("torch.distributed.checkpoint.") or (module, name) in _KNOWN
        if known and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) or (module, name) in _KNOWN:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


_KNOWN = {
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("torch", "layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), ("collections", "OrderedDict"),
    ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "list"), ("builtins", "dict"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        assert isinstance(metadata, Metadata)
        assert all(
            isinstance(i, MetadataIndex) and isinstance(s, _StorageInfo) for i, s in metadata.storage_data.items()
        )
        for value in metadata.state_dict_metadata.values():
            if isinstance(value, TensorStorageMetadata):
                assert isinstance(value.properties.dtype, torch.dtype)
                assert all(type(n) is int for c in value.chunks for n in (*value.size, *c.offsets, *c.sizes))
    except FileNotFoundError as error:
        raise RlctlError(f"`{path}` is missing", "give a directory with a checkpoint in torch_dist format") from error
    except Exception as error:  # a damaged pickle raises anything
        raise RlctlError(f"`{path}` cannot be read: {error!r}", "the checkpoint is damaged; copy it again") from error
    return metadata


# --- writing --------------------------------------------------------------------------------------------------------


class Writer:
    """Records appended to `.distcp` files; `finish` writes what makes them a checkpoint.

    Args:
        folder: exists.
        rules: of the model.
        dtypes: of each rule's tensor by (key, index); the same for all layers and experts of a global tensor.
        num_layers: of the model.
    """

    def __init__(
        self,
        folder: Path,
        rules: Sequence[WeightRule],
        dtypes: Mapping[tuple[str, Shape], torch.dtype],
        num_layers: int,
    ) -> None:
        self.folder, self.rules, self.num_layers = folder, rules, num_layers
        self._tensors = _plan(rules, dtypes, num_layers)
        self._end = (0, 0)  # number of the file, its bytes

    def resume(self, places: Iterable[Place]) -> None:
        """Go on behind the last of these records; what lies behind it is cut off."""
        last = max(places, key=lambda p: (_number(p.file), p.start), default=None)
        if last is None:
            return
        self._end = (_number(last.file), last.start + last.length)
        with (self.folder / last.file).open("r+b") as file:
            file.truncate(self._end[1])

    def write(self, rule: WeightRule, whole: torch.Tensor) -> Place:
        """Append the rule's tensor."""
        key, lead, _ = global_position(rule, self.num_layers)
        assert tuple(whole.shape) == rule.shape, (rule.key, whole.shape)
        assert whole.dtype == self._tensors[key].properties.dtype, (rule.key, whole.dtype)
        record = whole.detach().contiguous().reshape((1,) * len(lead) + rule.shape)
        if record.untyped_storage().nbytes() != record.nbytes:
            record = record.clone()  # torch.save writes the whole storage
        return self._append(record)

    def finish(self, places: Mapping[tuple[str, Shape], Place], arguments: Namespace) -> None:
        """Write `.metadata`, metadata.json and the common state, and bring all to the disk.

        Args:
            places: of every rule's record by (key, index).
            arguments: for the common state.
        """
        common = COMMON | {"args": arguments}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for rule in self.rules:
            key, lead, _ = global_position(rule, self.num_layers)
            place = places[rule.key, rule.index]
            offset = torch.Size((*lead, *(0,) * len(rule.shape)))
            storage[MetadataIndex(key, offset)] = _StorageInfo(place.file, place.start, place.length)
        state: dict[str, Any] = dict(self._tensors)
        for objects, content in ((self._extra_states(), [None]), ([_COMMON_KEY], [common])):
            place = self._append(content)  # equal ones share one record
            for name in objects:
                state[name] = BytesStorageMetadata()
                storage[MetadataIndex(name)] = _StorageInfo(place.file, place.start, place.length)
        metadata = Metadata(state_dict_metadata=state, storage_data=storage, version="1.0.0")
        (self.folder / METADATA).write_bytes(pickle.dumps(metadata))
        torch.save(common, self.folder / "common.pt")  # read by versions before the common state became a record
        (self.folder / "metadata.json").write_text(json.dumps(FORMAT))
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _append(self, content: Any) -> Place:
        number, start = self._end
        if start >= FILE_BYTES:
            number, start = number + 1, 0
        name = f"__{number}_0.distcp"
        with (self.folder / name).open("r+b" if start else "wb") as file:
            file.seek(start)
            torch.save(content, file)
            end = file.tell()
        self._end = (number, end)
        return Place(file=name, start=start, length=end - start)

    def _extra_states(self) -> list[str]:
        """Names of the (empty) extra states that Megatron's modules save and ask for."""
        names = []
        for rule in self.rules:
            module, _, leaf = rule.key.rpartition(".")
            if leaf != "weight" or not module.endswith(_EXTRA_STATES):
                continue
            key, lead, sizes = global_position(rule, self.num_layers)
            experts = self._tensors[key].size[1 : len(lead)]
            shard = f"_extra_state/shard_{'.'.join(map(str, lead))}_{'.'.join(map(str, (*sizes, *experts)))}"
            names.append(f"{key.removesuffix('weight')}{shard}")
            if key.endswith(_ATTENTION[0]):
                names.append(f"{key.removesuffix(_ATTENTION[0])}{_ATTENTION[1]}.{shard}")
        return names


def _number(file: str) -> int:
    return int(file.removeprefix("__").partition("_")[0])


def _plan(
    rules: Sequence[WeightRule], dtypes: Mapping[tuple[str, Shape], torch.dtype], num_layers: int
) -> dict[str, TensorStorageMetadata]:
    """Shape, dtype and records of each global tensor."""
    grouped: dict[str, list[tuple[WeightRule, Shape]]] = {}
    for rule in rules:
        key, lead, _ = global_position(rule, num_layers)
        grouped.setdefault(key, []).append((rule, lead))
    planned = {}
    for key, members in grouped.items():
        stated = {dtypes[rule.key, rule.index] for rule, _ in members}
        if len(stated) > 1:
            raise RlctlError(
                f"`{key}` is one tensor over all layers, but its sources have {len(stated)} dtypes: "
                + ", ".join(sorted(map(str, stated))),
                "convert with `--dtype`, which makes them one",
            )
        shape = members[0][0].shape
        leading = tuple(max(axis) + 1 for axis in zip(*(lead for _, lead in members), strict=True))
        assert all(rule.shape == shape for rule, _ in members), key
        assert math.prod(leading) == len(members), key
        zeros = (0,) * len(shape)
        planned[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=stated.pop()),
            size=torch.Size((*leading, *shape)),
            chunks=[
                ChunkStorageMetadata(
                    offsets=torch.Size((*lead, *zeros)), sizes=torch.Size((1,) * len(lead) + shape)
                )
                for _, lead in members
            ],
        )  # fmt: skip
    return planned
