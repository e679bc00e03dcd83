"""Every experiment recipe for GPUs: it resolves, fits what its head names, and its ranks build at true size."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re

import pytest

from rlctl.device import Hardware
from rlctl.errors import CHECK_FAILED, ENVIRONMENT, RlctlError
from rlctl.launch.needs import needs
from rlctl.plan import build
from rlctl.plan.build import Tiling, dry_build
from rlctl.plan.hardware import gpu_memory_bytes
from rlctl.plan.memory import parameters_of_stage
from rlctl.recipe import find
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive

NO_GPU = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=8 << 30)
FOR_GPUS = [s.name for s in find.listing([find.packaged()]) if (said := find.parts(s.name)) and said.gpus]
HEAD = re.compile(r"# Memory: (\d+) GB a GPU while training, (\d+) GB while generating")


@functools.cache
def _derived(name):
    return derive(compose("grpo", name, folders=[find.packaged()]), NO_GPU)


def resolved(name):
    return copy.deepcopy(_derived(name))


def test_there_is_a_recipe_for_each_flagship_model_and_backend():
    said = {(p.model, p.backend) for p in map(find.parts, FOR_GPUS)}
    both = {(m, b) for m in ("llama-3.1-8b-instruct", "llama-3.1-70b", "qwen3-32b") for b in ("megatron", "dtensor")}
    # transformers stacks experts that lie apart on disk, and has no context parallelism
    assert said >= both | {("llama-3.3-70b-instruct", "megatron"), ("qwen3-30b-a3b", "megatron")}


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_is_what_its_name_says(name):
    job, said = resolved(name), find.parts(name)
    assert (job.recipe.policy.model_name, job.backend) == (said.model, said.backend)
    assert (job.recipe.cluster.num_nodes, job.recipe.cluster.gpus_per_node) == (said.nodes, said.gpus)
    assert job.layout.world == said.nodes * said.gpus
    strategy = name.split(f"{said.backend}-")[1]
    for degree, size in re.findall(r"(tp|pp|cp|ep)(\d+)", strategy):
        assert getattr(job.layout, degree) == int(size)
    for degree in ("tp", "pp", "cp", "ep"):
        assert getattr(job.layout, degree) == 1 or f"{degree}{getattr(job.layout, degree)}" in strategy


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_fits_h100_with_the_memory_that_its_head_states(name):
    job = resolved(name)
    gpu, share = gpu_memory_bytes("h100"), job.recipe.policy.generation.vllm_cfg.gpu_memory_utilization
    used = needs(job).memory
    head = HEAD.search((find.packaged() / "experiment" / f"{name}.yaml").read_text())
    assert used.fits(gpu, utilization=share)
    assert [round(x / 1e9) for x in (used.training, used.generating(gpu, utilization=share))] == list(
        map(int, head.groups())
    )
    longest = job.recipe.policy.max_total_sequence_length
    assert used.cache_tokens(gpu, utilization=share) > 16 * longest, "a group generates at once"


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_GPUS)
def test_megatron_or_transformers_builds_the_first_middle_and_last_rank(name):
    job = resolved(name)
    reports = dry_build(job.recipe)
    world = job.layout.world
    assert [r.rank for r in reports] == [0, world // 2, world - 1]
    if job.backend == "megatron":
        expected = [parameters_of_stage(job.model.config, job.layout, r.stage) for r in reports]
        assert [r.parameters for r in reports] == expected
        assert [r.weight_bytes for r in reports] == [2 * n for n in expected]
        assert all(r.slices for r in reports)
    else:
        assert all(r.parameters == -(-job.parameters // world) for r in reports)


@pytest.mark.slow
def test_a_tied_embedding_builds_on_both_ends_of_a_pipeline():
    job = resolved("grpo-qwen3-32b-4n8g-megatron-tp8")
    recipe = job.recipe
    recipe.policy.model_name = "qwen3-0.6b"
    recipe.policy.megatron_cfg.tensor_model_parallel_size = 2
    recipe.policy.megatron_cfg.pipeline_model_parallel_size = 2
    recipe.cluster.num_nodes, recipe.cluster.gpus_per_node = 1, 4
    assert [r.stage for r in dry_build(recipe)] == [0, 1, 1]


@pytest.mark.slow
def test_a_width_that_does_not_divide_is_refused_before_megatron_meets_it():
    recipe = resolved("grpo-qwen3-32b-4n8g-megatron-tp8").recipe
    recipe.policy.hf_config_overrides = {"intermediate_size": 25601}
    with pytest.raises(
        RlctlError, match="25601 feed-forward features do not divide by tensor-parallel size 8"
    ) as caught:
        dry_build(recipe)
    assert caught.value.exit_status == ENVIRONMENT


def test_a_rank_that_differs_from_the_plan_is_reported():
    report = build.RankReport(rank=3, stage=0, parameters=10, weight_bytes=20, slices=1)
    build._compare(report, 10, "bfloat16")
    for wrong in (dataclasses.replace(report, parameters=11), dataclasses.replace(report, weight_bytes=40)):
        with pytest.raises(RlctlError, match="rank 3 has") as caught:
            build._compare(wrong, 10, "bfloat16")
        assert caught.value.exit_status == CHECK_FAILED


def tiled(*slices, shape=(4, 6)):
    tiling = Tiling()
    for offset, size, main in slices:
        tiling.add("weight", shape, (offset, size), main)
    return tiling


def test_a_tiling_with_replicas_is_accepted():
    left, right = ((0, 0), (4, 3)), ((0, 3), (4, 3))
    tiled((*left, True), (*right, True), (*left, False)).check({"weight": (4, 6)})


@pytest.mark.parametrize(
    ("slices", "expected", "message"),
    [
        ([((0, 0), (4, 3), True)], {"weight": (4, 6)}, "do not tile"),
        ([((0, 0), (4, 3), True), ((0, 2), (4, 3), True)], {"weight": (4, 6)}, "do not tile"),
        ([((0, 0), (4, 6), True), ((0, 0), (4, 6), True)], {"weight": (4, 6)}, "has \\[2\\] writers"),
        ([((0, 0), (4, 6), False)], {"weight": (4, 6)}, "has \\[0\\] writers"),
        ([((0, 0), (4, 6), True)], {"weight": (4, 6), "other": (1,)}, "tensor other is None in the build"),
        ([((0, 0), (4, 6), True)], {"weight": (6, 4)}, "tensor weight is"),
    ],
)
def test_a_hole_an_overlap_a_second_writer_or_an_unknown_tensor_is_reported(slices, expected, message):
    with pytest.raises(RlctlError, match=message) as caught:
        tiled(*slices).check(expected)
    assert caught.value.exit_status == CHECK_FAILED
