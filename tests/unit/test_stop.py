"""When a worker is told to end, and when it ends by itself."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import pytest

from rlctl.errors import RlctlError
from rlctl.launch import stop as module
from rlctl.launch.stop import Stop, deadline_seconds


@pytest.fixture
def stop(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = Stop()
    made.listen(local=False)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_before_the_first_step_a_signal_ends_at_once(stop):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_within_steps_a_signal_waits_for_the_next_question(stop, number):
    assert not stop(1.0)
    os.kill(os.getpid(), number)
    assert stop(1.0)


def test_one_keystroke_that_arrives_twice_is_one(stop):
    stop(1.0)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop(1.0)


def test_a_later_signal_ends_at_once_with_130():
    code = (
        "import os, signal, time; from rlctl.launch import stop as m; m.SAME_SECONDS = 0.05; s = m.Stop()\n"
        "s.listen(local=False); s(1.0); os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(5); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (130, "")


def test_under_the_local_launcher_sigterm_kills():
    code = (
        "import os, signal; from rlctl.launch.stop import Stop; s = Stop(); s.listen(local=True); s(1.0)\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM


def test_a_step_that_would_end_after_the_deadline_is_not_begun(stop, monkeypatch):
    stop.must_save_by = 100.0
    start = stop._started
    monkeypatch.setattr(module.time, "monotonic", lambda: start + 60.0)
    assert not stop(33.0)  # 60 + 1.2 * 33 is 99.6
    assert stop(34.0)  # 60 + 1.2 * 34 is 100.8


@pytest.mark.parametrize(("text", "seconds"), [("00:03:45:00", 13_500.0), ("1:00:00:01", 86_401.0), (None, math.inf)])
def test_the_deadline_is_days_hours_minutes_seconds(text, seconds):
    assert deadline_seconds(text) == seconds


@pytest.mark.parametrize("text", ["3h", "03:45:00", "", "a:b:c:d"])
def test_another_form_of_deadline_is_refused(text):
    with pytest.raises(RlctlError, match="DD:HH:MM:SS"):
        deadline_seconds(text)
