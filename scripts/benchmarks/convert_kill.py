"""Kill conversions at random moments and resume them: `convert_kill.py [COUNT] [SEED]`; one line a kill.

1. A tiny model of many tensors is converted, both ways in turn, by a process that SIGKILL ends up to 20 ms after its
   journal has a random number of lines.
2. What is left is never called by the target's name; converting again without `--resume` is refused with exit status 2.
3. `--resume` completes it, and `convert verify` finds every bit of the source.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from rlctl.cli.app import run

LAYERS = 40


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "rlctl", "convert", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_and_resume(direction: str, source: Path, out: Path, *, wait_for: int, after: float) -> str:
    """What was found; raises if anything is not as promised."""
    partial = out.with_name(out.name + ".partial")
    process = start(direction, str(source), str(out))
    journal = partial / "journal.jsonl"
    while process.poll() is None and (journal.read_bytes().count(b"\n") if journal.exists() else 0) < wait_for:
        time.sleep(0.0005)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if out.exists():
        assert run(["convert", "verify", str(source), str(out)]) == 0
        return "it had ended"
    lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
    assert run(["convert", direction, str(source), str(out)]) == 2 or not partial.exists()
    assert run(["convert", direction, str(source), str(out), "--resume"]) == 0
    assert run(["convert", "verify", str(source), str(out)]) == 0
    assert not partial.exists()
    return f"{lines} lines in its journal; resumed, bit-equal"


def main() -> None:
    """Print one line a kill."""
    count, seed = int(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 0
    randomly = random.Random(seed)
    console = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        hf, mcore = Path(folder) / "hf", Path(folder) / "mcore"
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=4
        )
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(hf)
        assert run(["convert", "hf-to-mcore", str(hf), str(mcore)]) == 0
        found = []
        for i in range(count):
            direction, source = (("hf-to-mcore", hf), ("mcore-to-hf", mcore))[i % 2]
            lines, after = randomly.randint(0, 3 + 6 * LAYERS), randomly.random() * 0.02
            found.append(kill_and_resume(direction, source, Path(folder) / f"out{i}", wait_for=lines, after=after))
            print(f"{direction}, killed: {found[-1]}", file=console, flush=True)
            shutil.rmtree(Path(folder) / f"out{i}")
        ended = sum(one == "it had ended" for one in found)
        print(json.dumps({"kills": count, "resumed": count - ended, "had_ended": ended}), file=console, flush=True)


if __name__ == "__main__":
    main()
