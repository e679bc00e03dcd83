"""Hugging Face directories: a lazy reader, and a streaming writer that publishes whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlctl.errors import RlctlError

INDEX = "model.safetensors.index.json"
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


class Reader:
    """The tensors of a directory by name; one is read when asked for.

    Raises:
        RlctlError: no weights, an index that names a missing file, or a file cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.exists()
            else sorted(f.name for f in folder.glob("*.safetensors"))
        )
        if not names:
            raise RlctlError(f"`{folder}` has no safetensors weights", "give a directory with model.safetensors")
        self._files: dict[str, Any] = {}
        for name in names:
            self._open(folder / name)

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise RlctlError(f"`{path}` is missing, but {INDEX} names it", "download the model again")
        try:
            handle = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise RlctlError(f"`{path}` cannot be read: {error}", "it may be cut short; download it again") from error
        self._files |= dict.fromkeys(handle.keys(), handle)

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._files)

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, as stored.

        Raises:
            RlctlError: the directory has no such tensor.
        """
        if name not in self._files:
            raise RlctlError(
                f"`{self.folder}` has no tensor `{name}`", "its config.json and its weights are not of one model"
            )
        return self._files[name].get_tensor(name)


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
