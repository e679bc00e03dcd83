#!/usr/bin/env bash
# The published step of Qwen3 32B on 8 nodes of 8 H100: Megatron-Core tp4 pp2.
source "$(dirname "$0")/published.sh"
train megatron 8 qwen3-32b policy.max_total_sequence_length=4096 policy.generation.vllm_cfg.tensor_parallel_size=4 \
  policy.megatron_cfg.tensor_model_parallel_size=4 policy.megatron_cfg.pipeline_model_parallel_size=2 \
  policy.activation_checkpointing=false policy.generation.vllm_cfg.gpu_memory_utilization=0.6
compare
