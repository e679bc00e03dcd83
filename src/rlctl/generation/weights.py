"""The stream of weights from a policy into an engine, checked: every tensor of the model arrives exactly once.

The stream is collective. It is exhausted whatever happens, so that a mistake ends all ranks with a message instead of
a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rlctl import plugins
from rlctl.errors import CHECK_FAILED, RlctlError
from rlctl.generation.base import WeightSource
from rlctl.lazy import torch

NamedTensor = tuple[str, "torch.Tensor"]


def expected(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors in Hugging Face form; a tied output projection is not one."""
    rules = plugins.load("model", hf_config["model_type"]).rules(dict(hf_config))
    return {name: shape for r in rules for name, shape in zip(r.sources, r.source_shapes, strict=True)}


def load(
    source: WeightSource,
    into: Callable[[Iterator[NamedTensor]], None],
    *,
    expecting: Mapping[str, tuple[int, ...]],
) -> None:
    """Feed a policy's weights to an engine.

    Args:
        source: the policy's weights; every rank calls this.
        into: takes the tensors, one by one.
        expecting: name -> shape.

    Raises:
        RlctlError: exit status 4: a tensor is missing, unknown, repeated, or of another shape.
    """
    buckets = iter(source.whole())
    stream = _checked(buckets, expecting)
    try:
        into(stream)
        for name, _ in stream:
            raise AssertionError(f"the engine did not take `{name}`")
    finally:
        for _ in buckets:  # the other ranks wait in each bucket
            pass


def _checked(buckets: Iterable[list[NamedTensor]], expecting: Mapping[str, tuple[int, ...]]) -> Iterator[NamedTensor]:
    seen: set[str] = set()
    wrong: list[str] = []
    for bucket in buckets:
        for name, tensor in bucket:
            problem = _problem(name, tuple(tensor.shape), seen, expecting)
            seen.add(name)
            if problem:
                wrong.append(f"`{name}` {problem}")
            else:
                yield name, tensor
    wrong += [f"`{name}` did not arrive" for name in expecting if name not in seen]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise RlctlError(
            f"weight sync: {wrong[0]}{more}",
            "the training backend and the engine disagree about the model: check policy.hf_config_overrides",
            exit_status=CHECK_FAILED,
        )


def _problem(name: str, shape: tuple[int, ...], seen: set[str], expecting: Mapping[str, tuple[int, ...]]) -> str | None:
    if name not in expecting:
        return "is not a tensor of the engine's model"
    if name in seen:
        return "arrived twice"
    if shape != tuple(expecting[name]):
        return f"has shape {list(shape)}, the engine's has {list(expecting[name])}"
    return None
