"""Peak memory and speed of `rlctl convert` on a random bfloat16 llama of about the size given, in GB.

1. The baseline is a process that imports the converter and does nothing.
2. Each conversion is a process of its own; its peak is the kernel's (ru_maxrss of the child).
3. `cp` copies the same bytes and calls fsync, before each conversion, on the same disk; caches are warm for both.
4. Each conversion is given `--max-memory`, which its peak must not exceed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rlctl import plugins
from rlctl.checkpoint.safetensors import Writer

MAX_MEMORY = 1_500_000_000
HIDDEN, FFN, VOCABULARY = 2048, 5632, 32000
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip


def generate(folder: Path, gigabytes: float) -> int:
    """Write the model tensor by tensor; returns its bytes."""
    folder.mkdir()
    outer, layer = 2 * VOCABULARY * HIDDEN, 3 * HIDDEN * FFN + 5 * HIDDEN * HIDDEN // 2
    layers = max(1, round((gigabytes * 1e9 / 2 - outer) / layer))
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    rules = plugins.load("model", "llama").rules(config)
    shapes = {n: s for r in rules for n, s in zip(r.sources, r.source_shapes, strict=True)}
    writer = Writer(folder, {n: (s, torch.bfloat16) for n, s in shapes.items()}, shard_bytes=1 << 30)
    writer.create()
    for name, shape in shapes.items():
        writer.write(name, torch.randn(shape, dtype=torch.bfloat16))
    writer.finish()
    return sum(entry.num_bytes for entry in writer.entries.values())


def measured(code: str) -> tuple[float, float]:
    """(seconds, peak bytes) of a Python process."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, code
    return time.monotonic() - start, usage.ru_maxrss * 1024


def copied(source: Path, target: Path) -> float:
    """Seconds of cp and fsync."""
    start = time.monotonic()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def main() -> None:
    """Print one line a measurement."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        work = Path(folder)
        nbytes = generate(work / "hf", float(sys.argv[1]))
        imports = "import sys; from rlctl.cli.app import run; import rlctl.checkpoint.convert"
        idle_seconds, idle = measured(imports)
        print(f"model {nbytes / 1e6:.0f} MB; interpreter with imports: {idle / 1e6:.0f} MB, {idle_seconds:.1f} s")
        for direction, source, target in (("hf-to-mcore", "hf", "mcore"), ("mcore-to-hf", "mcore", "back")):
            for verify in ("none", "tensors"):
                shutil.rmtree(work / target, ignore_errors=True)
                copy = copied(work / "hf", work / "copy")
                command = ["convert", direction, str(work / source), str(work / target), "--verify", verify]
                command += ["--max-memory", str(MAX_MEMORY)]
                seconds, peak = measured(f"{imports}; sys.exit(run({command!r}))")
                net = seconds - idle_seconds
                assert peak < MAX_MEMORY, peak
                print(
                    f"{direction} --verify {verify}: {(peak - idle) / 1e6:.0f} MB above the interpreter, "
                    f"{peak / 1e6:.0f} MB in all, --max-memory {MAX_MEMORY / 1e6:.0f} MB; {net:.2f} s, "
                    f"cp and fsync {copy:.2f} s: {copy / net:.2f} of its speed"
                )
        measured(f"{imports}; sys.exit(run(['convert', 'verify', {str(work / 'hf')!r}, {str(work / 'back')!r}]))")
        print("the model that came back has the same bits")


if __name__ == "__main__":
    main()
