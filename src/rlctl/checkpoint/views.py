"""A model on disk as its Hugging Face tensors, whichever format it is in.

Both formats are read rule by rule, so that converting, verifying and inspecting know neither. Opening one checks that
each tensor of the rules is there with its shape, and that nothing else is: what remains unread would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from rlctl import plugins
from rlctl.checkpoint import safetensors, torch_dist
from rlctl.errors import RlctlError
from rlctl.models import base, resolve
from rlctl.models.base import HfConfig, Shape, Stacked, WeightRule
from rlctl.parallel import num_experts

MANIFEST = "rlctl_manifest.json"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_BLOCKS = 1_000_000  # a damaged config must not make a table without end
_ASSUMED = {  # defaults of transformers' config classes that no other field decides
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "qwen3_moe": ("num_key_value_heads",),
}
_DIGITS = 18  # of an iteration's number
_ALWAYS = 6  # of the sizes below: the first ones may not be null
_NAMED = 3  # tensors that a message lists
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip


class HfView:
    """A directory of safetensors.

    Raises:
        RlctlError: exit status 2; a config that is not understood, or tensors that are not the config's.
    """

    kind: Literal["hf"] = "hf"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self.rules = table(self.config)
        self.reader = safetensors.Reader(folder)
        self.iteration = folder
        wanted = {n: s for r in self.rules for n, s in zip(r.sources, r.source_shapes, strict=True)}
        declared = stacked_of(self.config)
        self.stacked = {name: declared[name] for name in declared if name in self.reader.entries}
        entries = self.reader.entries = safetensors.unstack(self.reader.entries, declared, wanted)
        copies = {name: of for name, of in base.repeated_tensors(self.config).items() if name in entries}
        self.dropped = sorted(name for name in entries if base.is_derived(name))
        self.repeated = copies
        _check_names(folder, wanted.keys(), entries.keys() - copies.keys() - set(self.dropped))
        for name in wanted.keys() | copies.keys():
            if entries[name].dtype not in WEIGHT_DTYPES:
                raise RlctlError(
                    f"`{entries[name].file}`: tensor `{name}` is {str(entries[name].dtype).removeprefix('torch.')}, "
                    "which is not understood as weights",
                    f"give a model in {', '.join(str(d).removeprefix('torch.') for d in WEIGHT_DTYPES)}",
                )
        for name, shape in (wanted | {name: wanted[of] for name, of in copies.items()}).items():
            if entries[name].shape != shape:
                raise _other_shape(folder / entries[name].file.name, name, entries[name].shape, shape)

    def dtype(self, name: str, rule: WeightRule) -> torch.dtype:
        """Of a tensor of the rule."""
        return self.reader.entries[name].dtype

    def read(self, rule: WeightRule) -> list[torch.Tensor]:
        """The tensors of a rule, in its order; each contiguous."""
        return [self.reader.get(name) for name in rule.sources]

    def check_repeated(self) -> None:
        """Refuse a tensor that should repeat another and does not.

        Raises:
            RlctlError: exit status 2.
        """
        for name, of in self.repeated.items():
            if digest(self.reader.get(name)) != digest(self.reader.get(of)):
                raise RlctlError(
                    f"`{self.folder}`: config.json says `tie_word_embeddings: true`, but `{name}` differs from `{of}`",
                    "set `tie_word_embeddings: false` in config.json if the tensor is meant, or remove it",
                )


class McoreView:
    """A Megatron checkpoint in torch_dist format, with the config.json of its model.

    Args:
        folder: the checkpoint, or one iteration of it.
        like: a Hugging Face directory with the model's config.json, for a checkpoint that `convert` did not make.

    Raises:
        RlctlError: exit status 2; no config, or tensors that are not the config's.
    """

    kind: Literal["mcore"] = "mcore"

    def __init__(self, folder: Path, like: Path | None = None) -> None:
        self.iteration = find_iteration(folder)
        root = self.iteration.parent if (self.iteration.parent / "config.json").is_file() else folder
        self.folder = root if like is None else like
        self.config = read_config(self.folder)
        self.rules = table(self.config)
        self.reader = torch_dist.Reader(self.iteration)
        manifest = read_manifest(root)
        self.dropped: list[str] = []
        self.repeated: dict[str, str] = {}
        self.stacked: dict[str, Stacked] = {}
        if manifest is not None:
            self._take_names(root, manifest)
        self._where: dict[tuple[str, Shape], tuple[str, Shape]] = {}
        self._check_rules()

    def _take_names(self, root: Path, manifest: dict[str, Any]) -> None:
        """How the tensors were stored before: under a second name, or several as one."""
        known, declared = base.repeated_tensors(self.config), stacked_of(self.config)
        self.repeated = {name: of for name, of in known.items() if name in manifest["repeated"]}
        self.stacked = {name: one for name, one in declared.items() if name in manifest["stacked"]}
        if self.repeated != manifest["repeated"] or list(self.stacked) != manifest["stacked"]:
            raise RlctlError(
                f"`{root / MANIFEST}` speaks of tensors that config.json has no place for",
                "its config.json and its weights are not of one model",
            )

    def _check_rules(self) -> None:
        counts: dict[str, int] = {}
        for rule in self.rules:
            where = self.reader.locate(rule)
            if where is None:
                raise RlctlError(
                    f"`{self.iteration}` has no tensor `{rule.key}`, which config.json asks for",
                    "its config.json and its weights are not of one model",
                )
            key, lead = where
            counts[key] = counts.get(key, 0) + 1
            self._where[rule.key, rule.index] = where
            size, found = tuple(self.reader.tensors[key].size), self.reader.shape(key, lead)
            rows = found[:1] if rule.vocabulary and found and found[0] >= rule.shape[0] else rule.shape[:1]
            if found != (*rows, *rule.shape[1:]) or not all(p < n for p, n in zip(lead, size, strict=False)):
                raise _other_shape(self.iteration, key, size, (*(p + 1 for p in lead), *rule.shape))
        _check_names(self.iteration, counts.keys(), self.reader.keys())
        for rule in self.rules:
            key, lead = self._where[rule.key, rule.index]
            positions = torch.Size(self.reader.tensors[key].size[: len(lead)]).numel()
            if counts[key] != positions:
                raise RlctlError(
                    f"`{self.iteration}`: `{key}` holds {positions} tensors, config.json asks for {counts[key]}",
                    "its config.json and its weights are not of one model",
                )

    def dtype(self, name: str, rule: WeightRule) -> torch.dtype:
        """Of a tensor of the rule."""
        return self.reader.dtype(self._where[rule.key, rule.index][0])

    def read(self, rule: WeightRule) -> list[torch.Tensor]:
        """The tensors of a rule, in its order; each contiguous, padding of the vocabulary removed."""
        return split(rule, self.reader.get(*self._where[rule.key, rule.index]))

    def check_repeated(self) -> None:
        """Nothing is stored twice in this format."""

    def padded(self) -> list[tuple[str, int, int]]:
        """(key, rows, rows that are tokens) of each tensor with a padded vocabulary."""
        rows = [(r, self.reader.shape(*self._where[r.key, r.index])[0]) for r in self.rules if r.vocabulary]
        return [(rule.key, found, rule.shape[0]) for rule, found in rows if found != rule.shape[0]]


View = HfView | McoreView


def open_view(folder: Path, *, like: Path | None = None) -> View:
    """The model in a directory.

    Raises:
        RlctlError: exit status 2; the directory holds neither format.
    """
    if not folder.is_dir():
        raise RlctlError(f"no directory `{folder}`", "give a Hugging Face or Megatron directory")
    if is_mcore(folder):
        return McoreView(folder, like)
    return HfView(folder)


def is_mcore(folder: Path) -> bool:
    """Whether the directory is a Megatron checkpoint."""
    return (folder / resolve.TRACKER).is_file() or (folder / torch_dist.METADATA).is_file()


def find_iteration(folder: Path) -> Path:
    """The directory with `.metadata`: the one that the tracker names, or the folder itself.

    Raises:
        RlctlError: exit status 2.
    """
    tracker = folder / resolve.TRACKER
    if not tracker.is_file():
        return folder
    stated = tracker.read_text(errors="replace").strip()
    if stated != "release" and not (stated.isdecimal() and len(stated) < _DIGITS):
        raise RlctlError(
            f"`{tracker}` says `{stated[:40]}`, which is no iteration", "write a number there, or `release`"
        )
    found = folder / (stated if stated == "release" else f"iter_{int(stated):07d}")
    if not found.is_dir():
        raise RlctlError(f"`{tracker}` names `{found.name}`, which is missing", "copy the checkpoint again")
    return found


def read_config(folder: Path) -> HfConfig:
    """config.json, understood.

    Raises:
        RlctlError: exit status 2, naming the field.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise RlctlError(
            f"`{folder}` has no config.json", "give the model's Hugging Face directory, for a checkpoint with `--like`"
        )
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise RlctlError(f"`{path}` is not JSON: {error}", "restore it from where the model came from") from error
    if not isinstance(config, dict):
        raise RlctlError(f"`{path}` is no JSON object", "restore it from where the model came from")
    for name in _SIZES:
        value = config.get(name)
        stated = value is not None or (name in config and name in _SIZES[:_ALWAYS])
        if stated and (type(value) is not int or value < 1):
            raise RlctlError(f"`{path}`: {name} is {value!r}, it must be a positive whole number", "correct it")
    for name in _ASSUMED.get(str(config.get("model_type")), ()):
        if name not in config:
            raise RlctlError(
                f"`{path}` lacks {name}, for which transformers assumes a number that no file states",
                "add it, as transformers writes it",
            )
    layers, experts = config.get("num_hidden_layers") or 1, num_experts(config) or 1
    if layers * experts > _MOST_BLOCKS:
        raise RlctlError(
            f"`{path}`: {layers:,} layers of {experts:,} experts are more than {_MOST_BLOCKS:,} blocks", "correct it"
        )
    epsilon = config.get("rms_norm_eps")
    if epsilon is not None and not (type(epsilon) in (int, float) and 0 < epsilon < 1):
        raise RlctlError(f"`{path}`: rms_norm_eps is {epsilon!r}, it must be a small positive number", "correct it")
    try:
        resolve.check_architecture(str(folder), config)
        base.rope(config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RlctlError(
            f"`{path}` is not understood: {error!r}", "restore it from where the model came from"
        ) from error
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % groups:
        raise RlctlError(
            f"`{path}`: num_key_value_heads {groups} does not divide num_attention_heads {heads}", "correct it"
        )
    return config


def table(config: HfConfig) -> list[WeightRule]:
    """The rules of a model; each source and each target in one rule."""
    rules: list[WeightRule] = plugins.load("model", config["model_type"]).rules(config)
    sources = [name for rule in rules for name in rule.sources]
    assert len(set(sources)) == len(sources)
    assert len({(rule.key, rule.index) for rule in rules}) == len(rules)
    return rules


def stacked_of(config: HfConfig) -> dict[str, Stacked]:
    """Tensors that a file may hold in place of several of the rules, by name."""
    return base.stacked_tensors(plugins.load("model", config["model_type"]), config)


def split(rule: WeightRule, whole: torch.Tensor) -> list[torch.Tensor]:
    """A Megatron tensor as the rule's Hugging Face tensors; padding of the vocabulary removed."""
    return [part.contiguous() for part in rule.operation.split(whole[: rule.shape[0]])]


def digest(tensor: torch.Tensor) -> str:
    """xxh3_128 of a contiguous tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(safetensors.raw(tensor))


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """What a manifest says of a tensor: dtype, shape, hash."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "xxh3_128": digest(tensor)
    }  # fmt: skip


