"""Tiny random Hugging Face models: norms and biases are random too, so that a dropped or swapped one shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def config(kind: str, **overrides: Any) -> Any:
    """hidden 64, 2 layers, 4 heads, 2 key-value groups, vocabulary 256."""
    import transformers

    fields = dict(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    if kind in ("qwen3", "qwen3_moe", "llama"):
        fields |= dict(head_dim=16)
    if kind == "qwen3_moe":
        fields |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
        fields |= dict(decoder_sparse_step=1, mlp_only_layers=[])
    if kind == "mistral":
        fields |= dict(sliding_window=None)
    if kind == "mixtral":
        fields |= dict(num_local_experts=4, num_experts_per_tok=2)
    classes = {
        "mistral": transformers.MistralConfig, "mixtral": transformers.MixtralConfig,
        "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig,
    }  # fmt: skip
    return classes[kind](**(fields | overrides))


def model(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(seed)
    built = transformers.AutoModelForCausalLM.from_config(config(kind, **overrides), attn_implementation="sdpa").float()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            mean, std = (1, 0.1) if "norm" in name else (0, 0.1 if name.endswith("bias") else 0.08)
            parameter.normal_(mean, std)
    return built.eval()


def save(kind: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """The model as a directory (weights and config; no tokenizer)."""
    model(kind, seed, **overrides).save_pretrained(folder)
    return folder
