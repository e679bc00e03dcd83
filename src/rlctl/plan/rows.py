"""Rows of measurements (data/measured.csv and files like it) as jobs: every prediction is from a row's inputs alone.

What a row leaves unsaid is assumed: no virtual stages, the least recompute that fits the GPU, a microbatch of one
sequence, degrees of 1.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.plan import footprint
from rlctl.plan.hardware import Gpu, gpu
from rlctl.plan.shape import Shape, published
from rlctl.plan.steptime import Constants, Job, Kernels, step_time

Row = Mapping[str, str]
TRAINING = ("pretrain", "sft", "lora", "rl_lora", "rl_train", "memory")
NEEDED = ("row_id", "model", "hardware", "n_gpus", "framework", "workload", "precision", "seq_len", "gbs", "mbs", "tp",
          "pp", "vpp", "cp", "ep", "dp_or_fsdp", "sp", "recompute", "notes")  # fmt: skip
_RECOMPUTE = {"full": 1.0, "full+offload": 1.0, "none": 0.0, "selective": 0.33, "selective-attn": 0.05,
              "selective-layer": 0.5}  # fmt: skip
_PRECISION = {
    "BF16": "bfloat16",
    "FP16": "bfloat16",
    "FP8": "fp8",
    "MXFP8": "fp8",
    "FP8-rowwise": "fp8",
    "NVFP4": "fp4",
}

HELD_OUT, FOLDS = 4, 5  # the fold that is never fitted, of how many


class Unpredictable(Exception):
    """Why a row has no prediction."""


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file.

    Raises:
        RlctlError: it is not there, or lacks a column.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RlctlError(f"cannot read `{path}`: {error}", "give a CSV file", exit_status=1) from error
    absent = [name for name in NEEDED if not rows or name not in rows[0]]
    if absent:
        raise RlctlError(f"`{path}` has no {', no '.join(absent)}", f"its columns must be {', '.join(NEEDED)}")
    return rows


def shape_of(row: Row) -> Shape:
    """Dimensions of a row's model, by name or from its notes.

    Raises:
        Unpredictable: the dimensions are not known.
    """
    shape = published(row["model"])
    if shape is not None:
        return shape
    said = {k: int(v) for k, v in re.findall(r"(hidden|layers|heads|vocab)=(\d+)", row["notes"])}
    if {"hidden", "layers", "heads", "vocab"} - said.keys():
        raise Unpredictable(f"the dimensions of model `{row['model']}` are not known")
    size = said["hidden"] // said["heads"]
    return Shape(
        layers=said["layers"], hidden=said["hidden"], heads=said["heads"], groups=said["heads"], head_size=size,
        ffn=4 * said["hidden"], vocabulary=said["vocab"], gated=False, tied=True,
    )  # fmt: skip


def number(row: Row, name: str, default: int | None = None) -> int:
    """An integer column.

    Raises:
        Unpredictable: it is empty and there is no default, or it is not a positive integer.
    """
    text = row[name].strip()
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[1-9]\d*(\.0*)?", text):
        raise Unpredictable(f"`{name}` is not given" if not text else f"`{name}` is `{text}`")
    return int(float(text))


def training_job(row: Row) -> Job:
    """The job of a training row.

    Raises:
        Unpredictable: a needed input is absent, or the degrees do not fit together.
    """
    shape, gpus = shape_of(row), number(row, "n_gpus")
    kernels = _kernels(row["framework"])
    tp, pp, cp, ep = (number(row, name, 1) for name in ("tp", "pp", "cp", "ep"))
    if gpus % (tp * pp * cp):
        raise Unpredictable(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    sequence, batch = number(row, "seq_len"), number(row, "gbs")
    size = number(row, "mbs", 1)
    size = min(size, max(1, batch // dp))
    if shape.moe_layers and shape.experts % ep:
        raise Unpredictable(f"ep {ep} does not divide {shape.experts} experts")
    etp = 1 if ep > 1 or not shape.moe_layers else tp
    job = Job(
        shape=shape, gpu=gpu_of(row), gpus=gpus, microbatch_tokens=size * sequence, span=sequence,
        microbatches=max(1, round(batch / (dp * size))), precision=_precision(row), kernels=kernels,
        tp=tp, sp=row["sp"] != "0", pp=pp, vpp=_virtual(row, shape, pp), cp=cp, ep=ep, etp=etp,
        shard=_shard(row, gpus), lora="lora" in row["workload"],
        reshard=not re.search("SHARD_GRAD_OP|reshard_after_forward=false", row["notes"]),
        logit_bytes=_logit_bytes(row), host_optimizer=_host_optimizer(row),
        old_attention="attn=FA2" in row["notes"] or row["framework"].startswith("llm-foundry"),
    )  # fmt: skip
    return dataclasses.replace(job, recompute=_recompute(row, job))


def updates_divisor(row: Row) -> int:
    """What a row's step is a part of: prime-rl prints the time of one of an update's two microbatches."""
    return 2 if "step time shown is per micro-batch" in row["notes"] else 1


def gpu_of(row: Row) -> Gpu:
    """A row's accelerator.

    Raises:
        Unpredictable: it is not known.
    """
    try:
        return gpu(row["hardware"])
    except RlctlError as error:
        raise Unpredictable(
            f"GPU `{row['hardware']}` is not known" if row["hardware"] else "no GPU is given"
        ) from error


def _precision(row: Row) -> Any:
    if row["precision"] not in _PRECISION:
        raise Unpredictable(
            f"precision `{row['precision']}` is not known" if row["precision"] else "no precision is given"
        )
    return _PRECISION[row["precision"]]


def _kernels(framework: str) -> Kernels:
    if re.match("NeMo AutoModel|llm-foundry|DeepSpeed|verl FSDP", framework):
        return "eager"
    return "compiled" if re.match("torchtitan|prime-rl", framework) else "fused"


def _virtual(row: Row, shape: Shape, pp: int) -> int:
    if pp == 1:
        return 1
    if row["vpp"].strip():
        return number(row, "vpp")
    unsaid = "Megatron" in row["framework"] or "NeMo" in row["framework"]
    return max(1, min(4, shape.layers // pp)) if unsaid and "VP not stated" in row["notes"] else 1


def _shard(row: Row, gpus: int) -> int:
    text = row["dp_or_fsdp"]
    if match := re.fullmatch(r"fsdp=(\d+)", text):
        return int(match[1])
    return min(gpus, 64) if text == "fsdp+dp" else 1


def _host_optimizer(row: Row) -> bool:
    notes = row["notes"]
    if row["framework"].startswith("prime-rl"):
        return row["workload"] == "rl_train"
    return "CPU AdamW offload" in notes or "optimizer offload 100%" in notes


def _logit_bytes(row: Row) -> float:
    framework = row["framework"]
    if "Liger" in framework or (framework.startswith("prime-rl") and row["workload"] != "sft"):
        return 0.0  # output layer and loss are one kernel
    if framework.startswith("prime-rl"):
        return 16.0
    return {"fused": 6.0, "compiled": 14.0, "eager": 10.0}[_kernels(framework)]


def memory_bytes(row: Row, job: Job) -> float:
    """Predicted bytes of the fullest GPU. Per-operation recompute redoes a third and frees more than half."""
    return footprint.peak(job, recompute=0.6 if row["recompute"].strip() == "selective" else job.recompute)


def _recompute(row: Row, job: Job) -> float:
    said = row["recompute"].strip()
    if said in _RECOMPUTE:
        return _RECOMPUTE[said]
    return footprint.least_recompute(job, limit=0.94 * job.gpu.memory_bytes)


def measured_tokens(row: Row) -> float | None:
    """Measured tokens/s of a GPU, of a training row; None without measurement."""
    if row["tokens_per_s_per_gpu"].strip():
        return float(row["tokens_per_s_per_gpu"])
    if not all(row[name].strip() for name in ("step_time_s", "gbs", "seq_len", "n_gpus")):
        return None
    return float(row["gbs"]) * float(row["seq_len"]) / float(row["n_gpus"]) / float(row["step_time_s"])


def group(row: Row) -> str:
    """Rows that differ in release or GPU count only are one configuration: they are held out together."""
    family = row["framework"].split()[0]
    return "|".join([family, row["model"], row["hardware"], row["workload"], row["precision"], row["seq_len"]])


def fold(name: str, folds: int = FOLDS) -> int:
    """Of a group of rows, by a hash of its name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % folds


