"""Numbers that would train silently wrong are refused by key, value and bound."""

from __future__ import annotations

import pytest

from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive

HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=1 << 34)


def resolve(*overrides):
    return derive(compose("grpo", "smoke-tiny", list(overrides)), HOST)


@pytest.mark.parametrize(
    "override",
    [
        "policy.optimizer.lr=-0.003",
        "policy.optimizer.lr=.nan",
        "policy.optimizer.betas=[1.5,2]",
        "policy.optimizer.eps=-1",
        "policy.optimizer.weight_decay=-50",
        "policy.optimizer.min_lr=1",
        "policy.scheduler.warmup_init_lr=0.1",
        "policy.scheduler.warmup_steps=-3",
        "policy.max_grad_norm=-1",
        "policy.max_grad_norm=.nan",
        "policy.generation.temperature=0",
        "policy.generation.temperature=-1",
        "policy.generation.temperature=.inf",
        "grpo.seed=1000000000000000000000000",
        "grpo.val_period=-1",
        "logger.rollouts_period=-1",
        "loss_fn.reference_policy_kl_penalty=.nan",
        "env.reward_weights={wanted: .nan}",
        "env.reward_timeout_seconds=-1",
    ],
)
def test_a_number_out_of_range_is_refused_with_its_key(override):
    with pytest.raises(RlctlError) as caught:
        resolve(override)
    assert override.split("=")[0].split(".")[-1] in caught.value.message
    assert caught.value.exit_status == 2


def test_the_edges_are_taken():
    resolve("policy.optimizer.weight_decay=0", "policy.max_grad_norm=0", "grpo.seed=0", "grpo.val_period=0")
