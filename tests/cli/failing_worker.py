"""rlctl.launch.worker with one rank that fails in one phase: RLCTL_TEST_FAILS is `RANK PHASE ACTION`.

The phase is one of the trainer's (its second time, but `start`, `checks` and `save`), or `reward`: while a rollout is
scored, or `loss`: between forward and backward of a microbatch. ACTION is `raise`, `KILL` or `STOP`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from rlctl.launch import worker

RANK, PHASE, ACTION = os.environ["RLCTL_TEST_FAILS"].split()
ONCE = {"start", "checks", "save"}  # phases whose first time is taken


def fail() -> None:
    if ACTION == "raise":
        raise RuntimeError("planted")
    os.kill(os.getpid(), getattr(signal, f"SIG{ACTION}"))


def plant() -> None:
    """Wrap what runs in the phase."""
    if PHASE == "reward":
        from rlctl.episodes import Run as module  # noqa: N813  patched alike

        name = "rollout"
    elif PHASE == "loss":
        from rlctl.policy import dtensor as module

        name = "weighted_loss"
    else:
        _in_phase()
        return
    real, calls = getattr(module, name), Counter()

    def wrapped(*args, **kwargs):
        calls["all"] += 1
        if calls["all"] == 2:
            fail()
        return real(*args, **kwargs)

    setattr(module, name, wrapped)


def _in_phase() -> None:
    from rlctl.log import RunLog

    real, entered = RunLog.phase, Counter()

    @contextlib.contextmanager
    def phase(self, name):
        with real(self, name):
            entered[name] += 1
            if name == PHASE and entered[name] == (1 if name in ONCE else 2):
                fail()
            yield

    RunLog.phase = phase


if __name__ == "__main__":
    if os.environ["RANK"] == RANK:
        plant()
    worker.leave(worker.main(Path(sys.argv[1])))
