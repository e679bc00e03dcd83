"""The Megatron backend against plain transformers autograd: loss, gradients, updates, weights, in every layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rlctl.parallel import Layout
from tests import distributed, tiny
from tests.parity import dtensor_steps, oracle
from tests.parity.megatron_steps import Case
from tests.parity.test_dtensor import OVERRIDES, TOLERANCE

pytestmark = pytest.mark.slow

TIED, DEEP = dict(tie_word_embeddings=True), dict(num_hidden_layers=4)
MODELS = {  # name -> kind and what differs from tests/tiny.py and OVERRIDES
    "llama": ("llama", {}), "llama-tied": ("llama", TIED),
    "qwen2": ("qwen2", {}), "qwen2-tied": ("qwen2", TIED),
    "qwen3": ("qwen3", {}), "qwen3-tied": ("qwen3", TIED),
    "qwen3_moe": ("qwen3_moe", {}), "qwen3_moe-tied": ("qwen3_moe", TIED),
    "mistral": ("mistral", {}), "mixtral": ("mixtral", {}),
    "llama-deep": ("llama", DEEP), "qwen2-tied-deep": ("qwen2", TIED | DEEP),
}  # fmt: skip
DENSE = [name for name in MODELS if name.startswith(("llama", "qwen2", "qwen3")) and "_moe" not in name]
DENSE = [name for name in DENSE if "deep" not in name]
TP = dict(tp=2, sp=True)


def cases(world: int, models: list[str], *degrees: dict, **options) -> list[Case]:
    return [Case(model, Layout(world=world, **one), **options) for model in models for one in degrees]


CASES = {
    1: cases(1, [*DENSE, "mistral", "qwen3_moe", "mixtral"], {}),
    2: cases(2, DENSE, {}, dict(tp=2), TP, dict(cp=2), dict(pp=2))
    + cases(2, ["qwen3_moe"], dict(ep=2), TP | dict(ep=2), TP | dict(etp=2), dict(pp=2), dict(cp=2))
    + cases(2, ["mistral"], TP)
    + cases(2, ["mixtral"], TP | dict(ep=2)),
    4: cases(4, ["llama-deep"], dict(pp=4), TP | dict(cp=2), dict(cp=4), dict(pp=2, cp=2))
    + cases(4, ["qwen2-tied-deep"], dict(pp=4), TP | dict(pp=2), dict(pp=2))
    + cases(4, ["qwen3_moe-tied"], dict(ep=4), TP | dict(ep=2), dict(pp=2, ep=2))
    + cases(4, ["llama-deep"], dict(pp=2, cp=2), recompute=True)
    + cases(4, ["qwen3_moe-tied"], dict(cp=2, ep=2), recompute=True)
    + cases(4, ["qwen2-tied-deep"], dict(pp=2), sequences=1)  # fewer than data-parallel ranks
    + cases(4, ["qwen3_moe-tied"], dict(ep=4), sequences=3),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny.save(kind, root / name, seed=i, **(OVERRIDES.get(kind, {}) | overrides))
        for i, (name, (kind, overrides)) in enumerate(MODELS.items())
    }


@pytest.fixture(scope="module")
def results(folders):
    """case -> what rank 0 found, after checking that all ranks found the same."""
    found = {}
    for world, all_of_it in CASES.items():
        ranks = distributed.run("tests.parity.megatron_steps:every", world, folders, all_of_it)
        for case, one in ranks[0].items():
            for other in ranks[1:]:
                assert other[case]["metrics"] == one["metrics"], case
                assert torch.equal(other[case]["scored"].logprobs, one["scored"].logprobs), case
            found[case] = one
    return found


@pytest.fixture(scope="module")
def wanted(folders):
    """(model, sequences) -> the oracle, and parameters after three updates."""
    algorithm, section = dtensor_steps.algorithm(), dtensor_steps.recipe().policy
    made = {}
    for case in {(c.model, c.sequences) for all_of_it in CASES.values() for c in all_of_it}:
        folder, batch = folders[case[0]], dtensor_steps.batch(case[1])
        made[case] = (
            oracle.evaluate(folder, batch, algorithm, temperature=section.generation.temperature),
            oracle.adamw(folder, batch, algorithm, steps=3, section=section),
        )
    return made


def as_on_disk(named: dict[str, torch.Tensor], *, mixtral: bool) -> dict[str, torch.Tensor]:
    """Transformers stacks experts in memory, [E, 2f, h] and [E, h, f]; files hold them one by one."""
    found = {}
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if mixtral else {}
    for name, tensor in named.items():
        stem, _, stacked = name.rpartition(".")
        stem = stem.replace(".mlp.", ".block_sparse_moe.") if mixtral else stem
        if not stem.endswith(".experts"):
            found[f"{stem}.{stacked}"] = tensor
            continue
        for expert, one in enumerate(tensor):
            parts = one.chunk(2) if stacked == "gate_up_proj" else [one]
            names = ("gate_proj", "up_proj") if stacked == "gate_up_proj" else (stacked,)
            names = [renamed.get(n, n) for n in names]
            found |= {f"{stem}.{expert}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    return found


def test_loading_then_gathering_gives_the_bits_of_the_files(results, folders):
    """HF -> Megatron -> HF in every layout: same names, shapes and bits."""
    for case, one in results.items():
        files = load_file(folders[case.model] / "model.safetensors")
        assert set(one["loaded"]) == set(files), case
        for name, tensor in files.items():
            assert torch.equal(one["loaded"][name], tensor), (case, name)


def test_logprobs_and_entropy_are_those_of_transformers(results, wanted):
    for case, one in results.items():
        want, _ = wanted[case.model, case.sequences]
        assert oracle.error(one["scored"].logprobs, want.logprobs) < TOLERANCE, case
        assert oracle.error(one["scored"].entropy, want.entropy) < TOLERANCE, case


def test_loss_and_gradient_norm_are_those_of_autograd(results, wanted):
    for case, one in results.items():
        want, _ = wanted[case.model, case.sequences]
        assert oracle.loss_error(one["metrics"]["loss"], want) < TOLERANCE, case
        assert abs(one["grad_norm"] - want.grad_norm) / want.grad_norm < TOLERANCE, case


def test_every_gradient_is_that_of_autograd(results, wanted):
    for case, one in results.items():
        want = as_on_disk(wanted[case.model, case.sequences][0].gradients, mixtral=case.model == "mixtral")
        assert set(one["gradients"]) == set(want), case
        for name, gradient in want.items():
            assert oracle.error(one["gradients"][name], gradient) < TOLERANCE, (case, name)


def test_three_updates_are_those_of_torch_adamw(results, wanted):
    """Clipping, weight decay on matrices alone, fp32 state."""
    for case, one in results.items():
        updated = as_on_disk(wanted[case.model, case.sequences][1], mixtral=case.model == "mixtral")
        assert set(one["weights"]) == set(updated), case
        for name, tensor in updated.items():
            assert oracle.error(one["weights"][name], tensor) < TOLERANCE, (case, name)


def test_no_layout_changes_a_metric(results):
    for case, one in results.items():
        alone = next((c for c in CASES[1] if c.model == case.model and c.sequences == case.sequences), None)
        if alone is not None:
            assert one["metrics"] == pytest.approx(results[alone]["metrics"], rel=1e-5, abs=1e-7), case


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


@pytest.fixture(scope="module")
def kept(folders):
    """(case, rank's findings) of what outlives a step."""
    chosen = cases(2, ["llama"], {}, dict(cp=2)) + cases(2, ["qwen2-tied"], dict(pp=2))
    chosen += cases(2, ["qwen3_moe"], dict(ep=2))
    ranks = distributed.run("tests.parity.megatron_steps:kept", 2, folders, chosen)
    return [(case, found) for rank in ranks for case, found in zip(chosen, rank, strict=True)]


def test_saving_and_loading_in_between_changes_no_bit(kept):
    """bfloat16 parameters with fp32 main parameters: the main ones are in the state too."""
    for case, found in kept:
        for name, tensor in found["state"]["wanted"].items():
            assert torch.equal(found["state"]["got"][name], tensor), (case, name)


def test_the_reference_stays_and_the_policy_is_put_back(kept):
    for case, found in kept:
        one = found["reference"]
        assert torch.equal(one["before"], one["start"]), case
        assert torch.equal(one["before"], one["after"]), case
        assert torch.equal(one["moved"], one["again"]), case
        assert not torch.equal(one["moved"], one["start"]), case


def test_tensors_that_do_not_belong_are_refused_by_name(folders, tmp_path):
    """Extra tensors, a tied head that differs, and shapes that are not the config's: none is dropped silently."""
    import shutil

    from safetensors.torch import save_file

    def damaged(name, model, change):
        folder = shutil.copytree(folders[model], tmp_path / name)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    embed, k_proj = "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"
    cases = {
        "bias": damaged("bias", "llama", lambda w: w.update({k_proj.replace("weight", "bias"): torch.ones(32)})),
        "tied": damaged("tied", "llama-tied", lambda w: w.update({"lm_head.weight": w[embed] + 1})),
        "shape": damaged("shape", "llama", lambda w: w.update({k_proj: torch.ones(16, 64)})),
        "same": damaged("same", "llama-tied", lambda w: w.update({"lm_head.weight": w[embed].clone()})),
    }
    (said,) = distributed.run("tests.parity.megatron_steps:refusals", 1, cases)
    assert "k_proj.bias" in said["bias"]
    assert "lm_head.weight" in said["tied"]
    assert "k_proj.weight" in said["shape"]
    assert said["same"] == "accepted"