def held_out(row: Row) -> bool:
    """Whether a training row was never fitted."""
    return fold(group(row)) == HELD_OUT


def usable(rows: Sequence[Row]) -> list[tuple[Row, Job]]:
    """Training rows with a measurement and a job."""
    found = []
    for row in rows:
        if row["workload"] not in TRAINING or not measured_tokens(row) or "unscored" in row["split_tag"]:
            continue
        try:
            found.append((row, training_job(row)))
        except Unpredictable:
            continue
    return found


def tokens_per_second(job: Job, fitted: Constants) -> float:
    """Predicted tokens/s of a GPU, over an update."""
    return job.tokens / job.gpus / step_time(job, fitted).total


def memory_errors(table: Sequence[Row]) -> dict[str, list[float]]:
    """Predicted / measured - 1 of bytes on a GPU, of rows that have them, by kind of framework."""
    found: dict[str, list[float]] = {}
    for row in table:
        if row["mem_gb_per_gpu"].strip() and row["workload"] in TRAINING:
            try:
                job = training_job(row)
            except Unpredictable:
                continue
            family = "fsdp" if job.shard > 1 else "megatron"
            found.setdefault(family, []).append(memory_bytes(row, job) / 1e9 / float(row["mem_gb_per_gpu"]) - 1)
    return found


def layout_choices(table: Sequence[Row], fitted: Constants) -> list[float]:
    """Measured speed of the layout predicted to be the fastest, over that of the fastest one.

    One figure for each framework, model, GPU, number of GPUs, workload, precision and length with several layouts.
    """
    alike: dict[tuple[str, ...], list[tuple[Row, Job]]] = {}
    for row, job in usable(table):
        columns = ("model", "hardware", "n_gpus", "workload", "precision", "seq_len")
        alike.setdefault((row["framework"].split()[0], *(row[c] for c in columns)), []).append((row, job))
    found = []
    for pairs in alike.values():
        if len({(j.tp, j.pp, j.cp, j.ep, j.etp, j.shard) for _, j in pairs}) > 1:
            chosen, _ = max(pairs, key=lambda pair: tokens_per_second(pair[1], fitted))
            speeds = {row["row_id"]: measured_tokens(row) or 0.0 for row, _ in pairs}
            found.append(speeds[chosen["row_id"]] / max(speeds.values()))
    return found
