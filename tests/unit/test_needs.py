"""launch/needs.py: layouts that are refused before any process starts, with the mend."""

from __future__ import annotations

import pytest

from rlctl.device import Hardware
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.launch import needs
from rlctl.parallel import Layout, check
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive
from tests import tiny

HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
SIZE = "policy.megatron_cfg.{}_parallel_size={}"


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "moe"
    tiny.save("qwen3_moe", folder, vocab_size=256, max_position_embeddings=128)
    return f"policy.model_name={folder}"


def refusal(*overrides, procs=4):
    job = derive(compose("grpo", "smoke-tiny", [*overrides, f"cluster.procs={procs}"]), HOST)
    return needs.refuse(job, needs.needs(job), HOST)


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline_model": 2, "context": 2},
        {"tensor_model": 2, "context": 2},
        {"tensor_model": 2, "pipeline_model": 2},
    ],
)
def test_megatrons_degrees_are_not_refused(degrees):
    assert refusal(*(SIZE.format(name, size) for name, size in degrees.items())) is None


def test_expert_and_expert_tensor_parallelism_exclude_each_other_on_a_host(monkeypatch, experts):
    monkeypatch.setattr("rlctl.models.resolve.check_assets", lambda *_, **__: None)  # the directory has no tokenizer
    assert refusal(experts, SIZE.format("expert_model", 2)) is None
    assert refusal(experts, SIZE.format("tensor_model", 2), SIZE.format("expert_tensor", 2)) is None
    both = (SIZE.format("expert_model", 2), SIZE.format("tensor_model", 2), SIZE.format("expert_tensor", 2))
    problem = refusal(experts, *both)
    assert problem is not None and problem.exit_status == ENVIRONMENT
    assert "expert_tensor_parallel_size=1" in problem.hint


def test_experts_with_tensor_parallelism_need_sequence_parallelism(monkeypatch, experts):
    monkeypatch.setattr("rlctl.models.resolve.check_assets", lambda *_, **__: None)
    off = (SIZE.format("tensor_model", 2), "policy.megatron_cfg.sequence_parallel=false")
    assert refusal(*off) is None
    problem = refusal(experts, *off)
    assert problem is not None and "sequence_parallel=true" in problem.hint


def test_a_token_budget_holds_the_longest_sequence_with_its_padding():
    odd = ("policy.max_total_sequence_length=63", "policy.train_micro_batch_size=1", SIZE.format("context", 2))
    assert refusal(*odd) is None  # a derived budget holds it
    problem = refusal(*odd, "policy.sequence_packing.train_mb_tokens=63")
    assert problem is not None and "64" in problem.hint and "train_mb_tokens" in problem.message
    budgets = [f"policy.sequence_packing.{key}_mb_tokens=64" for key in ("train", "logprob")]
    assert refusal(*odd, *budgets) is None
    budgets = [f"policy.sequence_packing.{key}_mb_tokens=63" for key in ("train", "logprob")]
    assert refusal(*odd[:2], *budgets) is None  # nothing is padded without a layout that asks for it


DENSE = tiny.config("llama").to_dict()
MOE = tiny.config("qwen3_moe").to_dict()


@pytest.mark.parametrize(
    ("layout", "config", "says"),
    [
        (
            Layout(world=4, tp=4),
            DENSE | {"num_key_value_heads": 4, "intermediate_size": 98},
            "98 feed-forward features",
        ),
        (Layout(world=2, tp=2, etp=2), MOE | {"moe_intermediate_size": 33}, "33 expert features"),
        (Layout(world=2, etp=2), DENSE, "0 expert features"),
        (Layout(world=2, ep=2), DENSE, "0 experts"),
    ],
)
def test_widths_that_do_not_divide_are_named(layout, config, says):
    with pytest.raises(RlctlError) as refused:
        check(layout, config)
    assert says in refused.value.message


def test_an_unused_dense_width_of_a_mixture_is_not_checked():
    check(Layout(world=2, tp=2, etp=1), MOE | {"intermediate_size": 33})
