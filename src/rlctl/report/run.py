"""A run directory as data: its recipe, metrics, samples, and how it ended. Reads files only.

A file that is not there yet is an empty one: a run that just started has a report too.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rlctl import config, plugins
from rlctl.errors import RlctlError

Status = Literal["running", "finished", "failed", "stopped"]
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
        """recipe.yaml, nested."""
        return yaml.safe_load((self.path / "recipe.yaml").read_text())

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in the order of steps; of a step that was done twice, the later one."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.is_file() else []
        by_step = {row["step"]: row for row in map(json.loads, lines)}
        return [by_step[step] for step in sorted(by_step)]

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """environment.json: versions and hardware."""
        file = self.path / "environment.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    @property
    def commands(self) -> list[str]:
        """What started it, and went on with it."""
        file = self.path / "command.txt"
        return file.read_text().splitlines() if file.is_file() else []

    @property
    def error(self) -> str | None:
        """The first worker's error."""
        reports = sorted(self.path.glob("logs/error_rank_*.json"), key=lambda f: (f.stat().st_mtime_ns, f.name))
        return json.loads(reports[0].read_text())["error"] if reports else None

    @property
    def steps(self) -> int:
        """Steps that are logged."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def planned_steps(self) -> int:
        """grpo.max_num_steps; the data may end before."""
        return self.recipe["grpo"]["max_num_steps"]

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

    def last(self, name: str) -> float | None:
        """A metric's newest value."""
        found = self.series(name)
        return found[-1][1] if found else None

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

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """results.json of each finished evaluation of this run, the oldest first."""
        files = sorted((self.path / "eval").rglob("results.json"))
        return [json.loads(f.read_text()) | {"path": str(f.parent)} for f in files]

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
    """The runs below a folder, newest first; evaluations are none."""
    found = (f.parent for f in folder.glob("**/recipe.yaml") if not (f.parent / "eval.json").is_file())
    return [Run(p) for p in sorted(found, key=lambda p: (p / "recipe.yaml").stat().st_mtime, reverse=True)]


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a dump."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        yield json.loads(line)


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
