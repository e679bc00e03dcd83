"""Bytes on each GPU, before any process starts. Pure: no torch, no device.

1. Parameters of a rank are counted from the architecture's weight rules, exactly as Megatron lays them out.
2. Weights, gradients and optimizer state follow from them by the backend's bytes per parameter.
3. Activations and logits follow from the tensors that each operation keeps for its backward.

It does not know time, nor the memory that allocators lose to fragmentation (`UNMODELLED_BYTES` stands for that).
Legend: H hidden size, D head size, A query width, K key (or value) width, F feed-forward size, E experts, c cp.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlctl import plugins
from rlctl.models.base import padded_vocabulary, tied
from rlctl.parallel import Layout

Backend = Literal["megatron", "dtensor"]
Precision = Literal["float32", "bfloat16"]

ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
UNMODELLED_BYTES = 4 << 30  # CUDA context, communication buffers, fragmentation: an allowance, not a measurement
LOGIT_CHUNK_BYTES = 2 * (64 << 20)  # two fp32 temporaries of policy/logprobs.py
_SPLIT = tuple(  # what tensor parallelism divides; all else is whole on every rank
    f"{module}.{part}"
    for module in ("word_embeddings", "output_layer", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    for part in ("weight", "bias" if module == "linear_qkv" else "weight")
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU, of the fullest pipeline stage, where not said otherwise."""

    stage: int
    parameters: int
    """That this rank computes with; with FSDP2, before sharding."""
    weights: int
    gradients: int
    main_weights: int
    """fp32 copies that the optimizer updates; 0 where the weights are fp32 themselves."""
    optimizer: int
    """Adam's two moments: the part that leaves the GPU while the engine is awake."""
    gathered: int
    """FSDP2 only: unsharded parameters and gradients of the blocks in use."""
    activations: int
    logits: int
    reference: int
    """In the host's memory: the frozen weights."""
    engine_weights: int
    """The generation engine's copy, inside its share of the GPU."""
    kv_bytes_per_token: int
    """Of the engine's cache, on this GPU."""

    @property
    def resident(self) -> int:
        """Bytes of the policy that stay while the engine is awake."""
        return self.weights + self.gradients + self.main_weights + UNMODELLED_BYTES

    @property
    def training(self) -> int:
        """Bytes while training: the engine sleeps."""
        return self.resident + self.optimizer + self.gathered + self.activations + self.logits

    def generating(self, memory_bytes: float, *, utilization: float) -> int:
        """Bytes while the engine is awake with its share of the GPU."""
        return self.resident + int(memory_bytes * utilization)

    def cache_tokens(self, memory_bytes: float, *, utilization: float) -> int:
        """Tokens that the engine's cache holds in its share; below 1, the share is too small for the weights."""
        return int((memory_bytes * utilization - self.engine_weights) // self.kv_bytes_per_token)

    def fits(self, memory_bytes: float, *, utilization: float) -> bool:
        """Whether training, and generation with that share, fit a GPU."""
        peak = max(self.training, self.generating(memory_bytes, utilization=utilization))
        return peak <= memory_bytes and self.cache_tokens(memory_bytes, utilization=utilization) > 0


class _Parameters(NamedTuple):
    """Parameters of one rank: those that data-parallel ranks share, and experts, which have ranks of their own."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def parameters_of_stage(hf_config: dict[str, Any], layout: Layout, stage: int) -> int:
    """Parameters on each rank of a pipeline stage, exactly those of Megatron's module.

    Args:
        hf_config: config.json as a dict.
        layout: degrees, checked (parallel.check).
        stage: 0 .. pp - 1.
    """
    return _parameters(hf_config, layout)[stage].total


def _parameters(hf: dict[str, Any], layout: Layout) -> list[_Parameters]:
    """Of each pipeline stage."""
    dense, expert = [0] * layout.pp, [0] * layout.pp
    for tensor, count in _tensors(json.dumps(hf, sort_keys=True)):
        rows = padded_vocabulary(tensor.rows, multiple=layout.tp) if tensor.vocabulary else tensor.rows
        size = rows * tensor.columns * count
        for stage in _stages(tensor.place, hf, layout):
            if tensor.routed:
                expert[stage] += size // (layout.etp * layout.ep)
            else:
                dense[stage] += size // layout.tp if tensor.split else size
    return [_Parameters(d, e) for d, e in zip(dense, expert, strict=True)]


class _Tensor(NamedTuple):
    """What of a weight rule matters for its size on a rank."""

    place: int | str
    """Its layer, `first` or `last`."""
    rows: int
    columns: int
    vocabulary: bool
    routed: bool
    split: bool


@functools.lru_cache(maxsize=32)
def _tensors(config: str) -> list[tuple[_Tensor, int]]:
    """The distinct tensors of a model and how many there are: experts are alike, and thousands."""
    hf = json.loads(config)
    return list(
        Counter(
            _Tensor(
                place=_place(rule.key),
                rows=rule.shape[0],
                columns=math.prod(rule.shape[1:]),
                vocabulary=rule.vocabulary,
                routed=bool(rule.index),
                split=rule.key.endswith(_SPLIT),
            )
            for rule in plugins.load("model", hf["model_type"]).rules(hf)
        ).items()
    )


def _place(key: str) -> int | str:
    if key.startswith("decoder.layers."):
        return int(key.split(".")[2])
    return "first" if key.startswith("embedding.") else "last"


def _stages(place: int | str, hf: dict[str, Any], layout: Layout) -> set[int]:
    """The pipeline stages that hold a tensor. A tied embedding is on the last one too, as its output layer."""
    last = layout.pp - 1
    if isinstance(place, int):
        return {place * layout.pp // hf["num_hidden_layers"]}
    if place == "first":
        return {0, last} if tied(hf) else {0}
    return {last}


def estimate(
    hf_config: dict[str, Any],
    layout: Layout,
    *,
    precision: Precision,
    backend: Backend,
    max_tokens_per_microbatch: int,
    activation_checkpointing: bool,
    reference: bool,
    generation_tp: int = 1,
) -> Memory:
    """Memory of the fullest rank.

    Args:
        hf_config: config.json as a dict.
        layout: degrees; with dtensor, parameters are sharded over all ranks that tensor parallelism leaves.
        precision: of the computation.
        backend: megatron or dtensor.
        max_tokens_per_microbatch: of all sequences of a training microbatch, padding included.
        activation_checkpointing: every layer is computed again in backward.
        reference: a frozen copy of the weights is kept on the host.
        generation_tp: tensor-parallel size of the generation engine.
    """
    width = ELEMENT_BYTES[precision]
    fields = plugins.load("model", hf_config["model_type"]).transformer_config(hf_config)
    whole = _parameters(hf_config, Layout(world=1))[0].total
    groups = fields["num_query_groups"]
    kv_elements = 2 * fields["num_layers"] * groups * fields["kv_channels"] // min(generation_tp, groups)
    tokens = -(-max_tokens_per_microbatch // layout.cp)
    columns = padded_vocabulary(hf_config["vocab_size"], multiple=layout.tp) // layout.tp
    stages = []
    for stage, local in enumerate(_parameters(hf_config, layout)):
        if backend == "megatron":
            state = _megatron_state(local, layout, precision)
        else:
            state = _fsdp_state(local, layout, precision, hf_config)
        kept = _activations(fields, layout, recompute=activation_checkpointing, stage=stage)
        is_last = stage == layout.pp - 1
        memory = Memory(
            stage=stage,
            parameters=local.total,
            activations=math.ceil(tokens * kept) * width,
            logits=2 * tokens * columns * width + LOGIT_CHUNK_BYTES if is_last else 0,
            reference=state["weights"] if reference else 0,
            engine_weights=width * whole // generation_tp,
            kv_bytes_per_token=width * kv_elements,
            **state,
        )
        stages.append(memory)
    return max(stages, key=lambda memory: memory.training)


def _megatron_state(local: _Parameters, layout: Layout, precision: Precision) -> dict[str, int]:
    """Weights in the precision, fp32 main gradients, and optimizer state sharded over data-parallel ranks.

    Source: megatron/core/optimizer/distrib_optimizer.py (fp32 weights are their own main copy). Context-parallel ranks
    count as data-parallel ones; experts are sharded over world / (etp * ep * pp) ranks.
    """
    replicas = layout.dp * layout.cp
    expert_replicas = layout.world // (layout.etp * layout.ep * layout.pp)
    updated = -(-local.dense // replicas) + -(-local.expert // expert_replicas)
    return {
        "weights": ELEMENT_BYTES[precision] * local.total,
        "gradients": 4 * local.total,
        "main_weights": 4 * updated if precision == "bfloat16" else 0,
        "optimizer": 8 * updated,
        "gathered": 0,
    }


def _fsdp_state(local: _Parameters, layout: Layout, precision: Precision, hf: dict[str, Any]) -> dict[str, int]:
    """fp32 parameters, gradients and moments, sharded; and the blocks that are unsharded at one time.

    Unsharded at one time: the block in use and the one prefetched, the outer tensors (embedding, output layer, final
    norm), and while the largest of them reduces its gradient, that gradient in the precision and in fp32.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`: reduce_dtype fp32).
    """
    width = ELEMENT_BYTES[precision]
    shard = -(-local.total // (layout.world // layout.tp))
    outer = _parameters(hf | {"num_hidden_layers": 0}, layout)[0].total
    layer = _parameters(hf | {"num_hidden_layers": 1}, layout)[0].total - outer
    gathered = width * (outer + 2 * layer) + (width + 4) * max(outer, layer)
    return {
        "weights": 4 * shard,
        "gradients": 4 * shard,
        "main_weights": 0,
        "optimizer": 8 * shard,
        "gathered": gathered,
    }


def _activations(fields: dict[str, Any], layout: Layout, *, recompute: bool, stage: int) -> float:
    """Elements per token that the layers of a stage keep for backward.

    At most pp - stage microbatches are in flight (1F1B). With recompute a layer keeps its input only, and one layer's
    whole set is alive at a time. The accounting is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4).
    """
    layers = fields["num_layers"] // layout.pp
    whole = _layer_elements(fields, layout)
    hidden = fields["hidden_size"] / (layout.tp if layout.sp else 1)
    kept = layers * (hidden if recompute else whole) * (layout.pp - stage)
    return kept + (whole if recompute else 0)


def _layer_elements(fields: dict[str, Any], layout: Layout) -> float:
    """Elements that one layer keeps per token of this rank, with the torch layer spec; fused layers keep fewer.

    Norms: each its input, normalised input and output, 6H, divided by sequence parallelism alone. Attention: rotated
    query, output and its concatenation 3A, the joint projection A + 2K through a view, rotated key K; with context
    parallelism the gathered keys and values 2Kc instead, and the view only if there are query and key norms, which add
    2A + K; rotary tables 4D. Feed-forward: gate, up, activated gate, up again, product: 5F. An expert layer has k
    copies of each token, balanced over experts: H + 6F of each, and 2E of router logits and probabilities.
    """
    tp, cp, normed = layout.tp, layout.cp, fields["qk_layernorm"]
    query, key = (fields["kv_channels"] * fields[n] for n in ("num_attention_heads", "num_query_groups"))
    attention = 3 * query + (key if cp == 1 else 2 * key * cp)
    attention += (query + 2 * key) * (cp == 1 or normed) + (2 * query + key) * normed
    total = 6 * fields["hidden_size"] / (tp if layout.sp else 1) + attention / tp + 4 * fields["kv_channels"]
    if "num_moe_experts" not in fields:
        return total + 5 * fields["ffn_hidden_size"] / tp
    copies = fields["moe_router_topk"] * layout.etp / tp
    expert = fields["hidden_size"] + 6 * fields["moe_ffn_hidden_size"] / layout.etp
    return total + copies * expert + 2 * fields["num_moe_experts"]
