"""What every engine does with requests before it generates: which tokens end a completion, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.types import Request


def hf_config(recipe: Recipe, model_dir: Path) -> dict[str, Any]:
    """config.json with the recipe's overrides."""
    return json.loads((model_dir / "config.json").read_text()) | recipe.policy.hf_config_overrides


def end_tokens(recipe: Recipe, model_dir: Path) -> frozenset[int]:
    """The tokens that end a turn: the model's own (config and generation config) and the tokenizer's."""
    found: set[int | None] = set()
    for name in ("config.json", "generation_config.json"):
        file = model_dir / name
        stated = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found |= set(stated if isinstance(stated, list) else [stated])
    place = recipe.policy.tokenizer.name or str(model_dir)
    if recipe.policy.tokenizer.name or (model_dir / "tokenizer_config.json").is_file():
        import transformers  # heavy, and not needed by engines of models without a tokenizer

        found.add(transformers.AutoTokenizer.from_pretrained(place).eos_token_id)
    return frozenset(token for token in found if token is not None)


def check(requests: Iterable[Request], *, unfinished: Sequence[int], vocabulary: int, max_length: int) -> None:
    """Refuse what an engine would truncate or crash on.

    Args:
        requests: about to be queued.
        unfinished: ids in the engine.
        vocabulary: ids of the model.
        max_length: tokens of prompt and completion that the engine holds.

    Raises:
        RlctlError: a prompt that is empty, too long, or has ids outside the vocabulary.
    """
    taken = set(unfinished)
    for request in requests:
        assert request.id not in taken, f"request id {request.id} is unfinished"
        taken.add(request.id)
        length = len(request.prompt_tokens)
        if length == 0 or request.max_new_tokens < 1:
            raise RlctlError(
                f"request with {length} prompt tokens and {request.max_new_tokens} new tokens",
                "a prompt and a completion have at least one token each",
            )
        if length + request.max_new_tokens > max_length:
            raise RlctlError(
                f"{length} prompt tokens + {request.max_new_tokens} new tokens exceed the engine's {max_length}",
                "lower policy.generation.max_new_tokens or data.max_input_seq_length, "
                "or raise policy.max_total_sequence_length as far as the model's positions go",
            )
        outside = [token for token in request.prompt_tokens if not 0 <= token < vocabulary]
        if outside:
            raise RlctlError(
                f"prompt token {outside[0]} is outside the model's vocabulary of {vocabulary}",
                "set policy.tokenizer.name to the tokenizer that belongs to the model",
            )
