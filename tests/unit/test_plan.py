"""The performance model: against published formulas and counts, and properties that hold on any hardware."""

from __future__ import annotations

import dataclasses
import time

import pytest

from rlctl.models.resolve import catalogue, num_parameters, resolve
from rlctl.parallel import Layout
from rlctl.plan import footprint, memory, rl, search
from rlctl.plan.hardware import gpu, names
from rlctl.plan.predict import Question
from rlctl.plan.shape import from_config, published
from rlctl.plan.steptime import Job, constants, step_time

FITTED = constants()
LLAMA_70B = from_config(resolve("llama-3.1-70b").config)
QWEN_MOE = from_config(resolve("qwen3-30b-a3b").config)


def job(**changes) -> Job:
    settings = {
        "shape": LLAMA_70B, "gpu": gpu("h100"), "gpus": 64, "microbatch_tokens": 8192.0, "microbatches": 16,
        "span": 8192.0, "tp": 4, "pp": 4,
    }  # fmt: skip
    return Job(**(settings | changes))


def seconds(**changes) -> float:
    return step_time(job(**changes), FITTED).total


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_parameter_counts_are_those_of_the_weight_rules_but_for_norms_and_biases(name):
    config = catalogue()[name]["config"]
    assert from_config(config).parameters == pytest.approx(num_parameters(config), rel=3e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-v3", 671), ("kimi-k2", 1026), ("qwen3-235b-a22b", 235.1), ("gpt-oss-120b", 116.8), ("grok1-314b", 314),
     ("llama3.1-405b", 405.8), ("nemotron3-nano-30b-a3b", 31.6), ("nemotron3-super-120b-a12b", 120),
     ("gpt3-175b", 175), ("nemotron4-15b", 15.6), ("intellect-3", 106), ("mpt-7b", 6.66)],
)  # fmt: skip
def test_published_models_have_their_published_size(name, billions):
    assert published(name).parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_training_flops_of_llama_are_megatrons():
    """Megatron-LM's formula for a GQA, gated model: 12 L h^2 ((1 + g/n + s/(2h)) + 3f/(2h) + V/(2Lh)) a token."""
    h, layers, f, v, s, ratio = 8192, 80, 28672, 128256, 8192, 8 / 64
    theirs = 12 * layers * h * h * ((1 + ratio + s / (2 * h)) + 1.5 * f / h + v / (2 * layers * h))
    assert LLAMA_70B.training_flops(s) == pytest.approx(theirs, rel=0.01)


def test_weights_and_optimizer_are_those_of_the_exact_count():
    layout = Layout(world=64, tp=4, sp=True, pp=4)
    exact = memory.estimate(
        resolve("llama-3.1-70b").config, layout, precision="bfloat16", backend="megatron",
        max_tokens_per_microbatch=8192, activation_checkpointing=False, reference=False,
    )  # fmt: skip
    total = exact.weights + exact.gradients + exact.main_weights + exact.optimizer
    assert footprint.weights_and_optimizer(job()) == pytest.approx(total, rel=0.01)


def test_fsdp_state_falls_with_the_ranks():
    def state(ranks: int) -> float:
        one = job(gpus=ranks, tp=1, pp=1, shard=ranks)
        return footprint.weights_and_optimizer(one) - footprint._gathered(one)

    assert state(16) == pytest.approx(2 * state(32))


def test_more_microbatches_never_lower_the_throughput_and_dissolve_the_bubble():
    rates = [job(microbatches=m).tokens / seconds(microbatches=m) for m in (4, 8, 16, 32, 64)]
    assert rates == sorted(rates)
    bubble = [step_time(job(microbatches=m), FITTED).bubble / seconds(microbatches=m) for m in (4, 32, 1024)]
    assert bubble[0] > bubble[1] > bubble[2] < 0.005
    assert step_time(job(vpp=20), FITTED).bubble == pytest.approx(step_time(job(), FITTED).bubble / 20)


def test_recompute_costs_time_and_saves_memory():
    assert seconds(recompute=1.0) > seconds(recompute=0.5) > seconds()
    assert footprint.activations(job(), recompute=1.0) < footprint.activations(job(), recompute=0.0)


