"""The DTensor backend against plain transformers autograd: loss, gradients, updates, in every layout."""

from __future__ import annotations

import pytest
import torch

from tests import distributed, tiny
from tests.parity import dtensor_steps, oracle

TOLERANCE = 1e-5
MODELS = [(kind, tied) for kind in ("llama", "qwen2", "qwen3") for tied in (False, True)]
MODELS.append(("mistral", False))
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
OVERRIDES = {
    "llama": dict(rope_parameters=LLAMA3_ROPE | dict(original_max_position_embeddings=64)),
    "qwen2": dict(vocab_size=dtensor_steps.VOCABULARY),  # odd: the ranks' parts differ
    "qwen3": dict(pad_token_id=dtensor_steps.FIRST_TOKEN),  # its embedding learns all the same
}
LAYOUTS = {1: [1], 2: [1, 2]}  # processes -> tensor-parallel sizes


def name_of(kind: str, tied: bool) -> str:
    return kind + ("-tied" if tied else "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name_of(kind, tied): tiny.save(
            kind, root / name_of(kind, tied), seed=i, tie_word_embeddings=tied, **OVERRIDES.get(kind, {})
        )
        for i, (kind, tied) in enumerate(MODELS)
    }


@pytest.fixture(scope="module")
def results(folders):
    """(model, processes, tp) -> what rank 0 found, after checking that all ranks found the same."""
    found = {}
    for world, tps in LAYOUTS.items():
        ranks = distributed.run("tests.parity.dtensor_steps:every", world, folders, tps)
        for (model, tp), one in ranks[0].items():
            for other in ranks[1:]:
                assert other[model, tp]["metrics"] == one["metrics"]
                assert torch.equal(other[model, tp]["scored"].logprobs, one["scored"].logprobs)
            found[model, world, tp] = one
    return found


@pytest.fixture(scope="module")
def wanted(folders):
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()
    section = dtensor_steps.recipe().policy
    return {
        model: (
            oracle.evaluate(folder, batch, algorithm, temperature=section.generation.temperature),
            oracle.adamw(folder, batch, algorithm, steps=3, section=section),
        )
        for model, folder in folders.items()
    }


CASES = [(name_of(*m), world, tp) for m in MODELS for world, tps in LAYOUTS.items() for tp in tps]
each_case = pytest.mark.parametrize(("model", "world", "tp"), CASES, ids=str)


@pytest.mark.slow
@each_case
def test_loss_gradient_norm_and_every_gradient_equal_autograd(results, wanted, model, world, tp):
    got, (want, _) = results[model, world, tp], wanted[model]
    assert oracle.loss_error(got["metrics"]["loss"], want) < TOLERANCE
    assert abs(got["metrics"]["grad_norm"] - want.grad_norm) / want.grad_norm < TOLERANCE
    assert got["gradients"].keys() == want.gradients.keys()
    errors = {name: oracle.error(got["gradients"][name], want.gradients[name]) for name in want.gradients}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.slow
@each_case
def test_no_layout_changes_a_metric(results, model, world, tp):
    got, alone = results[model, world, tp]["metrics"], results[model, 1, 1]["metrics"]
    assert {"loss", "grad_norm", "entropy", "ratio", "clipped_share", "kl"} <= set(got)
    assert got == pytest.approx(alone, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@each_case
def test_logprobs_and_entropy_equal_log_softmax_and_are_zero_outside_the_mask(results, wanted, model, world, tp):
    got, (want, _) = results[model, world, tp]["scored"], wanted[model]
    assert oracle.error(got.logprobs, want.logprobs) < TOLERANCE
    assert oracle.error(got.entropy, want.entropy) < TOLERANCE
    assert not got.logprobs[~dtensor_steps.batch().mask].any()


@pytest.mark.slow
@each_case
def test_three_clipped_updates_equal_torch_adamw(results, wanted, model, world, tp):
    got, (want, parameters) = results[model, world, tp]["weights"], wanted[model]
    assert want.grad_norm > dtensor_steps.recipe().policy.max_grad_norm  # clipping acts
    assert got.keys() == parameters.keys()
    errors = {name: oracle.error(got[name], parameters[name]) for name in parameters}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.slow
@each_case
def test_weights_have_the_names_and_shapes_of_the_directory(results, folders, model, world, tp):
    from safetensors import safe_open

    with safe_open(folders[model] / "model.safetensors", "pt") as stored:
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    got = results[model, world, tp]
    assert {name: shape for name, (shape, _) in got["specs"].items()} == shapes
    assert {name: tuple(t.shape) for name, t in got["weights"].items()} == shapes
    assert list(got["specs"]) == list(got["weights"])
