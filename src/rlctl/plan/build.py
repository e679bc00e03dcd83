"""Build ranks of a job at its true size, on one host, before it is queued: `--dry-run=build`.

1. A child process (no GPU visible) becomes one rank after another on torch's `fake` process group.
2. Megatron builds that rank's module on the meta device: it accepts the layout, or its complaint is the error.
3. The module's parameters are as many bytes as memory.py says.
4. Over all distinct ranks, the slices tile each global tensor of the weight rules exactly once, each with one writer.

For the DTensor backend the model is transformers' own, and its parameters are counted; sharding is torch's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import plugins
from rlctl.config import Recipe
from rlctl.errors import CHECK_FAILED, ENVIRONMENT, RlctlError
from rlctl.models import resolve
from rlctl.models.base import padded_vocabulary
from rlctl.parallel import Layout, check, layout_of
from rlctl.plan.memory import ELEMENT_BYTES, parameters_of_stage

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank that was built, e.g. rank 63 on stage 3 with 2,270,765,056 parameters in 142 slices."""

    rank: int
    stage: int
    parameters: int
    weight_bytes: int
    slices: int
    """Of global tensors; 0 for the DTensor backend, whose tensors torch shards evenly."""


def dry_build(recipe: Recipe) -> list[RankReport]:
    """Build the first, the middle and the last rank of a derived recipe, and check all distinct ones.

    Raises:
        RlctlError: exit status 3 when Megatron refuses the layout, 4 when the build and the plan differ.
    """
    cluster, policy = recipe.cluster, recipe.policy
    per_node = cluster.gpus_per_node or cluster.procs
    assert policy.model_name is not None
    assert per_node is not None
    layout = layout_of(recipe, cluster.num_nodes * per_node)
    config = resolve.resolve(policy.model_name, policy.hf_config_overrides).config
    check(layout, config)
    backend = "megatron" if policy.megatron_cfg.enabled else "dtensor"
    job = {"config": config, "layout": dataclasses.asdict(layout), "precision": policy.precision, "backend": backend}
    return [RankReport(**report) for report in _in_child(job)]


