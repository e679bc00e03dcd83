"""What a checkpoint belongs to: hashes of the model, the tokenizer, the recipe and the data that it was trained with.

A resume compares them by name. Keys of the recipe that may change between stop and resume are no part of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rlctl.config import Recipe
from rlctl.errors import RlctlError

_BLOCK = 1 << 16
_BLOCKS = 256  # of a weight file that are hashed: another fine-tune of the same model differs everywhere
_FREE_SECTIONS = ("checks", "logger", "checkpointing", "cluster", "run_dir")


LAYOUT_KEYS = frozenset(
    [f"policy.megatron_cfg.{name}" for name in (
        "enabled", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    )]
    + [f"policy.dtensor_cfg.{name}" for name in ("enabled", "tensor_parallel_size", "context_parallel_size")]
    + [f"policy.sequence_packing.{name}_mb_tokens" for name in ("train", "logprob")]
)  # fmt: skip
"""What may differ where a checkpoint is reshardable: who computes, not what. launch/resume.py judges that."""


def is_free(key: str) -> bool:
    """Whether a recipe's key may change on a resume, e.g. `grpo.max_num_steps`, `logger.tensorboard`."""
    if key in LAYOUT_KEYS:
        return True
    section, _, rest = key.partition(".")
    validates = rest == "max_val_samples" or rest.startswith(("val_", "num_val_"))
    return section in _FREE_SECTIONS or (section in ("grpo", "data") and (rest == "max_num_steps" or validates))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, before, now) of what differs and may not; a key that one side lacks is None there."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old | new)
        if not is_free(key) and (key not in old or key not in new or old[key] != new[key])
    ]


def of_run(recipe: Recipe, model_dir: Path, tokenizer: Any) -> dict[str, str]:
    """The hashes by name."""
    parts = {"model": _model(model_dir), "tokenizer": _tokenizer(tokenizer), "recipe": _recipe(recipe)}
    if recipe.data.train_path is not None:
        parts["data"] = _file(Path(recipe.data.train_path))
    if recipe.env.reward is not None:
        reward = Path(recipe.env.reward.rpartition(":")[0])
        if reward.is_file():
            parts["reward function"] = _file(reward)
    return parts


def check(checkpoint: Path, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse a checkpoint of something else.

    Raises:
        RlctlError: naming what differs.
    """
    other = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    if other:
        raise RlctlError(
            f"`{checkpoint}` was trained with another {' and another '.join(other)}: its content differs now",
            "restore what the run started with, or start a new run in another `--run-dir`",
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _recipe(recipe: Recipe) -> str:
    kept = {key: value for key, value in _flat(dataclasses.asdict(recipe)) if not is_free(key)}
    return _text(json.dumps(kept, sort_keys=True, default=str))


def _model(folder: Path) -> str:
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {_file(path)}".encode())
    return digest.hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    """Of what decides token ids; padding and truncation are settings of the last call."""
    stated = [tokenizer.chat_template, tokenizer.get_vocab(), tokenizer.special_tokens_map]
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        stated.append({key: value for key, value in backend.items() if key not in ("padding", "truncation")})
    return _text(json.dumps(stated, sort_keys=True, default=str))


def _file(path: Path) -> str:
    """Of its size, and of blocks evenly spread over it; a small file is hashed whole."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    step = max(_BLOCK, size // _BLOCKS)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK))
        file.seek(max(0, size - _BLOCK))
        digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _text(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()
