"""How good a model is at a task: samples on held-out prompts, their rewards, and estimates with intervals.

1. `validate` samples the held-out prompts with the weights that an engine holds; training calls it between steps.
2. `evaluate` does the same for a model by itself, some prompts at a time: rank 0 appends each part to samples.jsonl, so
   that an evaluation that was interrupted goes on where it stopped.
3. `summarize` turns the samples into estimates (estimates.py).

A sample's seed depends on the recipe's seed, its prompt and its number: a validation after the last step and an
evaluation of the exported model draw the same samples, in any number of parts and processes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlctl import device, estimates, plugins
from rlctl.checkpoint import identity
from rlctl.config import Recipe
from rlctl.envs.render import Renderer
from rlctl.errors import RlctlError
from rlctl.lazy import dist
from rlctl.log import RunLog
from rlctl.phase import as_line
from rlctl.rollout import Colocated, build_environment
from rlctl.types import Declared, Prompt, Rollout

METRICS = {
    "val/<figure>": Declared(
        meaning="a figure of rollout/ (of train/ for dpo), e.g. val/reward, on held-out data after the step",
        formula="as there",
        reduce=None,
        healthy="val/reward rises with rollout/reward; alone behind: the training prompts are learned by heart",
    ),
}
SEED_STEP = 0  # training counts from 1: no training sample shares its seed with a held-out one
SAMPLES_FILE, SETTINGS_FILE, RESULTS_FILE = "samples.jsonl", "eval.json", "results.json"
IDENTITY_FILE = "identity.json"
EXPORT_FILE = "export.json"
"""In the directory of an export job (export.py): {"checkpoint": PATH}."""
HF = "hf"
"""The exported model, in a run directory or in a checkpoint."""
PART_SAMPLES = 256  # of one engine between two writes of samples.jsonl


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an evaluation is besides its recipe."""

    target: str
    """As the user wrote it."""
    task: str
    samples: int
    """Of each prompt."""
    pass_reward: float = 1.0
    """A sample with at least this reward is correct."""
    step: int | None = None
    """Of the run that `target` is."""


def validate(rollouts: Colocated) -> dict[str, float]:
    """`val/...` metrics of the held-out prompts under the engine's weights. Collective; leaves the engine awake."""
    samples = rollouts.recipe.grpo.num_val_generations_per_prompt
    rollouts.sample(rollouts.held_out, samples=samples, step=SEED_STEP)
    return {f"val/{name.removeprefix('rollout/')}": value for name, value in rollouts.stats.items()}


