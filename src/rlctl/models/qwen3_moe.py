"""Qwen3 mixture of experts: qwen3 attention, every layer routed, softmax after top-k (`norm_topk_prob`)."""

from __future__ import annotations

from typing import Any

from rlctl.errors import RlctlError
from rlctl.models.base import (
    HfConfig,
    Stacked,
    WeightRule,
    attention_rules,
    dense_config,
    expert_rules,
    outer_rules,
    router_rules,
    stacked_experts,
)
from rlctl.parallel import num_experts

_NAMES = ("gate_proj", "up_proj", "down_proj")


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields.

    Raises:
        RlctlError: dense layers among the routed ones, or router weights that are not renormalised.
    """
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        raise RlctlError("Qwen3-MoE with dense layers is not understood", "use a model whose layers are all routed")
    if not hf.get("norm_topk_prob"):
        raise RlctlError("`norm_topk_prob: false` is not understood", "use a model with `norm_topk_prob: true`")
    return dense_config(hf, qk_norm=True) | {
        "num_moe_experts": num_experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": False,
    }


def rules(hf: HfConfig) -> list[WeightRule]:
    """The table of weights; experts one by one, as they lie on disk."""
    table = outer_rules(hf)
    for layer in range(hf["num_hidden_layers"]):
        block = f"model.layers.{layer}.mlp."
        table += attention_rules(hf, layer, qkv_bias=False, qk_norm=True)
        table += router_rules(hf, layer, experts=num_experts(hf), gate=f"{block}gate.weight")
        table += expert_rules(
            layer,
            experts=num_experts(hf),
            shape=(hf["moe_intermediate_size"], hf["hidden_size"]),
            prefix=f"{block}experts.",
            names=_NAMES,
        )
    return table


def stacked(hf: HfConfig) -> dict[str, Stacked]:
    """The experts as transformers 5 holds them in memory, and saves them with `save_original_format=False`."""
    found: dict[str, Stacked] = {}
    for layer in range(hf["num_hidden_layers"]):
        found |= stacked_experts(
            layer,
            experts=num_experts(hf),
            shape=(hf["moe_intermediate_size"], hf["hidden_size"]),
            prefix=f"model.layers.{layer}.mlp.experts.",
            names=_NAMES,
        )
    return found
