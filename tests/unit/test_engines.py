"""What every engine keeps to: the protocol, ends of completions, refusals; and the engine that answers late."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

from rlctl.errors import RlctlError
from rlctl.generation import requests as rules
from rlctl.generation import transformers, vllm
from rlctl.generation.base import EngineProtocol, generate, request_seed
from rlctl.types import Request, Sampling
from tests import engines, late_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return engines.save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    return transformers.Engine(engines.recipe(), folder)


METHODS = [name for name, value in vars(EngineProtocol).items() if callable(value) and not name.startswith("_")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("module", [transformers, vllm, late_engine], ids=lambda m: m.__name__)
def test_engines_have_the_methods_of_the_protocol(module, method):
    """Names and order of arguments."""
    asked = inspect.signature(getattr(EngineProtocol, method)).parameters
    assert list(inspect.signature(getattr(module.Engine, method)).parameters) == list(asked)


def test_an_engine_that_answers_late_and_out_of_order_gives_the_same_completions(engine, folder):
    asked = [dataclasses.replace(r, max_new_tokens=3 + r.id % 5) for r in engines.requests(11)]
    late = generate(late_engine.Engine(engines.recipe(), folder), asked)
    plain = generate(engine, asked)
    assert [(c.id, c.tokens, c.finish_reason) for c in late] == [(c.id, c.tokens, c.finish_reason) for c in plain]


def test_the_late_engine_is_late_and_out_of_order(folder):
    late = late_engine.Engine(engines.recipe(), folder)
    late.submit(asked := engines.requests(11))
    polls = []
    while sum(map(len, polls)) < len(asked):
        polls.append(late.poll())
    assert [] in polls
    given = [c.id for poll in polls for c in poll]
    assert given != sorted(given)


def test_short_completions_are_given_before_long_ones(engine):
    lengths = [9, 2, 5]
    asked = [dataclasses.replace(r, max_new_tokens=n) for r, n in zip(engines.requests(3), lengths, strict=True)]
    engine.submit(asked)
    assert [c.id for _ in lengths for c in engine.poll()] == [101, 102, 100]
    assert engine.poll() == []


def test_a_stop_token_ends_the_completion_and_belongs_to_it(engine):
    request = engines.requests(1)[0]
    whole = generate(engine, [request])[0]
    stop = whole.tokens[4]
    stopping = dataclasses.replace(request, sampling=Sampling(stop_token_ids=(stop,)))
    completion = generate(engine, [stopping])[0]
    assert completion.finish_reason == "stop"
    assert completion.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert completion.logprobs == pytest.approx(whole.logprobs[: len(completion.tokens)], abs=1e-6)


def test_the_models_own_end_tokens_end_a_completion(tmp_path, engine):
    request = engines.requests(1)[0]
    whole = generate(engine, [request])[0]
    folder = engines.save_tiny("llama", tmp_path)
    for file, stop in (("config.json", 3), ("generation_config.json", 6)):
        stated = json.loads((folder / file).read_text()) | {"eos_token_id": [whole.tokens[stop]]}
        (folder / file).write_text(json.dumps(stated))
    completion = generate(transformers.Engine(engines.recipe(), folder), [request])[0]
    assert completion.finish_reason == "stop"
    assert completion.tokens == whole.tokens[:4]


def test_end_tokens_are_the_models_and_the_tokenizers(tmp_path):
    folder = engines.save_tiny("llama", tmp_path)
    from rlctl.models import tiny_tokenizer

    tiny_tokenizer.build(264).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert rules.end_tokens(engines.recipe(), folder) == {5, 6, 257}


def test_aborted_requests_are_not_reported(engine):
    asked = engines.requests(5)
    engine.submit(asked)
    engine.abort([101, 103])
    engine.submit([dataclasses.replace(asked[0], id=7)])
    given = []
    while len(given) < 4:
        given += engine.poll()
    assert {c.id for c in given} == {100, 102, 104, 7}
    assert engine.poll() == []


def test_requests_that_sample_differently_do_not_share_a_batch(engine):
    hot, cold = engines.requests(3), engines.requests(3, temperature=0.1)
    cold = [dataclasses.replace(r, id=r.id + 10) for r in cold]
    mixed = [r for pair in zip(hot, cold, strict=True) for r in pair]
    expected = {c.id: c.tokens for c in generate(engine, hot) + generate(engine, cold)}
    assert {c.id: c.tokens for c in generate(engine, mixed)} == expected


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "says"),
    [
        ((1,) * 500, 13, "500 prompt tokens [+] 13 new tokens exceed the engine's 512"),
        ((1, 256), 4, "prompt token 256 is outside the model's vocabulary of 256"),
        ((-1, 3), 4, "prompt token -1 is outside"),
        ((), 4, "0 prompt tokens"),
        ((1,), 0, "0 new tokens"),
    ],
)
def test_what_an_engine_would_truncate_or_crash_on_is_refused(engine, prompt, new_tokens, says):
    with pytest.raises(RlctlError, match=says):
        engine.submit([Request(id=0, prompt_tokens=prompt, max_new_tokens=new_tokens, seed=0)])


def test_without_vllm_the_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RlctlError, match="`vllm` is not installed") as error:
        vllm.Engine(engines.recipe(max_total_sequence_length=64), folder)
    assert error.value.exit_status == 3
    assert "rlctl[cpu]" in error.value.hint


def test_the_vllm_engines_options_are_read_without_heavy_modules():
    """`recipes check`, `plan` and dry runs read them."""
    heavy = "('torch', 'transformers', 'vllm', 'megatron')"
    code = f"import sys, rlctl.generation.vllm; print([m for m in {heavy} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "[]"


def test_weights_and_arithmetic_have_the_recipes_precision(folder):
    """bfloat16: near the float32 oracle, and not equal to it."""
    engine = transformers.Engine(engines.recipe(precision="bfloat16"), folder)
    asked = engines.requests(4)
    assert 1e-4 < engines.difference(engines.load(folder), asked, generate(engine, asked)) < 0.2


def test_config_overrides_reach_the_model(folder):
    """The oracle is the model with another epsilon."""
    overrides = {"rms_norm_eps": 0.5}
    asked = engines.requests(4)
    given = generate(transformers.Engine(engines.recipe(hf_config_overrides=overrides), folder), asked)
    model = engines.load(folder)
    assert engines.difference(model, asked, given) > 1e-3
    for norm in [m for m in model.modules() if hasattr(m, "variance_epsilon")]:
        norm.variance_epsilon = 0.5
    assert engines.difference(model, asked, given) < 1e-5


def test_request_seeds_differ_in_every_coordinate():
    seeds = [request_seed(*c) for c in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]]
    seeds.append(request_seed(1, 2, 3, 4, turn=1))
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, 2, 3, 4) == seeds[0]
