"""The live display of a run, in the process that holds the terminal.

1. The first worker writes events, one JSON line each, to a pipe that never blocks it: what does not fit is not shown.
2. A thread here reads them, scrolls messages, and redraws the lines below them: where the run is, how it goes, a
   sample.
3. When it ends, only the messages stay, which are those of a run without a display. The cursor is hidden for no longer
   than a write takes, so that no end of this process, however sudden, leaves a terminal that needs mending.

It knows events and lines of text, and no run.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_REFRESH_SECONDS = 0.25
_DRAIN_SECONDS = 2.0
_SPARK = "▁▂▃▄▅▆▇█"
_KEPT = 200  # values of a trend
_PHASE_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "red")


def wanted(mode: str, stream: TextIO | None = None) -> bool:
    """Whether to show the live display: `logger.console`, the stream (standard error) and the terminal allow it."""
    stream = stream or sys.stderr
    term = os.environ.get("TERM")
    if mode == "plain" or "NO_COLOR" in os.environ or term in (None, "", "dumb"):
        return False
    try:
        os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8"


def clean(text: str, *, newline: str = "⏎ ") -> str:
    """Text that cannot steer a terminal: control and formatting characters are shown, not sent."""
    out = []
    for character in text:
        if character == "\n":
            out.append(newline)
        elif character == "\t":
            out.append(" ")
        elif unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            out.append(f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}")
        else:
            out.append(character)
    return "".join(out)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars, e.g. `▁▄█`; one that is not finite is a space."""
    shown = list(values)[-width:] if width > 0 else []
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return ""
    low, spread = min(finite), max(finite) - min(finite)
    bars = [_SPARK[0 if spread == 0 else round((v - low) / spread * 7)] if math.isfinite(v) else " " for v in shown]
    return "".join(bars)


def duration(seconds: float) -> str:
    """E.g. `8 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class View:
    """What is known of the run, and how it is drawn.

    Args:
        now: seconds on a clock that only goes on.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._phase, self._phase_began = "starting the workers", now
        self._progress: tuple[int, int] | None = None
        self._doing = ""
        self._step, self._total = 0, 0
        self._times: list[tuple[float, int]] = []
        self._metrics: dict[str, float | None] = {}
        self._trend: list[float] = []
        self._warning = ""
        self._sample: dict[str, Any] | None = None

    def feed(self, event: Mapping[str, Any], now: float) -> str | None:
        """Take an event; the text to scroll, if it has any."""
        if "phase" in event:
            self._phase, self._phase_began, self._progress, self._doing = event["phase"], now, None, ""
        if "progress" in event:
            done, of = event["progress"]
            self._progress = (done, of)
        if "doing" in event:
            self._doing = event["doing"]
        if "total" in event:
            self._step, self._total = event["step"], event["total"]
            self._times.append((now, self._step))
        if "metrics" in event:
            self._metrics = event["metrics"]
            value = self._metrics[self._headline()]
            self._trend = [*self._trend, math.nan if value is None else value][-_KEPT:]
        if "sample" in event:
            self._sample = event["sample"]
        said: str | None = event.get("say")
        if said is not None and said.startswith("warning: "):
            self._warning = said.removeprefix("warning: ")
        return said

    def lines(self, now: float, *, width: int, height: int) -> list[Text]:
        """The display, at most `height` lines of at most `width` cells; what matters most comes first."""
        found = [self._where(now, width), self._now(now)]
        found += self._figures(width)
        if self._warning:
            found.append(Text(f"warning  {clean(self._warning)}", style="yellow"))
        found += self._sample_lines(width, room=height - len(found))
        for line in found:
            line.truncate(width, overflow="ellipsis")
        return found[: max(1, height)]

    def _where(self, now: float, width: int) -> Text:
        if self._total == 0:
            return Text(f"starting  {duration(now - self._began)}", style="bold")
        text = Text(f"step {self._step}/{self._total} ", style="bold")
        times = f" {duration(now - self._began)}{self._left(now)}"
        bar = max(0, min(30, width - text.cell_len - len(times)))
        full = round(bar * self._step / self._total)
        text.append("━" * full, style="green").append("━" * (bar - full), style="dim")
        return text.append(times, style="not bold")

    def _left(self, now: float) -> str:
        """The rest of the run at the pace so far; from the second step on, for the first one warms up."""
        if len(self._times) < 2 or self._step >= self._total:
            return ""
        (first, a), (last, b) = self._times[max(0, len(self._times) - 20)], self._times[-1]
        return (
            f", {duration((last - first) / (b - a) * (self._total - self._step) - (now - last))} left" if b > a else ""
        )

    def _now(self, now: float) -> Text:
        ends = self._phase == "step" and self._step == self._total > 0
        phase = "finishing" if ends else self._phase.replace("_", " ")
        text = Text(f"{phase}  {duration(now - self._phase_began)}", style="cyan")
        if self._progress is not None:
            text.append(f"  {self._progress[0]} of {self._progress[1]} rollouts")
        elif self._doing:
            text.append(f"  {clean(self._doing)}", style="dim")
        return text

    def _headline(self) -> str:
        return "rollout/reward" if "rollout/reward" in self._metrics else "train/loss"

    def _figures(self, width: int) -> list[Text]:
        if not self._metrics:
            return []
        cells = []
        headline = self._headline()
        first = Text(f"{headline.split('/')[1]} {_number(self._metrics[headline], '.3f')} ")
        first.append(sparkline(self._trend, min(24, width - 14)), style="green")
        cells.append(first)
        for name, label, form in _FIGURES:
            if name in self._metrics and name != headline:
                cells.append(Text(f"{label} {_number(self._metrics[name], form)}"))
        mismatch = "mismatch/token_mult_prob_error"
        if mismatch in self._metrics:
            value = self._metrics[mismatch]
            cells.append(Text(f"mismatch {_number(None if value is None else value - 1, '.4f')}"))
        return [*_flow(cells, width), *_phases(self._metrics, width)]

    def _sample_lines(self, width: int, *, room: int) -> list[Text]:
        if self._sample is None or room < 3:
            return []
        sample, most = self._sample, max(1, min(4, room - 2))
        reward = "no vote" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
        lines = [Text("prompt   ", style="dim").append(_tail(clean(sample["prompt"]), width - 9), style="default")]
        lines.append(Text("sample   ", style="dim").append(reward, style="bold"))
        body = Text(clean(sample["response"]))
        return [*lines, *_wrapped(body, width, most)]


