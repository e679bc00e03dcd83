"""What a rank that failed leaves in logs/error_rank_N.json, and how the launcher tells it."""

from __future__ import annotations

import errno
import json
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlctl.errors import ENVIRONMENT, RlctlError

_RANKS, _LINES, _FRAMES = 8, 4, 6  # shown of each
_TAIL_CHARACTERS = 400_000  # stacks of hundreds of threads
_DUMP = re.compile(
    r"^(?:Current t|T)hread 0x(?:.*\n)(?:(?:  File .*|Current thread .*|Thread .*|  <.*|\s*|(?:  )?\.\.\.)\n)*",
    re.MULTILINE,
)
"""A dump of faulthandler: all threads, each with its frames."""
MEMORY = "memory_plan"
"""Of environment.json: bytes by part."""
_TOLD = "error_told"


def leave(error: BaseException, logs: Path, *, rank: int, phase: str) -> int:
    """Write a rank's error for the launcher; returns the exit status.

    Args:
        error: of the user, of the machine, or of ours.
        logs: of the run.
        rank: this one.
        phase: what it was doing.
    """
    node = os.environ.get("SLURMD_NODENAME", "")
    who = f"rank {rank}" + (f" on node {node}" if node else "")
    details = ""
    if isinstance(error, RlctlError):
        message, hint, status, details = error.message, error.hint, error.exit_status, error.details
    elif _is_out_of_memory(error):
        problem = out_of_memory(logs.parent, f"{who} ran out of memory in phase `{phase}`: {_first_line(error)}")
        message, hint, status, details = problem.message, problem.hint, problem.exit_status, problem.details
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"cannot write `{error.filename or logs.parent}`: {error.strerror}"
        hint, status = "free space there, then go on with `--resume auto`", ENVIRONMENT
    else:
        message = f"{who} failed in phase `{phase}`: {type(error).__name__}: {_first_line(error)}"
        hint, status = "", 1
    text = "".join(traceback.format_exception(error))
    report = {
        "error": message,
        "hint": hint,
        "exit_status": status,
        "phase": phase,
        "traceback": text,
        "details": details,
    }
    path = logs / f"error_rank_{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(path)
    return status


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", maxsplit=1)[0]


def _is_out_of_memory(error: BaseException) -> bool:
    """Of a device (torch.OutOfMemoryError), or of the host: Python's own, or torch's allocator."""
    words = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory")
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or (isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in words))
    )


def out_of_memory(run_dir: Path, message: str) -> RlctlError:
    """The error of a rank without memory, with what the plan says of its parts, and the key that lowers the largest."""
    environment = run_dir / "environment.json"
    plan = json.loads(environment.read_text())[MEMORY] if environment.is_file() else {}
    sized = sorted(((size, name) for name, size in plan.items() if size), reverse=True)
    lines = [f"{size / 1e9:8.2f} GB  {name.replace('_', ' ')}" for size, name in sized]
    mend = next((text for text, names in _MENDS if sized and sized[0][1] in names), _MENDS[0][0])
    title = f"planned memory of the fullest rank, {sum(plan.values()) / 1e9:.2f} GB"
    return RlctlError(message, mend, exit_status=ENVIRONMENT, details=_block(title, lines))


_MENDS = (
    (
        "lower policy.train_micro_batch_size or policy.sequence_packing.train_mb_tokens, "
        "or set policy.activation_checkpointing=true",
        {"activations", "logits"},
    ),
    (
        "lower policy.generation.vllm_cfg.kv_cache_bytes (on a host) or gpu_memory_utilization (on GPUs)",
        {"kv cache", "engine weights"},
    ),
    (
        "use more GPUs or processes, or more tensor parallelism, so that each holds less of the model",
        {"weights", "gradients", "main_weights", "optimizer", "gathered", "reference", "not modelled", "process"},
    ),
)


def is_first(logs: Path) -> bool:
    """Whether no rank asked this before, in this start of the run; ranks that fail together ask at the same time."""
    try:
        (logs / _TOLD).touch(exist_ok=False)
    except OSError:
        return False
    return True


def clear(logs: Path) -> None:
    """Remove what the ranks of an earlier start left."""
    for report in [*logs.glob("error_rank_*.json"), logs / _TOLD]:
        report.unlink(missing_ok=True)


def reports(run_dir: Path) -> list[Path]:
    """The ranks' own errors, the first one first."""
    return sorted((run_dir / "logs").glob("error_rank_*.json"), key=lambda f: (f.stat().st_mtime_ns, f.name))


def told(report: Path) -> RlctlError:
    """A rank's error as the launcher tells it, with its log in the hint."""
    said = json.loads(report.read_text())
    rank = report.stem.removeprefix("error_rank_")
    log = report.parent / f"rank_{rank}.log"
    hint = f"{said['hint']} (log: {log})" if said["hint"] else f"see {log}"
    frames = [line.strip() for line in said["traceback"].splitlines() if line.startswith("  File ")]
    where = "" if said["hint"] else _block(f"rank {rank}, innermost call first", frames[: -_FRAMES - 1 : -1])
    return RlctlError(said["error"], hint, exit_status=int(said["exit_status"]), details=said["details"] or where)


def details(logs: Path, phases: Mapping[int, str]) -> str:
    """What the ranks said last, and where each is: for a failure that no rank tells itself.

    Args:
        logs: of the run; stacks that were asked for on SIGUSR1 are at the end of the ranks' logs.
        phases: of the ranks to show, the first ones first.
    """
    blocks = []
    for rank, phase in list(phases.items())[:_RANKS]:
        file = logs / f"rank_{rank}.log"
        text = file.read_text(errors="replace")[-_TAIL_CHARACTERS:] if file.is_file() else ""
        before, stack = _split(text)
        lines = [line.rstrip() for line in before.splitlines() if line.strip()][-_LINES:]
        blocks.append(_block(f"rank {rank}, phase `{phase}`, last lines of its log", lines or ["(nothing)"]))
        if stack:
            blocks.append(_block(f"rank {rank}, innermost call first", stack[:_FRAMES]))
    more = f"\n(and {len(phases) - _RANKS} ranks more)" if len(phases) > _RANKS else ""
    return "\n".join(blocks) + more


def _split(text: str) -> tuple[str, list[str]]:
    """What faulthandler did not write, and the main thread's frames in its last dump; it lists that thread last."""
    found = list(_DUMP.finditer(text))
    if not found:
        return text, []
    frames = re.findall(r"^  (File .*)$", found[-1][0].rpartition("hread 0x")[2], re.MULTILINE)
    return _DUMP.sub("", text), frames


def _block(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"    {line}" for line in lines)]) if lines else ""
