"""Seconds of a training step, before any process starts: closed form, a few constants from measurements.

1. Matrix products, attention and memory-bound operations of one microbatch, each at its share of the data sheet's peak.
2. What the host and the links add to each layer: launches, tensor-, context- and expert-parallel traffic.
3. A step: microbatches through the pipeline, then what FSDP, data parallelism and the optimizer leave exposed.

It does not know memory, nor generation (rl.py). Constants: data/constants.yaml, by
scripts/benchmarks/calibrate_plan.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from rlctl.plan.hardware import Gpu
from rlctl.plan.shape import Shape

Kernels = Literal["fused", "compiled", "eager"]

# Not fitted; each with its source.
TOKENS_HALF = 256.0  # tokens at which a matrix product reaches half its peak: torch.matmul sweeps in data/measured.csv
MEMORY_SHARE = 0.85  # of the data sheet's bandwidth, by streaming kernels: STREAM-like figures of the vendors
AMPERE_ATTENTION = 0.45  # of peak, causal FLOPs: arXiv 2307.08691 (FlashAttention-2), A100, head size 128, 2k to 4k
BLACKWELL_ATTENTION = 0.47  # cuDNN and FA4 rows of data/measured.csv, forward and backward
OLD_KERNEL = {"ampere": 1.0, "hopper": 0.5, "blackwell": 0.2}
"""FlashAttention-2 against the hardware's own kernel: arXiv 2407.08608, figure 5; Blackwell gains nothing."""
ADAM_BYTES = 40.0  # read and written for each updated parameter: fp32 weight, gradient, moments, and the 16-bit copy
HOST_ADAM_PER_SECOND = 1.05e8  # parameters a GPU's share of the host updates: the rows of prime-rl with offload
LINK_SHARE = 0.8  # of NVLink or NIC, by large collectives: NCCL rows of data/measured.csv
EXPERT_EXPOSED = 0.7  # of expert-parallel traffic; DeepEP-like dispatch hides little of it
WIDTH_HALF = 500.0  # narrowest local dimension at which a product reaches half its peak: as TOKENS_HALF
HOST_DENSE = 3e-4  # seconds to launch a dense layer, forward and backward: 30 kernels at 10 us
EAGER = 1.5  # factor on `passes` where nothing is fused
STRAGGLER = 0.005  # of a step, for each doubling beyond 8 GPUs: sweeps over GPU counts in data/measured.csv
FP4_SHARE = 0.6  # NVFP4 recipes keep attention projections and the last layers in fp8


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Fitted on measured rows. Shares are of the data sheet's peak."""

    matmul_16: float = 0.78
    matmul_8: float = 0.62
    matmul_blackwell: float = 0.9
    """Factor on both, on Blackwell."""
    attention_hopper: float = 0.4
    passes: float = 30.0
    """Times that memory-bound operations stream the hidden state, in forward and backward of a layer."""
    expert_passes: float = 10.0
    """Times that they stream each expert's copy of it: routing, permutation, activation."""
    unfused: float = 0.85
    """Factor on the matrix products of frameworks without fused layers (torch.compile or eager)."""
    host_expert: float = 2e-3
    """Seconds that the host needs to launch one expert layer, forward and backward."""
    expert_tokens_half: float = 300.0
    """Tokens of one expert at which its product reaches half its peak."""
    tp_exposed: float = 0.2
    fsdp_exposed: float = 0.15
    decode_bandwidth: float = 0.7
    """Of memory, by decoding; generation only."""
    decode_host: float = 3e-3
    """Seconds of each decode step that are neither weights nor cache."""
    decode_expert: float = 0.5
    """Factor on the products of prefill and decoding, of a model with experts."""
    rl_overhead: float = 1.6
    """Factor on training and logprobs inside an RL step: uneven lengths, waking and offloading, host work."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One optimizer update of one model on one layout."""

    shape: Shape
    gpu: Gpu
    gpus: int
    microbatch_tokens: float
    """Of one microbatch on all its context-parallel ranks."""
    microbatches: int
    """Of each data-parallel rank in an update."""
    span: float
    """Mean length that a token attends over, twice: see Shape.score_flops."""
    precision: Literal["bfloat16", "fp8", "fp4"] = "bfloat16"
    kernels: Kernels = "fused"
    tp: int = 1
    sp: bool = True
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    shard: int = 1
    """Ranks over which FSDP shards the weights; 1: they are whole on each (Megatron's distributed optimizer)."""
    reshard: bool = True
    """FSDP frees the gathered weights after forward."""
    recompute: float = 0.0
    """Share of the layers whose forward is done again."""
    lora: bool = False
    host_optimizer: bool = False
    old_attention: bool = False
    forward_only: bool = False
    logit_bytes: float = 6.0
    """Kept for each logit: 6 fused, 14 to 16 plain, 0 where output layer and loss are one kernel."""

    @property
    def dp(self) -> int:
        """Data-parallel degree, at least 1."""
        return max(1, self.gpus // (self.tp * self.pp * self.cp))

    @property
    def tokens(self) -> float:
        """Of the update, on all ranks."""
        return self.microbatch_tokens * self.microbatches * self.dp


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an update, by what they are spent on; they add up to `total`."""

    matmul: float
    attention: float
    memory_bound: float
    """And what launching adds where the host is the slower."""
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    bubble: float
    fsdp: float
    gradients: float
    optimizer: float
    waiting: float
    """For the slowest of many GPUs."""

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(vars(self).values())


@functools.cache
def constants() -> Constants:
    """The fitted constants of this release."""
    return Constants(**yaml.safe_load((Path(__file__).parent / "data" / "constants.yaml").read_text())["constants"])


def step_time(job: Job, fitted: Constants) -> StepTime:
    """Seconds of one optimizer update (or, `forward_only`, of one pass over its tokens)."""
    matmul, attention, memory, launch = _compute(job, fitted)
    links = _tensor_parallel(job, fitted), _context_parallel(job, attention), _expert_parallel(job)
    recomputed = 0.0
    if not job.forward_only:
        forward = matmul * _layer_share(job) / (2.0 if job.lora else 3.0) + attention / 3.5 + memory / 3.0
        forward += (launch * _layer_share(job) + links[1]) / 3.5
        recomputed = job.recompute * (forward + links[0] / 2.0 + links[2] / 2.0)
    stage = matmul + attention + memory + launch + recomputed + sum(links)
    count, busy = job.microbatches, job.microbatches * stage
    parts = {
        "matmul": count * matmul,
        "attention": count * attention,
        "memory_bound": count * (memory + launch),
        "recompute": count * recomputed,
        "tensor_parallel": count * links[0],
        "context_parallel": count * links[1],
        "expert_parallel": count * links[2],
        "bubble": stage * (job.pp - 1) / job.vpp,
        "fsdp": _fsdp(job, busy, fitted),
        "gradients": 0.0 if job.forward_only else _gradients(job, stage),
        "optimizer": 0.0 if job.forward_only else _optimizer(job),
    }
    waiting = STRAGGLER * max(0.0, math.log2(job.gpus / 8)) * sum(parts.values())
    return StepTime(waiting=waiting, **parts)


def _layer_share(job: Job) -> float:
    outer = job.shape.vocabulary * job.shape.hidden
    return 1.0 - outer / job.shape.active


def matmul_peak(job: Job, fitted: Constants) -> float:
    """FLOP/s that large matrix products reach."""
    flops = job.gpu.flops
    kind = (
        job.precision if job.precision in flops else "fp8" if job.precision == "fp4" and "fp8" in flops else "bfloat16"
    )
    share = fitted.matmul_16 if kind == "bfloat16" else fitted.matmul_8 * (FP4_SHARE if kind == "fp4" else 1.0)
    if job.gpu.generation == "blackwell":
        share *= fitted.matmul_blackwell
    return flops[kind] * share * (1.0 if job.kernels == "fused" else fitted.unfused)


def _compute(job: Job, fitted: Constants) -> tuple[float, float, float, float]:
    """Seconds of a microbatch on the slowest pipeline stage: products, attention, memory-bound, what launching adds."""
    shape, tokens = job.shape, job.microbatch_tokens / job.cp
    peak = matmul_peak(job, fitted) * tokens / (tokens + TOKENS_HALF)
    narrow = min(shape.hidden, shape.heads * shape.head_size / job.tp, (shape.ffn or shape.hidden * job.tp) / job.tp)
    dense = 2.0 * shape.dense_parameters * tokens / job.tp / (peak * narrow / (narrow + WIDTH_HALF))
    logits_peak = tokens / (tokens + TOKENS_HALF) * job.gpu.flops["bfloat16"] * fitted.matmul_16
    logits = 2.0 * shape.vocabulary * shape.hidden * tokens / job.tp / logits_peak
    routed = _routed(job, fitted, tokens)
    passes = 1.0 if job.forward_only else 2.0 if job.lora else 3.0
    uneven = shape.layers % job.pp == 0 and job.pp > 1  # else the layers leave room for the output layer
    matmul = passes * ((dense + routed) / job.pp + logits / (1 if uneven else job.pp))
    attention = (1.0 if job.forward_only else 3.5) * shape.score_flops(job.span) * tokens / job.tp / job.pp
    attention /= job.gpu.flops["bfloat16"] * _attention_share(job, fitted)
    factor = (EAGER if job.kernels == "eager" else 1.0) * (1.15 if job.precision != "bfloat16" else 1.0)
    factor *= (1.0 if job.forward_only else 3.0) / 3.0 / (job.tp if job.sp else 1)
    copies = fitted.expert_passes * shape.moe_layers * shape.top_k * (shape.expert_hidden or shape.hidden)
    streams = 2.0 * tokens * factor * (fitted.passes * shape.layers * shape.hidden + copies) / job.pp
    memory = streams / (MEMORY_SHARE * job.gpu.bandwidth)
    host = (shape.layers - shape.moe_layers) * HOST_DENSE + shape.moe_layers * fitted.host_expert
    host *= (0.4 if job.forward_only else 1.0) / job.pp
    device = matmul + attention + memory + _context_parallel(job, attention)  # hidden by launching, like the rest
    return matmul, attention, memory, (device**4 + host**4) ** 0.25 - device


def _routed(job: Job, fitted: Constants, tokens: float) -> float:
    """Forward seconds of all expert layers."""
    shape = job.shape
    if not shape.moe_layers:
        return 0.0
    unique = tokens / job.tp * job.etp
    each = unique * shape.top_k * job.ep / shape.experts
    width = shape.expert_ffn / job.etp
    peak = matmul_peak(job, fitted) * each / (each + fitted.expert_tokens_half) * width / (width + WIDTH_HALF)
    return 2.0 * shape.routed_active * unique / job.etp / peak


def _attention_share(job: Job, fitted: Constants) -> float:
    share = {"ampere": AMPERE_ATTENTION, "hopper": fitted.attention_hopper, "blackwell": BLACKWELL_ATTENTION}
    own = share[job.gpu.generation]
    small = min(1.0, job.shape.head_size / 128) ** 0.5
    return own * small * (OLD_KERNEL[job.gpu.generation] if job.old_attention else 1.0)


def group_bandwidth(gpu: Gpu, *, members_per_domain: float, inside: bool) -> float:
    """Bytes/s of a collective: NVLink inside a domain, else all the NICs of the members that share one."""
    link = gpu.nvlink if inside else min(gpu.nvlink, gpu.nic * max(1.0, members_per_domain))
    return LINK_SHARE * link


def _tensor_parallel(job: Job, fitted: Constants) -> float:
    """All-gathers and reduce-scatters of the hidden state, a microbatch: exposed part only."""
    if job.tp == 1:
        return 0.0
    shape, tokens = job.shape, job.microbatch_tokens / job.cp
    blocks = 2.0 * shape.layers - (shape.moe_layers if job.etp == 1 else 0)  # attention, feed-forward
    volume = blocks / job.pp * 2 * 2.0 * shape.hidden * tokens * (job.tp - 1) / job.tp
    link = group_bandwidth(job.gpu, members_per_domain=job.gpu.domain, inside=job.tp <= job.gpu.domain)
    exposed = fitted.tp_exposed * (1.0 if job.kernels == "fused" else 3.0) if job.tp <= job.gpu.domain else 1.0
    return exposed * volume * (1.0 if job.forward_only else 2.0) / link


def _context_parallel(job: Job, attention: float) -> float:
    """Keys and values around the ring, where attention does not hide them."""
    if job.cp == 1:
        return 0.0
    shape, tokens = job.shape, job.microbatch_tokens / job.cp
    volume = (job.cp - 1) * 4.0 * shape.groups * shape.head_size * tokens / job.tp * shape.attending / job.pp
    inside = job.tp * job.cp <= job.gpu.domain
    link = group_bandwidth(job.gpu, members_per_domain=max(1, job.gpu.domain // job.tp), inside=inside)
    seconds = volume * (1.0 if job.forward_only else 3.0) / link
    return max(0.0, seconds - attention) + 0.1 * seconds


def _expert_parallel(job: Job) -> float:
    """Tokens to their experts and back."""
    if job.ep == 1 or not job.shape.moe_layers:
        return 0.0
    shape, gpu = job.shape, job.gpu
    tokens = job.microbatch_tokens / job.cp / job.tp
    size = (shape.expert_hidden or shape.hidden) * (1.5 if job.precision != "bfloat16" else 2.0)
    domains = max(1.0, job.ep * job.etp / gpu.domain)
    near = shape.top_k * (job.ep - 1) / job.ep / gpu.nvlink
    far = min(shape.top_k, domains) * (1 - 1 / domains) / gpu.nic if domains > 1 else 0.0
    directions = 2.0 if job.forward_only else 4.0
    layers = shape.moe_layers / job.pp
    return EXPERT_EXPOSED * directions * layers * tokens * size * max(near, far) / LINK_SHARE


def _local(job: Job) -> tuple[float, float]:
    """Parameters of a rank before FSDP: dense, routed."""
    shape = job.shape
    dense = (shape.dense_parameters / job.pp + shape.outer_parameters / (2 if job.pp > 1 else 1)) / job.tp
    return dense, shape.routed_parameters / (job.pp * job.ep * job.etp)


def _fsdp(job: Job, busy: float, fitted: Constants) -> float:
    """Gathers of the weights and scatters of their gradients that computation does not hide, a step."""
    if job.shard == 1:
        return 0.0
    dense, routed = _local(job)
    experts_shared = job.shard / job.ep
    volume = 2.0 * (dense + (routed if experts_shared > 1 else 0.0))
    link = group_bandwidth(
        job.gpu, members_per_domain=job.gpu.domain / job.tp, inside=job.shard * job.tp <= job.gpu.domain
    )
    gathers = job.microbatches * (1.0 if job.forward_only else 2.0) if job.reshard else 1.0
    scatters = 0.0 if job.forward_only or job.lora else job.microbatches * (1.0 if job.reshard else 0.5)
    seconds = volume * (gathers + scatters) / link
    return max(0.0, seconds - 0.9 * busy) + fitted.fsdp_exposed * min(seconds, 0.9 * busy)


def _gradients(job: Job, stage: float) -> float:
    """Reduce-scatter of gradients and all-gather of weights, once, behind the last microbatch at best."""
    if job.shard > 1 or job.dp * job.cp == 1 or job.lora:
        return 0.0
    dense, routed = _local(job)
    members = job.gpu.domain / job.tp
    link = group_bandwidth(job.gpu, members_per_domain=members, inside=job.dp * job.cp * job.tp <= job.gpu.domain)
    seconds = 6.0 * (dense + routed) / link
    return max(0.0, seconds - 0.7 * stage * min(job.vpp * job.pp, 2)) + 0.2 * min(seconds, 0.7 * stage)


def _optimizer(job: Job) -> float:
    """AdamW on this rank's share of the parameters."""
    if job.lora:
        return 0.0
    dense, routed = _local(job)
    replicas = job.shard if job.shard > 1 else job.dp * job.cp
    own = dense / max(1, replicas) + routed / max(1.0, replicas * job.tp / (job.ep * job.etp))
    if job.host_optimizer:
        return own / HOST_ADAM_PER_SECOND
    return own * ADAM_BYTES / (MEMORY_SHARE * job.gpu.bandwidth)
