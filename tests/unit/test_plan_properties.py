"""The performance model's monotonicity, over random jobs."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.models.resolve import resolve
from rlctl.plan import rl
from rlctl.plan.hardware import gpu, names
from rlctl.plan.shape import from_config
from rlctl.plan.steptime import Job, constants, step_time

FITTED = constants()
SHAPES = {name: from_config(resolve(name).config) for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b")}
SLACK = 1 + 1e-9


@st.composite
def jobs(draw) -> Job:
    """Layouts that divide the models; FSDP or the distributed optimizer."""
    name = draw(st.sampled_from(sorted(SHAPES)))
    tp, pp, cp = (draw(st.sampled_from(s)) for s in ((1, 2, 4), (1, 2, 4), (1, 2)))
    ep = draw(st.sampled_from((1, 8))) if SHAPES[name].experts else 1
    is_fsdp = draw(st.booleans())
    if is_fsdp:
        pp = cp = 1
    gpus = tp * pp * cp * draw(st.sampled_from((1, 2, 8, 16)))
    tokens = draw(st.integers(512, 32768))
    return Job(
        shape=SHAPES[name], gpu=gpu(draw(st.sampled_from(names()))), gpus=gpus, microbatch_tokens=float(tokens),
        microbatches=draw(st.integers(1, 64)), span=float(draw(st.integers(256, tokens))), tp=tp, pp=pp, cp=cp,
        ep=ep if gpus % (ep * pp) == 0 else 1, shard=gpus // tp if is_fsdp else 1,
        kernels=draw(st.sampled_from(("fused", "compiled", "eager"))), recompute=draw(st.sampled_from((0.0, 0.5, 1.0))),
        forward_only=draw(st.booleans()),
    )  # fmt: skip


def seconds(job: Job) -> float:
    return step_time(job, FITTED).total


@settings(deadline=None, max_examples=200)
@given(jobs(), st.floats(1.01, 4.0))
def test_more_tokens_never_take_less_time(job, factor):
    longer = dataclasses.replace(job, microbatch_tokens=factor * job.microbatch_tokens)
    assert seconds(longer) * SLACK >= seconds(job)
    more = dataclasses.replace(job, microbatches=job.microbatches + 1)
    assert seconds(more) > seconds(job)
    spread = dataclasses.replace(job, span=factor * job.span)
    assert seconds(spread) * SLACK >= seconds(job)


@settings(deadline=None, max_examples=200)
@given(jobs(), st.sampled_from(("bandwidth", "nvlink", "nic")), st.floats(1.01, 8.0))
def test_a_faster_memory_or_link_never_takes_more_time(job, field, factor):
    faster = dataclasses.replace(job, gpu=dataclasses.replace(job.gpu, **{field: factor * getattr(job.gpu, field)}))
    assert seconds(faster) <= seconds(job) * SLACK


@settings(deadline=None, max_examples=200)
@given(jobs(), st.floats(1.01, 8.0))
def test_a_faster_processor_never_takes_more_time(job, factor):
    flops = {name: factor * value for name, value in job.gpu.flops.items()}
    faster = dataclasses.replace(job, gpu=dataclasses.replace(job.gpu, flops=flops))
    assert seconds(faster) <= seconds(job) * SLACK


@settings(deadline=None, max_examples=200)
@given(jobs())
def test_twice_the_data_parallel_ranks_halve_the_computation(job):
    """Of the same tokens; traffic, waiting and the optimizer are on top."""
    even = dataclasses.replace(job, microbatches=2 * job.microbatches)
    double = dataclasses.replace(job, gpus=2 * job.gpus, shard=2 * job.shard if job.shard > 1 else 1)
    assert double.tokens == even.tokens
    compute = lambda one: step_time(one, FITTED).matmul + step_time(one, FITTED).attention  # noqa: E731
    assert 2 * compute(double) <= compute(even) * SLACK
    assert compute(even) <= 2 * compute(double) * SLACK


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(sorted(SHAPES)), st.integers(1, 512), st.integers(16, 4096), st.sampled_from((1, 2, 4)),
    st.sampled_from(names()), st.floats(1.01, 3.0),
)  # fmt: skip
def test_a_rollout_phase_grows_with_sequences_and_lengths_and_falls_with_bandwidth(
    name, sequences, response, tp, kind, factor
):
    card = gpu(kind)
    engine = rl.Engine(shape=SHAPES[name], gpu=card, tp=tp, memory_bytes=0.9 * card.memory_bytes)

    def phase(count: int = sequences, mean: float = response, by: rl.Engine = engine) -> float | None:
        found = rl.generate(
            by, rl.Lengths(prompt=128, response=mean, limit=4 * mean), sequences=count, prompts=1, fitted=FITTED
        )
        return None if found is None else found.total

    base = phase()
    if base is None:
        return
    assert phase(mean=factor * response) is None or phase(mean=factor * response) >= base
    faster = dataclasses.replace(engine, gpu=dataclasses.replace(card, bandwidth=factor * card.bandwidth))
    assert phase(by=faster) <= base * SLACK
    assert phase(count=2 * sequences) >= base / SLACK
