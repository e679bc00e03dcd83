"""Parallel degrees and every product check: pure, so that a recipe is judged before any process starts.

Ranks are laid out as Megatron does it: tp varies fastest, then cp, then dp, then pp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.config import Recipe
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of one training job, e.g. Layout(world=8, tp=2, sp=True) has dp 4."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel degree: world / (tp * pp * cp)."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def pad_unit(self) -> int:
        """Sequences are padded to a multiple of this: 2*cp for the zigzag split, times tp with sequence parallelism."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sp else 1)

    def __str__(self) -> str:
        parts = [f"dp{self.dp}", f"tp{self.tp}" + ("+sp" if self.sp else "")]
        parts += [
            f"{name}{n}" for name, n in (("pp", self.pp), ("cp", self.cp), ("ep", self.ep), ("etp", self.etp)) if n > 1
        ]
        return " ".join(parts)


def layout_of(recipe: Recipe, world: int) -> Layout:
    """The recipe's degrees on `world` processes, for the backend that it enables; a degree that is not set is 1."""
    if not recipe.policy.megatron_cfg.enabled:
        dtensor = recipe.policy.dtensor_cfg
        return Layout(world=world, tp=dtensor.tensor_parallel_size or 1, cp=dtensor.context_parallel_size or 1)
    megatron = recipe.policy.megatron_cfg
    tp = megatron.tensor_model_parallel_size or 1
    return Layout(
        world=world,
        tp=tp,
        pp=megatron.pipeline_model_parallel_size or 1,
        cp=megatron.context_parallel_size or 1,
        ep=megatron.expert_model_parallel_size or 1,
        etp=megatron.expert_tensor_parallel_size or 1,
        sp=tp > 1 if megatron.sequence_parallel is None else megatron.sequence_parallel,
    )


def check(layout: Layout, hf_config: dict[str, Any]) -> None:
    """Refuse a layout that does not divide the world or the model.

    Args:
        layout: the degrees.
        hf_config: the model's config.json as a dict.

    Raises:
        RlctlError: exit status 3, naming the product or the dimension and the degrees that would do.
    """
    product = layout.tp * layout.pp * layout.cp
    if layout.world % product:
        raise RlctlError(
            f"{layout.world} processes do not divide by tp {layout.tp} * pp {layout.pp} * cp {layout.cp} = {product}",
            f"use a multiple of {product} processes, or smaller degrees",
            exit_status=ENVIRONMENT,
        )
    heads, groups = (
        hf_config["num_attention_heads"],
        hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"],
    )
    layers, experts = hf_config["num_hidden_layers"], num_experts(hf_config)
    width = hf_config.get("intermediate_size") or 0
    expert_width = (hf_config.get("moe_intermediate_size") or width) if experts else 0
    for what, size, degree, name in (
        ("attention heads", heads, layout.tp, "tensor"),
        ("key-value heads", groups, layout.tp, "tensor"),
        ("feed-forward features", width, 1 if experts or not width else layout.tp, "tensor"),
        ("layers", layers, layout.pp, "pipeline"),
        ("experts", experts, layout.ep, "expert"),
        ("expert features", expert_width, layout.etp, "expert-tensor"),
    ):
        if size % degree or (not size and degree > 1):
            fits = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0) or "1"
            raise RlctlError(
                f"{size} {what} do not divide by {name}-parallel size {degree}",
                f"choose a {name}-parallel size of {fits}",
                exit_status=ENVIRONMENT,
            )
    expert_product = layout.etp * layout.ep * layout.pp
    if experts and layout.world % expert_product:
        raise RlctlError(
            f"{layout.world} processes do not divide by etp {layout.etp} * ep {layout.ep} * pp {layout.pp}",
            "lower the expert-parallel size",
            exit_status=ENVIRONMENT,
        )


def num_experts(hf_config: dict[str, Any]) -> int:
    """Experts of a layer; 0 for a dense model."""
    return int(hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0)


def zigzag(lengths: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Positions, in the packed stream, of the tokens that a context-parallel rank holds.

    Each sequence is cut in 2C chunks; rank r holds chunks r and 2C-1-r, so that causal work is equal (Megatron's
    convention, megatron/core/utils.py `get_batch_on_this_cp_rank`).

    Args:
        lengths: of the sequences, each a multiple of 2C.
        rank: in the context-parallel group.
        size: C.

    Returns:
        [T] int64.
    """
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    if size == 1:
        return torch.arange(starts[-1])
    out = []
    for start, n in zip(starts, lengths, strict=False):
        chunks = torch.arange(start, start + n).chunk(2 * size)
        out += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(out)
