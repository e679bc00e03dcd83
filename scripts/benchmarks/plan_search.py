"""Seconds that a search over layouts takes: the figures of docs/plan.md. Usage: plan_search.py [REPEATS]."""

from __future__ import annotations

import statistics
import sys
import time

from rlctl.models.resolve import resolve
from rlctl.plan import rl, search
from rlctl.plan.hardware import gpu
from rlctl.plan.predict import Question
from rlctl.plan.steptime import constants

CASES = (("llama-3.1-8b", 8), ("llama-3.1-70b", 64), ("qwen3-30b-a3b", 256), ("qwen3-30b-a3b", 4608))


def seconds(name: str, gpus: int) -> tuple[int, float]:
    """Layouts considered, and CPU seconds; nothing is kept from an earlier search."""
    rl.Lengths.sample.cache_clear()
    rl.Lengths.span.cache_clear()
    question = Question(
        hf_config=resolve(name).config, gpu=gpu("h100"), gpus=gpus, precision="bfloat16", microbatch_tokens=8192,
        sequences=8 * max(256, gpus), prompts=max(256, gpus), updates=1, reference=True, utilization=0.6,
        lengths=rl.Lengths(prompt=512, response=2048, limit=3584),
    )  # fmt: skip
    began = time.process_time()
    found = search.search(question, "megatron", fitted=constants())
    return found.considered, time.process_time() - began


def main(repeats: int) -> None:
    for name, gpus in CASES:
        runs = [seconds(name, gpus) for _ in range(repeats)]
        times = sorted(t for _, t in runs)
        print(f"{name:14s} {gpus:5d} GPUs {runs[0][0]:5d} layouts  median {statistics.median(times):.2f} s, "
              f"most {times[-1]:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
