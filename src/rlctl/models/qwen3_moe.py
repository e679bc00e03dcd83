"""Qwen3 mixture of experts: qwen3 attention, every layer routed, softmax after top-k (`norm_topk_prob`)."""

from __future__ import annotations

from typing import Any

from rlctl.errors import RlctlError
from rlctl.models.base import HfConfig, WeightRule, attention_rules, dense_config, gate_up_rule, outer_rules
from rlctl.parallel import num_experts


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
        table += attention_rules(hf, layer, qkv_bias=False, qk_norm=True) + _moe_rules(hf, layer)
    return table


def _moe_rules(hf: HfConfig, layer: int) -> list[WeightRule]:
    hidden, ffn = hf["hidden_size"], hf["moe_intermediate_size"]
    source, key = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    table = [
        WeightRule(
            key=f"{key}pre_mlp_layernorm.weight",
            sources=(f"{source}post_attention_layernorm.weight",),
            source_shapes=((hidden,),),
        ),
        WeightRule(
            key=f"{key}mlp.router.weight",
            sources=(f"{source}mlp.gate.weight",),
            source_shapes=((num_experts(hf), hidden),),
        ),
    ]
    for expert in range(num_experts(hf)):
        one, experts = f"{source}mlp.experts.{expert}.", f"{key}mlp.experts.experts."
        table += [
            gate_up_rule(f"{experts}linear_fc1.weight", one, (ffn, hidden), index=(expert,)),
            WeightRule(
                key=f"{experts}linear_fc2.weight",
                sources=(f"{one}down_proj.weight",),
                source_shapes=((hidden, ffn),),
                index=(expert,),
            ),
        ]
    return table
