"""One start of the workers of a benchmark: record rollouts, or replay them through one backend.

A replayed step is the trainer's step without generation and reward: old and reference logprobs where the algorithm
needs them, gradients, the optimizer's update, and the gathering of whole weights that an engine takes. All ranks meet
before a step; seconds are rank 0's, whose collectives wait for the slowest.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl import device, parts, plugins
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.bench import parity, replay
from rlctl.bench.job import RECORD, RESULT_FILE, Job, read
from rlctl.bench.work import padded_tokens, step_flops
from rlctl.config import Recipe
from rlctl.log import RunLog
from rlctl.models.materialize import materialize
from rlctl.models.resolve import resolve
from rlctl.policy.base import PolicyProtocol
from rlctl.policy.schedule import learning_rate
from rlctl.rollout import Colocated
from rlctl.types import Batch

_MATMUL = 1024
_MATMUL_SECONDS = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """What replaying takes."""

    recipe: Recipe
    policy: PolicyProtocol
    algorithm: AlgorithmProtocol


def run(recipe: Recipe, run_dir: Path, log: RunLog) -> None:
    """Do the directory's job; rank 0 writes its result."""
    job = read(run_dir)
    do = {"record": _record, "parity": _parity, "time": _time, "train": _train}[job.kind]
    with log.phase(job.kind):
        result = do(recipe, run_dir, log, job)
    if dist.get_rank() == 0:
        partial = run_dir / f"{RESULT_FILE}.partial"
        partial.write_text(json.dumps(result, indent=2) + "\n")
        partial.rename(run_dir / RESULT_FILE)


def _record(recipe: Recipe, run_dir: Path, log: RunLog, job: Job) -> dict[str, Any]:
    """Generate the recipe's first steps with the initial weights."""
    made = parts.build(recipe, run_dir, log)
    if isinstance(made.rollouts, Colocated):
        made.rollouts.publish(made.policy.weights(), version=0)
    batches, seconds = [], []
    for step in range(1, job.steps + 1):
        began = time.monotonic()
        batches.append(made.rollouts.next(step))
        seconds.append(time.monotonic() - began)
    if made.engine is not None:
        made.engine.close()
    if dist.get_rank() == 0:
        replay.save(batches, Path(job.rollouts))
    return {"rollouts": replay.digest(batches), "generation_and_reward_seconds": seconds}


def side(recipe: Recipe) -> Side:
    """Build what replays, with the initial weights. Collective."""
    device.seed_everything(recipe.grpo.seed)
    file = plugins.load("algorithm", recipe.algorithm)
    algorithm = file.Algorithm(file.Config(grpo=recipe.advantage, loss_fn=recipe.loss_fn))
    assert recipe.policy.model_name is not None
    model_dir = materialize(resolve(recipe.policy.model_name))
    backend = "megatron" if recipe.policy.megatron_cfg.enabled else "dtensor"
    policy = plugins.load("backend", backend).Policy(recipe, model_dir, reference="ref" in algorithm.needs)
    return Side(recipe=recipe, policy=policy, algorithm=algorithm)


def _parity(recipe: Recipe, run_dir: Path, log: RunLog, job: Job) -> dict[str, Any]:
    options = dataclasses.replace(recipe.policy.optimizer, lr=parity.LR, eps=parity.EPS)
    made = side(dataclasses.replace(recipe, policy=dataclasses.replace(recipe.policy, optimizer=options)))
    parity.measure(made.policy, replay.load(Path(job.rollouts))[0], made.algorithm, run_dir / RECORD)
    return {}


def _time(recipe: Recipe, run_dir: Path, log: RunLog, job: Job) -> dict[str, Any]:
    batches, peak = replay.load(Path(job.rollouts)), _matmul_flops_per_second()
    made = side(recipe)
    config = resolve(str(recipe.policy.model_name), recipe.policy.hf_config_overrides).config
    steps = [_step(made, batches[i % len(batches)], i + 1)[0] for i in range(job.warmup + job.steps)][job.warmup :]
    used = [batches[i % len(batches)] for i in range(job.warmup, job.warmup + job.steps)]
    totals = torch.tensor([peak, float(device.peak_memory_bytes())], dtype=torch.float64)
    gathered = [torch.zeros_like(totals) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, totals)
    weight_bytes = sum(torch.Size(s).numel() * d.itemsize for s, d in made.policy.weights().specs().values())
    return {
        "steps": steps,
        "rollouts": replay.digest(batches),
        "real_tokens": [len(b.tokens) for b in used],
        "padded_tokens": [padded_tokens(b, recipe, made.policy.layout) for b in used],
        "flops": [step_flops(b, config, _passes(made)) for b in used],
        "matmul_flops_per_second": float(sum(t[0] for t in gathered)),
        "peak_memory_bytes": int(max(t[1] for t in gathered)),
        "weight_bytes": weight_bytes,
        "memcpy_seconds": _memcpy_seconds(weight_bytes),
        "threads": torch.get_num_threads(),
    }


