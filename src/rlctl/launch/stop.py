"""When a worker ends before its last step: signals, and `checkpointing.checkpoint_must_save_by`.

1. Before the first step, the first SIGINT or SIGTERM ends the process.
2. Then it is a request: the step ends, the trainer saves, and all ranks leave together.
3. A later signal ends the process at once.

Under the local launcher SIGINT is the request, and SIGTERM is left to kill: torchrun sends it when another rank failed,
and then waiting for the end of a step could wait for the failed rank. Elsewhere, schedulers send SIGTERM as a request.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from typing import Any

from rlctl.errors import INTERRUPTED, RlctlError

SAME_SECONDS = 3.0  # one Ctrl-C in a terminal reaches a worker twice under torchrun: directly, and forwarded
MARGIN = 1.2  # a step's length against the longest one before


def deadline_seconds(text: str | None) -> float:
    """Seconds of `DD:HH:MM:SS`; none: infinite.

    Raises:
        RlctlError: another form.
    """
    if text is None:
        return math.inf
    found = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", text)
    if found is None:
        raise RlctlError(
            f"`checkpointing.checkpoint_must_save_by` is `{text}`, which is no DD:HH:MM:SS",
            "write days, hours, minutes and seconds, e.g. 00:03:45:00",
        )
    days, hours, minutes, seconds = map(int, found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class Stop:
    """Asked by the trainer before each step: whether this rank must end now."""

    def __init__(self) -> None:
        self.must_save_by = math.inf
        """Seconds from here."""
        self.requested = False
        self._started = time.monotonic()
        self._stepping = False
        self._signalled = -math.inf

    def listen(self, *, local: bool) -> None:
        """Take the signals; `local`: under the local launcher."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if local else self._handle)

    def __call__(self, step_seconds: float) -> bool:
        """Whether to end now. From the first call on, a signal waits for the next call.

        Args:
            step_seconds: of the longest step so far, its save included.
        """
        self._stepping = True
        late = time.monotonic() - self._started + MARGIN * step_seconds > self.must_save_by
        return self.requested or late

    def _handle(self, number: int, frame: Any) -> None:
        again = self.requested and time.monotonic() - self._signalled > SAME_SECONDS
        if again:
            os._exit(INTERRUPTED)
        self.requested, self._signalled = True, time.monotonic()
        if not self._stepping:
            raise KeyboardInterrupt
