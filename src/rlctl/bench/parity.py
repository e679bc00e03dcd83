"""Do two sides compute the same? Loss, logprobs, gradient norm, every gradient, and parameters after 1 and 3 updates.

1. Each side writes what it computed on the same batch, under Hugging Face names: `measure`.
2. The records are compared, tensor by tensor: `compare`. Nothing larger than a tensor is held twice.

The error of a tensor is max|a - b| / max|b|; the loss's denominator is sum(w * |token loss|), since GRPO's first loss
is about 0. Updates are made with LR and EPS, not with the recipe's: Adam divides by sqrt(v) + eps, so with eps near 0
an entry whose gradient is rounding noise would move a full step in a random direction on either side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.bench import replay
from rlctl.policy.base import PolicyProtocol
from rlctl.types import Batch

LR, EPS = 1e-3, 1e-3
UPDATES = 3
TOY_PARAMETERS = 20_000_000
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}
TOY_TOLERANCE = 1e-5  # of float32 models with fewer parameters
_BUCKET_BYTES = 1 << 28
_NUMBERS = "numbers.json"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison, e.g. Check(name="gradients", error=3e-7, tolerance=1e-5, worst="model.norm.weight", count=21)."""

    name: str
    error: float
    tolerance: float
    worst: str
    """The tensor with the largest error, or what else is wrong."""
    count: int
    """Tensors or numbers that were compared."""

    @property
    def ok(self) -> bool:
        """NaN is not."""
        return self.error <= self.tolerance

    def plain(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self) | {"ok": self.ok}


def tolerance(precision: str, parameters: int) -> float:
    """What rounding explains in that precision."""
    return TOY_TOLERANCE if precision == "float32" and parameters < TOY_PARAMETERS else TOLERANCES[precision]


def measure(policy: PolicyProtocol, batch: Batch, algorithm: AlgorithmProtocol, folder: Path) -> None:
    """Write what this side computes; rank 0 writes. Collective.

    Args:
        policy: fresh, with LR and EPS.
        batch: recorded.
        algorithm: the recipe's.
        folder: is made.
    """
    batch = replay.with_given_logprobs(batch)
    batch = batch.replace(advantages=algorithm.advantages(batch))
    batch = batch.replace(loss_weights=algorithm.loss_weights(batch))
    assert batch.loss_weights is not None
    outputs = policy.forward(batch, outputs=("logprobs", "entropy"))
    _write(folder / "logprobs", [("logprobs", outputs.logprobs)])
    token_loss, _ = algorithm.loss(batch, outputs)
    loss = policy.backward(batch, algorithm)["loss"]
    _write(folder / "gradients", policy.gradients())
    norm = 0.0
    for update in range(1, UPDATES + 1):
        found = policy.train_step(batch, algorithm)["grad_norm"]
        norm = found if update == 1 else norm
        if update in (1, UPDATES):
            named = (pair for bucket in policy.weights().whole() for pair in bucket)
            _write(folder / f"after {update}", named)
    if dist.get_rank() == 0:
        numbers = {
            "loss": loss,
            "loss_scale": float((batch.loss_weights * token_loss.abs()).sum()),
            "grad_norm": norm,
            "rollouts": replay.digest([batch]),
            "parameters": _count(folder / "after 1"),
        }
        (folder / _NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")


def compare(ours: Path, theirs: Path, *, limit: float) -> list[Check]:
    """Every comparison of two records.

    Args:
        ours: a side's.
        theirs: the other side's, the denominator.
        limit: largest error that passes.
    """
    a, b = (json.loads((folder / _NUMBERS).read_text()) for folder in (ours, theirs))
    same = a["rollouts"] == b["rollouts"]
    checks = [
        Check(
            name="tokens", error=0.0 if same else 1.0, tolerance=0.0, count=1,
            worst="" if same else f"rollouts {a['rollouts'][:12]} and {b['rollouts'][:12]}",
        ),
        _number("loss", abs(a["loss"] - b["loss"]), b["loss_scale"], limit),
        _tensors("logprobs", ours, theirs, limit),
        _number("grad norm", abs(a["grad_norm"] - b["grad_norm"]), b["grad_norm"], limit),
        _tensors("gradients", ours, theirs, limit),
    ]  # fmt: skip
    return [*checks, *(_tensors(f"after {n}", ours, theirs, limit) for n in (1, UPDATES))]


def _number(name: str, apart: float, scale: float, limit: float) -> Check:
    return Check(name=name, error=apart / max(scale, 1e-30), tolerance=limit, worst="", count=1)


def _tensors(name: str, ours: Path, theirs: Path, limit: float) -> Check:
    label = {"after 1": "parameters after 1 update", f"after {UPDATES}": f"parameters after {UPDATES} updates"}
    a, b = _index(ours / name), _index(theirs / name)
    found: dict[str, Any] = {"name": label.get(name, name), "tolerance": limit, "count": len(b)}
    if a.keys() != b.keys():
        missing = sorted(a.keys() ^ b.keys())
        return Check(error=float("inf"), worst=f"only one side has {missing[0]}", **found)
    worst, largest = "", -1.0
    for tensor in b:
        error = _error(_read(a[tensor], tensor), _read(b[tensor], tensor))
        if not error <= largest:  # NaN is the worst
            worst, largest = tensor, error
            if math.isnan(error):
                break
    return Check(error=largest, worst=worst, **found)


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    apart, scale = float((a - b).abs().max()), float(b.abs().max())
    return apart if apart == 0 else apart / max(scale, 1e-30)


def _write(folder: Path, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Tensors into files of at most _BUCKET_BYTES, or one tensor; every rank exhausts `named`."""
    writes = dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True)
    for i, bucket in enumerate(_buckets(named)):
        if writes:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}, folder / f"{i:05d}.safetensors"
            )


def _buckets(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.clone()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _index(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _count(folder: Path) -> int:
    return sum(_read(path, name).numel() for name, path in _index(folder).items())