def test_a_faster_part_never_slows_a_step():
    base = gpu("h100")
    for field in ("bandwidth", "nvlink", "nic"):
        faster = dataclasses.replace(base, **{field: 2 * getattr(base, field)})
        for layout in ({}, {"tp": 8, "pp": 1}, {"tp": 1, "pp": 1, "shard": 64}, {"cp": 4}):
            assert seconds(gpu=faster, **layout) <= seconds(**layout), (field, layout)


def test_tensor_parallelism_across_servers_is_slower_than_inside_one():
    inside, across = (step_time(job(tp=tp, pp=1), FITTED).tensor_parallel for tp in (8, 16))
    assert across > 1.5 * inside, "for the same microbatch"
    rates = [job(tp=tp, pp=1).tokens / seconds(tp=tp, pp=1) for tp in (8, 16)]
    assert rates[0] > 1.2 * rates[1]


def test_parts_add_up_to_the_step():
    parts = step_time(job(shard=1, cp=2), FITTED)
    assert parts.total == pytest.approx(sum(vars(parts).values()))


def engine(**changes) -> rl.Engine:
    shape = from_config(resolve("llama-3.1-8b").config)
    return rl.Engine(**({"shape": shape, "gpu": gpu("h100"), "memory_bytes": 48e9} | changes))


def test_decoding_gains_tokens_with_the_batch_and_never_beats_the_memory():
    one = engine()
    rates = [b / one.step_seconds(b, context=1000, fitted=FITTED) for b in (1, 4, 16, 64, 256)]
    assert rates == sorted(rates)
    weights = 2 * (one.shape.parameters - one.shape.vocabulary * one.shape.hidden)
    assert one.step_seconds(1, context=1, fitted=FITTED) > weights / one.gpu.bandwidth


def test_lengths_have_the_mean_asked_for_and_keep_the_limit():
    lengths = rl.Lengths(prompt=100, response=900, limit=2000).sample(512)
    assert sum(lengths) / 512 == pytest.approx(900, rel=0.01)
    assert lengths[-1] == 2000
    assert list(lengths) == sorted(lengths)


def test_a_rollout_phase_lasts_at_least_as_long_as_its_longest_response():
    lengths = rl.Lengths(prompt=100, response=900, limit=4000)
    phase = rl.generate(engine(), lengths, sequences=64, prompts=8, fitted=FITTED)
    floor = lengths.sample(64)[-1] * engine().step_seconds(1, context=1, fitted=FITTED)
    assert phase.decode > floor
    assert 0 < phase.tail < phase.decode


def test_fewer_slots_than_sequences_take_longer():
    lengths = rl.Lengths(prompt=100, response=900, limit=4000)
    few, many = (
        rl.generate(engine(most_sequences=n), lengths, sequences=256, prompts=8, fitted=FITTED) for n in (16, 256)
    )
    assert few.slots == 16
    assert few.decode > many.decode


def test_an_engine_without_room_for_the_weights_generates_nothing():
    lengths = rl.Lengths(prompt=100, response=900, limit=4000)
    assert rl.generate(engine(memory_bytes=16e9), lengths, sequences=8, prompts=1, fitted=FITTED) is None


def question(name: str, gpus: int, **changes) -> Question:
    settings = {
        "hf_config": resolve(name).config, "gpu": gpu("h100"), "gpus": gpus, "precision": "bfloat16",
        "microbatch_tokens": 8192, "sequences": 512, "prompts": 32, "updates": 1, "reference": True, "utilization": 0.6,
        "lengths": rl.Lengths(prompt=512, response=2048, limit=3584),
    }  # fmt: skip
    return Question(**(settings | changes))


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b"])
def test_a_search_is_quick_and_its_layouts_fit(name):
    start = time.process_time()
    found = search.search(question(name, 64), "megatron", fitted=FITTED)
    assert time.process_time() - start < 2.0
    assert len(found.best) == search.BEST
    assert all(p.memory.fits(80e9, utilization=0.6) for p in found.best)
    totals = [p.step.total for p in found.best]
    assert totals[0] <= min(totals) * 1.02


def test_a_model_that_cannot_fit_has_no_layout():
    found = search.search(question("llama-3.1-70b", 8), "megatron", fitted=FITTED)
    assert found.best == []


@pytest.mark.parametrize("kind", names())
def test_every_accelerator_states_its_figures_and_their_source(kind):
    one = gpu(kind)
    assert one.source
    assert one.memory_bytes > 4e10
    assert one.flops["bfloat16"] > 3e14
    assert one.bandwidth > one.nvlink > one.nic > 0
