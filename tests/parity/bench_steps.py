"""What test_bench.py runs inside its processes: an honest record of each backend, and one of each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlctl.bench import measure, parity, replay
from rlctl.parallel import Layout
from rlctl.policy import dtensor, megatron
from tests.parity import dtensor_steps, megatron_steps


class Scaled:
    """GRPO whose loss is 1 % too large."""

    def __init__(self) -> None:
        self.inner = dtensor_steps.algorithm()
        self.needs, self.unit = self.inner.needs, self.inner.unit
        self.advantages, self.loss_weights = self.inner.advantages, self.inner.loss_weights

    def loss(self, batch: Any, out: Any) -> Any:
        token_loss, metrics = self.inner.loss(batch, out)
        return 1.01 * token_loss, metrics


class OneGradientZeroed:
    """A policy that loses one tensor's gradient when it is looked at."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.inner, attribute)

    def gradients(self) -> Any:
        for name, gradient in self.inner.gradients():
            yield name, torch.zeros_like(gradient) if name == self.name else gradient


def recipe(backend: str, **policy: Any) -> Any:
    whole = Layout(world=2)
    made = megatron_steps.recipe(whole, **policy) if backend == "megatron" else dtensor_steps.recipe(**policy)
    made.policy.optimizer.lr, made.policy.optimizer.eps = parity.LR, parity.EPS
    return made


def policy(backend: str, folder: Path, **settings: Any) -> Any:
    kind = megatron.Policy if backend == "megatron" else dtensor.Policy
    return kind(recipe(backend, **settings), folder)


def batches(folder: Path) -> Any:
    """Recorded and read back, and the same with one token changed."""
    file = folder / f"rollouts-{torch.distributed.get_rank()}.safetensors"
    replay.save([dtensor_steps.batch()], file)
    whole = replay.load(file)[0]
    tokens = whole.tokens.clone()
    tokens[9] = (tokens[9] + 1) % dtensor_steps.VOCABULARY
    return whole, whole.replace(tokens=tokens)


def records(model: Path, folder: Path, zeroed: str) -> dict[str, Any]:
    """Write every record; and the steps that a replay times."""
    batch, changed = batches(folder)
    honest = dtensor_steps.algorithm()
    for backend in ("dtensor", "megatron"):
        parity.measure(policy(backend, model), batch, honest, folder / backend)
    parity.measure(policy("megatron", model), batch, Scaled(), folder / "loss scaled")
    parity.measure(OneGradientZeroed(policy("megatron", model), zeroed), batch, honest, folder / "gradient zeroed")
    parity.measure(policy("megatron", model), changed, honest, folder / "token changed")
    parity.measure(policy("megatron", model, precision="bfloat16"), batch, honest, folder / "other precision")
    parity.measure(policy("megatron", model, activation_checkpointing=True), batch, honest, folder / "recompute")
    learner = dtensor.Policy(recipe("dtensor"), model, reference=True)
    side = measure.Side(recipe=recipe("dtensor"), policy=learner, algorithm=honest)
    return {"steps": [measure._step(side, batch, step) for step in (1, 2)]}
