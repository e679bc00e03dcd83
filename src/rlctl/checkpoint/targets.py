"""Where a conversion writes: one class a format, and the journal of what is written.

A target writes a rule's tensors and says where they are; from that place it reads them back, so that a conversion that
was killed goes on behind the last rule whose bytes are right.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from rlctl.checkpoint import safetensors, torch_dist
from rlctl.checkpoint.torch_dist import Place
from rlctl.checkpoint.views import described, split
from rlctl.errors import RlctlError
from rlctl.models.base import HfConfig, Shape, Stacked, WeightRule
from rlctl.models.described import arguments, run_config
from rlctl.models.resolve import TRACKER

RUN_CONFIG = "run_config.yaml"
JOURNAL = "journal.jsonl"

Key = tuple[str, Shape]


class McoreTarget:
    """A Megatron checkpoint in torch_dist format."""

    def __init__(
        self, folder: Path, rules: Sequence[WeightRule], dtypes: Mapping[str, torch.dtype], config: HfConfig
    ) -> None:
        self.config, self.dtype = config, dtypes[rules[0].sources[0]]
        self.folder, self.iteration = folder, folder / torch_dist.ITERATION
        self.rules = rules
        of_rule = {(rule.key, rule.index): _one_dtype(rule, dtypes) for rule in rules}
        self.writer = torch_dist.Writer(self.iteration, rules, of_rule, config["num_hidden_layers"])

    def prepare(self, places: Sequence[dict[str, Any]]) -> None:
        """Make the files, or go on behind these places."""
        self.iteration.mkdir(exist_ok=True)
        self.writer.resume([Place(**place) for place in places])

    def write(self, rule: WeightRule, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """The tensors of a rule; returns their place."""
        return vars(self.writer.write(rule, rule.operation.merge(tensors)))

    def read_back(self, rule: WeightRule, place: dict[str, Any]) -> list[torch.Tensor]:
        """What lies at a place, as the rule's tensors."""
        return split(rule, torch_dist.read_record(self.iteration, Place(**place)).reshape(rule.shape))

    def finish(self, places: Mapping[Key, dict[str, Any]]) -> None:
        """Make it a checkpoint; all bytes reach the disk."""
        content = run_config(self.config, str(self.dtype).removeprefix("torch."))
        (self.iteration / RUN_CONFIG).write_text(yaml.safe_dump(content, sort_keys=False))
        self.writer.finish({key: Place(**place) for key, place in places.items()}, arguments(self.config))
        (self.folder / TRACKER).write_text(torch_dist.ITERATION.removeprefix("iter_").lstrip("0") or "0")


class HfTarget:
    """A directory of safetensors.

    Args:
        folder: exists.
        rules: of the model.
        dtypes: by tensor.
        repeated: tensors to store again under a second name, {second: first}.
        stacked: tensors to store as one.
        shard_bytes: limit of one file.
    """

    def __init__(
        self,
        folder: Path,
        rules: Sequence[WeightRule],
        dtypes: Mapping[str, torch.dtype],
        repeated: Mapping[str, str],
        stacked: Mapping[str, Stacked],
        shard_bytes: int,
    ) -> None:
        shapes = {n: s for r in rules for n, s in zip(r.sources, r.source_shapes, strict=True)}
        specs = {name: (shape, dtypes[name]) for name, shape in shapes.items()}
        specs |= {name: specs[of] for name, of in repeated.items()}
        self.folder, self.repeated = folder, repeated
        self.writer = safetensors.Writer(folder, specs, shard_bytes=shard_bytes, stacked=stacked)

    def prepare(self, places: Sequence[dict[str, Any]]) -> None:
        """Make the files at full size; if some tensors are written already, the files are there."""
        if not places:
            self.writer.create()

    def write(self, rule: WeightRule, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """The tensors of a rule; their places follow from the names."""
        for name, tensor in zip(rule.sources, tensors, strict=True):
            self.writer.write(name, tensor)
            for second, first in self.repeated.items():
                if first == name:
                    self.writer.write(second, tensor)
        return {}

    def read_back(self, rule: WeightRule, place: dict[str, Any]) -> list[torch.Tensor]:
        """What lies at the places of a rule's tensors."""
        return [safetensors.read(name, self.writer.entries[name]) for name in rule.sources]

    def finish(self, places: Mapping[Key, dict[str, Any]]) -> None:
        """Make it a model directory; all bytes reach the disk."""
        self.writer.finish()


Target = McoreTarget | HfTarget


def _one_dtype(rule: WeightRule, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    stated = {dtypes[name] for name in rule.sources}
    if len(stated) > 1:
        raise RlctlError(
            f"{', '.join(f'`{n}` is {dtypes[n]}' for n in rule.sources)}: they become one tensor",
            "convert with `--dtype`, which makes them one",
        )
    return stated.pop()


class Journal:
    """One line a rule written, behind one line that says what is converted; locked while it is open.

    Args:
        path: made if it is not there.

    Raises:
        RlctlError: exit status 1; another conversion writes there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except OSError as error:
            raise RlctlError(
                f"another conversion writes to `{path.parent}`", "wait for it, or end it", exit_status=1
            ) from error

    def read(self) -> list[dict[str, Any]]:
        """The lines; one that a kill cut short ends them."""
        self._file.seek(0)
        lines = []
        for text in self._file:
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def rewrite(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Replace all lines."""
        self._file.seek(0)
        self._file.truncate()
        for line in lines:
            self.append(line)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; it survives the process, and what it speaks of is checked before it is trusted."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """End it."""
        self.path.unlink()
        self._file.close()


def written_rules(
    target: Target, rules: Sequence[WeightRule], lines: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The lines, from the first on, that name the rules in order and whose tensors are on disk with the stated hash."""
    good: list[Mapping[str, Any]] = []
    for rule, line in zip(rules, lines, strict=False):
        if [line.get("key"), line.get("index")] != [rule.key, list(rule.index)]:
            break
        try:
            tensors = target.read_back(rule, line["place"])
        except (RlctlError, RuntimeError, OSError):
            break
        if {n: described(t) for n, t in zip(rule.sources, tensors, strict=True)} != line["tensors"]:
            break
        good.append(line)
    return good
