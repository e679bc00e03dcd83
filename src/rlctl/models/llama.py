"""Llama 2, 3, 3.1-3.3 and SmolLM2: the plain dense decoder; llama3 rope scaling, tied or not."""

from __future__ import annotations

from typing import Any

from rlctl.models.base import HfConfig, WeightRule, dense_config, dense_rules


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields."""
    return dense_config(hf)


def rules(hf: HfConfig) -> list[WeightRule]:
    """The table of weights."""
    return dense_rules(hf)
