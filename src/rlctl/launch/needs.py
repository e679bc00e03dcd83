"""What a resolved recipe needs, against what is here. Pure: starts nothing."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from rlctl import plugins
from rlctl.device import Hardware
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.parallel import num_experts
from rlctl.plan import memory
from rlctl.recipe.derive import Resolved
from rlctl.sinks.chosen import missing_package

HOST_PROCESS_BYTES = 3 << 29  # resident size of a worker without its model: torch, transformers and vLLM imported


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Of one job."""

    memory: memory.Memory
    """Of the fullest rank."""
    cache_bytes: int
    """The engine's key-value cache on a host; on a GPU it takes what is free, so 0."""
    rank_bytes: int
    """At a rank's peak: on a GPU training, for engine and optimizer take turns; on a host all together."""
    node_bytes: int
    """Host memory of a node's processes where there are no GPUs; else 0."""


def needs(resolved: Resolved) -> Needs:
    """Memory of a recipe by plan/memory.py."""
    policy = resolved.recipe.policy
    generation, packing = policy.generation, policy.sequence_packing
    tokens = policy.train_micro_batch_size * policy.max_total_sequence_length
    if packing.enabled:
        assert packing.train_mb_tokens is not None
        tokens = packing.train_mb_tokens
    estimate = memory.estimate(
        resolved.model.config,
        resolved.layout,
        precision=policy.precision,
        backend=resolved.backend,
        max_tokens_per_microbatch=tokens,
        activation_checkpointing=policy.activation_checkpointing,
        reference="ref" in algorithm_needs(resolved),
        generation_tp=generation.vllm_cfg.tensor_parallel_size if generation.backend == "vllm" else 1,
    )
    if resolved.recipe.cluster.procs is None:
        return Needs(memory=estimate, cache_bytes=0, rank_bytes=estimate.training, node_bytes=0)
    cache = generation.vllm_cfg.kv_cache_bytes if generation.backend == "vllm" else 0
    copy = 0 if generation.backend is None else estimate.engine_weights
    engine = cache + copy + estimate.reference
    own = estimate.training - memory.UNMODELLED_BYTES + engine + HOST_PROCESS_BYTES
    return Needs(memory=estimate, cache_bytes=cache, rank_bytes=own, node_bytes=own * resolved.recipe.cluster.procs)


_PARTS = ("weights", "gradients", "main_weights", "optimizer", "gathered", "activations", "logits")


def breakdown(resolved: Resolved, need: Needs) -> dict[str, int]:
    """Bytes of the fullest rank by part; on a host the engine's and the process's own count as well."""
    parts = {name: getattr(need.memory, name) for name in _PARTS}
    if resolved.recipe.cluster.procs is None:
        return parts | {"not modelled": memory.UNMODELLED_BYTES}
    return parts | {
        "reference": need.memory.reference,
        "engine weights": 0 if resolved.recipe.policy.generation.backend is None else need.memory.engine_weights,
        "kv cache": need.cache_bytes,
        "process": HOST_PROCESS_BYTES,
    }


def fits(resolved: Resolved, need: Needs, *, memory_bytes: float) -> bool:
    """Whether a GPU of that size holds the fullest rank, in training and with the engine awake."""
    generation = resolved.recipe.policy.generation
    if generation.backend is None:
        return need.memory.training <= memory_bytes
    if generation.backend == "vllm":
        return need.memory.fits(memory_bytes, utilization=generation.vllm_cfg.gpu_memory_utilization)
    return max(need.memory.training, need.memory.resident + need.memory.engine_weights) <= memory_bytes


def algorithm_needs(resolved: Resolved) -> frozenset[str]:
    """What the algorithm asks to be computed, e.g. {"ref"}."""
    module = plugins.load("algorithm", resolved.recipe.algorithm)
    options = module.Config(grpo=resolved.recipe.advantage, loss_fn=resolved.recipe.loss_fn)
    return module.Algorithm(options).needs


def refuse(resolved: Resolved, need: Needs, hardware: Hardware) -> RlctlError | None:
    """Why this machine cannot run the job now; None when it can. The hint names the mend."""
    problem = _devices(resolved, hardware) or _memory(resolved, need, hardware)
    return problem or _unsupported(resolved) or _padding(resolved) or _packages(resolved)


