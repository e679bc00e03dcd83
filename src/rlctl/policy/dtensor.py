"""The DTensor backend: transformers' own model under FSDP2 and tensor parallelism.

1. A batch is dealt to the dp ranks as microbatches, each one packed stream whose position ids restart at each sequence
   (transformers masks attention by that); only rows that predict a scored token meet the vocabulary.
2. The loss is a global sum, so gradients are sums over microbatches and dp; the clipped norm is of the whole gradient.
3. The optimizer holds fp32 parameters and state, sharded as the model is.

All tp ranks of a dp rank do the same work on the same microbatches.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlctl import device
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.config import PolicySection, Recipe
from rlctl.errors import RlctlError
from rlctl.parallel import layout_of
from rlctl.policy import dtensor_model, resharding
from rlctl.policy.base import Offloadable, TrainState
from rlctl.policy.dtensor_weights import Weights
from rlctl.policy.logprobs import token_logprobs
from rlctl.policy.loss import weighted_loss
from rlctl.policy.metrics import MetricSums
from rlctl.policy.packing import Budget, Microbatch, build_microbatch, filling, logprob_budget, plan, train_budget
from rlctl.types import Batch, TokenOutputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """See policy/base.py.

    Args:
        recipe: resolved.
        model_dir: a Hugging Face directory with safetensors.
        reference: keep a copy of the initial weights, for `forward(..., weights="reference")`.
    """

    def __init__(self, recipe: Recipe, model_dir: Path, *, reference: bool = False) -> None:
        self.section: PolicySection = recipe.policy
        self.layout = layout_of(recipe, dist.get_world_size())
        self.packing: dict[str, float] = {}
        if self.layout.cp > 1:
            raise RlctlError(
                f"the dtensor backend has no context parallelism (context_parallel_size is {self.layout.cp})",
                "set policy.dtensor_cfg.context_parallel_size=1, or use --backend megatron",
            )
        shape = (self.layout.dp, self.layout.tp)
        self.mesh = init_device_mesh(device.mesh_type(), shape, mesh_dim_names=("dp", "tp"))
        self.model: Any = dtensor_model.build(
            model_dir,
            mesh=self.mesh,
            precision=self.section.precision,
            activation_checkpointing=self.section.activation_checkpointing,
            config_overrides=self.section.hf_config_overrides,
        )
        self.optimizer = _optimizer(self.model, self.section)
        self._reference = [p.to_local().detach().to("cpu", copy=True) for p in self._shards()] if reference else None

    # --- forward ---

    def forward(
        self,
        batch: Batch,
        weights: Literal["policy", "reference"] = "policy",
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> TokenOutputs:
        """Logprobs and, if asked for, entropy [N] of the masked tokens, without gradient; the same on every rank."""
        gathered = torch.zeros(2, len(batch.tokens))
        context = self._reference_weights() if weights == "reference" else contextlib.nullcontext()
        with torch.no_grad(), context:
            for micro in self._microbatches(batch, logprob_budget(self.section), groups=None):
                index = micro.source[micro.target_index]
                for row, values in zip(gathered, self._score(micro), strict=True):
                    row[index] = values.cpu()
        # One dp rank alone writes each token, so the sum is exact.
        moved = gathered.to(device.current())
        dist.all_reduce(moved, group=self.mesh.get_group("dp"))
        logprobs, entropy = moved.cpu()
        return TokenOutputs(logprobs=logprobs, entropy=entropy if "entropy" in outputs else None)

    def _score(self, micro: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropy [n] of a microbatch's targets."""
        where = device.current()
        logits = self.model(
            input_ids=micro.tokens.to(where),
            position_ids=micro.position_ids.to(where),
            use_cache=False,  # with a cache transformers would not look for packed sequences
            logits_to_keep=micro.rows.to(where),
        ).logits[0]
        tp = self.mesh["tp"]
        columns = -(-self.model.config.vocab_size // tp.size())  # DTensor splits as torch.chunk does
        return token_logprobs(
            logits,
            micro.targets.to(where),
            temperature=self.section.generation.temperature,
            group=tp.get_group() if tp.size() > 1 else None,
            vocab_start=columns * tp.get_local_rank(),
        )

    def _microbatches(self, batch: Batch, budget: Budget, *, groups: list[int] | None) -> list[Microbatch]:
        """This dp rank's share."""
        dealt = plan(
            batch.lengths.tolist(),
            groups,
            dp=self.layout.dp,
            max_tokens=budget.max_tokens,
            max_sequences=budget.max_sequences,
        )
        self.packing = filling(dealt, batch.lengths.tolist(), max_tokens=budget.max_tokens)
        return [build_microbatch(batch, chosen) for chosen in dealt[self.mesh.get_local_rank("dp")]]

    # --- training ---

    def train_step(self, batch: Batch, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """One optimizer update on a minibatch whose `advantages` and `loss_weights` are set.

        Returns:
            loss, grad_norm (before clipping), entropy and the algorithm's metrics; the same on every rank.

        Raises:
            RlctlError: the gradient is not finite; the weights are as before.
        """
        return self.update(self.backward(batch, algorithm))

    def update(self, metrics: dict[str, float]) -> dict[str, float]:
        """One optimizer update by the gradients of `backward`, which gave `metrics`; returns what `train_step` does.

        Raises:
            RlctlError: the gradient is not finite; the weights are as before.
        """
        if not math.isfinite(metrics["grad_norm"]):
            raise RlctlError(
                f"the gradient norm is {metrics['grad_norm']}, with a loss of {metrics['loss']}",
                "lower policy.optimizer.lr; resume from the last checkpoint",
                exit_status=1,
            )
        limit = self.section.max_grad_norm
        if 0 < limit < metrics["grad_norm"]:
            for shard in self._shards():
                assert shard.grad is not None
                shard.grad.mul_(limit / (metrics["grad_norm"] + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def backward(self, batch: Batch, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """Gradients of a minibatch, left for `gradients`; returns what `train_step` returns, and updates nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        groups = batch.group.tolist() if algorithm.unit == "group" else None
        sums = MetricSums()
        # All tp ranks have the same numbers; one of them reports.
        reported = sums if self.mesh.get_local_rank("tp") == 0 else MetricSums()
        for micro in self._microbatches(batch, train_budget(self.section), groups=groups):
            logprobs, entropy = self._score(micro)
            weighted_loss(micro, algorithm, logprobs=logprobs, entropy=entropy, sums=reported).backward()
        return sums.reduce() | {"grad_norm": self._grad_norm()}

    def _grad_norm(self) -> float:
        """Of the whole gradient. A parameter that every tp rank holds counts on the first alone."""
        total = torch.zeros((), dtype=torch.float64, device=device.current())
        for shard in self._shards():
            if shard.grad is not None and (dtensor_model.is_split(shard) or self.mesh.get_local_rank("tp") == 0):
                local = shard.grad.to_local()  # type: ignore[attr-defined]
                total += torch.linalg.vector_norm(local, dtype=torch.float64).square()
        dist.all_reduce(total)
        return float(total.sqrt())

    def set_lr(self, lr: float) -> None:
        """Learning rate of the updates to come."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    # --- weights and state ---

    def weights(self) -> Weights:
        """The current weights, in the recipe's precision."""
        return Weights(self.model, DTYPES[self.section.precision])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole gradient, fp32) after `backward`. Collective."""
        for name, shard in dtensor_model.named_parameters(self.model):
            assert isinstance(shard.grad, DTensor), name
            yield name, shard.grad.full_tensor()

    def state(self) -> TrainState:
        """This rank's shards of parameters and optimizer state, for the same layout."""
        local: dict[str, Any] = {"layout": str(self.layout)}
        for name, shard in dtensor_model.named_parameters(self.model):
            local[f"parameter/{name}"] = shard.to_local().detach().clone()
            for key, value in self.optimizer.state[shard].items():  # type: ignore[index]
                local[f"{key}/{name}"] = (value.to_local() if isinstance(value, DTensor) else value).clone()
        return TrainState(local=local)

    @torch.no_grad()
    def load_state(self, state: TrainState) -> None:
        """Set what `state` gave.

        Raises:
            RlctlError: it was saved in another layout.
        """
        if state.local["layout"] != str(self.layout):
            raise RlctlError(
                f"the checkpoint was saved as {state.local['layout']}, this run is {self.layout}",
                "resume with the layout of the checkpoint",
            )
        for name, shard in dtensor_model.named_parameters(self.model):
            shard.to_local().copy_(state.local[f"parameter/{name}"])
            saved = {k: state.local[f"{k}/{name}"] for k in OPTIMIZER_STATE if f"{k}/{name}" in state.local}
            self.optimizer.state.pop(shard, None)  # type: ignore[call-overload]
            if saved:
                self.optimizer.state[shard] = {  # type: ignore[index]
                    key: value.clone() if key == "step" else _like(shard, value) for key, value in saved.items()
                }

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far. Collective."""
        return resharding.updates_of(self.optimizer.state.values(), self.optimizer.param_groups)

    @torch.no_grad()
    def whole_state(self, bucket_bytes: int) -> Iterator[resharding.Chunk]:
        """See policy/base.py."""
        named = list(dtensor_model.named_parameters(self.model))
        buckets = list(_buckets(named, bucket_bytes))
        for quantity in ("main", *(resharding.MOMENTS if self.num_updates else ())):
            gatherers = [functools.partial(self._gather, bucket, quantity) for bucket in buckets]
            yield from resharding.spread(quantity, gatherers)

    def _gather(
        self, bucket: list[tuple[str, DTensor]], quantity: resharding.Quantity, to: int
    ) -> list[tuple[str, torch.Tensor]]:
        """The whole tensors of a bucket, on one rank."""
        found = []
        for name, shard in bucket:
            value = shard if quantity == "main" else self.optimizer.state[shard][quantity]  # type: ignore[index]
            whole = value.full_tensor()
            if to == dist.get_rank():
                found.append((name, whole.detach()))
        return found

    @torch.no_grad()
    def load_whole_state(self, read: resharding.Read, *, updates: int) -> None:
        """See policy/base.py."""
        for name, shard in dtensor_model.named_parameters(self.model):
            shard.to_local().copy_(resharding.local_part(shard, read("main", name)))
            self.optimizer.state.pop(shard, None)  # type: ignore[call-overload]
            if updates:
                moments = {q: _like(shard, resharding.local_part(shard, read(q, name))) for q in resharding.MOMENTS}
                self.optimizer.state[shard] = {"step": torch.tensor(float(updates)), **moments}  # type: ignore[index]

    def offload(self, what: Offloadable) -> None:
        """To the host; nothing to do where the host computes."""
        if device.is_accelerated():
            self._move(what, torch.device("cpu"))
            device.empty_cache()

    def onload(self, what: Offloadable) -> None:
        """Back to the device."""
        if device.is_accelerated():
            self._move(what, device.current())

    def _move(self, what: Offloadable, where: torch.device) -> None:
        if what in ("weights", "all"):
            self.model.to(where)
        if what in ("optimizer", "all"):
            for state in self.optimizer.state.values():
                state |= {k: v if k == "step" else v.to(where) for k, v in state.items()}

    def _shards(self) -> list[DTensor]:
        return [shard for _, shard in dtensor_model.named_parameters(self.model)]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Within it, the model has the reference's weights."""
        assert self._reference is not None, "the policy was built without a reference"
        kept = [shard.to_local().detach().to("cpu", copy=True) for shard in self._shards()]
        try:
            for shard, value in zip(self._shards(), self._reference, strict=True):
                shard.to_local().copy_(value)
            yield
        finally:
            for shard, value in zip(self._shards(), kept, strict=True):
                shard.to_local().copy_(value)


def _buckets(named: list[tuple[str, DTensor]], limit: int) -> Iterator[list[tuple[str, DTensor]]]:
    """Parameters of together at most `limit` bytes in fp32, or one."""
    bucket: list[tuple[str, DTensor]] = []
    size = 0
    for name, shard in named:
        if bucket and size + 4 * shard.numel() > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, shard))
        size += 4 * shard.numel()
    if bucket:
        yield bucket


OPTIMIZER_STATE = ("step", "exp_avg", "exp_avg_sq")  # of torch.optim.AdamW


def _optimizer(model: torch.nn.Module, section: PolicySection) -> torch.optim.AdamW:
    """AdamW; norms and biases (one axis) are not decayed. Groups are of one mesh, as multi-tensor kernels need."""
    options = section.optimizer
    groups: dict[tuple[bool, Any], list[torch.Tensor]] = {}
    for _, shard in dtensor_model.named_parameters(model):
        groups.setdefault((shard.ndim > 1, shard.device_mesh), []).append(shard)
    return torch.optim.AdamW(
        [{"params": p, "weight_decay": options.weight_decay * decayed} for (decayed, _), p in groups.items()],
        lr=options.lr,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
    )


def _like(shard: DTensor, local: torch.Tensor) -> DTensor:
    """A tensor sharded as another is, from this rank's part."""
    made = torch.zeros_like(shard, requires_grad=False)
    assert isinstance(made, DTensor)
    made.to_local().copy_(local)
    return made
