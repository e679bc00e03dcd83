"""`rlctl bench`: record rollouts once, then start each side's workers in turn, and put the report together.

1. Rollouts: a file, drawn lengths, or generated once by the first side's engine with the initial weights.
2. Parity: each side writes what it computes; all are compared with the first.
3. Timing: A B A B, each start a process group of its own, so that neither side always has the warmer machine.
4. Convergence, where asked for.

The directory of each start stays in the benchmark's, with its logs.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
import yaml

from rlctl.bench import compare, fairness
from rlctl.bench.job import RECORD, RESULT_FILE, Job
from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.launch import local, run_directory
from rlctl.recipe import compose
from rlctl.recipe.derive import Resolved

ROLLOUTS = "rollouts.safetensors"
RECORDED_STEPS = 2  # replayed in turn
CURVE_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    out: Path
    steps: int
    repeats: int
    warmup: int
    parity_only: bool
    train_steps: int
    rollouts: Path | None
    lengths: str | None
    judge_fairness: bool
    """False in a sweep, whose sides differ on purpose."""
    keep_records: bool
    command: Sequence[str]


class Bench:
    """One benchmark.

    Args:
        sides: name -> its resolved job; the first one is compared with each of the others.
        settings: see there.
        hardware: this machine.
        say: takes a progress line.
    """

    def __init__(
        self, sides: Mapping[str, Resolved], settings: Settings, hardware: Hardware, say: Callable[[str], None]
    ) -> None:
        self.sides, self.settings, self.hardware, self.say = sides, settings, hardware, say
        self.first = next(iter(sides))
        self.rollouts = settings.out / ROLLOUTS

    def run(self) -> dict[str, Any]:
        """All of it; the report as plain data.

        Raises:
            RlctlError: a job failed or was stopped, or the rollouts do not fit.
        """
        run_directory.check(self.settings.out)
        self.settings.out.mkdir(parents=True, exist_ok=True)
        recorded = self._record()
        facts = {name: fairness.facts(r.recipe, r.layout) for name, r in self.sides.items()}
        unfair = fairness.differences(facts) if self.settings.judge_fairness else []
        for difference in unfair:
            self.say(f"differs  {difference}")
        parity = self._parity()
        agrees = all(check["ok"] for checks in parity.values() for check in checks)
        timed: dict[str, Any] = {}
        if agrees and not self.settings.parity_only and self.settings.steps:
            timed = self._time()
            unfair += self._tokens(recorded["rollouts"], timed)
        convergence = self._train() if self.settings.train_steps else None
        comparable = agrees and not unfair
        timing = {name: compare.summary(results) for name, results in timed.items()}
        return {
            **self._head(),
            "verdict": "COMPARABLE" if comparable else "NOT COMPARABLE",
            **recorded,
            "fairness": [asdict(difference) for difference in unfair],
            "fairness_judged": self.settings.judge_fairness,
            "parity": parity,
            "sides": {n: {"facts": facts[n], "timing": timing.get(n)} for n in self.sides},
            "ratios": self._ratios(timing) if comparable else {},
            "convergence": convergence,
        }

    def _head(self) -> dict[str, Any]:
        recipe, settings = self.sides[self.first].recipe, self.settings
        return {
            "bench_schema": compare.SCHEMA,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": list(settings.command),
            "model": recipe.policy.model_name,
            "algorithm": recipe.algorithm,
            "precision": recipe.policy.precision,
            "recipe_hash": recipe_hash(self.sides),
            "machine": fingerprint(self.hardware),
            "where": where(self.sides[self.first]),
            "steps": settings.steps,
            "repeats": settings.repeats,
            "warmup": settings.warmup,
        }

    def _record(self) -> dict[str, Any]:
        from rlctl.bench import measure, replay  # torch; nothing before needed it

        settings, resolved = self.settings, self.sides[self.first]
        generation: Mapping[str, Any] | None = None
        source = "generated with the initial weights"
        if settings.rollouts is not None:
            source = str(settings.rollouts)
            replay.load(settings.rollouts)
            shutil.copyfile(settings.rollouts, self.rollouts)
        elif settings.lengths is not None:
            source = f"random tokens, lengths {settings.lengths}"
            replay.save([_drawn(resolved, settings.lengths, seed) for seed in range(RECORDED_STEPS)], self.rollouts)
        else:
            self.say("record   rollouts, with the initial weights")
            steps = min(RECORDED_STEPS, max(settings.steps, 1))
            generation = self._start("record", resolved, Job(kind="record", rollouts=str(self.rollouts), steps=steps))
        batches = replay.load(self.rollouts)
        for name, side in self.sides.items():
            _check_fits(batches, side, name)
        return {
            "rollouts": replay.digest(batches),
            "rollouts_source": source,
            "rollouts_size": measure.lengths_of(batches),
            "generation_and_reward_seconds": generation and generation["generation_and_reward_seconds"],
        }

    def _parity(self) -> dict[str, list[dict[str, Any]]]:
        from rlctl.bench import parity  # see _record

        folders: dict[str, Path] = {}
        for name, resolved in self.sides.items():
            self.say(f"parity   {name}")
            folder = f"parity-{_slug(name)}"
            self._start(folder, resolved, Job(kind="parity", rollouts=str(self.rollouts), steps=1))
            folders[name] = self.settings.out / folder / RECORD
        base = self.sides[self.first]
        found: dict[str, list[dict[str, Any]]] = {}
        precisions = {side.recipe.policy.precision for side in self.sides.values()}
        limit = max(parity.tolerance(precision, base.parameters) for precision in precisions)
        for name in list(self.sides)[1:]:
            checks = parity.compare(folders[self.first], folders[name], limit=limit)
            found[f"{self.first} and {name}"] = [check.plain() for check in checks]
        if not self.settings.keep_records:
            for record in folders.values():
                shutil.rmtree(record)
        return found

    def _time(self) -> dict[str, list[Mapping[str, Any]]]:
        settings = self.settings
        found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in self.sides}
        job = Job(kind="time", rollouts=str(self.rollouts), steps=settings.steps, warmup=settings.warmup)
        for repeat in range(1, settings.repeats + 1):
            for name, resolved in self.sides.items():
                result = self._start(f"time-{_slug(name)}-{repeat}", resolved, job)
                seconds = compare.percentile([step["wall"] for step in result["steps"]], 0.5)
                self.say(f"time     {name}, repeat {repeat} of {settings.repeats}: {seconds:.3f} s a step")
                found[name].append(result)
        return found

    def _tokens(self, digest: str, timed: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[fairness.Difference]:
        """What was replayed is what was recorded."""
        seen = {name: sorted({result["rollouts"] for result in results}) for name, results in timed.items()}
        return [] if all(v == [digest] for v in seen.values()) else [fairness.Difference(what="tokens", values=seen)]

    def _train(self) -> dict[str, Any]:
        found = {}
        for name in list(self.sides)[:2]:
            self.say(f"train    {name}, {self.settings.train_steps} replayed steps")
            job = Job(kind="train", rollouts=str(self.rollouts), steps=self.settings.train_steps)
            found[name] = self._start(f"train-{_slug(name)}", self.sides[name], job)
        return compare.curves(found, tolerance=CURVE_TOLERANCE) | {"curves": {n: r["curve"] for n, r in found.items()}}

    def _ratios(self, timing: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        if not timing:
            return {}
        ours = timing[self.first]["step_seconds"]
        return {f"{n} / {self.first}": compare.ratio(timing[n]["step_seconds"], ours) for n in list(timing)[1:]}

    def _start(self, name: str, resolved: Resolved, job: Job) -> dict[str, Any]:
        """Run one job's workers; its result."""
        folder = self.settings.out / name
        resolved = replace(resolved, recipe=replace(resolved.recipe, run_dir=str(folder)))
        run_directory.create(folder, resolved, hardware=self.hardware, command=self.settings.command)
        job.write(folder)
        cluster = resolved.recipe.cluster
        processes = cluster.gpus_per_node or cluster.procs
        assert processes is not None
        status = local.run(folder, processes=processes, has_gpus=cluster.gpus_per_node is not None)
        if status:
            raise RlctlError("interrupted", "give the line again with a new `--out`", exit_status=status)
        return json.loads((folder / RESULT_FILE).read_text())


