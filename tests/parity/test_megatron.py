"""The Megatron backend against plain transformers autograd: loss, gradients, updates, weights, in every layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests import distributed, tiny
from tests.parity import dtensor_steps, oracle
from tests.parity.test_dtensor import MODELS, OVERRIDES, TOLERANCE, name_of

pytestmark = pytest.mark.slow

LAYOUTS = {1: [(1, False)], 2: [(1, False), (2, False), (2, True)]}  # processes -> (tensor parallel, sequence parallel)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name_of(kind, tied): tiny.save(
            kind, root / name_of(kind, tied), seed=i, tie_word_embeddings=tied, **OVERRIDES[kind]
        )
        for i, (kind, tied) in enumerate(MODELS)
    }


@pytest.fixture(scope="module")
def results(folders):
    """(model, processes, layout) -> what rank 0 found, after checking that all ranks found the same."""
    found = {}
    for world, layouts in LAYOUTS.items():
        ranks = distributed.run("tests.parity.megatron_steps:every", world, folders, layouts)
        for (model, layout), one in ranks[0].items():
            for other in ranks[1:]:
                assert other[model, layout]["metrics"] == one["metrics"]
                assert torch.equal(other[model, layout]["scored"].logprobs, one["scored"].logprobs)
            found[model, world, layout] = one
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


def test_loading_then_gathering_gives_the_bits_of_the_files(results, folders):
    """HF -> Megatron -> HF in every layout: same names, shapes and bits."""
    for (model, world, layout), one in results.items():
        files = load_file(folders[model] / "model.safetensors")
        assert set(one["loaded"]) == set(files), (model, world, layout)
        for name, tensor in files.items():
            assert torch.equal(one["loaded"][name], tensor), (model, world, layout, name)


def test_logprobs_and_entropy_are_those_of_transformers(results, wanted):
    for key, one in results.items():
        want, _ = wanted[key[0]]
        assert oracle.error(one["scored"].logprobs, want.logprobs) < TOLERANCE, key
        assert oracle.error(one["scored"].entropy, want.entropy) < TOLERANCE, key


def test_loss_and_gradient_norm_are_those_of_autograd(results, wanted):
    for key, one in results.items():
        want, _ = wanted[key[0]]
        assert oracle.loss_error(one["metrics"]["loss"], want) < TOLERANCE, key
        assert abs(one["grad_norm"] - want.grad_norm) / want.grad_norm < TOLERANCE, key


def test_every_gradient_is_that_of_autograd(results, wanted):
    for key, one in results.items():
        want, _ = wanted[key[0]]
        assert set(one["gradients"]) == set(want.gradients), key
        for name, gradient in want.gradients.items():
            assert oracle.error(one["gradients"][name], gradient) < TOLERANCE, (key, name)


def test_three_updates_are_those_of_torch_adamw(results, wanted):
    """Clipping, weight decay on matrices alone, fp32 state."""
    for key, one in results.items():
        _, updated = wanted[key[0]]
        for name, tensor in updated.items():
            assert oracle.error(one["weights"][name], tensor) < TOLERANCE, (key, name)


@pytest.fixture(scope="module")
def one_model(folders):
    return folders["llama"]


def test_microbatches_change_nothing(one_model):
    """Loss, metrics, gradients and updates for 1, 2 or 7 sequences a microbatch, packed by tokens or not."""
    from rlctl.config import SequencePacking

    variants = [
        dict(sequence_packing=SequencePacking(enabled=False), train_micro_batch_size=1),
        dict(sequence_packing=SequencePacking(enabled=False), train_micro_batch_size=7),
        dict(sequence_packing=SequencePacking(train_mb_tokens=40)),
        dict(activation_checkpointing=True),
    ]
    (found,) = distributed.run("tests.parity.megatron_steps:splits", 1, one_model, variants)
    first = found[0]
    for other, variant in zip(found[1:], variants[1:], strict=True):
        for name, value in first["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), (variant, name)
        for name, gradient in first["gradients"].items():
            assert oracle.error(other["gradients"][name], gradient) < TOLERANCE, (variant, name)


def test_saving_and_loading_in_between_changes_no_bit(one_model):
    """bfloat16 parameters with fp32 main parameters: the main ones are in the state too."""
    for rank in distributed.run("tests.parity.megatron_steps:state", 2, one_model):
        for name, tensor in rank["wanted"].items():
            assert torch.equal(rank["got"][name], tensor), name


def test_the_reference_stays_and_the_policy_is_put_back(one_model):
    for rank in distributed.run("tests.parity.megatron_steps:reference", 2, one_model):
        assert torch.equal(rank["before"], rank["start"])
        assert torch.equal(rank["before"], rank["after"])
        assert torch.equal(rank["moved"], rank["again"])
        assert not torch.equal(rank["moved"], rank["start"])
