"""The command `rlctl`, and `python -m rlctl`.

The guard is needed: Megatron's checkpoint writer spawns processes that import this module again.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and exit with its status."""
    _open_standard_streams()
    from rlctl.cli.app import run  # after it: a module's file must not become descriptor 1 or 2

    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Open /dev/null where stdin, stdout or stderr is closed: else the next file opened would get what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


if __name__ == "__main__":
    main()
