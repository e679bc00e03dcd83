"""The command `rlctl`, and `python -m rlctl`.

The guard is needed: Megatron's checkpoint writer spawns processes that import this module again.
"""

from __future__ import annotations

import sys

from rlctl.cli.app import run


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
