"""Weight rules: how the tensors of a Hugging Face model make one Megatron tensor, and back.

A model is a config mapping and a table of invertible rules; nothing here knows parallelism. A rule names a *global*
tensor of Megatron (as its `sharded_state_dict` does), the Hugging Face tensors that it is made of, and their shapes,
without any tensor. The inverse of a rule is never written by hand in a model's file: each operation is a pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlctl.errors import RlctlError
from rlctl.lazy import torch

Shape = tuple[int, ...]
HfConfig = dict[str, Any]
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Operation(Protocol):
    """An invertible rearrangement of whole tensors; `split(merge(x)) == x`, bit for bit."""

    def merge(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hugging Face tensors -> the Megatron tensor."""
        ...

    def split(self, target: torch.Tensor) -> list[torch.Tensor]:
        """The Megatron tensor -> Hugging Face tensors, in the rule's order."""
        ...


@dataclass(frozen=True)
class Copy:
    """One tensor, as it is."""

    def merge(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return sources[0]

    def split(self, target: torch.Tensor) -> list[torch.Tensor]:  # noqa: D102
        return [target]


@dataclass(frozen=True)
class Concat:
    """Tensors stacked along dim 0: gate and up projections into `linear_fc1`."""

    parts: int

    def merge(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return torch.cat(list(sources))

    def split(self, target: torch.Tensor) -> list[torch.Tensor]:  # noqa: D102
        return list(target.chunk(self.parts))


@dataclass(frozen=True)
class GroupedQkv:
    """Query, key and value interleaved by key-value group along dim 0: `[q heads of the group, k, v]` for each group.

    Source: megatron/core/transformer/attention.py, `SelfAttention.get_query_key_value_tensors`.
    """

    groups: int
    head_dim: int

    def merge(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: D102
        return torch.cat([x.reshape(self.groups, -1, *x.shape[1:]) for x in sources], dim=1).flatten(0, 1)

    def split(self, target: torch.Tensor) -> list[torch.Tensor]:  # noqa: D102
        grouped = target.reshape(self.groups, -1, *target.shape[1:])
        query = grouped.shape[1] - 2 * self.head_dim
        return [x.flatten(0, 1) for x in grouped.split([query, self.head_dim, self.head_dim], dim=1)]


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """One Megatron tensor and the Hugging Face tensors it is made of."""

    key: str
    """Global name, layer number written out: `decoder.layers.3.mlp.linear_fc2.weight`."""
    sources: tuple[str, ...]
    source_shapes: tuple[Shape, ...]
    operation: Operation = Copy()
    index: Shape = ()
    """Position on prepended axes: (expert,) for a tensor of one expert."""
    vocabulary: bool = False
    """Dim 0 counts tokens, and is padded to what tensor parallelism divides."""

    @property
    def shape(self) -> Shape:
        """Of the Megatron tensor, without padding."""
        return (sum(s[0] for s in self.source_shapes), *self.source_shapes[0][1:])


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """One tensor of a file that holds several tensors of the rules, one behind the other."""

    shape: Shape
    parts: tuple[str, ...]
    """Names in the rules, in the order of the bytes; all of one size."""


def padded_vocabulary(size: int, *, multiple: int) -> int:
    """The vocabulary rounded up to what tensor parallelism divides."""
    return -(-size // multiple) * multiple


def head_dim(hf: HfConfig) -> int:
    """Dimension of an attention head: stated, or hidden size / heads."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def tied(hf: HfConfig, *, default: bool = False) -> bool:
    """Whether the output layer is the embedding."""
    stated = hf.get("tie_word_embeddings")
    return default if stated is None else bool(stated)


def repeated_tensors(hf: HfConfig) -> dict[str, str]:
    """Tensors that a file may hold although a rule does not name them: {name: the tensor whose bits it must have}."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if tied(hf) else {}


def is_derived(name: str) -> bool:
    """Whether a file's tensor follows from the config, and is never read: rotary frequencies of old saves."""
    return name.endswith("rotary_emb.inv_freq")


def rope(hf: HfConfig) -> dict[str, Any]:
    """Rotary parameters in one form, `{"rope_theta", "rope_type", ...}`, from transformers 4's or 5's keys.

    Raises:
        RlctlError: a rope type other than default, linear or llama3; never a silent fallback.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise RlctlError(f"rope parameters are {scaling!r}, they must be an object", "correct config.json")
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise RlctlError(f"rope type `{kind}` is not understood", "rlctl knows default, linear and llama3")
    needed: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}
    stated: dict[str, Any] = {"rope_theta": theta, **{name: scaling.get(name) for name in needed[kind]}}
    for name, value in stated.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise RlctlError(
                f"{name} is {value!r} for rope type `{kind}`, it must be a positive number", "correct config.json"
            )
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise RlctlError(
            f"low_freq_factor {scaling['low_freq_factor']} is not below high_freq_factor {scaling['high_freq_factor']}",
            "correct config.json",
        )
    return {**scaling, "rope_theta": float(theta), "rope_type": kind}


def dense_config(hf: HfConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, Any]:
    """Megatron `TransformerConfig` fields of a decoder with RMSNorm, SwiGLU and grouped-query attention.

    Raises:
        RlctlError: an activation, bias or sliding window that this mapping would drop silently.
    """
    if hf["hidden_act"] != "silu":
        raise RlctlError(f"activation `{hf['hidden_act']}` is not understood", "rlctl knows silu (SwiGLU)")
    for name in ("mlp_bias",) if qkv_bias else ("mlp_bias", "attention_bias"):
        if hf.get(name):
            raise RlctlError(
                f"`{name}: true` is not understood for model type `{hf['model_type']}`", "use a model without it"
            )
    if hf.get("use_sliding_window"):
        raise RlctlError("sliding-window attention is not understood", "use a model with `use_sliding_window: false`")
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
    }


def dense_rules(
    hf: HfConfig, *, qkv_bias: bool = False, qk_norm: bool = False, tied_default: bool = False
) -> list[WeightRule]:
    """The rules of a whole dense decoder."""
    rules = outer_rules(hf, tied_default=tied_default)
    for layer in range(hf["num_hidden_layers"]):
        rules += attention_rules(hf, layer, qkv_bias=qkv_bias, qk_norm=qk_norm)
        rules += mlp_rules(hf, layer)
    return rules


def outer_rules(hf: HfConfig, *, tied_default: bool = False) -> list[WeightRule]:
    """Embedding, final norm, and the output layer where it is not tied."""
    table = (hf["vocab_size"], hf["hidden_size"])
    rules = [
        WeightRule(
            key="embedding.word_embeddings.weight",
            sources=("model.embed_tokens.weight",),
            source_shapes=(table,),
            vocabulary=True,
        ),
        WeightRule(
            key="decoder.final_layernorm.weight", sources=("model.norm.weight",), source_shapes=((hf["hidden_size"],),)
        ),
    ]
    if not tied(hf, default=tied_default):
        rules.append(
            WeightRule(key="output_layer.weight", sources=("lm_head.weight",), source_shapes=(table,), vocabulary=True)
        )
    return rules


def attention_rules(hf: HfConfig, layer: int, *, qkv_bias: bool, qk_norm: bool) -> list[WeightRule]:
    """One layer's attention, its input norm included."""
    hidden, dim, heads = hf["hidden_size"], head_dim(hf), hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads") or heads
    source, key = f"model.layers.{layer}.", f"decoder.layers.{layer}.self_attention."
    rows = (heads * dim, groups * dim, groups * dim)
    grouped = GroupedQkv(groups, dim)

    def qkv(kind: str, tail: Shape) -> WeightRule:
        names = tuple(f"{source}self_attn.{x}_proj.{kind}" for x in "qkv")
        return WeightRule(
            key=f"{key}linear_qkv.{kind}",
            sources=names,
            source_shapes=tuple((r, *tail) for r in rows),
            operation=grouped,
        )

    def copy(target: str, name: str, shape: Shape) -> WeightRule:
        return WeightRule(key=key + target, sources=(source + name,), source_shapes=(shape,))

    rules = [
        copy("linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden,)),
        qkv("weight", (hidden,)),
        copy("linear_proj.weight", "self_attn.o_proj.weight", (hidden, heads * dim)),
    ]
    if qkv_bias:
        rules.append(qkv("bias", ()))
    if qk_norm:
        rules += [copy(f"{x}_layernorm.weight", f"self_attn.{x}_norm.weight", (dim,)) for x in "qk"]
    return rules


def mlp_rules(hf: HfConfig, layer: int) -> list[WeightRule]:
    """One layer's dense SwiGLU block, its norm included."""
    hidden, ffn = hf["hidden_size"], hf["intermediate_size"]
    source, key = f"model.layers.{layer}.", f"decoder.layers.{layer}.mlp."
    return [
        WeightRule(
            key=f"{key}linear_fc1.layer_norm_weight",
            sources=(f"{source}post_attention_layernorm.weight",),
            source_shapes=((hidden,),),
        ),
        gate_up_rule(f"{key}linear_fc1.weight", f"{source}mlp.", (ffn, hidden)),
        WeightRule(
            key=f"{key}linear_fc2.weight", sources=(f"{source}mlp.down_proj.weight",), source_shapes=((hidden, ffn),)
        ),
    ]


def gate_up_rule(
    key: str, source: str, shape: Shape, *, index: Shape = (), names: tuple[str, str] = ("gate_proj", "up_proj")
) -> WeightRule:
    """`linear_fc1` from the gate and up projections."""
    sources = tuple(f"{source}{name}.weight" for name in names)
    return WeightRule(key=key, sources=sources, source_shapes=(shape, shape), operation=Concat(2), index=index)


def router_rules(hf: HfConfig, layer: int, *, experts: int, gate: str) -> list[WeightRule]:
    """One layer's router and the norm before it; `gate` is the router's name on disk."""
    hidden, key = hf["hidden_size"], f"decoder.layers.{layer}."
    return [
        WeightRule(
            key=f"{key}pre_mlp_layernorm.weight",
            sources=(f"model.layers.{layer}.post_attention_layernorm.weight",),
            source_shapes=((hidden,),),
        ),
        WeightRule(key=f"{key}mlp.router.weight", sources=(gate,), source_shapes=((experts, hidden),)),
    ]


def expert_rules(
    layer: int, *, experts: int, shape: Shape, prefix: str, names: tuple[str, str, str]
) -> list[WeightRule]:
    """One layer's experts.

    Args:
        layer: its number.
        experts: how many.
        shape: (features, hidden) of a gate projection.
        prefix: of a tensor on disk, before the expert's number.
        names: of gate, up and down projection on disk.
    """
    key, rules = f"decoder.layers.{layer}.mlp.experts.experts.", []
    for expert in range(experts):
        one = f"{prefix}{expert}."
        rules += [
            gate_up_rule(f"{key}linear_fc1.weight", one, shape, index=(expert,), names=names[:2]),
            WeightRule(
                key=f"{key}linear_fc2.weight",
                sources=(f"{one}{names[2]}.weight",),
                source_shapes=(shape[::-1],),
                index=(expert,),
            ),
        ]
    return rules


def stacked_experts(
    layer: int, *, experts: int, shape: Shape, prefix: str, names: tuple[str, str, str]
) -> dict[str, Stacked]:
    """The same experts as transformers 5 stacks them: `gate_up_proj` [E, 2f, h] and `down_proj` [E, h, f].

    Source: transformers/models/mixtral/modeling_mixtral.py, `MixtralExperts`. The arguments are `expert_rules`'s.
    """
    ffn, hidden = shape
    gate, up, down = names
    block, numbers = f"model.layers.{layer}.mlp.experts.", range(experts)
    both = tuple(f"{prefix}{e}.{name}.weight" for e in numbers for name in (gate, up))
    return {
        f"{block}gate_up_proj": Stacked(shape=(experts, 2 * ffn, hidden), parts=both),
        f"{block}down_proj": Stacked(
            shape=(experts, hidden, ffn), parts=tuple(f"{prefix}{e}.{down}.weight" for e in numbers)
        ),
    }


def stacked_tensors(family: Any, hf: HfConfig) -> dict[str, Stacked]:
    """What a file of this family may hold in place of the rules' tensors, by name; `family` is its module."""
    return family.stacked(hf) if hasattr(family, "stacked") else {}
