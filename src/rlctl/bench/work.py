"""What a replayed step has to compute, counted on real tokens: floating-point operations and padding.

Legend: P weights of matrix products that a token meets (embedding and output layer left out), L_s tokens of sequence s,
n scored tokens, V vocabulary, h hidden size, W multiply-adds of a query-key pair over all heads.

    forward = sum_s [2 * P * L_s + layers * W * L_s^2] + 2 * V * h * n
    step    = forward * (3 + forward passes without gradient)

Attention is causal, hence half of 2 * W * L^2; backward is two forwards; recomputation is no work that was asked for,
and is not counted (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from typing import Any

from rlctl.config import Recipe
from rlctl.parallel import Layout
from rlctl.plan import shape as shapes
from rlctl.policy.packing import plan, train_budget
from rlctl.types import Batch

FORMULA = "(2*P*sum(L) + layers*W*sum(L^2) + 2*V*h*n) * (3 + forward passes without gradient), on real tokens"


def step_flops(batch: Batch, hf_config: dict[str, Any], passes: int) -> float:
    """Floating-point operations of a step on all ranks together.

    Args:
        batch: of the step.
        hf_config: of the model.
        passes: forward passes without gradient.
    """
    shape = shapes.from_config(hf_config)
    weights = shape.dense_parameters + shape.routed_active
    lengths = batch.lengths.double()
    forward = 2.0 * weights * float(lengths.sum()) + shape.attending * shape.score_width * float(lengths.square().sum())
    forward += 2.0 * shape.vocabulary * shape.hidden * float(batch.mask.sum())
    return forward * (3 + passes)


def padded_tokens(batch: Batch, recipe: Recipe, layout: Layout) -> int:
    """Tokens that a training pass over the batch processes on all data-parallel ranks, padding and dummies included."""
    budget, unit = train_budget(recipe.policy), _pad_unit(recipe, layout)
    dealt = plan(
        batch.lengths.tolist(),
        None,
        dp=layout.dp,
        max_tokens=budget.max_tokens,
        max_sequences=budget.max_sequences,
        pad_unit=unit,
    )
    lengths = batch.lengths.tolist()
    return sum(sum(-(-lengths[i] // unit) * unit for i in chosen) or unit for micros in dealt for chosen in micros)


def _pad_unit(recipe: Recipe, layout: Layout) -> int:
    """Only Megatron's sequence and context parallelism pad."""
    return layout.pad_unit if recipe.policy.megatron_cfg.enabled else 1