def _drawn(resolved: Resolved, text: str, seed: int) -> Any:
    from rlctl.bench import replay  # see Bench._record

    steps = resolved.recipe.grpo
    return replay.draw(
        replay.parse_lengths(text),
        prompts=steps.num_prompts_per_step,
        group_size=steps.num_generations_per_prompt,
        longest=resolved.recipe.policy.max_total_sequence_length,
        vocabulary=resolved.model.config["vocab_size"],
        seed=seed,
    )


def _check_fits(batches: Sequence[Any], resolved: Resolved, name: str) -> None:
    """Refuse rollouts of another shape than the recipe's.

    Raises:
        RlctlError: exit status 2.
    """
    vocabulary, longest = resolved.model.config["vocab_size"], resolved.recipe.policy.max_total_sequence_length
    hint = "give rollouts recorded with this recipe, or change the recipe"
    for batch in batches:
        if len(batch) != resolved.batch_size:
            raise RlctlError(f"the rollouts have {len(batch)} sequences a step, {name} {resolved.batch_size}", hint)
        if int(batch.lengths.max()) > longest:
            raise RlctlError(
                f"the rollouts have a sequence of {int(batch.lengths.max())} tokens, {name} takes at most {longest}",
                hint,
            )
        if int(batch.tokens.max()) >= vocabulary or int(batch.tokens.min()) < 0:
            raise RlctlError(
                f"the rollouts have token {int(batch.tokens.max())}, the vocabulary of {name} has {vocabulary}", hint
            )


def recipe_hash(sides: Mapping[str, Resolved]) -> str:
    """xxh3_128 of all that the sides' recipes say; where they run and write is left out."""
    values = {name: compose.as_values(side.recipe) for name, side in sides.items()}
    for one in values.values():
        for key in ("run_dir", "checkpointing", "logger"):
            one.pop(key)
    return xxhash.xxh3_128_hexdigest(yaml.safe_dump(values, sort_keys=True).encode())


def fingerprint(hardware: Hardware) -> dict[str, Any]:
    """What timings depend on here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "system": platform.system(), **asdict(hardware)}


def where(resolved: Resolved) -> str:
    """For the head of every page."""
    cluster = resolved.recipe.cluster
    if cluster.gpus_per_node:
        return f"{cluster.gpus_per_node} GPUs of one node"
    return f"{cluster.procs} CPU processes with gloo, one thread each: says nothing about GPUs"


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
