"""A run directory as data: its recipe, metrics, samples, and how it ended. Reads files only.

A file that is not there yet is an empty one: a run that just started has a report too. What is damaged is left out and
named (files.py); only a recipe must be whole.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rlctl import config, plugins
from rlctl.errors import RlctlError
from rlctl.report import files

Status = Literal["running", "finished", "failed", "stopped"]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
_END = object()
_NEEDED = (  # what readers below take for granted
    "algorithm", "policy.model_name", "policy.megatron_cfg.enabled", "policy.generation.backend", "env.name",
    "grpo.max_num_steps", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt",
)  # fmt: skip
_LOCK = ".lock"  # held by a worker as long as it lives (launch/run_directory.py)


@dataclass(frozen=True)
class Run:
    """One run directory."""

    path: Path
    ended: bool = False
    """The caller is the run itself, at its end: that its lock is held says nothing."""

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.absolute().name

    @functools.cached_property
    def recipe(self) -> dict[str, Any]:
        """recipe.yaml, nested.

        Raises:
            RlctlError: it is no recipe.
        """
        return _read_recipe(self.path / "recipe.yaml")

    @functools.cached_property
    def _metrics(self) -> files.Lines:
        return files.json_lines(self.path / "metrics.jsonl", name="metrics.jsonl", check=files.metrics_line)

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in the order of steps; of a step that was done twice, the later one."""
        by_step = {row["step"]: row for row in self._metrics.rows}
        return [by_step[step] for step in sorted(by_step)]

    @functools.cached_property
    def _environment(self) -> tuple[Any, str | None]:
        needed = files.mapping("python", "platform", "packages", "hardware")
        return files.document(self.path / "environment.json", name="environment.json", check=needed)

    @property
    def environment(self) -> dict[str, Any]:
        """environment.json: versions and hardware."""
        return self._environment[0] or {}

    @functools.cached_property
    def _start_checks(self) -> tuple[Any, str | None]:
        return files.document(self.path / "checks.json", name="checks.json", check=files.check_list)

    @property
    def start_checks(self) -> list[dict[str, Any]]:
        """What the run tested before its first step: `name`, `ok`, `expected`, `found`, `detail` of each."""
        return self._start_checks[0] or []

    @property
    def damaged(self) -> list[str]:
        """Files and lines that were left out, with the reason; of dumps see `read_samples`."""
        documents = (self._environment[1], self._start_checks[1], *(e[1] for e in self._evaluations))
        return [*self._metrics.damaged, *(wrong for wrong in documents if wrong is not None)]

    @property
    def commands(self) -> list[str]:
        """What started it, and went on with it."""
        file = self.path / "command.txt"
        return file.read_text(errors="replace").splitlines() if file.is_file() else []

    @property
    def failure(self) -> dict[str, Any] | None:
        """The first worker's error: `error`, `hint`, `phase`."""
        reports = sorted(self.path.glob("logs/error_rank_*.json"), key=lambda f: (f.stat().st_mtime_ns, f.name))
        found = (files.document(f, name=f.name, check=files.mapping("error", "hint", "phase"))[0] for f in reports)
        return next((report for report in found if report is not None), None)

    @property
    def error(self) -> str | None:
        """Why it failed."""
        return None if self.failure is None else str(self.failure["error"])

    @property
    def steps(self) -> int:
        """Steps that are logged."""
        newest = self.newest(["step"])["step"]
        return 0 if newest is None else round(newest)

    @property
    def planned_steps(self) -> int:
        """grpo.max_num_steps, or as many as the data have, which a checkpoint knows."""
        most = self.recipe["grpo"]["max_num_steps"]
        for file in sorted(self.path.glob("checkpoints/step_*/trainer.json"), reverse=True):
            trainer, _ = files.document(file, name=file.name, check=files.mapping("epoch_steps"))
            if trainer is not None:
                return min(most, trainer["epoch_steps"])
        return most

    @property
    def status(self) -> Status:
        """How it stands. A run that was killed is `stopped`."""
        if not self.ended and _is_held(self.path / _LOCK):
            return "running"
        if self.error is not None:
            return "failed"
        return "finished" if self.steps >= self.planned_steps or (self.path / "hf").is_dir() else "stopped"

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric where it was logged and finite."""
        return [(row["step"], row[name]) for row in self.rows if name in row and row[name] is not None]

    def not_finite(self, name: str) -> list[int]:
        """Steps at which a metric was logged and not finite."""
        return [row["step"] for row in self.rows if name in row and row[name] is None]

    def newest(self, names: Sequence[str]) -> dict[str, float | None]:
        """The newest finite value of each metric. Reads lines from the end, as few as it takes."""
        if "rows" in self.__dict__:
            lines: Iterator[Any] = reversed(self.rows)
            wanted = set(names)
        else:
            content = _bytes(self.path / "metrics.jsonl")
            wanted = {name for name in names if f'"{name}"'.encode() in content}
            lines = map(_metrics_or_none, reversed(content.split(b"\n")[:-1]))
        found: dict[str, float | None] = dict.fromkeys(names)
        for row in lines:
            for name in [n for n in wanted if row is not None and row.get(n) is not None]:
                found[name] = row[name]
                wanted.remove(name)
            if not wanted:
                break
        return found

    def last(self, name: str) -> float | None:
        """A metric's newest value."""
        return self.newest([name])[name]

    def metrics(self, prefix: str = "") -> list[str]:
        """Names of metrics, in the order of their first line."""
        return list(dict.fromkeys(n for row in self.rows for n in row if n.startswith(prefix) and n != "step"))

    @property
    def sequences_per_step(self) -> int:
        """Rollouts of a step."""
        return self.recipe["grpo"]["num_prompts_per_step"] * self.recipe["grpo"]["num_generations_per_prompt"]

    def dumps(self, kind: Literal["rollouts", "validation"] = "rollouts") -> dict[int, Path]:
        """Step -> the file with that step's samples, in the order of steps."""
        return {int(f.stem.removeprefix("step_")): f for f in sorted((self.path / kind).glob("step_*.jsonl"))}

    @functools.cached_property
    def _evaluations(self) -> list[tuple[Any, str | None]]:
        needed = files.mapping("task", "samples", "reward", "pass_at_k", "pass_reward", "step")
        found = sorted((self.path / "eval").rglob("results.json"))
        read = [files.document(f, name=str(f.relative_to(self.path)), check=needed) for f in found]
        return [(v and v | {"path": str(f.parent)}, wrong) for f, (v, wrong) in zip(found, read, strict=True)]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """results.json of each finished evaluation of this run, the oldest first."""
        return [value for value, _ in self._evaluations if value is not None]

    @functools.cached_property
    def changed(self) -> list[tuple[str, Any, Any]]:
        """(key, value, default) of each recipe key that is not its default."""
        before, now = flatten(defaults(self.recipe)), flatten(self.recipe)
        absent = object()
        rows = [(key, value, before.get(key, absent)) for key, value in now.items() if key != "run_dir"]
        return [
            (key, value, None if default is absent else default) for key, value, default in rows if value != default
        ]


