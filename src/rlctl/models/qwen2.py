"""Qwen2 and Qwen2.5: llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from rlctl.models.base import HfConfig, WeightRule, dense_config, dense_rules


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields."""
    return dense_config(hf, qkv_bias=True)


def rules(hf: HfConfig) -> list[WeightRule]:
    """The table of weights."""
    return dense_rules(hf, qkv_bias=True)