def _in_child(job: dict[str, Any]) -> list[dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rlctl.plan.build", folder]
        try:
            child = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RlctlError(
                f"the build took more than {TIMEOUT_SECONDS} s", "build fewer ranks: a smaller layout", exit_status=1
            ) from error
        result = Path(folder) / "result.json"
        if child.returncode or not result.is_file():
            last = (child.stderr.strip() or "no message").splitlines()[-1]
            raise RlctlError(
                f"the build process ended with {child.returncode}: {last}",
                "a negative number is a signal: -9 is what a host without memory sends",
                exit_status=1,
            )
        answer = json.loads(result.read_text())
    if "error" in answer:
        raise RlctlError(answer["error"], answer["hint"], exit_status=answer["exit_status"])
    return answer["reports"]


def _main(folder: str) -> None:
    job = json.loads((Path(folder) / "job.json").read_text())
    layout = Layout(**job["layout"])
    build = _build_megatron if job["backend"] == "megatron" else _build_transformers
    answer: dict[str, Any]
    try:
        answer = {"reports": [dataclasses.asdict(r) for r in build(job["config"], layout, job["precision"])]}
    except RlctlError as error:
        answer = {"error": error.message, "hint": error.hint, "exit_status": error.exit_status}
    (Path(folder) / "result.json").write_text(json.dumps(answer))


def _shown(world: int) -> list[int]:
    """First, middle and last rank."""
    return sorted({0, world // 2, world - 1})


def _build_megatron(config: dict[str, Any], layout: Layout, precision: str) -> list[RankReport]:
    from rlctl.models import fake  # torch and Megatron: in the child process only

    fake.prepare()
    from rlctl.checkpoint.shards import shards  # imports Megatron: only after `prepare`

    tiling = Tiling()
    reports, seen = [], set()
    for rank in range(layout.world):
        try:
            with fake.rank_of(layout, rank) as place:
                if place in seen and rank not in _shown(layout.world):
                    continue
                model = fake.build_on_meta(config, layout, precision=precision)
                held = shards(model)
        except Exception as error:  # Megatron refuses in many ways; each is a fact about this layout
            raise RlctlError(
                f"Megatron-Core refuses {layout} for this model: {type(error).__name__}: {error}",
                "change the degrees in policy.megatron_cfg",
                exit_status=ENVIRONMENT,
            ) from error
        report = RankReport(
            rank=rank,
            stage=place[0],
            parameters=sum(p.numel() for p in model.parameters()),
            weight_bytes=sum(p.nbytes for p in model.parameters()),
            slices=len(held),
        )
        _compare(report, parameters_of_stage(config, layout, report.stage), precision)
        if place not in seen:
            seen.add(place)
            for shard in held:
                tiling.add(shard.identity, shard.global_shape, (shard.offset, tuple(shard.data.shape)), shard.main)
        if rank in _shown(layout.world):
            reports.append(report)
    tiling.check(_global_shapes(config, layout))
    return reports


def _compare(report: RankReport, expected: int, precision: str) -> None:
    if (report.parameters, report.weight_bytes) != (expected, expected * ELEMENT_BYTES[precision]):
        raise _differs(
            f"rank {report.rank} has {report.parameters} parameters in {report.weight_bytes} bytes, "
            f"the plan says {expected} in {expected * ELEMENT_BYTES[precision]}"
        )


def _differs(message: str) -> RlctlError:
    return RlctlError(message, "this is a fault of rlctl; please report it", exit_status=CHECK_FAILED)


def _global_shapes(config: dict[str, Any], layout: Layout) -> dict[Any, tuple[int, ...]]:
    """Identity -> shape of each global tensor of the architecture's rules."""
    shapes = {}
    for rule in plugins.load("model", config["model_type"]).rules(config):
        rows = padded_vocabulary(rule.shape[0], multiple=layout.tp) if rule.vocabulary else rule.shape[0]
        shapes[(rule.key, rule.index)] = (rows, *rule.shape[1:])
    return shapes


class Tiling:
    """Slices of global tensors by identity, from many ranks."""

    def __init__(self) -> None:
        self._shapes: dict[Any, tuple[int, ...]] = {}
        self._writers: dict[Any, dict[Box, int]] = {}

    def add(self, identity: Any, global_shape: Sequence[int], box: Box, main: bool) -> None:
        """One rank's slice; the same slice on another rank is a replica.

        Raises:
            RlctlError: ranks disagree on the tensor's shape.
        """
        shape = tuple(global_shape)
        if self._shapes.setdefault(identity, shape) != shape:
            raise _differs(f"ranks disagree on the shape of {identity}: {shape} and {self._shapes[identity]}")
        writers = self._writers.setdefault(identity, {})
        writers[box] = writers.get(box, 0) + main

    def check(self, expected: dict[Any, tuple[int, ...]]) -> None:
        """Every expected tensor is tiled exactly once, each slice has one writer, and nothing else is there.

        Raises:
            RlctlError: naming the tensor.
        """
        if self._shapes != expected:
            odd = sorted(k for k in self._shapes.keys() | expected if self._shapes.get(k) != expected.get(k))
            raise _differs(
                f"tensor {odd[0]} is {self._shapes.get(odd[0])} in the build, {expected.get(odd[0])} in the rules"
            )
        for identity, writers in self._writers.items():
            if _volume(writers) != math.prod(expected[identity]) or not _disjoint(list(writers)):
                raise _differs(f"the slices of {identity} {expected[identity]} do not tile it: {sorted(writers)}")
            if set(writers.values()) != {1}:
                raise _differs(f"a slice of {identity} has {sorted(writers.values())} writers instead of one each")


def _volume(boxes: Iterable[Box]) -> int:
    return sum(math.prod(shape) for _, shape in boxes)


def _disjoint(boxes: Sequence[Box]) -> bool:
    return not any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def _overlap(a: Box, b: Box) -> bool:
    axes = zip(*a, *b, strict=True)
    return all(start < other + size and other < start + extent for start, extent, other, size in axes)


def _build_transformers(config: dict[str, Any], layout: Layout, precision: str) -> list[RankReport]:
    import torch  # in the child process only
    import transformers

    with torch.device("meta"):
        hf_config = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, precision))
    parameters = sum(p.numel() for p in model.parameters())
    if parameters != resolve.num_parameters(config):
        raise _differs(f"transformers builds {parameters} parameters, the plan says {resolve.num_parameters(config)}")
    share = -(-parameters // layout.world)
    size = share * ELEMENT_BYTES["float32"]  # FSDP2 shards the fp32 main parameters
    return [
        RankReport(rank=rank, stage=0, parameters=share, weight_bytes=size, slices=0) for rank in _shown(layout.world)
    ]


if __name__ == "__main__":
    _main(sys.argv[1])
