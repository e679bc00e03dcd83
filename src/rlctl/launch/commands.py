"""The lines that would run a job elsewhere, or small and here: exact, to be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rlctl.launch import slurm
from rlctl.recipe.derive import Resolved

HEAD = "HEAD_ADDRESS"
PORT = 29500
_OWN_FLAGS = {"--dry-run", "--json", "--debug", "--quiet"}  # about this invocation, not about the job


def start(resolved: Resolved, arguments: Sequence[str]) -> str:
    """The line that starts the job where it can run: torchrun's, or sbatch's."""
    slurm_job = resolved.recipe.cluster.launcher == "slurm"
    return sbatch(resolved, arguments) if slurm_job else torchrun(resolved, arguments)


def torchrun(resolved: Resolved, arguments: Sequence[str]) -> str:
    """The line for each node of the job.

    Args:
        resolved: the job.
        arguments: after `rlctl`, as the user wrote them.
    """
    cluster, run_dir = resolved.recipe.cluster, resolved.recipe.run_dir
    job = _job(arguments, without=("--launcher", "--run-dir"))
    assert run_dir is not None
    per_node = cluster.gpus_per_node or cluster.procs
    if cluster.num_nodes > 1:
        start = (
            f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {per_node} "
            f"--rdzv-backend c10d --rdzv-endpoint {HEAD}:{PORT}"
        )
    else:
        start = f"torchrun --standalone --nproc-per-node {per_node}"
    return f"{start} -m rlctl {shlex.join(job)} --launcher env --run-dir {shlex.quote(run_dir)}"


def resume(run_dir: Path, arguments: Sequence[str]) -> str:
    """The line that goes on with a run."""
    return f"rlctl {job(run_dir, arguments)}"


def job(run_dir: Path, arguments: Sequence[str]) -> str:
    """`resume` after its first word."""
    kept = shlex.join(_job(arguments, without=("--resume", "--run-dir")))
    return f"{kept} --run-dir {shlex.quote(str(run_dir))} --resume auto"


def sbatch(resolved: Resolved, arguments: Sequence[str]) -> str:
    """What `--launcher slurm` submits: sbatch's line, and the script's."""
    run_dir = Path(str(resolved.recipe.run_dir))
    line = shlex.join(["sbatch", *slurm.options(resolved.recipe, run_dir), str(run_dir / slurm.SCRIPT)])
    return f"{line}\n{run_dir / slurm.SCRIPT}: {slurm.script(job(run_dir, arguments)).splitlines()[1]}"


def _job(arguments: Sequence[str], *, without: Sequence[str]) -> list[str]:
    """The user's arguments without those that a line sets itself, and without those about their own invocation."""
    kept, skip = [], False
    for argument in arguments:
        flag = argument.split("=")[0]
        if skip:
            skip = False
        elif flag in without:
            skip = "=" not in argument
        elif flag not in _OWN_FLAGS:
            kept.append(argument)
    return kept


def small(resolved: Resolved) -> str:
    """The demonstration job with the same algorithm and backend."""
    return f"rlctl train {resolved.recipe.algorithm} --model smollm2-135m --backend {resolved.backend}"
