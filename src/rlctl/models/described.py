"""What Megatron-LM and Megatron-Bridge look for beside a checkpoint's weights, from config.json.

1. Megatron-LM reads `args` of the common state: with `--use-checkpoint-args` the model's shape, and always whether
   there is an optimizer or random state to load (megatron/training/checkpointing.py, `load_args_from_checkpoint` and
   `load_checkpoint`).
2. Megatron-Bridge reads run_config.yaml in the iteration's directory: `model` names the provider class and its fields,
   `checkpoint` what was saved (megatron/bridge/training/model_load_save.py, `load_model_config`).

The padded vocabulary is left to the loader, which knows its own tensor parallelism.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rlctl import plugins
from rlctl.models.base import HfConfig, rope, tied

PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_is_expressible(hf: HfConfig) -> bool:
    """Whether Megatron's own options can say this model's rope: its llama3 scaling has one option, the factor.

    Source: megatron/core/models/common/embeddings/rotary_pos_embedding.py, `_apply_scaling`.
    """
    stated = rope(hf)
    return stated["rope_type"] != "llama3" or all(stated[k] == v for k, v in _MEGATRON_LLAMA3.items())


def arguments(hf: HfConfig) -> Namespace:
    """Of Megatron-LM's command line, that make this model."""
    fields, stated = _fields(hf), rope(hf)
    known = {
        "seq_length": hf["max_position_embeddings"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": int(stated["rope_theta"]),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": stated["rope_type"] == "llama3",
        "rope_scaling_factor": stated["factor"] if stated["rope_type"] == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": stated["factor"] if stated["rope_type"] == "linear" else None,
        "group_query_attention": fields["num_query_groups"] != fields["num_attention_heads"],
        "add_bias_linear": False,
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "norm_epsilon": fields["layernorm_epsilon"],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not tied(hf),
        "num_experts": fields.get("num_moe_experts"),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }
    left_out = ("num_moe_experts", "layernorm_epsilon")
    return Namespace(**{k: v for k, v in fields.items() if k not in left_out}, **known)


def run_config(hf: HfConfig, dtype: str) -> dict[str, Any]:
    """The content of run_config.yaml.

    Args:
        hf: config.json.
        dtype: of the weights as they are stored, e.g. `bfloat16`.
    """
    stated = rope(hf)
    model = _fields(hf) | {
        "_target_": PROVIDER,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "rotary_base": int(stated["rope_theta"]),
        "rotary_percent": 1.0,
        "rope_scaling": stated["rope_type"] == "llama3",
        "rope_scaling_factor": stated["factor"] if stated["rope_type"] == "llama3" else 1.0,
        "seq_len_interpolation_factor": stated["factor"] if stated["rope_type"] == "linear" else None,
        "seq_length": hf["max_position_embeddings"],
        "share_embeddings_and_output_weights": tied(hf),
        "vocab_size": hf["vocab_size"],
        "should_pad_vocab": True,
        "params_dtype": {"_target_": f"torch.{dtype}", "_call_": False},
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    checkpoint = {"ckpt_format": "torch_dist", "save_optim": False, "save_rng": False, "fully_parallel_save": False}
    return {"model": model, "checkpoint": checkpoint}


def _fields(hf: HfConfig) -> dict[str, Any]:
    fields: dict[str, Any] = plugins.load("model", hf["model_type"]).transformer_config(hf)
    return fields
