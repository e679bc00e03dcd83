"""One rank of a Slurm step: `python -m rlctl.launch.slurm_task RUN_DIR ADDRESS`, started by srun.

1. Slurm's numbers become the names that torch.distributed knows.
2. Rank 0 chooses a free port, and the others read it from the run directory, which all nodes share.
3. srun's standard output is the user's console; the worker takes both streams over for its log.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.launch import failure, worker

WAIT_SECONDS = 120.0


def main(run_dir: Path, address: str) -> int:
    """Become the worker of this rank; returns its exit status."""
    os.dup2(1, 2)
    task = {name: os.environ[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NTASKS", "STEP_NUM_NODES")}
    rank, nodes = int(task["PROCID"]), int(task["STEP_NUM_NODES"])
    rendezvous = run_dir / "logs" / f"rendezvous_{os.environ['RLCTL_SLURM_STEP']}.json"
    os.environ |= {
        "RANK": task["PROCID"],
        "LOCAL_RANK": task["LOCALID"],
        "WORLD_SIZE": task["NTASKS"],
        "LOCAL_WORLD_SIZE": str(int(task["NTASKS"]) // nodes),
        "MASTER_ADDR": address,
    }
    try:
        os.environ["MASTER_PORT"] = str(_port(rendezvous, rank))
    except RlctlError as error:
        return failure.leave(error, run_dir / "logs", rank=rank, phase="start")
    return worker.main(run_dir, supervised=True)


def _port(file: Path, rank: int) -> int:
    """The port at which rank 0 will listen.

    Raises:
        RlctlError: rank 0 wrote none in WAIT_SECONDS.
    """
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"port": port}))
        partial.replace(file)
        return port
    end = time.monotonic() + WAIT_SECONDS
    while not file.is_file():
        if time.monotonic() > end:
            raise RlctlError(
                f"rank {rank} on {socket.gethostname()} waited {WAIT_SECONDS:.0f} s for `{file}`, which rank 0 writes",
                "give a `--run-dir` on storage that all nodes share",
                exit_status=1,
            )
        time.sleep(0.1)
    return int(json.loads(file.read_text())["port"])


if __name__ == "__main__":
    worker.leave(main(Path(sys.argv[1]), sys.argv[2]))
