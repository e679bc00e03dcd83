"""Token logprobs and entropy against torch's own log_softmax and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlctl.policy import logprobs
from tests import distributed

VOCABULARY = 37


def inputs(rows: int = 11, *, dtype: torch.dtype = torch.float32, columns: int = VOCABULARY):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 4).to(dtype)
    return logits.requires_grad_(), torch.randint(0, VOCABULARY, (rows,), generator=generator)


def oracle(logits, targets, temperature):
    """log_softmax of the true vocabulary in fp64, and its entropy."""
    table = torch.log_softmax(logits[:, :VOCABULARY].double() / temperature, -1)
    return table.gather(1, targets[:, None])[:, 0], torch.distributions.Categorical(logits=table.detach()).entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_fp32_values_entropy_and_gradient_equal_log_softmax(temperature):
    logits, targets = inputs()
    upstream = torch.linspace(-1, 2, len(targets))
    got, entropy = logprobs.token_logprobs(logits, targets, temperature=temperature, group=None)
    (gradient,) = torch.autograd.grad(got @ upstream, logits)
    want, want_entropy = oracle(logits, targets, temperature)
    (want_gradient,) = torch.autograd.grad(want @ upstream.double(), logits)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=0, atol=1e-6)
    assert got.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad


def test_fp64_gradient_passes_gradcheck():
    logits, targets = inputs(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: logprobs.token_logprobs(x, targets, temperature=0.8, group=None)[0], (logits,)
    )


def test_chunks_of_rows_change_nothing(monkeypatch):
    logits, targets = inputs()
    whole = logprobs.token_logprobs(logits, targets, temperature=0.9, group=None)
    (whole_gradient,) = torch.autograd.grad(whole[0].sum(), logits)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2 * VOCABULARY)
    parts = logprobs.token_logprobs(logits, targets, temperature=0.9, group=None)
    (parts_gradient,) = torch.autograd.grad(parts[0].sum(), logits)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    assert torch.equal(whole_gradient, parts_gradient)


def test_padding_columns_get_no_probability_and_no_gradient():
    logits, targets = inputs(columns=VOCABULARY + 7)
    with torch.no_grad():
        logits[:, VOCABULARY:] = 50.0  # would take all the probability
    got, entropy = logprobs.token_logprobs(logits, targets, temperature=1.0, group=None, vocab_valid=VOCABULARY)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    want, want_entropy = oracle(logits, targets, 1.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=2e-6)
    assert not gradient[:, VOCABULARY:].any()
    assert gradient[:, :VOCABULARY].any()


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, -3e38, 0.0], [5.0, -torch.inf, -50.0]], requires_grad=True)
    got, entropy = logprobs.token_logprobs(logits, torch.zeros(3, dtype=torch.int64), temperature=1.0, group=None)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert got.tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(entropy).all()


def test_bf16_logits_are_computed_in_fp32():
    logits, targets = inputs(dtype=torch.bfloat16)
    got, _ = logprobs.token_logprobs(logits, targets, temperature=1.0, group=None)
    torch.testing.assert_close(got.double(), oracle(logits, targets, 1.0)[0], rtol=0, atol=2e-6)
    assert got.dtype == torch.float32


def test_no_rows_is_no_error_and_keeps_the_graph():
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    got, entropy = logprobs.token_logprobs(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0, group=None)
    got.sum().backward()
    assert logits.grad is not None
    assert entropy.shape == (0,)


def test_scatter_to_stream_is_differentiable():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    stream = logprobs.scatter_to_stream(values, index=torch.tensor([3, 1]), length=5)
    assert stream.tolist() == [0, 2, 0, 1, 0]
    (stream * torch.arange(5.0)).sum().backward()
    assert values.grad.tolist() == [3, 1]


def vocabulary_parallel(columns: int, per_rank: int) -> tuple:
    logits, targets = inputs(columns=columns)
    start = dist.get_rank() * per_rank
    local = logits.detach()[:, start : start + per_rank].clone().requires_grad_()
    got, entropy = logprobs.token_logprobs(
        local, targets, temperature=0.7, group=dist.group.WORLD, vocab_start=start, vocab_valid=VOCABULARY
    )
    (gradient,) = torch.autograd.grad(got @ torch.linspace(-1, 2, len(targets)), local)
    return got.detach(), entropy, gradient


@pytest.mark.slow
@pytest.mark.parametrize("per_rank", [20, 40], ids=["padded last rank", "a rank of padding only"])
def test_two_ranks_with_half_the_vocabulary_equal_one_with_all(per_rank):
    columns = 2 * per_rank
    results = distributed.run("tests.numerics.test_logprobs:vocabulary_parallel", 2, columns, per_rank)
    logits, targets = inputs(columns=columns)
    want, want_entropy = oracle(logits, targets, 0.7)
    (want_gradient,) = torch.autograd.grad(want @ torch.linspace(-1, 2, len(targets)).double(), logits)
    for got, entropy, _ in results:
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=2e-6)
    gradient = torch.cat([g for _, _, g in results], 1)
    torch.testing.assert_close(gradient, want_gradient, rtol=0, atol=1e-6)
