"""`rlctl ARGUMENTS` with failing_worker.py as the worker, and a short timeout for stalls."""

import functools
import sys

from rlctl.cli.app import run
from rlctl.launch import local

STALL_SECONDS = 6.0

if __name__ == "__main__":
    local.run = functools.partial(local.run, worker="tests.cli.failing_worker", stall_seconds=STALL_SECONDS)
    sys.exit(run(sys.argv[1:]))
