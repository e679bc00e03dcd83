"""`rlctl plan --rows`: every row of a file predicted from its inputs alone.

`low` and `high` are the 10-90 % interval of `step_time_s`, or of `tokens_per_s_per_gpu` for a generation row, which has
no step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlctl.plan import interval, rl
from rlctl.plan.rows import TRAINING, Row, Unpredictable, memory_bytes, read, training_job, updates_divisor
from rlctl.plan.steptime import constants, step_time


def predict_file(file: Path) -> list[dict[str, Any]]:
    """An answer for each row, in order.

    Raises:
        RlctlError: the file cannot be read, or lacks a column.
    """
    return [predict_row(row) for row in read(file)]


def predict_row(row: Row) -> dict[str, Any]:
    """row_id, step_time_s, tokens_per_s_per_gpu, mem_gb_per_gpu, low, high, quantity; None and a reason where not."""
    answer: dict[str, Any] = {
        "row_id": row["row_id"], "step_time_s": None, "tokens_per_s_per_gpu": None, "mem_gb_per_gpu": None,
        "low": None, "high": None, "quantity": None, "reason": None,
    }  # fmt: skip
    try:
        if row["workload"] in TRAINING:
            return answer | _training(row)
        if row["workload"] == "generation":
            return answer | _generation(row)
        if row["workload"] == "grpo_step":
            return answer | _rl_step(row)
    except Unpredictable as reason:
        return answer | {"reason": str(reason)}
    return answer | {"reason": f"workload `{row['workload']}` is no training step, RL step or generation"}


def _training(row: Row) -> dict[str, Any]:
    job = training_job(row)
    update = step_time(job, constants()).total
    seconds = update / updates_divisor(row)
    low, high = interval.bounds(job)
    return {
        "step_time_s": seconds, "tokens_per_s_per_gpu": job.tokens / job.gpus / update,
        "mem_gb_per_gpu": memory_bytes(row, job) / 1e9, "low": seconds / high, "high": seconds / low,
        "quantity": "step_time_s",
    }  # fmt: skip


def _generation(row: Row) -> dict[str, Any]:
    rate = rl.predicted_rate(rl.throughput_of(row), constants())
    low, high = interval.of("generation")
    return {
        "tokens_per_s_per_gpu": rate, "low": rate * low, "high": rate * high, "quantity": "tokens_per_s_per_gpu",
    }  # fmt: skip


def _rl_step(row: Row) -> dict[str, Any]:
    work = rl.work_of(row)
    step = rl.rl_step(work, constants())
    if step is None:
        raise Unpredictable(f"an engine of tp {work.engine.tp} does not hold the model")
    low, high = interval.of("rl step")
    tokens = work.sequences * work.lengths.total
    gpus = work.generation_gpus * (2 if work.overlapped else 1)
    return {
        "step_time_s": step.total, "tokens_per_s_per_gpu": tokens / gpus / step.total,
        "mem_gb_per_gpu": memory_bytes(row, work.job) / 1e9, "low": step.total / high, "high": step.total / low,
        "quantity": "step_time_s",
    }  # fmt: skip
