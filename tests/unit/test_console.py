"""The live display: what it draws in which size; it can neither steer nor spoil a terminal, nor hold up a run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import threading
import time

import pytest
from rich.cells import cell_len

from rlctl import console
from rlctl.console import Screen, View, clean, sparkline
from rlctl.log import RunLog

METRICS = {
    "rollout/reward": 0.25, "rollout/response_length": 9.0, "rollout/truncated_share": 0.5,
    "rollout/invalid_share": 0.0,
    "mismatch/token_mult_prob_error": 1.0, "train/loss": 0.1, "train/kl": 0.01, "time/generate_seconds": 3.0,
    "time/train_seconds": 1.0, "time/step_seconds": 4.0, "perf/tokens_per_second": 120.0,
}  # fmt: skip
HOSTILE = "a\x1b[2J\x07\u202e[red]b[/red]\r\n漢字" * 30


def view(**sample):
    shown = View(0.0)
    for step, reward in enumerate((0.25, None, 0.75), start=1):
        shown.feed({"step": step, "total": 10, "metrics": METRICS | {"rollout/reward": reward}}, 10.0 * step)
    shown.feed({"phase": "generate"}, 30.0)
    shown.feed({"progress": [3, 8]}, 31.0)
    shown.feed({"say": "warning: " + HOSTILE}, 31.0)
    shown.feed({"sample": {"prompt": HOSTILE, "response": HOSTILE, "reward": 1.0} | sample}, 31.0)
    return shown


@pytest.mark.parametrize("width", [40, 79, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 16])
def test_it_fits_any_terminal_and_sends_no_control_characters(width, height):
    lines = [line.plain for line in view().lines(35.0, width=width, height=height)]
    assert 1 <= len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert all(character.isprintable() for line in lines for character in line)


def test_it_says_where_the_run_is_and_how_it_goes():
    text = "\n".join(line.plain for line in view().lines(35.0, width=100, height=16))
    assert "step 3/10" in text
    assert "35 s, 1 min 05 s left" in text  # 10 s a step, 7 to go, 5 s of them passed
    assert "generate  5 s  3 of 8 rollouts" in text
    for figure in ("reward 0.750 ▁ █", "kl 0.01", "truncated 50%", "mismatch 0.0000", "tokens/s 120"):
        assert figure in text
    assert "generate 3.0 s   train 1.0 s" in text
    assert "[red]b[/red]" in text


def test_a_step_without_rollouts_shows_its_loss():
    shown = View(0.0)
    shown.feed({"step": 1, "total": 2, "metrics": {"train/loss": 0.5, "time/step_seconds": 1.0}}, 1.0)
    assert "loss 0.500" in "\n".join(line.plain for line in shown.lines(2.0, width=80, height=10))


def test_control_characters_are_shown_and_not_sent():
    assert clean("a\x1b[31m\x9b\u202eb\n") == "a\\x1b[31m\\x9b\\u202eb⏎ "
    assert sparkline([1.0, float("nan"), 2.0], 9) == "▁ █"


def test_plain_lines_where_it_would_not_help(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    controller, terminal = pty.openpty()
    with os.fdopen(controller), os.fdopen(terminal, "w", encoding="utf-8") as stream:
        assert console.wanted("auto", stream)
        assert not console.wanted("plain", stream)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not console.wanted("auto", stream)
        monkeypatch.delenv("NO_COLOR")
        monkeypatch.setenv("TERM", "dumb")
        assert not console.wanted("auto", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert not console.wanted("auto", io.StringIO())


@contextlib.contextmanager
def shown_screen(monkeypatch):
    """A started screen, and what its terminal got by the end."""
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()
    got = []

    def read():
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(controller, 1 << 16):
                got.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        screen = Screen(stream)
        screen.start()
        yield screen, got
        screen.close()
    reader.join()
    os.close(controller)


def test_what_a_run_says_scrolls_and_the_cursor_is_left_shown(tmp_path, monkeypatch):
    with shown_screen(monkeypatch) as (screen, got), os.fdopen(os.dup(screen.descriptor), "w") as pipe:
        log = RunLog(tmp_path, writes=True, tensorboard=False, console=pipe, events=True)
        log.say("hello [bold]there")
        log.step(1, METRICS, total=3)
        log.sample(prompt="漢" * 10_000, response="\x1b" * 10_000, reward=None)
        log.close()
    shown = b"".join(got).decode()
    assert "hello [bold]there" in shown
    assert "step 1/3  reward 0.250" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # show cursor after the last hide cursor


def test_a_pipe_that_nobody_reads_holds_up_no_run(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(writer, "w") as pipe:
        log = RunLog(tmp_path, writes=True, tensorboard=False, console=pipe, events=True)
        for step in range(1, 2000):
            log.step(step, METRICS, total=2000)
        log.close()
        os.set_blocking(reader, False)
        *events, rest = os.read(reader, 1 << 20).split(b"\n")
    os.close(reader)
    assert rest == b""  # nothing is cut in the middle
    assert all(json.loads(event) for event in events)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1999


def test_a_fault_of_the_display_leaves_the_lines(monkeypatch):
    monkeypatch.setattr(View, "lines", lambda *a, **k: 1 / 0)
    with shown_screen(monkeypatch) as (screen, got):
        os.write(screen.descriptor, b'{"say": "one"}\n')
        while b"ZeroDivisionError" not in b"".join(got):
            time.sleep(0.01)
        os.write(screen.descriptor, b'{"say": "two"}\n')
    shown = b"".join(got).decode()
    assert shown.count("ZeroDivisionError") == 1
    assert shown.index("one") < shown.index("ZeroDivisionError") < shown.index("two")
