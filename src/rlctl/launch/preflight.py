"""Whether a job fits the GPUs that it is for, by the plan; and if not, what would mend it. Pure: starts nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from rlctl.algorithms.base import source
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.launch.needs import Needs, breakdown, fits, needs
from rlctl.plan.hardware import gpu as gpu_of
from rlctl.plan.profile import constants
from rlctl.plan.search import Pins, search
from rlctl.recipe import auto
from rlctl.recipe.derive import Resolved

FORCE = "or go on all the same with `--force`"
_LEAST_SHARE = 0.1  # of a GPU for the engine: below, its cache is of no use


def refuse(resolved: Resolved, need: Needs) -> RlctlError | None:
    """Why the fullest GPU is too small; None where it is not, or where its kind is not known.

    Args:
        resolved: the job; `cluster.gpu_kind` says what it is for.
        need: its memory.
    """
    kind = resolved.recipe.cluster.gpu_kind
    if kind is None or resolved.recipe.cluster.gpus_per_node is None:
        return None
    size = gpu_of(kind).memory_bytes
    if fits(resolved, need, memory_bytes=size):
        return None
    mend = _mend(resolved, size)
    return RlctlError(
        f"{resolved.layout} does not fit {kind}: {_limit(resolved, need, size)}",
        f"{mend or 'take more GPUs or larger ones, or shorter sequences'}; {FORCE}",
        exit_status=ENVIRONMENT,
    )


def _limit(resolved: Resolved, need: Needs, size: float) -> str:
    """The term that is too large."""
    memory = need.memory
    if memory.training > size:
        parts = breakdown(resolved, need)
        largest = max(parts, key=lambda name: parts[name])
        return (
            f"training needs {memory.training / 1e9:.1f} GB of {size / 1e9:.0f} GB; the largest part is "
            f"{largest.replace('_', ' ')}, {parts[largest] / 1e9:.1f} GB"
        )
    share = resolved.recipe.policy.generation.vllm_cfg.gpu_memory_utilization
    awake = memory.engine_weights if resolved.recipe.policy.generation.backend == "transformers" else share * size
    if memory.resident + awake > size:
        return (
            f"while generating, the policy keeps {memory.resident / 1e9:.1f} GB and the engine takes "
            f"{awake / 1e9:.1f} GB of {size / 1e9:.0f} GB"
        )
    return (
        f"the engine's weights, {memory.engine_weights / 1e9:.1f} GB, leave no cache in its share, "
        f"{share * size / 1e9:.1f} GB"
    )


def _mend(resolved: Resolved, size: float) -> str | None:
    """The first change that makes it fit, checked: recompute, the engine, a smaller microbatch, another layout."""
    for text, change in _changes(resolved, size):
        recipe = copy.deepcopy(resolved.recipe)
        changed = replace(resolved, recipe=recipe)
        change(changed)
        if fits(changed, needs(changed), memory_bytes=size):
            return f"set {text}"
    return _other_layout(resolved)


def _changes(resolved: Resolved, size: float) -> list[tuple[str, Callable[[Resolved], None]]]:
    policy, found = resolved.recipe.policy, list[tuple[str, Callable[[Resolved], None]]]()
    if not policy.activation_checkpointing:
        found.append(("policy.activation_checkpointing=true", _recompute))
    if policy.generation.backend == "vllm":
        need = needs(resolved).memory
        share = int(100 * (size - need.resident) / size) / 100
        if _LEAST_SHARE <= share < policy.generation.vllm_cfg.gpu_memory_utilization:
            found.append((f"policy.generation.vllm_cfg.gpu_memory_utilization={share}", _engine_share(share)))
        tp, per_node = policy.generation.vllm_cfg.tensor_parallel_size, resolved.recipe.cluster.gpus_per_node or 1
        groups = resolved.model.config.get("num_key_value_heads") or resolved.model.config["num_attention_heads"]
        found += [
            (f"policy.generation.vllm_cfg.tensor_parallel_size={t}", _engine_tp(t))
            for t in (2, 4, 8)
            if t > tp and per_node % t == 0 and groups % t == 0
        ]
    packing, longest = policy.sequence_packing, policy.max_total_sequence_length
    if packing.enabled and packing.train_mb_tokens and packing.train_mb_tokens >= 2 * longest:
        padded = -(-longest // resolved.layout.pad_unit) * resolved.layout.pad_unit
        found.append((f"policy.sequence_packing.train_mb_tokens={padded}", _budget(padded)))
    return found


def _recompute(job: Resolved) -> None:
    job.recipe.policy.activation_checkpointing = True


def _engine_share(share: float) -> Callable[[Resolved], None]:
    return lambda job: setattr(job.recipe.policy.generation.vllm_cfg, "gpu_memory_utilization", share)


def _engine_tp(size: int) -> Callable[[Resolved], None]:
    return lambda job: setattr(job.recipe.policy.generation.vllm_cfg, "tensor_parallel_size", size)


def _budget(tokens: int) -> Callable[[Resolved], None]:
    return lambda job: setattr(job.recipe.policy.sequence_packing, "train_mb_tokens", tokens)


def _other_layout(resolved: Resolved) -> str | None:
    """The fastest layout of as many GPUs that fits, as settings."""
    recipe = resolved.recipe
    if source(recipe.algorithm) != "rollouts" or recipe.cluster.gpu_kind is None:
        return None
    gpu = gpu_of(recipe.cluster.gpu_kind)
    question = auto.question_of(recipe, resolved.model.config, gpu, resolved.layout.world)
    engine = 1 if recipe.policy.generation.backend == "transformers" else None
    found = search(question, resolved.backend, fitted=constants(), pins=Pins(generation_tp=engine))
    if not found.best:
        return None
    return f"another layout of these GPUs fits: {' '.join(auto.settings(resolved.backend, found.best[0]))}"
