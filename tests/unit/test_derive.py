"""recipe/derive.py: what is filled in. What is refused is in tests/cli/test_mistakes.py."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.launch import commands, needs
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import Resolved, derive
from rlctl.recipe.overrides import Override

HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
GPUS = Hardware(gpus=8, gpu_name="NVIDIA H100", cpus=96, memory_bytes=10**12)


def resolved(*overrides: str, recipe: str = "smoke-tiny", hardware: Hardware = HOST, **flags: Any) -> Resolved:
    settings = [Override(key=k.replace("__", "."), value=v, text=f"--{k} {v}") for k, v in flags.items()]
    return derive(compose("grpo", recipe, overrides, flags=settings), hardware)


def test_every_open_key_of_the_smoke_recipe_is_filled() -> None:
    job = resolved()
    policy = job.recipe.policy
    assert (job.backend, str(job.layout), job.layout.world) == ("megatron", "dp2 tp1", 2)
    assert (job.batch_size, job.updates_per_step, policy.train_global_batch_size) == (64, 1, 64)
    assert policy.sequence_packing.train_mb_tokens == 64 * 16
    assert policy.logprob_batch_size == policy.train_micro_batch_size == 16
    assert policy.generation.backend == "transformers"
    assert job.recipe.data.max_input_seq_length == 63
    assert policy.megatron_cfg.sequence_parallel is False and policy.dtensor_cfg.enabled is False
    assert job.derived["policy.megatron_cfg.tensor_model_parallel_size"] == 1


def test_a_resolved_recipe_resolves_to_itself() -> None:
    job = resolved()
    again = derive(compose("grpo", "smoke-tiny").__class__(recipe=job.recipe, source=None, overrides=()), HOST)  # type: ignore[arg-type]
    assert again.recipe == job.recipe and again.derived == {}


def test_tensor_parallelism_brings_sequence_parallelism() -> None:
    job = resolved("policy.megatron_cfg.tensor_model_parallel_size=2")
    assert str(job.layout) == "dp1 tp2+sp"
    assert job.recipe.policy.megatron_cfg.sequence_parallel is True


def test_the_dtensor_backend_takes_its_own_degrees() -> None:
    job = resolved("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.tensor_parallel_size=2")
    assert (job.backend, str(job.layout)) == ("dtensor", "dp1 tp2")


@pytest.mark.parametrize(
    ("hardware", "flags", "world", "gpus_per_node"),
    [
        (HOST, {}, 2, None),
        (HOST, {"cluster__procs": 4}, 4, None),
        (GPUS, {}, 8, 8),
        (GPUS, {"cluster__gpus_per_node": 2}, 2, 2),
        (GPUS, {"cluster__gpus_per_node": 2, "cluster__num_nodes": 2}, 4, 2),
        (HOST, {"cluster__gpus_per_node": 4}, 4, 4),
    ],
)
def test_processes_are_gpus_where_there_are_any(
    hardware: Hardware, flags: dict, world: int, gpus_per_node: int | None
) -> None:
    job = resolved(hardware=hardware, **flags)
    assert (job.layout.world, job.recipe.cluster.gpus_per_node) == (world, gpus_per_node)


def test_updates_are_counted_in_whole_groups() -> None:
    assert resolved("policy.train_global_batch_size=16").updates_per_step == 4


def test_a_launcher_of_the_cluster_decides_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))
    job = resolved(cluster__launcher="env")
    assert (job.layout.world, job.recipe.cluster.num_nodes, job.recipe.cluster.procs) == (4, 2, 2)


def test_procs_are_refused_where_there_are_gpus() -> None:
    with pytest.raises(RlctlError, match="hosts without GPUs, this one has 8") as caught:
        resolved(hardware=GPUS, cluster__procs=2)
    assert caught.value.exit_status == 3


def test_the_reference_policy_is_counted_only_with_a_kl_penalty() -> None:
    plain, penalised = resolved(), resolved("loss_fn.reference_policy_kl_penalty=0.01")
    assert needs.algorithm_needs(plain) == frozenset()
    assert needs.needs(penalised).rank_bytes - needs.needs(plain).rank_bytes == 4 * plain.parameters


def test_a_host_holds_all_its_processes() -> None:
    job = resolved(cluster__procs=3)
    need = needs.needs(job)
    assert need.node_bytes == 3 * need.rank_bytes
    assert needs.refuse(job, need, HOST) is None
    small = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=need.node_bytes - 1)
    problem = needs.refuse(job, need, small)
    assert problem is not None and problem.exit_status == 3 and "3 processes need" in problem.message


def test_the_torchrun_line_keeps_the_users_arguments_and_sets_its_own() -> None:
    job = resolved(cluster__gpus_per_node=8, cluster__num_nodes=2, run_dir="my runs/a")
    arguments = [
        "train",
        "grpo",
        "--json",
        "--run-dir",
        "x",
        "--launcher=local",
        "env.toy.wanted='a b'",
        "--dry-run=build",
    ]
    assert commands.torchrun(job, arguments) == (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD_ADDRESS:29500 "
        "-m rlctl train grpo 'env.toy.wanted='\"'\"'a b'\"'\"'' --launcher env --run-dir 'my runs/a'"
    )


def test_derived_token_budgets_hold_a_padded_sequence():
    """An odd length with sequence parallelism: each sequence is padded to a multiple of tp."""
    composed = compose(
        "grpo",
        "smoke-tiny",
        [
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "policy.max_total_sequence_length=65",
            "policy.train_micro_batch_size=1",
        ],
    )
    recipe = derive(composed, Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=1 << 34)).recipe
    assert recipe.policy.sequence_packing.train_mb_tokens == 66
