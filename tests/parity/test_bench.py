"""The benchmark's parity: both backends agree on two processes, and each planted fault is found and named."""

from __future__ import annotations

import json

import pytest
import torch

from rlctl.bench import parity
from tests import distributed, tiny
from tests.parity import bench_steps, oracle

ZEROED = "model.layers.1.mlp.up_proj.weight"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    model = tiny.save("llama", root / "llama")
    ranks = distributed.run("tests.parity.bench_steps:records", 2, model, root, ZEROED)
    return root, model, ranks[0]


def checks(made, name, limit=parity.TOY_TOLERANCE):
    return {check.name: check for check in parity.compare(made[0] / name, made[0] / "dtensor", limit=limit)}


def failed(made, name):
    return {check for check, found in checks(made, name).items() if not found.ok}


def test_the_backends_agree_on_every_check(made):
    found = checks(made, "megatron")
    assert failed(made, "megatron") == set()
    assert found["gradients"].count == found["parameters after 3 updates"].count == 21


def test_a_record_is_what_autograd_of_transformers_gives(made):
    root, model, _ = made
    algorithm = bench_steps.dtensor_steps.algorithm()
    batch = bench_steps.replay.with_given_logprobs(bench_steps.dtensor_steps.batch())
    batch = batch.replace(advantages=algorithm.advantages(batch))
    batch = batch.replace(loss_weights=algorithm.loss_weights(batch))
    want = oracle.evaluate(model, batch, algorithm, temperature=0.8)
    index = parity._index(root / "megatron" / "gradients")
    errors = {n: oracle.error(parity._read(index[n], n), want.gradients[n]) for n in want.gradients}
    assert max(errors.values()) < 1e-5
    numbers = json.loads((root / "megatron" / "numbers.json").read_text())
    assert abs(numbers["grad_norm"] - want.grad_norm) / want.grad_norm < 1e-5


def test_parameters_have_moved_by_far_more_than_the_tolerance(made):
    root, model, _ = made
    before = tiny.model("llama").state_dict()
    index = parity._index(root / "megatron" / "after 1")
    moved = {n: oracle.error(parity._read(path, n), before[n]) for n, path in index.items()}
    assert min(moved.values()) > 10 * parity.TOY_TOLERANCE


def test_a_loss_scaled_by_a_hundredth_is_found_in_loss_norm_and_gradients(made):
    assert {"loss", "grad norm", "gradients"} <= failed(made, "loss scaled")
    assert checks(made, "loss scaled")["grad norm"].error == pytest.approx(0.01, rel=1e-3)


def test_one_zeroed_gradient_is_named(made):
    assert failed(made, "gradient zeroed") == {"gradients"}
    found = checks(made, "gradient zeroed")["gradients"]
    assert found.worst == ZEROED
    assert found.error == 1.0


def test_one_changed_token_is_found_in_the_hash_and_the_logprobs(made):
    assert {"tokens", "logprobs", "gradients"} <= failed(made, "token changed")


def test_another_precision_is_far_outside_the_tolerance_and_inside_its_own(made):
    assert {"logprobs", "gradients"} <= failed(made, "other precision")
    limit = parity.tolerance("bfloat16", 1)
    found = checks(made, "other precision", limit)
    assert {name for name, check in found.items() if not check.ok} <= {"grad norm"}


def test_the_gradient_norm_in_bfloat16_agrees(made):
    assert checks(made, "other precision", parity.tolerance("bfloat16", 1))["grad norm"].ok


def test_recomputation_changes_no_number(made):
    assert failed(made, "recompute") == set()


def test_a_replayed_step_is_timed_whole(made):
    for seconds, metrics in made[2]["steps"]:
        parts = sum(value for name, value in seconds.items() if name != "wall")
        assert 0 < parts <= seconds["wall"]
        assert {"forward_backward", "optimizer", "weight_gather"} <= set(seconds)
        assert torch.isfinite(torch.tensor(metrics["grad_norm"]))