def open_run(path: Path) -> Run:
    """The run in a directory.

    Raises:
        RlctlError: it is none.
    """
    if not path.is_dir():
        raise RlctlError(f"no run directory `{path}`", "`rlctl runs list` shows those in runs/")
    if not (path / "recipe.yaml").is_file():
        raise RlctlError(f"`{path}` is no run directory: it has no recipe.yaml", "give the directory of a run")
    return Run(path)


def find_runs(folder: Path) -> list[Run]:
    """The runs below a folder, newest first; evaluations are none, nor is what lies inside of a run."""
    found: list[Path] = []
    for place, below, names in os.walk(folder):
        if "recipe.yaml" in names:
            below.clear()
            if "eval.json" not in names:
                found.append(Path(place))
    return [Run(p) for p in sorted(found, key=lambda p: (p / "recipe.yaml").stat().st_mtime, reverse=True)]


def read_samples(path: Path) -> files.Lines:
    """The samples of a dump."""
    return files.json_lines(path, name=f"{path.parent.name}/{path.name}", check=files.sample_line)


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        recipe = yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506  safe: it makes plain values only
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise RlctlError(f"`{path}` cannot be read: {said}", "restore it, or leave this run out") from error
    for key in _NEEDED:
        at = recipe
        for name in key.split("."):
            at = at.get(name, _END) if isinstance(at, dict) else _END
        if at is _END:
            raise RlctlError(
                f"`{path}` is not what a run resolved to: it lacks `{key}`", "restore it, or leave this run out"
            )
    return recipe


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _metrics_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if files.metrics_line(row) is None else None


def _is_held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


def defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Every key's default, for the recipe's own algorithm, environment and engine, nested as recipe.yaml is."""
    options = plugins.load("algorithm", recipe["algorithm"]).Config()
    values = dataclasses.asdict(config.Recipe())
    del values["advantage"]
    values["grpo"] |= dataclasses.asdict(options.grpo)
    values["loss_fn"] = dataclasses.asdict(options.loss_fn)
    values["policy"]["generation"]["vllm_cfg"] = dataclasses.asdict(plugins.load("engine", "vllm").Config())
    del values["env"]["options"]
    name = recipe["env"]["name"]
    if name in plugins.names("environment"):
        values["env"][name] = dataclasses.asdict(plugins.load("environment", name).Config())
    return values


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested maps -> dotted keys; an empty map stays a value."""
    if not isinstance(values, Mapping) or not values:
        return {prefix.rstrip("."): list(values) if isinstance(values, tuple) else values}
    return {k: v for name, part in values.items() for k, v in flatten(part, f"{prefix}{name}.").items()}


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """(key, each run's value) of the recipe keys in which runs differ."""
    flat = [flatten(run.recipe) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one if key != "run_dir")
    rows = [(key, [one.get(key) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(v != values[0] for v in values)]
