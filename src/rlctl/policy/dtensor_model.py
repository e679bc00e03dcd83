"""A transformers model, sharded by FSDP2 over `dp` and by tensor parallelism over `tp`, filled from a directory.

1. The model is built without storage; then decoder layer by layer, and last what is outside them: read the tensors,
   split them over tp, shard them over dp. A rank holds one layer whole at a time, never the model.
2. What is split over tp, and how, is transformers' plan for the model type; embedding and head are split by vocabulary.
3. Parameters are fp32, whatever the computation's precision; gradients are summed in fp32, not averaged.

It does not know batches or losses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlctl.checkpoint.safetensors import Reader
from rlctl.errors import RlctlError
from rlctl.parallel import num_experts

Precision = Literal["float32", "bfloat16"]
PLANNED_APART = {"embedding_rowwise"}  # the embedding is split by vocabulary whether or not the plan has it


def build(
    model_dir: Path,
    *,
    mesh: DeviceMesh,
    precision: Precision,
    activation_checkpointing: bool,
    config_overrides: dict[str, Any],
) -> nn.Module:
    """The model, ready to run on every rank of the mesh.

    Args:
        model_dir: config.json and safetensors.
        mesh: of axes (dp, tp).
        precision: of the computation.
        activation_checkpointing: keep only each layer's input, and compute the layer again in backward.
        config_overrides: patched into config.json.

    Raises:
        RlctlError: the directory's tensors are not the model's, or the model cannot be split over tp.
    """
    model = _empty(model_dir, config_overrides)
    reader = Reader(model_dir)
    _check_names(model, reader)
    styles = _styles(model) if mesh["tp"].size() > 1 else {}
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    names = {module: name for name, module in model.named_modules()}
    policy = _mixed_precision(precision)
    for layer in layers:
        _fill(layer, names[layer], reader)
        _split(layer, names[layer], styles, mesh["tp"])
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    _fill(model, "", reader)
    _split(model, "", styles, mesh["tp"])
    _tie(model)
    # Without resharding, a forward pass that no backward follows would leave the outermost parameters gathered, and the
    # next pass would use them although the shards have changed since.
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=True)
    _sum_gradients(model)
    if activation_checkpointing:
        _checkpoint_activations(model, layers)
    return model


def named_parameters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Name as in the directory, and parameter; a tied head appears once, as the embedding."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        yield name, parameter


def is_split(parameter: DTensor) -> bool:
    """Whether the tp ranks hold different parts of it."""
    axes = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in axes and parameter.placements[axes.index("tp")].is_shard()


def _empty(model_dir: Path, overrides: dict[str, Any]) -> Any:
    """The model with parameters on the meta device and buffers in place; no dropout."""
    config = transformers.AutoConfig.from_pretrained(model_dir)
    if overrides:
        config = type(config).from_dict(json.loads((model_dir / "config.json").read_text()) | overrides)
    experts = num_experts(config.to_dict())
    if experts:
        raise RlctlError(
            f"the dtensor backend does not train mixtures of experts (`{config.model_type}` has {experts} experts)",
            "use --backend megatron",
        )
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    # A padding index would drop the gradient of a real token: many models pad with their end-of-turn token, and here
    # nothing that is scored attends to padding.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def _is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head) + ".weight"


def _check_names(model: Any, reader: Reader) -> None:
    """The directory's tensors are exactly the model's; a tied head may be stored too if it equals the embedding."""
    wanted, stored = {name for name, _ in model.named_parameters()}, set(reader.names())
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    stored = {n for n in stored if not any(p.search(n) for p in ignored)}
    if _is_tied(model):
        head = _head_name(model)
        if head in stored:
            table = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
            if not torch.equal(reader.get(head), reader.get(table)):
                raise RlctlError(
                    f"`{reader.folder}`: config.json ties the embeddings, but `{head}` differs from `{table}`",
                    "set tie_word_embeddings to false in config.json, or remove the tensor",
                )
        wanted, stored = wanted - {head}, stored - {head}
    for what, names in (("lacks", wanted - stored), ("has unknown", stored - wanted)):
        if names:
            raise RlctlError(
                f"`{reader.folder}` {what} tensors of {type(model).__name__}: {', '.join(sorted(names)[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                "its config.json and its weights are not of one model, or the dtensor backend does not know the model: "
                "try --backend megatron",
            )


def _fill(module: nn.Module, prefix: str, reader: Reader) -> None:
    """Read every parameter that has no storage yet, in fp32. A tied head has no tensor of its own and stays without."""
    stored = set(reader.names())
    for name, parameter in list(module.named_parameters()):
        full = f"{prefix}.{name}" if prefix else name
        if not parameter.is_meta or full not in stored:
            continue
        tensor = reader.get(full).to(torch.float32)
        if tensor.shape != parameter.shape:
            raise RlctlError(
                f"`{full}` in `{reader.folder}` is {list(tensor.shape)}, config.json makes it {list(parameter.shape)}",
                "its config.json and its weights are not of one model",
            )
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor))


def _styles(model: Any) -> dict[re.Pattern[str], str]:
    """Pattern of module names -> how it is split, by transformers' plan for the model type."""
    plan = model.config.base_model_tp_plan or {}
    plan = {pattern: kind for pattern, kind in plan.items() if kind not in PLANNED_APART}
    unknown = sorted({kind for kind in plan.values() if _style(kind) is None})
    if unknown or not plan:
        raise RlctlError(
            f"the dtensor backend cannot split model type `{model.config.model_type}` over tensor-parallel ranks"
            + (f" (unknown split: {', '.join(unknown)})" if unknown else " (it has no plan)"),
            "set policy.dtensor_cfg.tensor_parallel_size=1, or use --backend megatron",
        )
    dotted = {f"{model.base_model_prefix}.{pattern}": kind for pattern, kind in plan.items()}
    return {re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")): kind for pattern, kind in dotted.items()}


def _style(kind: str) -> ParallelStyle | None:
    if kind == "colwise":
        return ColwiseParallel()
    if kind == "rowwise":
        return RowwiseParallel()
    if kind == "replicated_with_grad_allreduce":  # a norm over each head: whole on every rank, applied to its own heads
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    return None


def _split(module: nn.Module, prefix: str, styles: dict[re.Pattern[str], str], tp: DeviceMesh) -> None:
    """Split a layer's modules by the plan; of the whole model, the embedding and the head by vocabulary."""
    if not styles:
        return
    for name, child in list(module.named_modules()):
        full = f"{prefix}.{name}"
        kind = next((kind for pattern, kind in styles.items() if pattern.fullmatch(full)), None)
        if prefix and kind is not None:
            parallelize_module(child, tp, _style(kind), src_data_rank=None)
    if not prefix:
        model: Any = module
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        parallelize_module(embedding, tp, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
        parallelize_module(head, tp, ColwiseParallel(output_layouts=Shard(-1)), src_data_rank=None)


def _tie(model: Any) -> None:
    if _is_tied(model):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _sum_gradients(model: nn.Module) -> None:
    """Sum gradients over dp: the loss weights already hold every denominator.

    FSDP2 averages: `_get_gradient_divide_factors` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py. A factor
    of 1 alone would become a premultiplied sum, which gloo lacks; forced to plain sums it divides by 1 afterwards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _checkpoint_activations(model: Any, layers: list[Any]) -> None:
    """Recompute layers in backward. They look at their own `training` flag; their parts stay in evaluation mode."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True
