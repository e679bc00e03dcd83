#!/usr/bin/env bash
# The published step of Qwen3 30B-A3B on 8 nodes of 8 H100: Megatron-Core tp2 ep8.
# Differs from the published run: the engine's share of a GPU is smaller.
source "$(dirname "$0")/published.sh"
train megatron 8 qwen3-30b-a3b policy.max_total_sequence_length=4096 policy.generation.vllm_cfg.tensor_parallel_size=4 \
  policy.megatron_cfg.tensor_model_parallel_size=2 policy.megatron_cfg.expert_model_parallel_size=8 \
  policy.activation_checkpointing=false policy.generation.vllm_cfg.gpu_memory_utilization=0.55
compare
