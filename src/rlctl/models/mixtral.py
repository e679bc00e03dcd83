"""Mixtral: llama attention, every layer routed, softmax over the chosen experts."""

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

# What transformers assumes where config.json lacks it (configuration_mixtral.py) is no plain default of ours.
_STATED = ("num_local_experts", "num_experts_per_tok", "num_key_value_heads")


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields.

    Raises:
        RlctlError: a sliding window, noise on the router, or a config that lacks what decides its routing.
    """
    for name in _STATED:
        if name not in hf:
            raise RlctlError(
                f"config.json of a mixtral model lacks `{name}`", f"state it, as transformers writes it: `{name}`"
            )
    if "rope_theta" not in hf and "rope_theta" not in (hf.get("rope_parameters") or {}):
        raise RlctlError("config.json of a mixtral model lacks `rope_theta`", "state it; mixtral's own is 1000000.0")
    if hf.get("sliding_window") is not None:
        raise RlctlError(
            f"`sliding_window: {hf['sliding_window']}` is not understood", "use a model with `sliding_window: null`"
        )
    if hf.get("router_jitter_noise"):
        raise RlctlError(
            f"`router_jitter_noise: {hf['router_jitter_noise']}` is not understood", "set it to 0 in config.json"
        )
    return dense_config(hf) | {
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": False,  # softmax, top-k, division by the sum: the softmax of the chosen ones
    }


def rules(hf: HfConfig) -> list[WeightRule]:
    """The table of weights; experts one by one, as they lie on disk: w1 gate, w3 up, w2 down."""
    table = outer_rules(hf)
    for layer in range(hf["num_hidden_layers"]):
        block = f"model.layers.{layer}.block_sparse_moe."
        table += attention_rules(hf, layer, qkv_bias=False, qk_norm=False)
        table += router_rules(hf, layer, experts=hf["num_local_experts"], gate=f"{block}gate.weight")
        table += expert_rules(
            layer,
            experts=hf["num_local_experts"],
            shape=(hf["intermediate_size"], hf["hidden_size"]),
            prefix=f"{block}experts.",
            names=("w1", "w3", "w2"),
        )
    return table


def stacked(hf: HfConfig) -> dict[str, Stacked]:
    """The tensors as transformers 5 holds them in memory, and saves them with `save_original_format=False`."""
    found: dict[str, Stacked] = {}
    for layer in range(hf["num_hidden_layers"]):
        block = f"model.layers.{layer}.block_sparse_moe."
        found |= stacked_experts(
            layer,
            experts=hf["num_local_experts"],
            shape=(hf["intermediate_size"], hf["hidden_size"]),
            prefix=f"{block}experts.",
            names=("w1", "w3", "w2"),
        )
        found[f"model.layers.{layer}.mlp.gate.weight"] = Stacked(
            shape=(hf["num_local_experts"], hf["hidden_size"]), parts=(f"{block}gate.weight",)
        )
    return found
