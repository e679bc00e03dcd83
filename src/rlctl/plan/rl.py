"""Seconds of a whole RL step: generation with the tail of its lengths, logprobs, training, weight sync.

1. Response lengths are quantiles of a log-normal that is cut at the limit and has the mean asked for.
2. An engine decodes them in as many slots as its cache holds; a slot is refilled until the queue is empty. Then the
   batch shrinks, and a step tends to the time of reading the weights: the tail.
3. Training and logprobs are steptime.py's, on packed microbatches.

It does not know rewards and environments: their time is the user's own.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlctl.plan import rows
from rlctl.plan.hardware import Gpu
from rlctl.plan.shape import Shape
from rlctl.plan.steptime import LINK_SHARE, Constants, Job, step_time

SPREAD = 1.0  # standard deviation of the log of response lengths, before the cut: reasoning rollouts are this uneven
PREFILL_SHARE = 0.5  # of the peak that prefill and large decode batches reach: TensorRT-LLM rows of data/measured.csv
MOST_SEQUENCES = 1024  # vLLM's own limit of concurrent sequences on a data-centre GPU
ENGINE_RESERVE = 2e9  # bytes for the engine's activations
ALL_REDUCE_SECONDS = 8e-6  # latency of a small all-reduce inside a domain
PACKING_SHARE = 0.93  # of a packed microbatch that is tokens
SYNC_START = 1.0  # seconds to wake the engine, collect garbage and reset its caches
SYNC_TENSOR = 5e-4  # seconds for each Hugging Face tensor of a sync: refit rows of data/measured.csv


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One generation engine."""

    shape: Shape
    gpu: Gpu
    tp: int = 1
    memory_bytes: float
    """Its share of each GPU."""
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    """Of one element."""
    most_sequences: int = MOST_SEQUENCES

    def slots(self, tokens: float) -> int:
        """Sequences of that many tokens that decode at one time; 0 when the weights do not fit."""
        free = self.tp * (self.memory_bytes - ENGINE_RESERVE) - self.weight_bytes * self.shape.parameters
        return max(0, min(self.most_sequences, int(free / (self.cache_bytes * self.shape.cache_elements * tokens))))

    def step_seconds(self, batch: float, *, context: float, fitted: Constants) -> float:
        """Of one decode step.

        Args:
            batch: sequences.
            context: tokens that each attends to, on average.
            fitted: constants.
        """
        shape, gpu = self.shape, self.gpu
        link = self.tp * gpu.bandwidth * fitted.decode_bandwidth
        dense = self.weight_bytes * (shape.dense_parameters + shape.vocabulary * shape.hidden)
        touched = 1.0 - (1.0 - shape.top_k / shape.experts) ** batch if shape.experts else 0.0
        routed = self.weight_bytes * shape.routed_parameters * touched
        products = 2.0 * shape.active * batch / (self.tp * self._peak(fitted))
        cache = self.cache_bytes * shape.cache_elements * batch * context / link
        reduce = 0.0
        if self.tp > 1:
            reduce = 2 * shape.layers * (ALL_REDUCE_SECONDS + 4.0 * batch * shape.hidden / (LINK_SHARE * gpu.nvlink))
        return max((dense + routed) / link, products) + cache + reduce + fitted.decode_host

    def prefill_seconds(self, tokens: float, *, span: float, fitted: Constants) -> float:
        """Of that many prompt tokens."""
        flops = 2.0 * self.shape.active + self.shape.score_flops(span)
        return tokens * flops / (self.tp * self._peak(fitted))

    def _peak(self, fitted: Constants) -> float:
        flops = self.gpu.flops
        share = PREFILL_SHARE * (fitted.decode_expert if self.shape.experts else 1.0)
        return share * (flops["fp8"] if self.weight_bytes < 2 and "fp8" in flops else flops["bfloat16"])


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of a step's rollouts, in tokens."""

    prompt: float
    response: float
    """The mean."""
    limit: float
    """Of a response."""

    @property
    def total(self) -> float:
        """Mean of prompt and response."""
        return self.prompt + self.response

    @functools.lru_cache(maxsize=64)  # noqa: B019  frozen and small; a search asks for the same thousands of times
    def sample(self, count: int) -> tuple[float, ...]:
        """That many response lengths, sorted: quantiles of the cut log-normal, with the mean `response`."""
        places = [statistics.NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
        if self.response >= self.limit:
            return (self.limit,) * count
        low, high = math.log(self.response) - 3.0, math.log(self.limit) + 3.0
        for _ in range(40):
            middle = (low + high) / 2
            mean = sum(min(self.limit, math.exp(middle + SPREAD * z)) for z in places) / count
            low, high = (middle, high) if mean < self.response else (low, middle)
        return tuple(max(1.0, min(self.limit, math.exp(low + SPREAD * z))) for z in places)

    @functools.lru_cache(maxsize=64)  # noqa: B019  see `sample`
    def span(self, count: int) -> float:
        """Mean of squares of total lengths over their mean: what attention pays (Shape.score_flops)."""
        totals = [self.prompt + n for n in self.sample(min(count, 256))]
        return sum(n * n for n in totals) / sum(totals)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Seconds of the rollout phase."""

    prefill: float
    decode: float
    tail: float
    """The part of `decode` in which fewer than half of the slots are busy."""
    slots: int
    """Sequences that an engine decodes at one time, at most."""

    @property
    def total(self) -> float:
        """Seconds."""
        return self.prefill + self.decode


def generate(
    engine: Engine, lengths: Lengths, *, sequences: int, prompts: float, fitted: Constants, engines: int = 1
) -> Generation | None:
    """Simulate the engine that ends last; None when its weights and one sequence do not fit.

    Args:
        engine: one of them.
        lengths: of the rollouts.
        sequences: of this engine.
        prompts: of this engine, each prefilled once.
        fitted: constants.
        engines: how many share the rollouts; the longest of all is this one's.
    """
    slots = min(sequences, engine.slots(lengths.total))
    if slots < 1:
        return None
    drawn = lengths.sample(sequences * engines)[::-engines]
    stride = next(s for s in range(int(0.618 * sequences) or 1, 2 * sequences + 2) if math.gcd(s, sequences) == 1)
    waiting = [drawn[i * stride % sequences] for i in range(sequences)]
    context = lengths.prompt + lengths.response / 2
    busy = [waiting[i] for i in range(slots)]
    heapq.heapify(busy)
    following, step, decode, tail = slots, 0.0, 0.0, 0.0
    seconds: dict[int, float] = {}
    while busy:
        batch, end = len(busy), heapq.heappop(busy)
        if batch not in seconds:
            seconds[batch] = engine.step_seconds(batch, context=context, fitted=fitted)
        spent = (end - step) * seconds[batch]
        step, decode = end, decode + spent
        tail += spent if batch < slots / 2 else 0.0
        if following < sequences:
            heapq.heappush(busy, step + waiting[following])
            following += 1
    prefill = engine.prefill_seconds(prompts * lengths.prompt, span=lengths.prompt, fitted=fitted)
    return Generation(prefill=prefill, decode=decode, tail=tail, slots=slots)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one RL step by phase."""

    generation: Generation
    logprobs: float
    training: float
    sync: float
    overlapped: bool
    """Generation and training run at one time, on GPUs of their own."""

    @property
    def total(self) -> float:
        """Seconds."""
        learning = self.logprobs + self.training
        if self.overlapped:
            return max(self.generation.total, learning) + self.sync
        return self.generation.total + learning + self.sync


@dataclass(frozen=True, kw_only=True)
class Work:
    """One RL step."""

    job: Job
    """An update; `microbatches` is derived from the tokens."""
    engine: Engine
    lengths: Lengths
    sequences: int
    prompts: int
    updates: int
    logprob_passes: int
    """Forward passes over all tokens: the policy's own, the reference's."""
    generation_gpus: int
    overlapped: bool = False


def rl_step(work: Work, fitted: Constants) -> Step | None:
    """Seconds of one step; None when the engine does not hold the model."""
    engines = max(1, work.generation_gpus // work.engine.tp)
    generation = generate(
        work.engine,
        work.lengths,
        sequences=-(-work.sequences // engines),
        prompts=work.prompts / engines,
        fitted=fitted,
        engines=engines,
    )
    if generation is None:
        return None
    update = packed(work.job, work.lengths, sequences=work.sequences // work.updates)
    forward = dataclasses.replace(packed(work.job, work.lengths, sequences=work.sequences), forward_only=True)
    return Step(
        generation=generation,
        logprobs=fitted.rl_overhead * work.logprob_passes * step_time(forward, fitted).total,
        training=fitted.rl_overhead * work.updates * step_time(update, fitted).total,
        sync=sync_seconds(work.job),
        overlapped=work.overlapped,
    )


def packed(job: Job, lengths: Lengths, *, sequences: int) -> Job:
    """The job with as many microbatches as packing makes of that many sequences."""
    tokens = sequences * lengths.total / job.dp
    count = max(1, math.ceil(tokens / (PACKING_SHARE * job.microbatch_tokens)))
    return dataclasses.replace(job, microbatches=count, microbatch_tokens=tokens / count, span=lengths.span(sequences))


def sync_seconds(job: Job) -> float:
    """The policy's weights to the engines: every rank gathers all of them, tensor by tensor."""
    shape, gpu = job.shape, job.gpu
    link = gpu.nvlink if job.gpus <= gpu.domain else min(gpu.nvlink, gpu.nic * gpu.domain)
    tensors = 9 * (shape.layers - shape.moe_layers) + shape.moe_layers * (7 + 3 * shape.experts)
    return SYNC_START + tensors * SYNC_TENSOR + 2.0 * shape.parameters / (LINK_SHARE * link)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """An engine that never runs out of requests: a generation row."""

    engine: Engine
    prompt: int
    response: int


def predicted_rate(work: Throughput, fitted: Constants) -> float:
    """Output tokens/s of a GPU; 0 when the model does not fit."""
    engine = work.engine
    slots = engine.slots(work.prompt + work.response / 2)
    if not slots:
        return 0.0
    step = engine.step_seconds(slots, context=work.prompt + work.response / 2, fitted=fitted)
    request = work.response * step / slots + engine.prefill_seconds(work.prompt, span=work.prompt, fitted=fitted)
    return work.response / request / engine.tp


def throughput_of(row: rows.Row) -> Throughput:
    """A generation row.

    Raises:
        rows.Unpredictable: its lengths, model or GPU are not known.
    """
    match = re.search(r"ISL/OSL=(\d+)/(\d+)", row["notes"])
    if not match:
        raise rows.Unpredictable("input and output lengths are not given (ISL/OSL=A/B in `notes`)")
    size = 1.0 if row["precision"] == "FP8" else 2.0
    engine = Engine(
        shape=rows.shape_of(row), gpu=rows.gpu_of(row), tp=rows.number(row, "tp", 1), weight_bytes=size,
        cache_bytes=size, memory_bytes=0.9 * rows.gpu_of(row).memory_bytes, most_sequences=2048,
    )  # fmt: skip
    work = Throughput(engine=engine, prompt=int(match[1]), response=int(match[2]))
    if not engine.slots(work.prompt + work.response):
        raise rows.Unpredictable("the model does not fit")
    return work


def work_of(row: rows.Row) -> Work:
    """A GRPO row: a step of `gbs`-sized updates over G-GBS rollouts of G-avg-seqlen tokens.

    A row that is k steps off policy splits its GPUs in halves: rows do not say how.

    Raises:
        rows.Unpredictable: an input is absent.
    """
    said = {k: int(v.replace(",", "")) for k, v in re.findall(r"(G-avg-seqlen|G-GBS|gen_tp)=([\d,]*\d)", row["notes"])}
    if "alg=GRPO" not in row["notes"]:
        raise rows.Unpredictable("only single-turn GRPO steps are predicted (`alg=GRPO` in `notes`)")
    absent = [name for name in ("G-avg-seqlen", "G-GBS") if name not in said]
    if absent:
        raise rows.Unpredictable(f"{' and '.join(absent)} is not given in `notes`")
    gpus, overlapped = rows.number(row, "n_gpus"), bool(re.search(r"step Off", row["notes"]))
    share = gpus // 2 if overlapped else gpus
    job = rows.training_job({**row, "n_gpus": str(share)})
    prompt = min(150.0, said["G-avg-seqlen"] / 2)
    lengths = Lengths(prompt=prompt, response=said["G-avg-seqlen"] - prompt, limit=rows.number(row, "seq_len") - prompt)
    tp = said["gen_tp"] if said.keys() >= {"gen_tp"} else 1
    memory = (0.85 if overlapped else 0.6) * job.gpu.memory_bytes
    engine = Engine(shape=job.shape, gpu=job.gpu, tp=tp, memory_bytes=memory)
    return Work(
        job=job, engine=engine, lengths=lengths, sequences=said["G-GBS"], prompts=max(1, said["G-GBS"] // 32),
        updates=max(1, said["G-GBS"] // rows.number(row, "gbs")), logprob_passes=2, generation_gpus=share,
        overlapped=overlapped,
    )  # fmt: skip


def usable(table: Sequence[rows.Row]) -> list[tuple[rows.Row, Throughput, float]]:
    """Generation rows with a measurement."""
    found = []
    for row in table:
        if row["workload"] == "generation" and row["tokens_per_s_per_gpu"].strip():
            try:
                found.append((row, throughput_of(row), float(row["tokens_per_s_per_gpu"])))
            except rows.Unpredictable:
                continue
    return found


def whole_steps(table: Sequence[rows.Row]) -> Mapping[str, tuple[Work, float]]:
    """GRPO rows with a measurement, by row_id: the work and the measured seconds."""
    found = {}
    for row in table:
        if row["workload"] == "grpo_step" and row["step_time_s"].strip():
            try:
                found[row["row_id"]] = (work_of(row), float(row["step_time_s"]))
            except rows.Unpredictable:
                continue
    return found
