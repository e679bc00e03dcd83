"""From the name of a model to its config.json and its files, without torch, transformers or network.

A name is, in this order: a short name of catalogue.yaml, a local directory, or a Hugging Face id that is in the local
hub cache or in the catalogue. It does not know how weights are read, downloaded or made.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl import plugins
from rlctl.errors import ENVIRONMENT, RlctlError

TRACKER = "latest_checkpointed_iteration.txt"  # in a directory of Megatron checkpoints
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from, e.g. name "qwen3-8b", path None, hf_id "Qwen/Qwen3-8B", made None."""

    name: str
    """As the user wrote it."""
    config: dict[str, Any]
    """config.json, with `policy.hf_config_overrides` applied."""
    path: Path | None
    """A directory with weights; None: they must be downloaded or made first."""
    hf_id: str | None
    made: str | None
    """How the tool makes the model: `gguf`, `tiny`, or `mcore` from a Megatron checkpoint at `path`; None: it is
    downloaded or local."""
    chat_template: bool
    """Its tokenizer brings a chat template."""


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The entries of catalogue.yaml by short name."""
    return yaml.safe_load((Path(__file__).parent / "catalogue.yaml").read_text())


def resolve(name: str, overrides: dict[str, Any] | None = None) -> ModelSource:
    """Find a model by short name, directory or Hugging Face id.

    Args:
        name: e.g. `qwen3-8b`, `./my_model`, `Qwen/Qwen3-8B`.
        overrides: replace keys of config.json.

    Raises:
        RlctlError: exit status 2 for an unknown name, a directory without config or weights, or an architecture without
            a file in models/; 3 for a Hugging Face id that is neither cached nor in the catalogue.
    """
    if name in catalogue():
        source = _from_catalogue(name, name)
    elif Path(name).expanduser().is_dir():
        source = _from_directory(name, Path(name).expanduser(), hf_id=None)
    elif _is_path(name):
        raise RlctlError(f"no model directory `{name}`", "check the path, or give a short name or a Hugging Face id")
    elif "/" in name:
        source = _from_hub_id(name)
    else:
        raise _unknown(name)
    _check_overrides(source.config, overrides or {})
    config = source.config | (overrides or {})
    check_architecture(name, config)
    return ModelSource(**(vars(source) | {"config": config}))


def _check_overrides(config: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Refuse the rope keys of transformers 4 on a config of transformers 5, where `rope_parameters` wins over them."""
    without_effect = [key for key in ("rope_theta", "rope_scaling") if key in overrides]
    if "rope_parameters" in config and without_effect and "rope_parameters" not in overrides:
        raise RlctlError(
            f"policy.hf_config_overrides.{without_effect[0]} has no effect: the model's config states rope_parameters",
            "override rope_parameters, e.g. {rope_type: default, rope_theta: 500000}",
        )


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _from_catalogue(short: str, name: str) -> ModelSource:
    entry = catalogue()[short]
    cached = cached_snapshot(entry["hf"]) if entry["hf"] and "made" not in entry else None
    if cached is not None:
        return _from_directory(name, cached, hf_id=entry["hf"])
    return ModelSource(
        name=name,
        config=entry["config"],
        path=None,
        hf_id=entry["hf"],
        made=entry.get("made"),
        chat_template=entry["chat_template"],
    )


