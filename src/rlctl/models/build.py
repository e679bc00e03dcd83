"""The one function that calls Megatron's GPTModel.

GPTModel is deprecated upstream in favour of HybridModel, whose specs need Transformer Engine today; the change will be
here.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from rlctl import device, plugins
from rlctl.models.base import HfConfig, head_dim, padded_vocabulary, rope, tied
from rlctl.parallel import Layout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers are used: installed, and on a device that runs them."""
    return device.is_accelerated() and importlib.util.find_spec("transformer_engine") is not None


def build_model(
    hf: HfConfig,
    layout: Layout,
    *,
    precision: str,
    activation_checkpointing: bool = False,
    vp_stage: int | None = None,
    config_overrides: dict[str, Any] | None = None,
) -> GPTModel:
    """This rank's chunk of the model, weights not yet set; Megatron's parallel state must be that of `layout`.

    Args:
        hf: config.json as a dict.
        layout: the degrees.
        precision: float32 or bfloat16.
        activation_checkpointing: recompute every layer in backward.
        vp_stage: the virtual pipeline stage, if interleaved.
        config_overrides: further `TransformerConfig` fields.
    """
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # its deprecation notice, on every rank
    config = transformer_config(
        hf, layout, precision=precision, activation_checkpointing=activation_checkpointing, overrides=config_overrides
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, get_num_layers_to_build(config, vp_stage=vp_stage)),
        vocab_size=padded_vocabulary(hf["vocab_size"], multiple=layout.tp),
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=rope(hf)["rope_theta"],
        share_embeddings_and_output_weights=tied(hf),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    frequencies = rope_frequencies(hf)
    model.rotary_pos_emb.inv_freq = frequencies.to(model.rotary_pos_emb.inv_freq.device)
    return model


def transformer_config(
    hf: HfConfig,
    layout: Layout,
    *,
    precision: str,
    activation_checkpointing: bool,
    overrides: dict[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's config: the model's own fields, the degrees, and what the layer spec needs."""
    dtype = TORCH_DTYPES[precision]
    fields: dict[str, Any] = plugins.load("model", hf["model_type"]).transformer_config(hf)
    fields |= {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "perform_initialization": False,
        "calculate_per_token_loss": True,  # the loss arrives as a global sum: nothing else may scale it
        "gradient_accumulation_fusion": False,
        "variable_seq_lengths": True,  # packs differ in length
        "moe_token_dispatcher_type": "alltoall",  # the default is refused with packs, dense models too
    }
    if "num_moe_experts" in fields:
        fields |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        }
    if activation_checkpointing:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if not has_transformer_engine():
        fields |= {"transformer_impl": "local"} | dict.fromkeys(
            (
                "masked_softmax_fusion",
                "persist_layer_norm",
                "bias_activation_fusion",
                "bias_dropout_fusion",
                "apply_rope_fusion",
            ),
            False,
        )
    return TransformerConfig(**(fields | (overrides or {})))


def _block_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    if not has_transformer_engine():
        # a deferred import: it pulls Megatron's local modules, which a TE host does not need
        from rlctl.models.torch_layers import torch_block_spec

        return torch_block_spec(config, num_layers)
    from megatron.core.extensions.transformer_engine import TENorm  # only where TE is installed
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)


def rope_frequencies(hf: HfConfig) -> torch.Tensor:
    """Inverse rotary frequencies [head_dim / 2], fp32.

    Megatron's own llama3 scaling fixes the original context at 8,192 and the two factors at 1 and 4; the config's
    values are used here. Formulas: transformers/modeling_rope_utils.py (`default`, `linear`, `llama3`).
    """
    parameters, dim = rope(hf), head_dim(hf)
    frequencies = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    if parameters["rope_type"] == "default":
        return frequencies
    if parameters["rope_type"] == "linear":
        return frequencies / parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / parameters["factor"] + blend * frequencies