def _unsupported(resolved: Resolved) -> RlctlError | None:
    """Layouts that the plan knows and Megatron-Core or the host's communication library cannot train."""
    layout = resolved.layout
    if resolved.backend != "megatron" or not num_experts(resolved.model.config):
        return None
    if layout.tp > 1 and not layout.sp:
        return RlctlError(
            f"Megatron-Core does not train experts with tensor parallelism ({layout.tp}) but no sequence parallelism",
            "set policy.megatron_cfg.sequence_parallel=true, or leave it out",
            exit_status=ENVIRONMENT,
        )
    if layout.ep > 1 and layout.etp > 1 and resolved.recipe.cluster.procs is not None:
        return RlctlError(
            f"on a host without GPUs, expert parallelism ({layout.ep}) and expert tensor parallelism ({layout.etp}) "
            "exclude each other: tokens per expert differ, and the host's all-gather takes equal sizes only",
            "set policy.megatron_cfg.expert_tensor_parallel_size=1",
            exit_status=ENVIRONMENT,
        )
    return None


def _padding(resolved: Resolved) -> RlctlError | None:
    """A microbatch's tokens must hold the longest sequence with the padding that the layout asks for."""
    policy, unit = resolved.recipe.policy, resolved.layout.pad_unit
    padded = -(-policy.max_total_sequence_length // unit) * unit
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        budget = getattr(policy.sequence_packing, key)
        if policy.sequence_packing.enabled and budget < padded:
            return RlctlError(
                f"policy.sequence_packing.{key} is {budget}; a sequence of {policy.max_total_sequence_length} tokens "
                f"takes {padded}, as {resolved.layout} pads to a multiple of {unit}",
                f"set policy.sequence_packing.{key} to {padded} or more, or make max_total_sequence_length a multiple",
                exit_status=ENVIRONMENT,
            )
    return None


def _devices(resolved: Resolved, hardware: Hardware) -> RlctlError | None:
    cluster = resolved.recipe.cluster
    if cluster.launcher == "env" or _elsewhere(resolved):
        return None
    gpus = cluster.gpus_per_node or 0
    if gpus > hardware.gpus:
        here = f"{hardware.gpus} here" if hardware.gpus else "none here"
        size = (
            f"{cluster.num_nodes * gpus} GPUs ({cluster.num_nodes} x {gpus})"
            if cluster.num_nodes > 1
            else f"{gpus} GPUs"
        )
        return RlctlError(
            f"this job needs {size}, there are {here}",
            "run the torchrun line above on such nodes, or try it small here with the line above",
            exit_status=ENVIRONMENT,
        )
    if cluster.num_nodes > 1 and cluster.launcher == "local":
        return RlctlError(
            f"this job needs {cluster.num_nodes} nodes, and the local launcher starts processes on this one only",
            "run the torchrun line above on every node, or use `--launcher slurm`",
            exit_status=ENVIRONMENT,
        )
    return None


def _elsewhere(resolved: Resolved) -> bool:
    """Whether the job is for machines that cannot be looked at from here."""
    return resolved.recipe.cluster.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ


def _memory(resolved: Resolved, need: Needs, hardware: Hardware) -> RlctlError | None:
    if need.node_bytes <= hardware.memory_bytes or _elsewhere(resolved):
        return None
    procs = resolved.recipe.cluster.procs
    return RlctlError(
        f"{procs} processes need about {need.node_bytes / 1e9:.1f} GB, "
        f"this host has {hardware.memory_bytes / 1e9:.1f} GB",
        "choose a smaller model or fewer processes, or run on GPUs with `--gpus-per-node`",
        exit_status=ENVIRONMENT,
    )


def _packages(resolved: Resolved) -> RlctlError | None:
    if resolved.recipe.policy.generation.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        return RlctlError(
            "vLLM is not installed, and policy.generation.backend is `vllm`",
            "install the extra `cpu` or `gpu`, or set policy.generation.backend=transformers",
            exit_status=ENVIRONMENT,
        )
    return None if _elsewhere(resolved) else missing_package(resolved.recipe.logger)
