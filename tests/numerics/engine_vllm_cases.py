"""What test_engine_vllm.py runs in processes of its own: vLLM engines beside an existing process group.

Each case returns figures; the test asserts. Engines start one after the other in the same processes: only the first
start is slow.
"""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.generation.base import generate
from rlctl.generation.vllm import Config, Engine
from rlctl.types import Request
from tests import engines

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 1.3, "top_p": 0.6},
    "top_k": {"top_k": 5},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def recipe(tensor_parallel: int = 1, **vllm_kwargs: Any) -> Recipe:
    made = engines.recipe(max_total_sequence_length=256)
    made.policy.generation.vllm_cfg = Config(tensor_parallel_size=tensor_parallel, kv_cache_bytes=1 << 26)
    made.policy.generation.vllm_kwargs = {
        "block_size": 32
    } | vllm_kwargs  # short prompts fill blocks of the prefix cache
    return made


def outside() -> dict[str, Any]:
    """What vLLM must leave alone."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "set_num_threads": torch.set_num_threads.__module__ or "builtin",
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
    }


def weight_sync(folder: str, tensor_parallel: int) -> dict[str, Any]:
    """Largest logprob differences before and after new weights, and what surrounds them."""
    old = engines.load(Path(folder))
    before = outside()
    engine = Engine(recipe(tensor_parallel), Path(folder))
    asked = engines.requests(6)
    long = [dataclasses.replace(r, prompt_tokens=tuple(range(90)), max_new_tokens=8) for r in asked]
    result: dict[str, Any] = {
        name: engines.difference(old, again := engines.requests(6, **sampling), generate(engine, again))
        for name, sampling in SAMPLINGS.items()
    }
    generate(engine, long)  # fills the prefix cache
    new = engines.perturb(engines.load(Path(folder)))
    engine.load_weights(engines.Weights(new), version=7)
    given = generate(engine, asked)
    result["new"] = engines.difference(new, asked, given)
    result["stale"] = engines.difference(old, asked, given)
    result["prefix"] = engines.difference(new, long, generate(engine, long))
    result["versions"] = {c.version for c in given}
    result["tokens"] = [c.tokens for c in given]
    engine.close()
    after = outside()
    result["disturbed"] = [name for name in before | after if before.get(name) != after.get(name)]
    result["world_lives"] = float(_sum_over_ranks())
    return result


def _sum_over_ranks() -> torch.Tensor:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones


def requests_and_mistakes(folder: str, refused_models: dict[str, str]) -> dict[str, Any]:
    """Seeds, batches, stops, greedy, abort and refusals on one engine; each rank is a replica."""
    engine = Engine(recipe(), Path(folder))
    asked = engines.requests(8)
    together = generate(engine, asked)
    alone = [generate(engine, [r])[0] for r in asked]
    seeds = generate(engine, [dataclasses.replace(asked[0], id=i, seed=i) for i in range(8)])
    stop = together[0].tokens[2]
    stopping = dataclasses.replace(asked[0].sampling, stop_token_ids=(stop,))
    stopped = generate(engine, [dataclasses.replace(asked[0], sampling=stopping)])[0]
    greedy_asked = engines.requests(3, temperature=0.0)
    greedy = generate(engine, greedy_asked)
    engine.submit(asked)
    engine.abort([r.id for r in asked[1:]])
    left = []
    while len(left) < 1:
        left += engine.poll()
    model = engines.load(Path(folder))
    likeliest = [
        model(torch.tensor([[*r.prompt_tokens, *c.tokens]]))
        .logits[0, len(r.prompt_tokens) - 1 : -1]
        .argmax(-1)
        .tolist()
        for r, c in zip(greedy_asked, greedy, strict=True)
    ]
    refused = [
        _message(lambda r=r: engine.submit([r]))
        for r in (
            Request(id=1, prompt_tokens=(1,) * 250, max_new_tokens=7, seed=0),
            Request(id=2, prompt_tokens=(1, 999), max_new_tokens=7, seed=0),
            Request(id=3, prompt_tokens=(), max_new_tokens=7, seed=0),
        )
    ]
    engine.close()
    return {
        "together": [c.tokens for c in together],
        "alone": [c.tokens for c in alone],
        "seeds": [c.tokens for c in seeds],
        "stop": (stop, stopped),
        "greedy": [(list(c.tokens), c.logprobs) for c in greedy],
        "likeliest": likeliest,
        "left": [(c.id, c.tokens) for c in left],
        "refused": refused,
        "indivisible": _message(lambda: Engine(recipe(tensor_parallel=3), Path(folder))),
        **{name: _message(lambda f=folder: Engine(recipe(), Path(f))) for name, folder in refused_models.items()},
        "does_not_start": _message(lambda: Engine(recipe(no_such_option=1), Path(folder))),
    }


def _message(action: Any) -> tuple[str, int]:
    try:
        action()
    except RlctlError as error:
        return error.message, error.exit_status
    return "accepted", 0


def all_cases(folders: dict[str, str], refused_models: dict[str, str]) -> dict[str, Any]:
    """Every tiny case, in one start of two processes."""
    results: dict[str, Any] = {
        f"{name}-tp{tp}": weight_sync(folder, tp) for name, folder in folders.items() for tp in (1, 2)
    }
    return results | {"requests": requests_and_mistakes(folders["untied"], refused_models)}


def smollm2() -> dict[str, float]:
    """The demo model before and after new weights, in float32."""
    from rlctl.models.materialize import load_tokenizer, materialize
    from rlctl.models.resolve import resolve

    folder = materialize(resolve("smollm2-135m"))
    tokenizer = load_tokenizer(folder)
    made = engines.recipe(max_total_sequence_length=128)
    made.policy.generation.vllm_cfg = Config(kv_cache_bytes=1 << 28)
    engine = Engine(made, folder)
    asked = [
        Request(
            id=i,
            prompt_tokens=tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
            ),
            max_new_tokens=24,
            seed=i,
        )
        for i, question in enumerate(["What is 7 + 5?", "Name a colour.", "Count to five, then stop, please."])
    ]
    result = {"old": engines.difference(engines.load(folder), asked, generate(engine, asked))}
    new = engines.perturb(engines.load(folder), share=0.03)
    engine.load_weights(engines.Weights(new), version=1)
    given = generate(engine, asked)
    result |= {"new": engines.difference(new, asked, given)}
    result |= {"stale": engines.difference(engines.load(folder), asked, given)}
    engine.close()
    return result
