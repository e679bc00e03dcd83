"""What a model's size and speed depend on: a few numbers, from its config.json or from a publication.

memory.py counts the parameters of a rank exactly, from the weight rules; this closed form is for thousands of layouts,
and for models that rlctl does not train.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl import plugins
from rlctl.models.base import tied
from rlctl.models.resolve import catalogue


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a decoder; norms and biases are left out (below 0.1 % of the parameters)."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    """Of queries and keys."""
    vocabulary: int
    ffn: int = 0
    """Of the dense layers."""
    value_size: int | None = None
    """Of values, where it differs from head_size."""
    gated: bool = True
    tied: bool = False
    moe_layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    expert_hidden: int | None = None
    """What experts read, where it differs from hidden."""
    shared_ffn: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    """Latent attention (arXiv 2405.04434), with `query_rank` and `rope_size`."""
    rope_size: int = 0
    attention_layers: int | None = None
    """Where not every layer attends."""
    window: int = 0
    windowed_layers: int = 0
    state_layers: int = 0
    state_parameters: int = 0
    """Of one state-space layer."""

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def score_width(self) -> int:
        """Multiply-adds of a query-key pair, over all heads: n * (d_qk + d_v)."""
        return self.heads * (self.head_size + (self.value_size or self.head_size))

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        if not self.kv_rank:
            return self.hidden * self.head_size * (2 * self.heads + 2 * self.groups)
        value = self.value_size or self.head_size
        query = self.query_rank * (self.hidden + self.heads * self.head_size)
        key_value = self.hidden * (self.kv_rank + self.rope_size)
        key_value += self.kv_rank * self.heads * (self.head_size - self.rope_size + value)
        return query + key_value + self.heads * value * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert."""
        return (3 if self.gated else 2) * (self.expert_hidden or self.hidden) * self.expert_ffn

    @functools.cached_property
    def dense_parameters(self) -> int:
        """All but routed experts, embedding and output layer."""
        matrices = 3 if self.gated else 2
        dense_layers = 0 if not self.ffn else self.layers - self.moe_layers
        total = self.attending * self.attention_parameters + self.state_layers * self.state_parameters
        total += dense_layers * matrices * self.hidden * self.ffn
        latent = 2 * self.hidden * self.expert_hidden if self.expert_hidden else 0
        return total + self.moe_layers * (
            matrices * self.hidden * self.shared_ffn + self.hidden * self.experts + latent
        )

    @property
    def routed_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def routed_active(self) -> int:
        """Routed parameters that a token passes."""
        return self.moe_layers * self.top_k * self.expert_parameters

    @property
    def outer_parameters(self) -> int:
        """Embedding and output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense_parameters + self.routed_parameters + self.outer_parameters

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with, the output layer among them and the embedding not."""
        return self.dense_parameters + self.routed_active + self.vocabulary * self.hidden

    @property
    def cache_elements(self) -> int:
        """Of keys and values, per token."""
        one = self.kv_rank + self.rope_size if self.kv_rank else 2 * self.groups * self.head_size
        return self.attending * one

    def score_flops(self, span: float) -> float:
        """Forward FLOPs of causal attention per token, over all layers.

        Args:
            span: length of the sequence; for a pack, the sum of squares of its lengths over their sum.
        """
        wide = self.attending - self.windowed_layers
        return self.score_width * (wide * span + self.windowed_layers * min(2.0 * self.window, span))

    def training_flops(self, span: float) -> float:
        """Model FLOPs of forward and backward, per token: 6 N + 3 x attention, causal; recompute is not counted."""
        return 6.0 * self.active + 3.0 * self.score_flops(span)


def from_config(hf: dict[str, Any]) -> Shape:
    """The dimensions of a config.json that rlctl's models/ understand."""
    fields = plugins.load("model", hf["model_type"]).transformer_config(hf)
    layers = fields["num_layers"]
    moe = "num_moe_experts" in fields
    return Shape(
        layers=layers,
        hidden=fields["hidden_size"],
        heads=fields["num_attention_heads"],
        groups=fields["num_query_groups"],
        head_size=fields["kv_channels"],
        vocabulary=hf["vocab_size"],
        ffn=0 if moe else fields["ffn_hidden_size"],
        tied=tied(hf),
        moe_layers=layers if moe else 0,
        experts=fields["num_moe_experts"] if moe else 0,
        top_k=fields["moe_router_topk"] if moe else 0,
        expert_ffn=fields["moe_ffn_hidden_size"] if moe else 0,
    )


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "shapes.yaml").read_text())


@functools.cache
def published(name: str) -> Shape | None:
    """The dimensions of a model by the name that measured rows give it; None when they are not known here."""
    table = _table()
    if name in table:
        return Shape(**table[name])
    match = re.fullmatch(r"(.+)-L(\d+)", name)
    if match:
        whole = published(match[1])
        return None if whole is None else _cut(whole, int(match[2]))
    return from_config(catalogue()[name]["config"]) if name in catalogue() else None


def _cut(whole: Shape, layers: int) -> Shape:
    """The first layers of a model; dense layers come first."""
    dense = whole.layers - whole.moe_layers
    return dataclasses.replace(whole, layers=layers, moe_layers=max(0, layers - dense) if whole.moe_layers else 0)