def evaluate(recipe: Recipe, run_dir: Path, log: RunLog) -> None:
    """Sample, score and summarize, in an initialised process group.

    Args:
        recipe: resolved; its engine generates, `policy.model_name` is what is evaluated.
        run_dir: holds eval.json; gets samples.jsonl and results.json.
        log: open.

    Raises:
        RlctlError: a part has no sample with a vote.
    """
    settings = Settings(**json.loads((run_dir / SETTINGS_FILE).read_text()))
    with log.phase("start"):
        rollouts, tokenizer = _build(recipe, run_dir, log)
    prompts = rollouts.held_out
    done = _agree(lambda: kept(run_dir / SAMPLES_FILE, settings.samples))
    todo = [p for p in prompts if p.index not in done]
    if done:
        log.say(f"{len(done)} of {len(prompts)} prompts were sampled before; {len(todo)} are left")
    start, reward, tokens = time.monotonic(), 0.0, 0
    for part in _parts(todo, settings.samples, _engines(rollouts)):
        with log.phase("generate"):
            batch = rollouts.sample(part, samples=settings.samples, step=SEED_STEP)
        if _writes():
            _append(run_dir / SAMPLES_FILE, "".join(_line(r, tokenizer) for r in rollouts.last))
        done |= {p.index for p in part}
        reward, tokens = rollouts.stats["rollout/reward"], tokens + int(batch.mask.sum())
        log.say(f"prompts {len(done)}/{len(prompts)}  reward of these {len(part)}: {reward:.3f}")
    if _writes():
        rows = read_rows(run_dir / SAMPLES_FILE)
        results = asdict(settings) | summarize(rows, samples=settings.samples, pass_reward=settings.pass_reward)
        seconds = time.monotonic() - start
        results |= {"seconds": seconds, "tokens_per_second": tokens / seconds if tokens else None}
        write_whole(run_dir / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
    rollouts.engine.close()


def _build(recipe: Recipe, run_dir: Path, log: RunLog) -> tuple[Colocated, Any]:
    """The engine with the model's own weights, and its tokenizer. No policy is built."""
    from rlctl.models.materialize import load_tokenizer, materialize  # transformers: only workers need it
    from rlctl.models.resolve import resolve

    device.seed_everything(recipe.grpo.seed)
    environment = build_environment(recipe)
    assert recipe.policy.model_name is not None
    model_dir = materialize(resolve(recipe.policy.model_name), progress=log.say)
    stated = recipe.policy.tokenizer
    tokenizer = load_tokenizer(model_dir, name=stated.name, chat_template=stated.chat_template)
    if _writes():
        check_identity(run_dir, identity.of_run(recipe, model_dir, tokenizer))
    assert recipe.policy.generation.backend is not None
    engine = plugins.load("engine", recipe.policy.generation.backend).Engine(recipe, model_dir)
    log.say(f"evaluating {recipe.policy.model_name} on {recipe.env.name}, engine {recipe.policy.generation.backend}")
    return Colocated(recipe, environment, engine, Renderer(tokenizer), trains=False), tokenizer


def check_identity(run_dir: Path, now: Mapping[str, str]) -> None:
    """Note what is evaluated; samples of something else must not be mixed with it.

    Args:
        run_dir: of the evaluation.
        now: hashes by name; the recipe's is none of them, for it names where the run is (launch/evaluation.py).

    Raises:
        RlctlError: the directory holds samples of another model, tokenizer or data.
    """
    file, hashes = run_dir / IDENTITY_FILE, {name: value for name, value in now.items() if name != "recipe"}
    if not file.is_file():
        write_whole(file, json.dumps(hashes, indent=2) + "\n")
        return
    before = json.loads(file.read_text())
    other = sorted(name for name in hashes if name not in before or before[name] != hashes[name])
    if other:
        raise RlctlError(
            f"`{run_dir}` holds samples of another {' and another '.join(other)}: its content differs now",
            "give a new directory with `--run-dir`",
        )


def _line(rollout: Rollout, tokenizer: Any) -> str:
    """A group is numbered in its part; in the file it is the prompt, so that parts leave no trace."""
    return as_line(replace(rollout, group=rollout.prompt.index), tokenizer)


def _engines(rollouts: Colocated) -> int:
    world = dist.get_world_size() if dist.is_initialized() else 1
    return world // rollouts.engine.ranks_per_replica


def _parts(prompts: Sequence[Prompt], samples: int, engines: int) -> list[Sequence[Prompt]]:
    size = max(1, PART_SAMPLES * engines // samples)
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agree(read: Any) -> set[int]:
    """What rank 0 reads, on every rank."""
    box: list[Any] = [read() if _writes() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def kept(path: Path, samples: int) -> set[int]:
    """The prompts with all their samples in the file; whatever else an interruption left there is removed."""
    if not path.is_file():
        return set()
    rows = read_rows(path)
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["index"]] = counts.get(row["index"], 0) + 1
    whole = {index for index, count in counts.items() if count == samples}
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows if row["index"] in whole)
    write_whole(path, "".join(lines))
    return whole


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The samples of a file; a last line without its end is left out.

    Raises:
        RlctlError: another line is not JSON.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RlctlError(f"{path}:{number}: not JSON: {error}", "restore the file or remove that line") from error
    return rows


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def summarize(rows: Sequence[Mapping[str, Any]], *, samples: int, pass_reward: float) -> dict[str, Any]:
    """Estimates over prompts.

    Args:
        rows: of samples.jsonl. One without a vote counts for nothing but `invalid`.
        samples: of each prompt; pass@k is given for powers of two up to it.
        pass_reward: a sample with at least this reward is correct.

    Returns:
        As results.json has it: `prompts`, `reward`, `reward_parts`, `pass_at_k` and shares. A prompt with fewer than k
        votes is left out of pass@k; `prompts` in each estimate says how many took part.

    Raises:
        RlctlError: no sample has a vote.
    """
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["valid"]:
            groups.setdefault(row["index"], []).append(row)
    votes = list(groups.values())
    if not votes:
        raise RlctlError(f"none of {len(rows)} samples has a reward", "mend the reward or the environment")
    names = sorted({name for group in votes for row in group for name in row["reward_parts"]})
    counts = [(len(g), sum(row["reward"] >= pass_reward for row in g)) for g in votes]
    at_k = {}
    for k in estimates.powers_of_two(samples):
        values = [estimates.pass_at_k(n, c, k) for n, c in counts if n >= k]
        if values:
            at_k[str(k)] = asdict(estimates.estimate(values))
    return {
        "prompts": len({row["index"] for row in rows}),
        "reward": asdict(estimates.estimate([_mean([r["reward"] for r in g]) for g in votes])),
        "reward_parts": {n: _mean([_mean([r["reward_parts"].get(n, 0.0) for r in g]) for g in votes]) for n in names},
        "pass_at_k": at_k,
        "response_tokens": _mean([r["response_tokens"] for g in votes for r in g]),
        "truncated_share": _mean([float(r["truncated"]) for g in votes for r in g]),
        "invalid": sum(not row["valid"] for row in rows),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