def _train(recipe: Recipe, run_dir: Path, log: RunLog, job: Job) -> dict[str, Any]:
    """The curve of replayed training, and a fingerprint of every tensor after each step."""
    batches, made = replay.load(Path(job.rollouts)), side(recipe)
    curve, prints = [], []
    for i in range(job.steps):
        metrics = _step(made, batches[i % len(batches)], i + 1)[1]
        curve.append({name: metrics[name] for name in ("loss", "grad_norm", "entropy")})
        named = (pair for bucket in made.policy.weights().whole() for pair in bucket)
        prints.append({name: float(torch.linalg.vector_norm(tensor.double())) for name, tensor in named})
    return {"curve": curve, "norms": prints, "rollouts": replay.digest(batches)}


def _updates(recipe: Recipe) -> int:
    sequences = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
    return sequences // (recipe.policy.train_global_batch_size or sequences)


def _passes(made: Side) -> int:
    """Forward passes without gradient in a step."""
    return int("old" in made.algorithm.needs or _updates(made.recipe) > 1) + int("ref" in made.algorithm.needs)


def _step(made: Side, batch: Batch, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """One replayed step; seconds by phase with `wall`, and the last update's metrics."""
    policy, algorithm, seconds = made.policy, made.algorithm, dict[str, float]()
    updates = _updates(made.recipe)
    dist.barrier()
    began = time.perf_counter()
    if "old" in algorithm.needs or updates > 1:
        with _phase(seconds, "old_logprobs"):
            batch = batch.replace(old_logprobs=policy.forward(batch).logprobs)
    if "ref" in algorithm.needs:
        with _phase(seconds, "ref_logprobs"):
            batch = batch.replace(ref_logprobs=policy.forward(batch, weights="reference").logprobs)
    with _phase(seconds, "advantages"):
        batch = batch.replace(advantages=algorithm.advantages(batch))
        optimizer, scheduler = made.recipe.policy.optimizer, made.recipe.policy.scheduler
        policy.set_lr(learning_rate(step, optimizer=optimizer, scheduler=scheduler))
        minis = [m.replace(loss_weights=algorithm.loss_weights(m)) for m in batch.split(updates)]
    metrics: dict[str, float] = {}
    for mini in minis:
        with _phase(seconds, "forward_backward"):
            metrics = policy.backward(mini, algorithm)
        with _phase(seconds, "optimizer"):
            metrics = policy.update(metrics)
    with _phase(seconds, "weight_gather"):
        for _ in policy.weights().whole():
            pass
    return seconds | {"wall": time.perf_counter() - began}, metrics


@contextmanager
def _phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    device.synchronize()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began  # a phase of each update adds up


def _matmul_flops_per_second() -> float:
    """This process's best of a large matrix product in fp32, while all processes do the same."""
    a = torch.rand(_MATMUL, _MATMUL, device=device.current())
    dist.barrier()
    best, end = 0.0, time.perf_counter() + _MATMUL_SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ a
        device.synchronize()
        best = max(best, 2 * _MATMUL**3 / (time.perf_counter() - began))
    return best


def _memcpy_seconds(count: int) -> float:
    """The least of three copies of as many bytes in host memory."""
    source, target, found = torch.ones(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8), list[float]()
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return min(found)


def lengths_of(batches: Sequence[Batch]) -> dict[str, Any]:
    """What a report says of the rollouts."""
    lengths = torch.cat([b.lengths for b in batches]).float()
    return {
        "steps": len(batches),
        "sequences": sum(len(b) for b in batches),
        "tokens": int(lengths.sum()),
        "scored_tokens": sum(int(b.mask.sum()) for b in batches),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
    }
