"""Plain transformers and autograd: one process, one sequence at a time, eager attention, fp32, no packing.

What every backend must agree with. The algorithm's token loss is taken as given; logprobs are torch's log_softmax.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlctl.types import Batch, TokenOutputs


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Of one batch, by Hugging Face names."""

    loss: float
    loss_scale: float
    """sum(w * |token_loss|), what an error of the loss is measured against."""
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    logprobs: torch.Tensor  # [N]
    entropy: torch.Tensor  # [N]


def load(model_dir: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = None  # a batch has no padding; the id is a token like others
    return model.eval()


def sequence_outputs(model: Any, batch: Batch, *, temperature: float) -> TokenOutputs:
    """Logprobs and entropy [n] of a batch of one sequence, zero outside its mask."""
    assert len(batch) == 1
    table = torch.log_softmax(model(batch.tokens[None], use_cache=False).logits[0] / temperature, -1)
    before = table[:-1]  # row t-1 is about token t
    logprobs = before.gather(1, batch.tokens[1:, None])[:, 0]
    entropy = -(before.detach().exp() * before.detach()).sum(-1)
    first = torch.zeros(1)
    return TokenOutputs(
        logprobs=torch.where(batch.mask, torch.cat([first, logprobs]), 0.0),
        entropy=torch.where(batch.mask, torch.cat([first, entropy]), 0.0),
    )


def backward(model: Any, batch: Batch, algorithm: Any, *, temperature: float) -> Oracle:
    """Gradients are left in the model too."""
    model.zero_grad(set_to_none=True)
    loss = scale = 0.0
    outs = []
    together = batch.group.tolist() if algorithm.unit == "group" else range(len(batch))
    for _, members in itertools.groupby(range(len(batch)), key=lambda i: together[i]):
        chosen = list(members)
        alone = [sequence_outputs(model, batch.select(torch.tensor([i])), temperature=temperature) for i in chosen]
        unit, out = batch.select(torch.tensor(chosen)), TokenOutputs(logprobs=torch.cat([o.logprobs for o in alone]))
        token_loss, _ = algorithm.loss(unit, out)
        weighted = unit.loss_weights * token_loss
        weighted.sum().backward()
        loss += float(weighted.detach().double().sum())
        scale += float(weighted.detach().double().abs().sum())
        outs += alone
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return Oracle(
        loss=loss,
        loss_scale=scale,
        grad_norm=float(sum(g.double().square().sum() for g in gradients.values()).sqrt()),
        gradients=gradients,
        logprobs=torch.cat([o.logprobs.detach() for o in outs]),
        entropy=torch.cat([o.entropy for o in outs]),
    )


def evaluate(model_dir: Path, batch: Batch, algorithm: Any, *, temperature: float = 1.0) -> Oracle:
    """Loss, gradient norm, every gradient, logprobs and entropy."""
    return backward(load(model_dir), batch, algorithm, temperature=temperature)


def adamw(model_dir: Path, batch: Batch, algorithm: Any, *, steps: int, section: Any) -> dict[str, torch.Tensor]:
    """Parameters after steps of torch.optim.AdamW with torch's own clipping; matrices alone are decayed.

    Args:
        model_dir: where to start.
        batch: the same at every step.
        algorithm: its token loss.
        steps: updates.
        section: a recipe's `policy`.
    """
    model, options = load(model_dir), section.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
    )
    for _ in range(steps):
        backward(model, batch, algorithm, temperature=section.generation.temperature)
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.max_grad_norm)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|a-b| / max|b|."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def loss_error(got: float, oracle: Oracle) -> float:
    return abs(got - oracle.loss) / oracle.loss_scale
