#!/usr/bin/env bash
# On a machine with one CUDA device, under ten minutes: the tests of tests/gpu, then three steps of SmolLM2 on each backend,
# and a table of step times. Prints what to add to docs/limits.md.
source "$(dirname "$0")/setup.sh"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
.venv/bin/python -m pytest -m gpu tests/gpu
out=$(mktemp -d)
for backend in megatron dtensor; do
  .venv/bin/rlctl train grpo --model smollm2-135m --backend $backend --gpus-per-node 1 --run-dir "$out/$backend" \
    grpo.max_num_steps=3 checkpointing.enabled=false checkpointing.save_hf=false
done
.venv/bin/python - "$out" <<'P'
import json, sys
from pathlib import Path
print(f"{'backend':10} {'step s':>8} {'generate':>9} {'train':>8} {'sync':>8} {'peak GB':>8} {'max logprob error':>18}")
for run in sorted(Path(sys.argv[1]).iterdir()):
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    print(f"{run.name:10} {last['time/step_seconds']:8.2f} {last['time/generate_seconds']:9.2f} {last['time/train_seconds']:8.2f}"
          f" {last['time/weight_sync_seconds']:8.2f} {last['memory/peak_bytes'] / 1e9:8.2f} {last['mismatch/max_logprob_error']:18.1e}")
P
