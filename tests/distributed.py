"""Run a function in several gloo processes and get each rank's result.

The function lives in an importable test module and takes plain arguments; processes have torchrun's variables.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 400


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(function: str, world: int, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """The results of `module:function(*args)` by rank.

    Args:
        function: e.g. "tests.parity.steps:megatron_steps"; called inside an initialised gloo process group.
        world: processes.
        args: picklable.
        env: extra environment variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "args").write_bytes(pickle.dumps(args))
        port = str(free_port())
        ranks = []
        for rank in range(world):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            } | (env or {})  # fmt: skip
            log = (work / f"log{rank}").open("w")
            command = [sys.executable, "-m", "tests.distributed", function, str(work)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT))
        try:
            codes = _wait(ranks)
        finally:
            for p in ranks:
                p.kill()
        if any(codes):
            logs = "\n".join(
                f"--- rank {r} (exit {c})\n{(work / f'log{r}').read_text()[-4000:]}" for r, c in enumerate(codes)
            )
            raise AssertionError(f"{function} failed\n{logs}")
        return [pickle.loads((work / f"result{r}").read_bytes()) for r in range(world)]


def _wait(ranks: list[subprocess.Popen]) -> list[int | None]:
    """Exit codes; the first failure, or the timeout, ends the wait for all."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while True:
        codes = [p.poll() for p in ranks]
        if all(c is not None for c in codes) or any(codes) or time.monotonic() > end:
            return codes if time.monotonic() <= end else [c if c is not None else -1 for c in codes]
        time.sleep(0.05)


def _main(function: str, folder: str) -> None:
    import importlib

    from rlctl import device

    device.prepare_process()  # the worker's own start: host shim, threads, environment
    import torch.distributed as dist

    device.init_process_group(TIMEOUT_SECONDS)
    module, name = function.split(":")
    args = pickle.loads((Path(folder) / "args").read_bytes())
    result = getattr(importlib.import_module(module), name)(*args)
    (Path(folder) / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
