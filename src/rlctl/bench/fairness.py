"""Are two sides alike in everything but the backend? What differs is named, and makes a ratio meaningless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.config import Recipe
from rlctl.parallel import Layout


@dataclass(frozen=True, kw_only=True)
class Difference:
    """E.g. Difference(what="precision", values={"megatron": "float32", "dtensor": "bfloat16"})."""

    what: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.what}: " + ", ".join(f"{side} {value}" for side, value in self.values.items())


def facts(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """What must be equal, by name.

    Args:
        recipe: resolved.
        layout: of its backend.
    """
    policy, packing = recipe.policy, recipe.policy.sequence_packing
    return {
        "model": policy.model_name,
        "model changes": policy.hf_config_overrides,
        "algorithm": recipe.algorithm,
        "precision": policy.precision,
        "packing": packing.enabled,
        "microbatch tokens": [packing.train_mb_tokens, packing.logprob_mb_tokens] if packing.enabled else None,
        "microbatch sequences": None if packing.enabled else [policy.train_micro_batch_size, policy.logprob_batch_size],
        "recompute": policy.activation_checkpointing,
        "optimizer": {**vars(policy.optimizer), "betas": list(policy.optimizer.betas)},
        "schedule": dict(vars(policy.scheduler)),
        "gradient clipping": policy.max_grad_norm,
        "sequences of a step": recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt,
        "sequences of an update": policy.train_global_batch_size,
        "loss": _plain(recipe.loss_fn),
        "advantage": _plain(recipe.advantage),
        "temperature": policy.generation.temperature,
        "processes": layout.world,
        "layout (dp tp pp cp ep)": [layout.dp, layout.tp, layout.pp, layout.cp, layout.ep],
    }


def differences(sides: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """What is not the same on all sides.

    Args:
        sides: name -> its facts.
    """
    names = list(dict.fromkeys(name for found in sides.values() for name in found))
    by_name = {n: {side: found.get(n, "not said") for side, found in sides.items()} for n in names}
    return [
        Difference(what=name, values=_narrowed(values))
        for name, values in by_name.items()
        if any(value != next(iter(values.values())) for value in values.values())
    ]


def _narrowed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of mappings, the keys that differ."""
    if not all(isinstance(value, dict) for value in values.values()):
        return dict(values)
    keys = dict.fromkeys(key for value in values.values() for key in value)
    first = next(iter(values.values()))
    differ = [
        k for k in keys if any((k in v) != (k in first) or (k in v and v[k] != first[k]) for v in values.values())
    ]
    return {side: {key: value[key] for key in differ if key in value} for side, value in values.items()}


def _plain(options: Any) -> Any:
    if hasattr(options, "__dict__"):
        return {name: _plain(value) for name, value in vars(options).items()}
    return list(options) if isinstance(options, tuple) else options