def _from_directory(name: str, path: Path, *, hf_id: str | None) -> ModelSource:
    file = path / "config.json"
    megatron = (path / TRACKER).is_file()
    if not file.is_file():
        raise RlctlError(
            f"`{path}` has no config.json",
            f"convert it first: rlctl convert mcore-to-hf {path} NEW --like MODEL"
            if megatron
            else "give a directory in Hugging Face format",
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise RlctlError(f"`{file}` is not JSON: {error}", "restore the file from where the model came from") from error
    if not megatron and not any(path.glob("*.safetensors")):
        raise RlctlError(
            f"`{path}` has no weights: no *.safetensors file",
            "save the model with transformers' save_pretrained, or finish its download",
        )
    return ModelSource(
        name=name,
        config=config,
        path=path,
        hf_id=hf_id,
        made="mcore" if megatron else None,
        chat_template=_has_chat_template(path),
    )


def _from_hub_id(name: str) -> ModelSource:
    cached = cached_snapshot(name)
    if cached is not None:
        return _from_directory(name, cached, hf_id=name)
    ids = {entry["hf"]: short for short, entry in catalogue().items() if entry["hf"]}
    if name in ids:
        return _from_catalogue(ids[name], name)
    near = difflib.get_close_matches(name, ids, n=1)
    raise RlctlError(
        f"model `{name}` is not in the local Hugging Face cache, nor in the catalogue",
        (f"did you mean `{near[0]}`? " if near else "") + f"download it first: hf download {name}",
        exit_status=ENVIRONMENT,
    )


def cached_snapshot(hf_id: str, *, needs: tuple[str, ...] = ("config.json", "*.safetensors")) -> Path | None:
    """The `main` snapshot of a hub repository in the local cache; None unless it has a file for each pattern."""
    from huggingface_hub.constants import HF_HUB_CACHE  # deferred: only a lookup in the cache needs it

    folder = Path(HF_HUB_CACHE) / f"models--{hf_id.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = folder / "snapshots" / reference.read_text().strip()
    return snapshot if all(any(snapshot.glob(pattern)) for pattern in needs) else None


def _has_chat_template(path: Path) -> bool:
    if any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    file = path / "tokenizer_config.json"
    return file.is_file() and bool(json.loads(file.read_text()).get("chat_template"))


def _unknown(name: str) -> RlctlError:
    near = difflib.get_close_matches(name.lower(), catalogue(), n=3, cutoff=0.5)
    return RlctlError(
        f"unknown model `{name}`: no short name, no directory, no Hugging Face id",
        f"did you mean {' or '.join(f'`{n}`' for n in near)}?"
        if near
        else f"known short names: {', '.join(catalogue())}",
    )


def check_architecture(name: str, config: dict[str, Any]) -> None:
    """Refuse a config that no file in models/ understands.

    Raises:
        RlctlError: exit status 2, naming the field.
    """
    known = plugins.names("model")
    kind = config.get("model_type")
    if kind not in known:
        raise RlctlError(
            f"model `{name}` has model_type `{kind}`, which is not supported", f"known: {', '.join(known)}"
        )
    absent = [key for key in _CONFIG_KEYS if key not in config]
    if absent:
        raise RlctlError(
            f"config.json of model `{name}` lacks {', '.join(absent)}", "give a model that transformers can load"
        )
    plugins.load("model", kind).transformer_config(config)  # refuses what this architecture's mapping does not know


def num_parameters(config: dict[str, Any]) -> int:
    """Parameters of the whole model; a tied output projection counts once.

    Example: 8,030,261,248 for llama-3.1-8b.
    """
    rules = plugins.load("model", config["model_type"]).rules(config)
    return sum(math.prod(rule.shape) for rule in rules)


def check_assets(source: ModelSource, *, tokenizer_name: str | None, chat_template: str | None) -> None:
    """Refuse a model that cannot render a prompt: no tokenizer files, or no chat template.

    Args:
        source: the model.
        tokenizer_name: `policy.tokenizer.name`.
        chat_template: `policy.tokenizer.chat_template`.

    Raises:
        RlctlError: exit status 2.
    """
    brings_template, path = source.chat_template, source.path
    if tokenizer_name is not None:
        brings_template, path = _tokenizer_assets(tokenizer_name)
    if path is not None and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise RlctlError(
            f"`{path}` has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}",
            "copy the tokenizer files there, or set policy.tokenizer.name",
        )
    if not brings_template and chat_template is None:
        raise RlctlError(
            f"model `{source.name}` has no chat template",
            "set policy.tokenizer.chat_template to a Jinja template or a file, or use the instruct model",
        )


def _tokenizer_assets(name: str) -> tuple[bool, Path | None]:
    """Whether the tokenizer brings a chat template, and its folder where it is here."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and name in catalogue():
        return catalogue()[name]["chat_template"], None
    if not folder.is_dir() and (_is_path(name) or "/" not in name):
        raise RlctlError(f"no tokenizer `{name}`", "set policy.tokenizer.name to a directory or a Hugging Face id")
    path = folder if folder.is_dir() else cached_snapshot(name, needs=("tokenizer*",))
    return path is None or _has_chat_template(path), path
