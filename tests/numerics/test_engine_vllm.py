"""The vLLM engine, in two gloo processes with a process group of their own, against a plain forward pass."""

from __future__ import annotations

import importlib.util

import pytest

from tests import distributed, engines
from tests.numerics.engine_vllm_cases import SAMPLINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
TOLERANCE = 1e-5
HEADS = {"head_dim": 32}  # the smallest that vLLM's CPU attention computes
CASES = ["untied-tp1", "tied-tp1", "untied-tp2", "tied-tp2"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    work = tmp_path_factory.mktemp("vllm")
    folders = {
        "untied": engines.save_tiny("llama", work / "untied", **HEADS),
        "tied": engines.save_tiny("qwen3", work / "tied", tie_word_embeddings=True, **HEADS),
    }
    refused = {
        "heads": engines.save_tiny("llama", work / "heads", head_dim=16),
        "experts": engines.save_tiny("qwen3_moe", work / "experts", **HEADS),
    }
    arguments = [{k: str(v) for k, v in names.items()} for names in (folders, refused)]
    return distributed.run("tests.numerics.engine_vllm_cases:all_cases", 2, *arguments)


@pytest.fixture(scope="module", params=CASES)
def both(request, ranks):
    """A case's result on each rank."""
    return [rank[request.param] for rank in ranks]


def test_logprobs_are_those_of_the_distribution_drawn_from(both):
    for rank in both:
        assert {name: rank[name] for name in SAMPLINGS if rank[name] > TOLERANCE} == {}


def test_new_weights_are_taken_whole_also_by_a_tied_projection(both):
    for rank in both:
        assert rank["new"] < TOLERANCE
        assert rank["stale"] > 100 * TOLERANCE, "the test could not tell old weights from new"
        assert rank["versions"] == {7}


def test_key_value_blocks_of_old_weights_are_forgotten(both):
    for rank in both:
        assert rank["prefix"] < TOLERANCE


def test_all_ranks_give_the_same_completions(both):
    assert both[0]["tokens"] == both[1]["tokens"]


def test_environment_random_states_and_process_group_are_left_alone(both):
    for rank in both:
        assert rank["disturbed"] == []
        assert rank["world_lives"] == 2


@pytest.fixture(scope="module")
def answers(ranks):
    return ranks[0]["requests"]


def test_a_completion_depends_on_its_request_and_not_on_its_batch(answers):
    assert answers["together"] == answers["alone"]
    assert len(set(answers["seeds"])) == 8


def test_a_stop_token_ends_the_completion_and_belongs_to_it(answers):
    stop, completion = answers["stop"]
    first = answers["together"][0]
    assert completion.finish_reason == "stop"
    assert completion.tokens == first[: first.index(stop) + 1]
    assert len(completion.logprobs) == len(completion.tokens)


def test_temperature_zero_takes_the_likeliest_token(answers):
    assert [tokens for tokens, _ in answers["greedy"]] == answers["likeliest"]
    assert {logprob for _, logprobs in answers["greedy"] for logprob in logprobs} == {0.0}


def test_an_aborted_request_is_not_reported(answers):
    assert answers["left"] == [(100, answers["together"][0])]


def test_what_the_engine_would_truncate_or_crash_on_is_refused(answers):
    too_long, unknown_token, empty = answers["refused"]
    assert too_long == ("250 prompt tokens + 7 new tokens exceed the engine's 256", 2)
    assert unknown_token == ("prompt token 999 is outside the model's vocabulary of 256", 2)
    assert empty[1] == 2


def test_a_wrong_size_or_option_is_named(answers):
    message, status = answers["indivisible"]
    assert "2 processes do not divide" in message
    assert status == 3
    message, status = answers["does_not_start"]
    assert "no_such_option" in message
    assert status == 3


def test_smollm2_logprobs_agree_to_5e_5():
    (result,) = distributed.run("tests.numerics.engine_vllm_cases:smollm2", 1)
    assert result["old"] < 5e-5
    assert result["new"] < 5e-5
    assert result["stale"] > 1e-2


def test_models_that_vllm_would_compute_wrongly_on_this_host_are_refused(answers):
    message, status = answers["heads"]
    assert "this model has 16" in message
    assert status == 3
    message, status = answers["experts"]
    assert "experts keep their old weights" in message
    assert status == 3
