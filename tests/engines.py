"""What the engine tests share: a plain transformers forward as oracle, and a policy's weights without a policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from rlctl.config import Recipe
from rlctl.types import Completion, Request, Sampling
from tests import tiny


def recipe(**policy: Any) -> Recipe:
    made = Recipe()
    made.policy.precision = "float32"
    for name, value in policy.items():
        setattr(made.policy, name, value)
    return made


def requests(count: int, *, new_tokens: int = 12, vocabulary: int = 256, **sampling: Any) -> list[Request]:
    """Prompts of different lengths, different seeds."""
    return [
        Request(
            id=100 + i,
            prompt_tokens=tuple((7 * i + 11 * j + 3) % vocabulary for j in range(1 + 5 * (i % 4) + i)),
            max_new_tokens=new_tokens,
            seed=1000 + i,
            sampling=Sampling(**sampling),
        )
        for i in range(count)
    ]


@torch.no_grad()
def oracle(model: Any, request: Request, completion: Completion) -> torch.Tensor:
    """Logprobs of the sampled tokens: one sequence, no cache, no padding; transformers' own filters."""
    start = len(request.prompt_tokens)
    tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]])
    scores = model(tokens).logits[0, start - 1 : -1].float()
    sampling = request.sampling
    scores = transformers.TemperatureLogitsWarper(sampling.temperature)(tokens, scores)
    if sampling.top_k is not None:
        scores = transformers.TopKLogitsWarper(sampling.top_k)(tokens, scores)
    if sampling.top_p < 1:
        scores = transformers.TopPLogitsWarper(sampling.top_p)(tokens, scores)
    return scores.log_softmax(-1).gather(1, tokens[0, start:, None])[:, 0]


def difference(model: Any, asked: list[Request], given: list[Completion]) -> float:
    """Largest |engine - oracle| logprob."""
    pairs = zip(asked, given, strict=True)
    return max(float((torch.tensor(c.logprobs) - oracle(model, r, c)).abs().max()) for r, c in pairs)


def save_tiny(kind: str, folder: Path, **overrides: Any) -> Path:
    """A tiny model without end token, its config.json written as model authors' are."""
    tiny.save(kind, folder, eos_token_id=None, **overrides)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"num_local_experts"', '"num_experts"'))  # transformers 5 renames it
    return folder


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def perturb(model: Any, *, seed: int = 1, share: float = 0.2) -> Any:
    """Change every weight by a share of its spread."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        parameter.add_(noise * share * max(float(parameter.std()), 0.1))
    return model


class Weights:
    """A WeightSource: the tensors of a transformers model as its files name them, in small buckets."""

    def __init__(self, model: Any) -> None:
        parameters = dict(model.named_parameters())  # a tied projection is listed once
        self.tensors = list(revert_weight_conversion(model, parameters).items())

    def whole(self, bucket_bytes: int = 1 << 28, to: Any = "all") -> Iterator[list[tuple[str, torch.Tensor]]]:
        for i in range(0, len(self.tensors), 5):
            yield self.tensors[i : i + 5]
