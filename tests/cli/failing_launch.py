"""`rlctl ARGUMENTS` with failing_worker.py as the worker."""

import functools
import sys

from rlctl.cli.app import run
from rlctl.launch import local

if __name__ == "__main__":
    local.run = functools.partial(local.run, worker="tests.cli.failing_worker")
    sys.exit(run(sys.argv[1:]))
