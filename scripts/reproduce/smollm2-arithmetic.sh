#!/usr/bin/env bash
# SmolLM2-135M on single-digit sums: 12 steps, both backends, three seeds. Writes docs/results/smollm2-arithmetic.{csv,md}.
# About half an hour on 2 idle cores. Runs that are complete are not run again: RUNS says where they are kept.
source "$(dirname "$0")/../setup.sh"
runs=${RUNS:-runs/smollm2-arithmetic}
for seed in 1 2 3; do
  for backend in megatron dtensor; do
    folder=$runs/$backend-seed$seed
    [ "$(wc -l <"$folder/metrics.jsonl" 2>/dev/null || echo 0)" -ge 12 ] && continue
    rm -rf "$folder"
    .venv/bin/rlctl train grpo --model smollm2-135m --backend $backend --run-dir "$folder" \
      grpo.seed=$seed checkpointing.enabled=false checkpointing.save_hf=false logger.tensorboard=false
  done
done
exec .venv/bin/python scripts/reproduce/smollm2_arithmetic.py "$runs" docs/results/smollm2-arithmetic
