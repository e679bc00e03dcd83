"""sft and dpo, both backends on two ranks, against plain loops of transformers and torch's AdamW."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlctl.algorithms import dpo
from rlctl.models.materialize import load_tokenizer, materialize
from rlctl.models.resolve import resolve
from rlctl.types import TokenOutputs
from tests import distributed
from tests import supervised_cases as cases
from tests.declared import undeclared
from tests.numerics.algorithm_cases import batch


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    return distributed.run("tests.supervised_cases:curves", 2, tmp_path_factory.mktemp("runs"), ("sft", "dpo"))[0]


@pytest.fixture(scope="module")
def model():
    folder = materialize(resolve("tiny-llama"), progress=lambda text: None)
    return folder, load_tokenizer(folder)


def steps(rows, size=16):
    return list(itertools.batched(rows, size))[: cases.STEPS]


def losses(lines):
    """Of each step, and of the validation at the end."""
    return [x["train/loss"] for x in lines if "train/loss" in x] + [lines[-1]["val/loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_sft_gives_the_losses_of_transformers_in_a_plain_loop(curves, model, backend):
    folder, tokenizer = model
    train, held_out = (
        [cases.encoded(tokenizer, r["messages"]) for r in cases.rows(n)] for n in ("smoke-sft", "smoke-sft-held-out")
    )
    want = cases.plain_sft(folder, steps(train), held_out)
    assert losses(curves[f"sft {backend}"]) == pytest.approx(want, rel=1e-4)
    assert want[2] < want[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_dpo_starts_at_ln_2_and_gives_the_losses_of_the_papers_formula(curves, model, backend):
    folder, tokenizer = model
    ask = lambda row, answer: [  # noqa: E731
        {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]},
    ]  # fmt: skip
    train, held_out = (
        [tuple(cases.encoded(tokenizer, ask(r, a)) for a in ("chosen", "rejected")) for r in cases.rows(n)]
        for n in ("smoke-dpo", "smoke-dpo-held-out")
    )
    lines = curves[f"dpo {backend}"]
    want = cases.plain_dpo(folder, steps(train), held_out, beta=0.1)
    assert losses(lines) == pytest.approx(want, rel=1e-3)
    assert losses(lines)[0] == pytest.approx(math.log(2), abs=1e-6)
    margins = [x["train/preference_margin"] for x in lines if "train/loss" in x]
    assert margins == sorted(margins) and margins[-1] > 0.3
    assert lines[-1]["val/preference_accuracy"] == 1.0


@pytest.mark.slow
def test_nothing_is_said_of_rollouts_where_there_are_none(curves):
    names = {name for lines in curves.values() for line in lines for name in line}
    assert not [n for n in names if n.startswith(("rollout/", "mismatch/")) or "weight_sync" in n]
    assert not undeclared(names)


def pairs(lengths=(4, 6, 3, 7), **fields):
    made = batch(lengths).replace(group=torch.tensor([0, 0, 1, 1]), **fields)
    n = len(made.tokens)
    generator = torch.Generator().manual_seed(0)
    logprobs, reference = (torch.where(made.mask, -torch.rand(n, generator=generator) * 4, 0.0) for _ in range(2))
    return made.replace(ref_logprobs=reference), logprobs


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("sft", [0.0, 0.3])
def test_dpos_options_are_the_formula_worked_out_in_python(average, sft):
    made, logprobs = pairs()
    options = dpo.Loss(reference_policy_kl_penalty=0.7, preference_average_log_probs=average, sft_loss_weight=sft)
    rule = dpo.Algorithm(dpo.Config(loss_fn=options))
    token_loss, _ = rule.loss(made, TokenOutputs(logprobs=logprobs))
    got = float((rule.loss_weights(made) * token_loss).sum())

    ends = made.offsets.tolist()
    of = lambda values, i: values[ends[i] + 2 : ends[i + 1]].tolist()  # noqa: E731
    want = 0.0
    for chosen, rejected in ((0, 1), (2, 3)):
        ratios = []
        for i in (chosen, rejected):
            apart = [a - b for a, b in zip(of(logprobs, i), of(made.ref_logprobs, i), strict=True)]
            ratios.append(sum(apart) / (len(apart) if average else 1))
        want += math.log(1 + math.exp(-0.7 * (ratios[0] - ratios[1]))) / 2
        want += sft * -sum(of(logprobs, chosen)) / len(of(logprobs, chosen)) / 2
    assert got == pytest.approx(want, rel=1e-5)


def test_dpos_loss_is_the_same_in_whatever_order_and_parts_pairs_come():
    made, logprobs = pairs()
    rule = dpo.Algorithm(dpo.Config())
    whole = made.replace(loss_weights=rule.loss_weights(made))
    total = 0.0
    for members, rows in (([2, 3], slice(10, 20)), ([0, 1], slice(0, 10))):
        part = whole.select(torch.tensor(members))
        token_loss, _ = rule.loss(part, TokenOutputs(logprobs=logprobs[rows]))
        total += float((part.loss_weights * token_loss).sum())
    token_loss, _ = rule.loss(whole, TokenOutputs(logprobs=logprobs))
    assert total == pytest.approx(float((whole.loss_weights * token_loss).sum()), rel=1e-6)
