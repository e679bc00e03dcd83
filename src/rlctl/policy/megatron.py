"""The Megatron-Core backend: GPTModel, its DDP, distributed optimizer and schedules.

1. The loss is a global sum of weighted token losses; Megatron is told so (`calculate_per_token_loss`, no token count to
   `finalize_model_grads`), so nothing rescales it by microbatches, ranks or tokens.
2. Only hidden states that predict a token of the mask meet the vocabulary (GPTModel's `output_processor`).
3. Everything is gathered by sums of zeroed buffers that one rank writes, so results are the same bits on every rank.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rlctl import device, plugins
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.checkpoint.shards import ShardedWeights, load_whole, shards
from rlctl.checkpoint.views import HfView
from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.models.base import HfConfig
from rlctl.models.build import TORCH_DTYPES, build_model
from rlctl.parallel import Layout, layout_of
from rlctl.policy import resharding
from rlctl.policy.base import Offloadable, TrainState
from rlctl.policy.context import Part, part_of, whole
from rlctl.policy.logprobs import token_logprobs
from rlctl.policy.loss import weighted_loss
from rlctl.policy.metrics import MetricSums
from rlctl.policy.packing import Budget, Microbatch, build_microbatch, filling, logprob_budget, plan, train_budget
from rlctl.types import Batch, TokenOutputs


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """What turning hidden states into logprobs takes."""

    size: int
    temperature: float


class Policy:
    """See policy/base.py."""

    def __init__(self, recipe: Recipe, model_dir: Path, *, reference: bool = False) -> None:
        self.recipe = recipe
        hf_config: HfConfig = json.loads((model_dir / "config.json").read_text()) | recipe.policy.hf_config_overrides
        self.layout: Layout = layout_of(recipe, dist.get_world_size())
        self.packing: dict[str, float] = {}
        _initialize_groups(self.layout, recipe.grpo.seed)
        self.model = build_model(
            hf_config,
            self.layout,
            precision=recipe.policy.precision,
            activation_checkpointing=recipe.policy.activation_checkpointing,
        )
        self.model.to(device.current())
        self.rules = plugins.load("model", hf_config["model_type"]).rules(hf_config)
        view = HfView(model_dir)  # refuses tensors that the config has no place for, and shapes that are not its own
        view.check_repeated()
        load_whole(shards(self.model), self.rules, view.reader.get)
        self._reference = [p.detach().to("cpu", copy=True) for p in self.model.parameters()] if reference else None
        self.ddp = _wrap(self.model)
        self.optimizer = _optimizer(recipe, self.ddp)
        self.set_lr(recipe.policy.optimizer.lr)
        self.vocabulary = _Vocabulary(size=hf_config["vocab_size"], temperature=recipe.policy.generation.temperature)

    # --- forward ---

    def forward(
        self,
        batch: Batch,
        weights: Literal["policy", "reference"] = "policy",
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> TokenOutputs:
        """Logprobs and entropy [N] of the masked tokens, without gradient; the same on every rank."""
        gathered = torch.zeros(2, len(batch.tokens))

        def collect(micro: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            if self._writes():
                index = micro.source[micro.target_index]
                gathered[0, index], gathered[1, index] = logprobs.float().cpu(), entropy.float().cpu()
            return logprobs.sum()

        micros = self._microbatches(batch, logprob_budget(self.recipe.policy), groups=None)
        context = self._reference_weights() if weights == "reference" else contextlib.nullcontext()
        with torch.no_grad(), context:
            self._run(micros, collect, forward_only=True)
        gathered = _sum_over_world(gathered)
        return TokenOutputs(logprobs=gathered[0], entropy=gathered[1] if "entropy" in outputs else None)

    # --- training ---

    def train_step(self, batch: Batch, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """One optimizer update; returns loss, grad_norm, entropy and the algorithm's metrics."""
        return self.update(self.backward(batch, algorithm))

    def update(self, metrics: dict[str, float]) -> dict[str, float]:
        """One optimizer update by the gradients of `backward`, which gave `metrics`; returns what `train_step` does.

        Raises:
            RlctlError: the gradient is not finite; the weights are as before.
        """
        if not self._gradients_are_finite():
            raise RlctlError(
                f"the gradient is not finite, with a loss of {metrics['loss']}",
                "lower policy.optimizer.lr; resume from the last checkpoint",
                exit_status=1,
            )
        _, grad_norm, _ = self.optimizer.step()
        return metrics | {"grad_norm": float(grad_norm)}

    def backward(self, batch: Batch, algorithm: AlgorithmProtocol) -> dict[str, float]:
        """Gradients of a minibatch, left for `gradients`; returns what `train_step` returns but the norm."""
        groups = batch.group.tolist() if algorithm.unit == "group" else None
        micros = self._microbatches(batch, train_budget(self.recipe.policy), groups=groups)
        sums = MetricSums()
        reported = sums if self._writes() else MetricSums()  # others have the same numbers

        def loss(micro: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            return weighted_loss(micro, algorithm, logprobs=logprobs, entropy=entropy, sums=reported)

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(micros, loss, forward_only=False)
        return sums.reduce()

    def _gradients_are_finite(self) -> bool:
        bad = torch.zeros((), device=device.current())
        for buffer in self.ddp.buffers + self.ddp.expert_parallel_buffers:
            bad += (~torch.isfinite(torch.linalg.vector_norm(buffer.grad_data))).float()
        dist.all_reduce(bad)
        return not bad.item()

    def set_lr(self, lr: float) -> None:
        """Learning rate, and the weight decay that Megatron's own scheduler would set with it.

        A group's decay is `weight_decay * wd_mult` (0 for norms and biases), which only `OptimizerParamScheduler.step`
        applies (megatron/core/optimizer_param_scheduler.py); schedules here are rlctl's, for both backends.
        """
        decay = self.recipe.policy.optimizer.weight_decay
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = decay * group["wd_mult"]

    # --- weights and state ---

    def weights(self) -> ShardedWeights:
        """The current weights under their Hugging Face names."""
        return ShardedWeights(
            held=shards(self.model),
            rules=self.rules,
            dtype=TORCH_DTYPES[self.recipe.policy.precision],
            vocabulary_multiple=self.layout.tp,
        )

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole gradient, fp32) after `backward`. Collective.

        The distributed optimizer leaves each data-parallel rank its part of the reduced gradient buffer; the parts are
        gathered first, then the buffer's views take the place of the weights in `weights`.
        """
        self._share_gradients()
        for named in self._gradient_weights().whole():
            yield from named

    def _share_gradients(self) -> None:
        """Each data-parallel rank's part of the gradient buffers to all."""
        for group in self.ddp.bucket_groups + self.ddp.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)

    def _gradient_weights(self) -> ShardedWeights:
        """What lies where the gradients do, seen as weights; writing to its shards writes there.

        A shard is a view of a parameter; the same view of its gradient is taken. (Exchanging the parameter's data
        instead would, where types differ, cut autograd's accumulator off from the hook that fills the gradients.)
        """
        parameters = sorted(self.model.parameters(), key=torch.Tensor.data_ptr)
        starts = [parameter.data_ptr() for parameter in parameters]
        held = []
        for shard in shards(self.model):
            parameter: Any = parameters[bisect.bisect_right(starts, shard.data.data_ptr()) - 1]
            ahead = (shard.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
            assert ahead + shard.data.numel() <= parameter.numel(), shard.identity
            gradient = parameter.main_grad
            view = gradient.as_strided(shard.data.shape, shard.data.stride(), gradient.storage_offset() + ahead)
            held.append(dataclasses.replace(shard, data=view))
        return dataclasses.replace(self.weights(), held=held, dtype=torch.float32)

    def state(self) -> TrainState:
        """This rank's parameters, fp32 main parameters and Adam state, in this layout."""
        inner = [o.optimizer for o in self._optimizers()]
        main = [[p.detach().clone() for g in o.param_groups for p in g["params"]] for o in inner]
        return TrainState(
            local={
                "layout": str(self.layout),
                "parameters": {n: p.detach().clone() for n, p in self.model.named_parameters()},
                "main": main,
                "optimizer": [o.state_dict() for o in inner],
                "reference": self._reference,
            }
        )

    def load_state(self, state: TrainState) -> None:
        """Set what `state` gave, in the same layout."""
        assert state.local["layout"] == str(self.layout), (state.local["layout"], str(self.layout))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state.local["parameters"][name])
            pairs = zip(self._optimizers(), state.local["main"], state.local["optimizer"], strict=True)
            for wrapper, main, inner in pairs:
                wrapper.optimizer.load_state_dict(inner)
                flat = [p for g in wrapper.optimizer.param_groups for p in g["params"]]
                for parameter, saved in zip(flat, main, strict=True):
                    parameter.copy_(saved)
        self._reference = state.local["reference"]

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far. Collective."""
        inner = [o.optimizer for o in self._optimizers()]
        return resharding.updates_of(
            [state for o in inner for state in o.state.values()], [group for o in inner for group in o.param_groups]
        )

    def whole_state(self, bucket_bytes: int) -> Iterator[resharding.Chunk]:
        """See policy/base.py."""
        wrappers = self._optimizers()
        for quantity in ("main", *(resharding.MOMENTS if self.num_updates else ())):
            self.ddp.zero_grad_buffer()
            resharding.fill(wrappers, quantity)
            self._share_gradients()
            yield from resharding.spread(quantity, self._gradient_weights().gatherers(bucket_bytes))
        self.ddp.zero_grad_buffer()

    def load_whole_state(self, read: resharding.Read, *, updates: int) -> None:
        """See policy/base.py."""
        wrappers = self._optimizers()
        if updates:
            resharding.begin_moments(wrappers, updates)
        for quantity in ("main", *(resharding.MOMENTS if updates else ())):
            self.ddp.zero_grad_buffer()
            load_whole(self._gradient_weights().held, self.rules, functools.partial(read, quantity))
            resharding.take(wrappers, quantity)
        self.ddp.zero_grad_buffer()
        load_whole(shards(self.model), self.rules, functools.partial(read, "main"))

    def offload(self, what: Offloadable) -> None:
        """Nothing to free on a host; on a device the optimizer state and weights move to the CPU."""
        if not device.is_accelerated():
            return
        if what in ("optimizer", "all"):
            self._move_optimizer("cpu")
            device.empty_cache()

    def onload(self, what: Offloadable) -> None:
        """The reverse of `offload`."""
        if device.is_accelerated() and what in ("optimizer", "all"):
            self._move_optimizer(device.current())

    def _move_optimizer(self, where: Any) -> None:
        for wrapper in self._optimizers():
            for state in wrapper.optimizer.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value):
                        state[name] = value.to(where)

    # --- inside ---

    def _optimizers(self) -> list[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def _writes(self) -> bool:
        """One rank alone of those that compute the same logprobs."""
        return (
            ps.is_pipeline_last_stage()
            and ps.get_tensor_model_parallel_rank() == 0
            and ps.get_context_parallel_rank() == 0
        )

    def _microbatches(self, batch: Batch, budget: Budget, *, groups: list[int] | None) -> list[Microbatch]:
        """This data-parallel rank's share."""
        dealt = plan(
            batch.lengths.tolist(),
            groups,
            dp=ps.get_data_parallel_world_size(),
            max_tokens=budget.max_tokens,
            max_sequences=budget.max_sequences,
            pad_unit=self.layout.pad_unit,
        )
        self.packing = filling(dealt, batch.lengths.tolist(), max_tokens=budget.max_tokens)
        chosen = dealt[ps.get_data_parallel_rank()]
        return [build_microbatch(batch, sequences, pad_unit=self.layout.pad_unit) for sequences in chosen]

    def _run(self, micros: list[Microbatch], use: Any, *, forward_only: bool) -> None:
        """Run every microbatch through Megatron's schedule; `use(micro, logprobs, entropy)` gives the scalar loss."""

        def step(iterator: Iterator[Microbatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(iterator)
            part = part_of(micro, rank=ps.get_context_parallel_rank(), size=self.layout.cp)
            entropy: list[torch.Tensor] = []
            output = model(
                **_inputs(part, micro.cu_seqlens),
                output_processor=self._logprobs,
                output_processor_context=(part, len(micro.rows), entropy),
            )

            def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                tokens = torch.tensor(len(logprobs), dtype=torch.int, device=device.current())
                return use(micro, logprobs, entropy[0]), tokens, {}

            return output, loss

        self.ddp.train()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=self.ddp,
            num_microbatches=len(micros),
            seq_length=micros[0].tokens.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _logprobs(self, *, hidden_states: torch.Tensor, output_weight: Any, context: Any, **others: Any) -> Any:
        """GPTModel's output processor: this rank's hidden states [t, 1, h] -> logprobs [n] of the whole microbatch."""
        part, count, entropy = context
        weight = others["output_layer"].weight if output_weight is None else output_weight
        if self.layout.sp:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states)
        rows = part.rows.to(hidden.device)
        logits = torch.nn.functional.linear(hidden[:, 0].index_select(0, rows), weight)
        logprobs, entropies = token_logprobs(
            logits,
            part.targets.to(hidden.device),
            temperature=self.vocabulary.temperature,
            group=ps.get_tensor_model_parallel_group() if self.layout.tp > 1 else None,
            vocab_start=ps.get_tensor_model_parallel_rank() * logits.shape[1],
            vocab_valid=self.vocabulary.size,
        )
        if self.layout.cp > 1:
            where = {"mine": part.mine.to(hidden.device), "count": count, "group": ps.get_context_parallel_group()}
            logprobs, entropies = whole(logprobs, **where), whole(entropies, **where)
        entropy.append(entropies)
        return logprobs

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Within it, the model has the reference's weights."""
        assert self._reference is not None, "the policy was built without a reference"
        parameters = list(self.model.parameters())
        kept = [p.detach().to("cpu", copy=True) for p in parameters]
        with torch.no_grad():
            for parameter, reference in zip(parameters, self._reference, strict=True):
                parameter.copy_(reference)
            try:
                yield
            finally:
                for parameter, original in zip(parameters, kept, strict=True):
                    parameter.copy_(original)


def _initialize_groups(layout: Layout, seed: int) -> None:
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _wrap(model: torch.nn.Module) -> DistributedDataParallel:
    config: Any = model.config

    def finalize(chunks: Any, num_tokens: Any = None, **kwargs: Any) -> None:
        """Reduce gradients without dividing by tokens: the loss weights already did."""
        finalize_model_grads(chunks, None, **kwargs)

    config.finalize_model_grads_func = finalize
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        ),
        model,
    )
    config.no_sync_func = ddp.no_sync
    return ddp


def _optimizer(recipe: Recipe, ddp: DistributedDataParallel) -> Any:
    options = recipe.policy.optimizer
    half = recipe.policy.precision == "bfloat16"
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=0.0,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        clip_grad=recipe.policy.max_grad_norm or math.inf,  # 0 is no clipping; the norm is wanted all the same
        bf16=half,
        params_dtype=TORCH_DTYPES[recipe.policy.precision],
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)


def _inputs(part: Part, cu_seqlens: torch.Tensor) -> dict[str, Any]:
    """GPTModel's arguments: this rank's part of a packed stream, and the boundaries of the whole."""
    where = device.current()
    boundaries, longest = cu_seqlens.to(where), int(cu_seqlens.diff().max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {
        "input_ids": part.tokens.to(where),
        "position_ids": part.position_ids.to(where),
        "attention_mask": None,
        "packed_seq_params": packed,
    }


def _sum_over_world(values: torch.Tensor) -> torch.Tensor:
    moved = values.to(device.current())
    dist.all_reduce(moved)
    return moved.cpu()
