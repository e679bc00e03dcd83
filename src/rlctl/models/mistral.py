"""Mistral dense: llama with a window on attention, which is refused where it is set."""

from __future__ import annotations

from typing import Any

from rlctl.errors import RlctlError
from rlctl.models.base import HfConfig, WeightRule, dense_config, dense_rules

# What transformers assumes where config.json lacks it (configuration_mistral.py) is no plain default of ours.
_STATED = ("sliding_window", "num_key_value_heads")


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields.

    Raises:
        RlctlError: a sliding window, or a config that does not say whether there is one.
    """
    for name in _STATED:
        if name not in hf:
            raise RlctlError(
                f"config.json of a mistral model lacks `{name}`", f"state it, as transformers writes it: `{name}`"
            )
    if hf["sliding_window"] is not None:
        raise RlctlError(
            f"`sliding_window: {hf['sliding_window']}` is not understood", "use a model with `sliding_window: null`"
        )
    return dense_config(hf)


def rules(hf: HfConfig) -> list[WeightRule]:
    """The table of weights."""
    return dense_rules(hf)