def described_tensors(view: View, rule: WeightRule) -> dict[str, dict[str, Any]]:
    """What a manifest would say of a rule's tensors, by name."""
    return {name: described(tensor) for name, tensor in zip(rule.sources, view.read(rule), strict=True)}


def fingerprint(tensors: dict[str, dict[str, Any]]) -> str:
    """One hash of a model's tensors, the same in both formats."""
    lines = (f"{n} {t['dtype']} {t['shape']} {t['xxh3_128']}\n" for n, t in sorted(tensors.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a conversion wrote last; None where there is none.

    Raises:
        RlctlError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        complete = {"tensors", "repeated", "stacked", "fingerprint", "files", "versions"} <= manifest.keys()
        if complete and fingerprint(manifest["tensors"]) == manifest["fingerprint"]:
            return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise RlctlError(
        f"`{path}` is damaged", "convert again; without the file, `convert verify A B` compares two models"
    )


def _check_names(folder: Path, wanted: Any, found: Any) -> None:
    """Refuse tensors that are missing, or that nothing reads."""
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing:
        raise RlctlError(
            f"`{folder}` lacks {len(missing)} of {len(wanted)} tensors of its config.json: {_listed(missing)}",
            "complete the directory, or correct its config.json",
        )
    if extra:
        raise RlctlError(
            f"`{folder}` has {len(extra)} tensors that its config.json has no place for: {_listed(extra)}",
            "they would be lost; remove them from the files, or correct config.json",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{n}`" for n in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _other_shape(place: Path, name: str, found: Shape, wanted: Shape) -> RlctlError:
    return RlctlError(
        f"`{place}`: tensor `{name}` has shape {found}, config.json asks for {wanted}",
        "its config.json and its weights are not of one model",
    )
