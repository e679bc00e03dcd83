"""What a run writes while it goes: phase times, metrics.jsonl, TensorBoard, and plain progress lines.

Only rank 0 writes; every rank knows the phase it is in, which an error report names.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rlctl import device

MACHINE_DEPENDENT = ("time/", "perf/", "memory/", "system/")


class RunLog:
    """The log of one run on one rank.

    Args:
        run_dir: gets metrics.jsonl and tensorboard/.
        writes: whether this rank writes.
        tensorboard: also write TensorBoard events, from `begin_steps` on.
        console: where progress lines go; None for nowhere.
        on_phase: is told each phase that begins, or goes on after an inner one.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        writes: bool,
        tensorboard: bool,
        console: TextIO | None,
        on_phase: Callable[[str], None] = lambda name: None,
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
        self._wants_tensorboard = writes and tensorboard
        self._tensorboard: Any = None

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

    def begin_steps(self, *, done: int = 0) -> None:
        """Steps are timed from here; what was before, such as loading, is no part of the first.

        Args:
            done: steps of an earlier start; what it wrote to TensorBoard after them is superseded.
        """
        if self._wants_tensorboard:
            self._tensorboard = _tensorboard(self.run_dir / "tensorboard", purge_step=done + 1 if done else None)
        self._enter("step")
        self.seconds, self._started = {}, time.monotonic()

    def say(self, text: str) -> None:
        """A progress line."""
        if self._console is None:
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

    def step(self, step: int, metrics: Mapping[str, float], *, total: int) -> None:
        """Write one step's metrics with its phase times, and its progress line.

        Args:
            step: 1-based.
            metrics: by full name, e.g. `train/loss`; NaN is written as null, with a warning.
            total: steps of the run.
        """
        line = self.record(step, metrics)
        self.say(_progress(step, total, line))

    def record(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the metrics after `step` steps with the phase times since the last line; returns the whole line."""
        now = time.monotonic()
        times = {f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()}
        line = {**metrics, **times, "time/step_seconds": now - self._started}
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
        if self._tensorboard is not None:
            for name, value in line.items():
                self._tensorboard.add_scalar(name, value, step)
        return line

    def close(self) -> None:
        """Flush and close the files."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _tensorboard(folder: Path, *, purge_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # seconds to import; only rank 0 needs it

    return SummaryWriter(str(folder), purge_step=purge_step)


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
