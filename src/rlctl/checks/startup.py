"""Start-up self-checks: a small probe through the parts of a run, before its first step.

1. Names: the tokenizer's ids fit the model; the template opens a reply, begins once, and keeps what came before; of
   data, answers are learned up to the token that ends them.
2. Reward: a known good reply scores fully.
3. Packing does not leak: other tokens in a neighbour change nothing.
4. On unchanged weights, engine and policy give a sampled token the same probability; without an engine, a token's
   probability depends on itself and what is before it. A reference is the policy, before the first step.
5. One update on all microbatches at once has the gradient of the same work cut in more of them.
6. After that update, which changes every weight, the engine has the new weights, head included.

Then state, random numbers and the engine's weights are as they were, bit for bit. A check that fails names what it
expected, what it found, and the likely cause. `sync` is check 4 again, later. It does not know a backend or an engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl import device
from rlctl.checks import logprobs, probes, words
from rlctl.checks.base import Result, Sampler, Subject
from rlctl.checks.update import update
from rlctl.errors import CHECK_FAILED, RlctlError
from rlctl.lazy import dist

FILE = "checks.json"


def run(subject: Subject, run_dir: Path) -> list[Result]:
    """Do all checks, and write checks.json. Collective.

    Args:
        subject: the parts; an engine holds the policy's weights.
        run_dir: rank 0 writes there.

    Returns:
        The results, the same on every rank.

    Raises:
        RlctlError: exit status 4; the first check that failed, after all were done.
    """
    random_state = device.rng_state()
    samples = isinstance(subject.source, Sampler)
    first = (words.identity, words.template, words.gold) if samples else (words.identity, words.rows)
    results = [_timed(check, subject) for check in first]
    if samples or all(result.ok for result in results):  # of rows that are wrong there may be nothing to probe
        results += _probed(subject, samples=samples)
    device.set_rng_state(random_state)
    results = _first_rank(results)
    if dist.get_rank() == 0:
        text = json.dumps([asdict(result) for result in results], indent=1) + "\n"
        (run_dir / FILE).write_text(text)
    for result in results:
        if not result.ok:
            raise RlctlError(
                f"start-up check `{result.name}` failed: expected {result.expected}, found {result.found}",
                f"{result.detail}; all results are in {run_dir / FILE}, and `--no-checks` starts all the same",
                exit_status=CHECK_FAILED,
            )
    return results


def _probed(subject: Subject, *, samples: bool) -> list[Result]:
    batch = probes.sampled(subject) if samples else probes.rows(subject)
    checks = [logprobs.packing, logprobs.ratio if samples else logprobs.alignment]
    checks += [logprobs.reference] if subject.fresh and "ref" in subject.algorithm.needs else []
    return [_timed(check, subject, batch) for check in checks] + _timed_all(update, subject, batch)


def _first_rank(results: list[Result]) -> list[Result]:
    box = [results]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _timed(check: Callable[..., Result], *arguments: Any) -> Result:
    began = time.monotonic()
    result = check(*arguments)
    return Result(**(asdict(result) | {"seconds": time.monotonic() - began}))


def _timed_all(check: Callable[..., list[Result]], *arguments: Any) -> list[Result]:
    began = time.monotonic()
    results = check(*arguments)
    seconds = (time.monotonic() - began) / len(results)
    return [Result(**(asdict(result) | {"seconds": seconds})) for result in results]


def sync(subject: Subject, *, step: int) -> None:
    """Whether the engine has the policy's weights after a step, on fresh samples. Collective; changes nothing.

    Args:
        subject: the parts, the engine awake.
        step: just published.

    Raises:
        RlctlError: exit status 4.
    """
    random_state = device.rng_state()
    batch = probes.sampled(subject, draw=step + 1)
    subject.sampler.engine.sleep("kv_cache")  # its room is the policy's, for a forward pass
    result = _first_rank([logprobs.synced(subject, batch)])[0]
    subject.sampler.engine.wake("kv_cache")
    device.set_rng_state(random_state)
    if not result.ok:
        raise RlctlError(
            f"weight sync after step {step}: expected {result.expected}, found {result.found}",
            f"{result.detail}; the checkpoint before is intact, and checks.sync_probe_period=0 goes on all the same",
            exit_status=CHECK_FAILED,
        )
