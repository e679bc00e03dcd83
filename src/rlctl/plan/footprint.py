"""Bytes on the fullest GPU in closed form: for thousands of layouts, and for models that rlctl does not train.

The same accounting as memory.py (which is exact for rlctl's own layers and decides whether a job fits), with norms left
out, fused layers, and the options that other frameworks have.
"""

from __future__ import annotations

from rlctl.plan.steptime import Job

CONTEXT_BYTES = 1.5e9  # CUDA context and communicators


def weights_and_optimizer(job: Job) -> float:
    """Weights, gradients and AdamW state of a rank.

    Megatron's distributed optimizer: 2 + 4 bytes for each local parameter, 12 sharded over its replicas. FSDP: 16,
    sharded.
    """
    dense, routed = local_parameters(job)
    if job.lora:
        return 2.0 * (dense + routed) / (job.shard if job.shard > 1 else 1)
    if job.shard > 1:
        state = 8.0 if job.host_optimizer else 16.0
        return state * (dense / job.shard + routed / max(1.0, job.shard / job.ep)) + _gathered(job)
    replicas = max(1, job.dp * job.cp)
    expert_replicas = max(1.0, job.gpus / (job.pp * job.ep * job.etp))
    state = 0.0 if job.host_optimizer else 12.0
    return 6.0 * (dense + routed) + state * (dense / replicas + routed / expert_replicas)


def local_parameters(job: Job) -> tuple[float, float]:
    """Parameters of the fullest rank before FSDP: dense ones (the embedding is on the first stage), routed ones."""
    shape = job.shape
    outer = shape.outer_parameters
    if job.pp > 1:
        outer = shape.vocabulary * shape.hidden
    layers = shape.dense_parameters / job.pp
    expert_layers = -(-shape.moe_layers // job.pp)
    return (layers + outer) / job.tp, expert_layers * shape.experts * shape.expert_parameters / (job.ep * job.etp)


def _gathered(job: Job) -> float:
    """Unsharded at one time: two layers and the outer tensors; all of them with reshard off."""
    dense, routed = local_parameters(job)
    outer = job.shape.outer_parameters / job.tp
    if not job.reshard:
        return 2.0 * (dense + (routed if job.shard > job.ep else 0.0))
    experts = routed if job.shard > job.ep else 0.0
    return 2.0 * outer + 2 * 2.0 * (dense - outer + experts) / job.shape.layers


def activations(job: Job, *, recompute: float) -> float:
    """Kept for backward by the fullest stage (the first: it has the most microbatches in flight), with its logits.

    Args:
        job: the layout and the microbatch.
        recompute: share of the layers that keep their input only.
    """
    shape, tokens = job.shape, job.microbatch_tokens / job.cp
    hidden = shape.hidden / (job.tp if job.sp else 1)
    value = shape.value_size or shape.head_size
    attention = shape.heads * (2.0 * shape.head_size + 2.0 * value) / job.tp
    attention += 0.0 if shape.kv_rank else 4.0 * shape.groups * shape.head_size / job.tp
    gates = 3.0 if shape.gated else 2.0
    dense_layers = shape.layers - shape.moe_layers if shape.ffn else 0
    wide = dense_layers * 2.0 * gates * shape.ffn / job.tp
    copies = shape.top_k * job.etp / job.tp
    expert = copies * 2.0 * ((shape.expert_hidden or shape.hidden) + gates * shape.expert_ffn / job.etp)
    wide += shape.moe_layers * (expert + 2.0 * gates * shape.shared_ffn / job.tp)
    whole = 8.0 * hidden * shape.layers + attention * shape.attending + wide + 6.0 * shape.hidden * shape.state_layers
    in_flight = min(job.pp * (1.0 + (job.pp - 1) / (job.pp * job.vpp) if job.vpp > 1 else 1.0), job.microbatches)
    kept = in_flight / job.pp * ((1.0 - recompute) * whole + recompute * 2.0 * hidden * shape.layers)
    alive = whole / shape.layers if recompute else 0.0
    logits = job.logit_bytes * shape.vocabulary / job.tp if job.pp == 1 else 0.0
    return tokens * (kept + alive + logits)


def peak(job: Job, *, recompute: float | None = None) -> float:
    """Bytes at the peak of training."""
    share = job.recompute if recompute is None else recompute
    return weights_and_optimizer(job) + activations(job, recompute=share) + CONTEXT_BYTES


def least_recompute(job: Job, *, limit: float) -> float:
    """The smallest share of layers, in eighths, whose recompute makes the job fit; 1 if none does."""
    fixed = weights_and_optimizer(job) + CONTEXT_BYTES
    for eighth in range(9):
        if fixed + activations(job, recompute=eighth / 8) <= limit:
            return eighth / 8
    return 1.0
