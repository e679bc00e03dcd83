"""What a run writes while it goes: phase times, metrics.jsonl, other sinks, and progress lines or events.

Only rank 0 writes; every rank knows the phase it is in, which an error report names.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlctl import device
from rlctl.sinks import tensorboard as tensorboard_sink
from rlctl.sinks.base import Background, SinkProtocol
from rlctl.types import Declared

METRICS = {
    "time/step_seconds": Declared(
        meaning="the whole step: validation and dumps after it, and the checkpoint of the step before, are in it",
        formula="wall clock since the line before",
        reduce=None,
        healthy="near what `rlctl plan` says",
    ),
    "time/<phase>_seconds": Declared(
        meaning="a phase of it: generate, old_logprobs, ref_logprobs, train, weight_sync, sync_probe, validation, save",
        formula="wall clock; save is that of the step before",
        reduce=None,
        healthy="generate is the longest in most runs",
    ),
    "perf/tokens_per_second": Declared(
        meaning="throughput", formula="train/tokens / time/step_seconds", reduce=None, healthy="steady"
    ),
    "perf/tokens_per_second_per_rank": Declared(
        meaning="throughput of a process", formula="the same / processes", reduce=None, healthy="steady"
    ),
    "memory/peak_bytes": Declared(
        meaning="most memory that rank 0 held since it started",
        formula="of its GPU; on a host without one, of the process",
        reduce=None,
        healthy="does not grow after the first steps",
    ),
}
MACHINE_DEPENDENT = ("time/", "perf/", "memory/", "system/")
EVENT_BYTES = 4000  # below PIPE_BUF (4096 on Linux): a write of so much to a pipe is whole or not at all
_PROGRESS_SECONDS = 0.2
_SAMPLE_CHARACTERS = 400


class RunLog:
    """The log of one run on one rank.

    Args:
        run_dir: gets metrics.jsonl and tensorboard/.
        writes: whether this rank writes.
        tensorboard: also write TensorBoard events, from `begin_steps` on.
        console: where progress lines go; None for nowhere.
        on_phase: is told each phase that begins, or goes on after an inner one.
        sinks: more of them, opened by `begin_steps`.
        events: whether `console` is a pipe to a live display (console.py), which takes events instead of lines.
        ranks: of the run, for figures per rank.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        writes: bool,
        tensorboard: bool,
        console: TextIO | None,
        on_phase: Callable[[str], None] = lambda name: None,
        sinks: Sequence[SinkProtocol] = (),
        events: bool = False,
        ranks: int = 1,
    ) -> None:
        self.run_dir = run_dir
        self._on_phase = on_phase
        self.phase_name = "start"
        self._warned: set[str] = set()
        self.seconds: dict[str, float] = {}
        self._writes = writes
        self._console = console if writes else None
        self._started = time.monotonic()
        self._metrics: TextIO | None = None
        own = (tensorboard_sink.Sink(run_dir / "tensorboard"),) if tensorboard else ()
        self._unopened: Sequence[SinkProtocol] = (*own, *sinks) if writes else ()
        self._sinks: list[Background] = []
        self._ranks = ranks
        self.shows_samples = events and writes
        """Whether `sample` is of use."""
        self._events = events
        self._told_progress = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens within; phases of one name add up over a step."""
        outer = self.phase_name
        self._enter(name)
        start = time.monotonic()
        yield  # an exception leaves phase_name as it is: it says where the run was
        device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
        self._enter(outer)

    def _enter(self, name: str) -> None:
        self.phase_name = name
        self._on_phase(name)
        self._emit(phase=name)

    def begin_steps(self, *, done: int = 0) -> None:
        """Steps are timed from here; what was before, such as loading, is no part of the first.

        Args:
            done: steps of an earlier start; what it wrote to sinks after them is superseded.
        """
        self._sinks = [Background(sink, done=done, warn=self._warn) for sink in self._unopened]
        self._enter("step")
        self.seconds, self._started = {}, time.monotonic()

    def say(self, text: str) -> None:
        """A progress line."""
        if self._events:
            self._emit(say=text)
        if self._console is None or self._events:
            return
        try:
            print(text, file=self._console, flush=True)
        except OSError:  # a closed pipe or terminal must not end hours of training; the log files go on
            self._console = None

    def warn_once(self, topic: str, text: str) -> None:
        """A warning line, the first time that its topic comes up."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.say(f"warning: {text}")

    def progress(self, done: int, total: int) -> None:
        """How many rollouts of the phase are done, for a live display."""
        now = time.monotonic()
        if done == total or now - self._told_progress >= _PROGRESS_SECONDS:
            self._told_progress = now
            self._emit(progress=(done, total))

    def doing(self, what: str) -> None:
        """What a long phase is at, for a live display."""
        self._emit(doing=what)

    def sample(self, *, prompt: str, response: str, reward: float | None) -> None:
        """One rollout, for a live display: the prompt's end, the response's beginning."""
        prompt, response = prompt[-_SAMPLE_CHARACTERS:], response[:_SAMPLE_CHARACTERS]
        self._emit(sample={"prompt": prompt, "response": response, "reward": reward})

    def _warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def _emit(self, **event: Any) -> None:
        """An event to the live display; one that the pipe has no room for, or that is too long for it, is not shown."""
        if not self._events or self._console is None:
            return
        data = json.dumps(event).encode() + b"\n"
        if len(data) > EVENT_BYTES and "say" in event:
            data = json.dumps({"say": event["say"][: EVENT_BYTES // 8]}).encode() + b"\n"
        if len(data) > EVENT_BYTES:
            return
        with contextlib.suppress(OSError):
            os.write(self._console.fileno(), data)

    def step(self, step: int, metrics: Mapping[str, float], *, total: int) -> None:
        """Write one step's metrics with its phase times, and its progress line.

        Args:
            step: 1-based.
            metrics: by full name, e.g. `train/loss`; NaN is written as null, with a warning.
            total: steps of the run.
        """
        line = self.record(step, metrics)
        shown = {n: v if math.isfinite(v) else None for n, v in line.items() if not n.startswith("rollout/reward/")}
        self._emit(step=step, total=total, metrics=shown)
        self.say(_progress(step, total, line))

    def record(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the metrics after `step` steps with the phase times since the last line; returns the whole line."""
        now = time.monotonic()
        times = {f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        line = {**metrics, **times, "time/step_seconds": now - self._started}
        if "train/tokens" in metrics:
            line["perf/tokens_per_second"] = metrics["train/tokens"] / max(line["time/step_seconds"], 1e-9)
            line["perf/tokens_per_second_per_rank"] = line["perf/tokens_per_second"] / self._ranks
        line["memory/peak_bytes"] = float(device.peak_memory_bytes())
        self.seconds, self._started = {}, now
        if not self._writes:
            return line
        for name in sorted(n for n, v in line.items() if not math.isfinite(v)):
            self.say(f"warning: step {step}: {name} is not finite ({line[name]})")
        finite: dict[str, Any] = {n: v if math.isfinite(v) else None for n, v in line.items()}
        if self._metrics is None:
            self._metrics = (self.run_dir / "metrics.jsonl").open("a")
        self._metrics.write(json.dumps({"step": step, **finite}) + "\n")
        self._metrics.flush()
        for sink in self._sinks:
            sink.write(step, line)
        return line

    def close(self) -> bool:
        """Flush and close the files, within a bounded time.

        Returns:
            Whether all sinks ended; one that did not may hold up the end of the process.
        """
        if self._metrics is not None:
            self._metrics.close()
        return all([sink.close() for sink in self._sinks])


def _progress(step: int, total: int, line: Mapping[str, float]) -> str:
    width = len(str(total))
    generated = "rollout/reward" in line
    parts = [f"step {step:{width}}/{total}", *([f"reward {line['rollout/reward']:.3f}"] if generated else [])]
    shown = (
        ("train/loss", "loss", ".4f"),
        ("train/grad_norm", "grad norm", ".3g"),
        ("train/kl", "kl", ".2g"),
        ("train/preference_accuracy", "accuracy", ".2f"),
        ("train/preference_margin", "margin", ".3g"),
    )
    parts += [f"{label} {line[name]:{form}}" for name, label, form in shown if name in line]
    if generated:
        parts.append(f"length {line['rollout/response_length']:.0f}")
        if line["rollout/invalid_share"] > 0:
            parts.append(f"invalid {line['rollout/invalid_share']:.0%}")
        parts.append(f"mismatch {line['mismatch/token_mult_prob_error'] - 1:.4f}")  # 0 is agreement
    parts.append(f"{line['time/step_seconds']:.1f} s")
    return "  ".join(parts)
