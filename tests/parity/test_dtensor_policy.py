"""The DTensor backend beyond parity: what must change nothing, what must be kept, what is refused. Two processes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import distributed, tiny
from tests.parity import dtensor_steps, oracle

TOLERANCE = 1e-5
pytestmark = pytest.mark.slow


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_opt(folder):
    """A model type that transformers has no plan for."""
    import transformers

    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16
    )
    transformers.OPTForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {name: tiny.save(name, root / name) for name in ("llama", "qwen3_moe")}
    made["qwen3-tied"] = tiny.save("qwen3", root / "qwen3-tied", tie_word_embeddings=True)
    made["mixed"] = tiny.save("llama", root / "mixed")
    made["opt"] = save_opt(root / "opt")
    edit_config(made["mixed"], num_hidden_layers=3)
    made["narrow"] = tiny.save("llama", root / "narrow")
    edit_config(made["narrow"], intermediate_size=80)
    made["unequal head"] = tiny.save("llama", root / "unequal head", tie_word_embeddings=True)
    file = made["unequal head"] / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file, metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def ranks(folders):
    return distributed.run("tests.parity.dtensor_steps:everything_else", 2, folders)


def assert_equals_autograd(got, folder, batch, tolerance=TOLERANCE):
    metrics, gradients = got
    want = oracle.evaluate(folder, batch, dtensor_steps.algorithm(), temperature=0.8)
    assert oracle.loss_error(metrics["loss"], want) < tolerance
    assert abs(metrics["grad_norm"] - want.grad_norm) / want.grad_norm < tolerance
    errors = {name: oracle.error(gradients[name], want.gradients[name]) for name in want.gradients}
    assert max(errors.values()) < tolerance, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("variant", dtensor_steps.variants())
def test_microbatches_packing_and_recomputation_change_nothing(ranks, folders, variant):
    assert_equals_autograd(ranks[0]["variants"][variant], folders["llama"], dtensor_steps.batch())


def test_activation_checkpointing_computes_each_layer_twice(ranks):
    assert ranks[0]["layer runs"] == {False: 1, True: 2}


def test_a_rank_without_a_sequence_changes_nothing(ranks, folders):
    assert_equals_autograd(ranks[0]["few"], folders["llama"], dtensor_steps.batch(1))


def test_keeping_groups_whole_changes_nothing(ranks, folders):
    assert_equals_autograd(ranks[0]["groups"], folders["llama"], dtensor_steps.batch())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_reference_stays_what_the_policy_was(ranks, tp):
    found = ranks[0]["reference"][tp]
    assert torch.equal(found["reference"], found["initial"])
    assert torch.equal(found["policy again"], found["policy"])
    assert not torch.equal(found["policy"], found["initial"])


@pytest.mark.parametrize("tp", [1, 2])
def test_two_steps_a_reload_and_one_equal_three_steps_bit_for_bit(ranks, tp):
    for rank in ranks:
        straight, resumed = rank["reload"][tp]
        assert straight.keys() == resumed.keys()
        assert any(key.startswith("exp_avg_sq/") for key in straight)
        assert all(torch.equal(straight[k], resumed[k]) for k in straight if k != "layout")


def test_weights_sent_to_one_rank_reach_it_alone_in_as_many_buckets(ranks):
    (count, names), (other_count, other_names) = ranks[0]["buckets"], ranks[1]["buckets"]
    assert count == other_count > 3
    assert names == []
    assert len(other_names) == len(set(other_names)) > 10


def test_bfloat16_computes_near_fp32_and_keeps_updates_below_its_own_resolution(ranks, folders):
    found = ranks[0]["bfloat16"]
    assert_equals_autograd((found["metrics"], found["gradients"]), folders["llama"], dtensor_steps.batch(), 0.1)
    assert {t.dtype for t in found["weights"].values()} == {torch.bfloat16}
    name = "parameter/model.layers.0.mlp.up_proj.weight"
    assert found["after"][name].dtype == torch.float32
    assert (found["after"][name] != found["before"][name]).float().mean() > 0.9
    assert found["after"]["exp_avg/model.norm.weight"].dtype == torch.float32


def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_weights(ranks):
    message, unchanged = ranks[0]["infinite"]
    assert message.startswith("the gradient norm is nan")
    assert unchanged


@pytest.mark.parametrize(
    ("case", "says", "hint"),
    [
        ("experts", "does not train mixtures of experts (`qwen3_moe` has 4 experts)", "--backend megatron"),
        ("no plan", "cannot split model type `opt` over tensor-parallel ranks", "tensor_parallel_size=1"),
        ("context parallel", "no context parallelism (context_parallel_size is 2)", "--backend megatron"),
        ("wrong weights", "lacks tensors of LlamaForCausalLM: model.layers.2.", "not of one model"),
        ("wrong shapes", "is [96, 64], config.json makes it [80, 64]", "not of one model"),
        ("unequal head", "config.json ties the embeddings, but `lm_head.weight` differs", "tie_word_embeddings"),
    ],
)
def test_a_model_or_layout_that_does_not_fit_is_refused_by_name(ranks, case, says, hint):
    for rank in ranks:
        assert says in rank[case][0]
        assert hint in rank[case][1]
