"""Weight rules: a bijection between Hugging Face tensors and Megatron's, and what a config may not hide."""

from __future__ import annotations

import pytest
import torch

from rlctl import plugins
from rlctl.errors import RlctlError
from rlctl.models import base
from tests import tiny

KINDS = ["llama", "mistral", "qwen2", "qwen3"]


def rules_of(kind, **overrides):
    config = tiny.config(kind, **overrides).to_dict()
    return plugins.load("model", config["model_type"]).rules(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_of_transformers_is_in_one_rule_with_its_shape(kind, tied):
    model = tiny.model(kind, tie_word_embeddings=tied)
    stated = {
        n: s for r in rules_of(kind, tie_word_embeddings=tied) for n, s in zip(r.sources, r.source_shapes, strict=True)
    }
    assert stated == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe", "mixtral"])
def test_no_source_and_no_target_is_written_twice(kind):
    rules = rules_of(kind)
    sources = [name for rule in rules for name in rule.sources]
    targets = [(rule.key, rule.index) for rule in rules]
    assert len(set(sources)) == len(sources)
    assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_then_splitting_gives_the_same_bits(kind):
    weights = dict(tiny.model(kind).named_parameters())
    for rule in rules_of(kind):
        sources = [weights[name].detach() for name in rule.sources]
        merged = rule.operation.merge(sources)
        assert tuple(merged.shape) == rule.shape
        for before, after in zip(sources, rule.operation.split(merged), strict=True):
            assert torch.equal(before, after)


def test_qkv_is_grouped_as_megatron_reads_it():
    """Rows of two groups of two heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    merged = base.GroupedQkv(groups=2, head_dim=1).merge([q, k, v])
    assert merged.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hidden_act", "gelu", "gelu"),
        ("mlp_bias", True, "mlp_bias"),
        ("attention_bias", True, "attention_bias"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "yarn"),
    ],
)
def test_what_the_mapping_would_drop_is_refused_by_name(field, value, named):
    config = tiny.config("llama").to_dict() | {field: value}
    with pytest.raises(RlctlError, match=named):
        plugins.load("model", "llama").transformer_config(config)
        base.rope(config)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("mistral", {"sliding_window": 4096}, "`sliding_window: 4096`"),
        ("mistral", {"sliding_window": "absent"}, "lacks `sliding_window`"),  # transformers assumes 4096
        ("mistral", {"num_key_value_heads": "absent"}, "lacks `num_key_value_heads`"),  # transformers assumes 8
        ("mixtral", {"sliding_window": 4096}, "`sliding_window: 4096`"),
        ("mixtral", {"num_experts_per_tok": "absent"}, "lacks `num_experts_per_tok`"),
        ("mixtral", {"router_jitter_noise": 0.1}, "`router_jitter_noise: 0.1`"),
        ("mixtral", {"rope_parameters": "absent"}, "lacks `rope_theta`"),  # transformers assumes 1e6
    ],
)  # fmt: skip
def test_what_mistral_and_mixtral_leave_open_is_refused_by_name(kind, change, named):
    config = tiny.config(kind).to_dict() | change
    with pytest.raises(RlctlError, match=named):
        plugins.load("model", kind).transformer_config({k: v for k, v in config.items() if v != "absent"})


@pytest.mark.parametrize("parameters", [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 4096},
])  # fmt: skip
def test_rotary_frequencies_are_those_of_transformers(parameters):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from rlctl.models.build import rope_frequencies

    config = tiny.config("llama", head_dim=128, rope_parameters=parameters, max_position_embeddings=131072)
    want = LlamaRotaryEmbedding(config).inv_freq
    assert torch.allclose(rope_frequencies(config.to_dict()), want, rtol=1e-6, atol=0)


def test_rope_keys_of_transformers_four_are_read():
    config = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert base.rope(config) == {"type": "linear", "factor": 2.0, "rope_theta": 5e5, "rope_type": "linear"}


@pytest.mark.parametrize(("size", "multiple", "want"), [(256, 2, 256), (251, 2, 252), (49152, 7, 49154), (5, 8, 8)])
def test_vocabulary_padding_is_the_next_multiple(size, multiple, want):
    assert base.padded_vocabulary(size, multiple=multiple) == want
