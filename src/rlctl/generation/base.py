"""What a generation engine is: token ids in, token ids out, finished ones in any order.

An engine's file defines `Engine`, built as `Engine(recipe, model_dir)` in the trainer's own process, and optionally
`Config`. A replica is `ranks_per_replica` consecutive ranks, independent of the trainer's layout; each gets the same
requests, all give the same completions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from rlctl.types import Completion, Request


class WeightSource(Protocol):
    """What an engine needs of a policy's weights; see policy/base.py."""

    def whole(self, bucket_bytes: int = ..., to: Literal["all"] | int = ...) -> Iterator[list]:
        """Buckets of (Hugging Face name, whole tensor).

        Later buckets do not overwrite earlier ones: an engine may hold a tensor until a fused layer is complete.
        """
        ...


class EngineProtocol(Protocol):
    """One replica of a generation engine."""

    ranks_per_replica: int

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; ids are the caller's and unique among those unfinished."""
        ...

    def poll(self) -> list[Completion]:
        """Work for a while; finished completions in any order. Empty only if nothing finished yet."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Drop requests; they may still be reported, with finish_reason "abort"."""
        ...

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Take the policy's weights; later completions carry `version`. Collective over all ranks."""
        ...

    def sleep(self, what: Literal["weights", "kv_cache"]) -> None:
        """Free accelerator memory; idempotent."""
        ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """The reverse of `sleep`."""
        ...

    def close(self) -> None:
        """Shut the engine down, before the process groups are destroyed."""
        ...


def request_seed(run_seed: int, step: int, prompt: int, sample: int, turn: int = 0) -> int:
    """A seed in [0, 2**31) that depends on nothing else: the same for any replicas and after a resume."""
    text = f"{run_seed}/{step}/{prompt}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def generate(engine: EngineProtocol, requests: Sequence[Request]) -> list[Completion]:
    """All completions, in the order of the requests; matched by id."""
    engine.submit(requests)
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        done |= {c.id: c for c in engine.poll()}
    return [done[r.id] for r in requests]