_FIGURES = (
    ("train/kl", "kl", ".2g"),
    ("train/loss", "loss", ".3g"),
    ("train/grad_norm", "grad norm", ".3g"),
    ("rollout/response_length", "length", ".0f"),
    ("rollout/truncated_share", "truncated", ".0%"),
    ("rollout/invalid_share", "invalid", ".0%"),
    ("perf/tokens_per_second", "tokens/s", ".0f"),
    ("val/reward", "validation", ".3f"),
    ("train/preference_accuracy", "accuracy", ".2f"),
    ("val/loss", "validation", ".3f"),
)


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None else f"{value:{form}}"


def _flow(cells: Sequence[Text], width: int) -> list[Text]:
    """Cells side by side, as many to a line as fit."""
    lines: list[Text] = []
    for cell in cells:
        if lines and lines[-1].cell_len + 3 + cell.cell_len <= width:
            lines[-1].append("   ").append_text(cell)
        else:
            lines.append(cell)
    return lines


def _phases(metrics: Mapping[str, float | None], width: int) -> list[Text]:
    """A bar of the last step's seconds by phase, and its legend."""
    step = metrics["time/step_seconds"] or 0.0
    times = {
        name.removeprefix("time/").removesuffix("_seconds").replace("_", " "): value or 0.0
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/step_seconds"
    }
    other = step - sum(times.values())
    if other > 0.005 * step:
        times["other"] = other
    room, bar = min(width, 78), Text()
    total = sum(times.values())
    if total <= 0:
        return []
    legend = []
    for i, (name, seconds) in enumerate(times.items()):
        style = "dim" if name == "other" else _PHASE_STYLES[i % len(_PHASE_STYLES)]
        bar.append("█" * round(room * seconds / total), style=style)
        legend.append(Text(f"{name} {seconds:.1f} s", style=style))
    return [bar, *_flow([Text(f"step {step:.1f} s"), *legend], width)]


def _tail(text: str, width: int) -> str:
    """The end of a text, in at most `width` cells."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > max(0, width - 1):
        text = text[1:]
    return "…" + text


def _wrapped(text: Text, width: int, most: int) -> list[Text]:
    """At most `most` lines; the last one says when more is left out."""
    lines: list[Text] = []
    rest = text.plain
    while rest and len(lines) < most:
        cut = len(rest)
        while cell_len(rest[:cut]) > width and cut > 1:
            cut = min(cut - 1, max(1, width)) if cut > width else cut - 1
        lines.append(Text(rest[:cut]))
        rest = rest[cut:]
    if rest and lines:
        lines[-1].truncate(max(1, width - 1))
        lines[-1].append("…")
    return lines


class Screen:
    """A view on a terminal, fed through a pipe.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._reader, self.descriptor = os.pipe()
        """`descriptor`: for the worker to write events to."""
        os.set_blocking(self.descriptor, False)
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._view = View(time.monotonic())
        self._live = Live(console=self._console, auto_refresh=False, transient=True,
                          redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop")  # fmt: skip
        self._ending = threading.Event()
        self._drawing = True
        self._width = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="console")

    def start(self) -> None:
        """Draw, from now on."""
        self._live.start()
        self._console.show_cursor(True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Scroll a line of this process's own."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Show what is still in the pipe, and take the display away."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_DRAIN_SECONDS)
        self._stop_drawing()
        os.close(self.descriptor)
        if not self._thread.is_alive():
            os.close(self._reader)

    def _work(self) -> None:
        unread = b""
        while True:
            ready = select.select([self._reader], [], [], 0.0 if self._ending.is_set() else _REFRESH_SECONDS)[0]
            if ready:
                *lines, unread = (unread + os.read(self._reader, 1 << 16)).split(b"\n")
                self._guarded(lines)
            elif self._ending.is_set():
                return
            else:
                self._guarded([])

    def _guarded(self, lines: Sequence[bytes]) -> None:
        """Show; a terminal that is gone, or a fault of the display, must not end hours of training."""
        try:
            for line in lines:
                said = self._view.feed(json.loads(line), time.monotonic())
                if said is not None:
                    self._console.print(Text(clean(said, newline="\n")), soft_wrap=True)
            if self._drawing:
                self._draw()
        except Exception:  # by design, see above: messages go on without a display
            if self._drawing:
                self._drawing = False
                self._stop_drawing()
                self._tell_fault()

    def _draw(self) -> None:
        size = self._console.size
        if size.width < self._width:  # wrapped remains of wider lines
            self._live.stop()
            self._console.clear()
            self._live.start()
            self._console.show_cursor(True)
        self._width = size.width
        drawn = self._view.lines(time.monotonic(), width=size.width - 1, height=min(16, size.height - 2))
        self._live.update(Group(*drawn), refresh=True)

    def _tell_fault(self) -> None:
        try:
            self._console.print(Text("the live display failed, lines go on:\n" + traceback.format_exc()))
        except OSError:
            return

    def _stop_drawing(self) -> None:
        try:
            self._live.stop()
        except OSError:
            return
