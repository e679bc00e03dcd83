"""The one exception that a user meets: what is wrong, and how to mend it."""

from __future__ import annotations

FAILED = 1  # the job failed, I/O
USAGE = 2  # wrong whatever the machine: keys, types, names, paths, refused input
ENVIRONMENT = 3  # depends on sizes or the machine: divisibility, memory, disk, devices, packages
CHECK_FAILED = 4  # a verification, self-check or parity check failed
INTERRUPTED = 130


class RlctlError(Exception):
    """A mistake that the user can mend.

    Args:
        message: Names the value and the limit, without a final period.
        hint: Names the mend.
        exit_status: 1 job or I/O, 2 usage, 3 sizes or machine, 4 a check failed.
        details: Lines to read between the two, such as a rank's last words; mostly none.
    """

    def __init__(self, message: str, hint: str, *, exit_status: int = USAGE, details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_status = exit_status
        self.details = details

    def __reduce__(self) -> tuple:
        """Pickle by fields, so that a worker's error reaches the launcher whole."""
        return _rebuild, (self.message, self.hint, self.exit_status, self.details)


def _rebuild(message: str, hint: str, exit_status: int, details: str) -> RlctlError:
    return RlctlError(message, hint, exit_status=exit_status, details=details)
