"""A generation engine that answers late and out of order: what a trainer must cope with.

It has the transformers engine's completions, and holds them back: a poll may give nothing although some ended, and
gives what it gives shuffled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rlctl.config import Recipe
from rlctl.generation import transformers
from rlctl.generation.base import WeightSource
from rlctl.types import Completion, Request


class Engine:
    ranks_per_replica = 1

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        self._inner = transformers.Engine(recipe, model_dir, batch_size=4)
        self._order = random.Random(0)
        self._held: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._inner.submit(self._order.sample(list(requests), len(requests)))

    def poll(self) -> list[Completion]:
        self._held += self._inner.poll()
        self._order.shuffle(self._held)
        count = self._order.choice([0, 0, 1, len(self._held)])
        given, self._held = self._held[:count], self._held[count:]
        return given

    def abort(self, ids: Sequence[int]) -> None:
        self._inner.abort(ids)
        self._held = [c for c in self._held if c.id not in set(ids)]

    def load_weights(self, source: WeightSource, version: int) -> None:
        assert not self._held, "new weights while completions of the old ones are not collected"
        self._inner.load_weights(source, version)

    def sleep(self, what: Literal["weights", "kv_cache"]) -> None:
        self._inner.sleep(what)

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._inner.wake(what)

    def close(self) -> None:
        self._inner.close()
