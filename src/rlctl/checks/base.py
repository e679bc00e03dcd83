"""What is checked, what a check finds, and the limits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.config import Recipe
from rlctl.envs.base import EnvironmentProtocol
from rlctl.envs.render import Renderer
from rlctl.generation.base import EngineProtocol
from rlctl.lazy import torch
from rlctl.policy.base import PolicyProtocol
from rlctl.supervised import Row
from rlctl.types import Prompt

# Engine against policy, per token. In float32 whole runs of a 135M model stayed below 3e-4; in bfloat16 the mean over
# tokens is near 0.01, and a mask or temperature that is wrong gives more than 0.3.
LOGPROB_LIMITS = {"float32": ("largest", 2e-3), "bfloat16": ("mean", 0.1)}
LEAK_LIMITS = {"float32": 1e-4, "bfloat16": 0.05}  # a leak moves logprobs by tenths at least
SPLIT_LIMITS = {"float32": 1e-4, "bfloat16": 0.05}  # relative, of loss and gradient norm


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What makes rollouts."""

    engine: EngineProtocol
    environment: EnvironmentProtocol
    prompts: Sequence[Prompt]
    publish: Callable[[], None]
    """Gives the engine the policy's weights."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The parts that are checked."""

    recipe: Recipe
    policy: PolicyProtocol
    algorithm: AlgorithmProtocol
    renderer: Renderer
    source: Sampler | Sequence[Row]
    """What makes batches: an engine, or rendered rows of data."""
    fresh: bool
    """No update was made: the policy is its own reference."""

    @property
    def sampler(self) -> Sampler:
        """Where rollouts come from; only asked for where there are some."""
        assert isinstance(self.source, Sampler)
        return self.source


@dataclass(frozen=True, kw_only=True)
class Result:
    """One check's outcome, as checks.json has it."""

    name: str
    ok: bool
    expected: str
    found: str
    detail: str
    """The likely cause where it failed; else what the check could not see, if anything."""
    seconds: float = 0.0


def snapshot(value: Any) -> Any:
    """A copy on the host that nothing changes."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: snapshot(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(part) for part in value)
    return copy.deepcopy(value)
