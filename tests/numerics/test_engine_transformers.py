"""The transformers engine against a plain forward pass of the same weights."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.generation.base import generate
from rlctl.generation.transformers import Engine
from rlctl.types import Request, Sampling
from tests import engines

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return engines.save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    return Engine(engines.recipe(), folder)


SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.6},
    {"top_k": 5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logprobs_are_those_of_the_distribution_drawn_from(engine, folder, sampling):
    asked = engines.requests(9, **sampling)
    given = generate(engine, asked)
    assert engines.difference(engines.load(folder), asked, given) < TOLERANCE
    assert all(len(c.tokens) == 12 and c.finish_reason == "length" for c in given)


def test_a_completion_depends_on_its_request_and_not_on_its_batch(folder):
    asked = engines.requests(12)
    together = generate(Engine(engines.recipe(), folder), asked)
    in_fives = generate(Engine(engines.recipe(), folder, batch_size=5), asked[::-1])[::-1]
    alone = generate(Engine(engines.recipe(), folder, batch_size=1), asked)
    assert [c.tokens for c in together] == [c.tokens for c in in_fives] == [c.tokens for c in alone]


def test_global_random_state_is_neither_read_nor_changed(engine):
    asked = engines.requests(3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = generate(engine, asked)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert generate(engine, asked) == first


def test_another_seed_gives_another_completion(engine):
    request = engines.requests(1)[0]
    seeds = [dataclasses.replace(request, id=i, seed=i) for i in range(8)]
    assert len({c.tokens for c in generate(engine, seeds)}) == 8


def test_tokens_are_drawn_with_their_probabilities(engine, folder):
    """Frequencies of 3000 first tokens over the six that top-k leaves, within 4.5 standard deviations."""
    count, prompt = 3000, (5, 6, 7)
    asked = [
        Request(id=i, prompt_tokens=prompt, max_new_tokens=1, seed=i, sampling=Sampling(top_k=6, temperature=0.5))
        for i in range(count)
    ]
    drawn = torch.tensor([c.tokens[0] for c in generate(engine, asked)])
    with torch.no_grad():
        logits = engines.load(folder)(torch.tensor([prompt])).logits[0, -1] / 0.5
    probability = torch.softmax(logits.topk(6).values, 0)
    frequency = torch.stack([(drawn == token).float().mean() for token in logits.topk(6).indices])
    deviation = (frequency - probability).abs() / (probability * (1 - probability) / count).sqrt()
    assert deviation.max() < 4.5
    assert frequency.sum() == pytest.approx(1)


def test_temperature_zero_takes_the_likeliest_token(engine, folder):
    asked = engines.requests(3, temperature=0.0)
    model = engines.load(folder)
    for request, completion in zip(asked, generate(engine, asked), strict=True):
        tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]])
        likeliest = model(tokens).logits[0, len(request.prompt_tokens) - 1 : -1].argmax(-1)
        assert completion.tokens == tuple(likeliest.tolist())
        assert set(completion.logprobs) == {0.0}


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False), ("qwen2", True), ("qwen3_moe", False)])
def test_new_weights_are_taken_whole(tmp_path, kind, tied):
    engine = Engine(engines.recipe(), engines.save_tiny(kind, tmp_path / "old", tie_word_embeddings=tied))
    asked = engines.requests(5)
    stale = engines.load(tmp_path / "old")
    assert engines.difference(stale, asked, generate(engine, asked)) < TOLERANCE

    new = engines.perturb(engines.load(tmp_path / "old"))
    engine.load_weights(engines.Weights(new), version=3)
    given = generate(engine, asked)
    assert engines.difference(new, asked, given) < TOLERANCE
    assert engines.difference(stale, asked, given) > 100 * TOLERANCE, "the test could not tell old weights from new"
    assert {c.version for c in given} == {3}


def _without(tensors):
    return tensors[:-1]


def _twice(tensors):
    return [*tensors, tensors[0]]


def _misshapen(tensors):
    return [(tensors[0][0], tensors[0][1][:1]), *tensors[1:]]


def _unknown(tensors):
    return [*tensors, ("model.layers.9.mlp.gate_proj.weight", tensors[0][1])]


@pytest.mark.parametrize(
    ("damage", "says"),
    [(_without, "did not arrive"), (_twice, "twice"), (_misshapen, "shape"), (_unknown, "layers.9")],
)
def test_a_damaged_weight_stream_is_refused_and_read_to_its_end(tmp_path, damage, says):
    engine = Engine(engines.recipe(), engines.save_tiny("llama", tmp_path / "old"))
    source = engines.Weights(engines.load(tmp_path / "old"))
    source.tensors = damage(source.tensors)
    ended = []

    class Watched:
        def whole(self, *args, **kwargs):
            yield from source.whole()
            ended.append(True)

    with pytest.raises(RlctlError, match=says) as error:
        engine.load_weights(Watched(), version=1)
    assert error.value.exit_status == 4
    assert ended


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("RLCTL_SKIP_DEMO") is not None, reason="RLCTL_SKIP_DEMO is set")
def test_smollm2_logprobs_agree_to_5e_5():
    from rlctl.models.materialize import load_tokenizer, materialize
    from rlctl.models.resolve import resolve

    folder = materialize(resolve("smollm2-135m"))
    tokenizer = load_tokenizer(folder)
    engine = Engine(engines.recipe(), folder)
    asked = [
        Request(id=i, prompt_tokens=tuple(_rendered(tokenizer, question)), max_new_tokens=24, seed=i)
        for i, question in enumerate(["What is 7 + 5?", "Name a colour.", "Count to five, then stop, please."])
    ]
    given = generate(engine, asked)
    assert engines.difference(engines.load(folder), asked, given) < 5e-5
    new = engines.perturb(engines.load(folder), share=0.03)
    engine.load_weights(engines.Weights(new), version=1)
    assert engines.difference(new, asked, generate(engine, asked)) < 5e-5


def _rendered(tokenizer, question):
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
