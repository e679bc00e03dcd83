"""Qwen3 dense: llama with a norm on each query and key head."""

from __future__ import annotations

from typing import Any

from rlctl.models.base import HfConfig, WeightRule, dense_config, dense_rules


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields."""
    return dense_config(hf, qk_norm=True)


def rules(hf: HfConfig) -> list[WeightRule]:
    """The table of weights."""
    return dense_rules(hf, qk_norm=True)
