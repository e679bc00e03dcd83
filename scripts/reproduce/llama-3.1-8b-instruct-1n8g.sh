#!/usr/bin/env bash
# The published step of Llama 3.1 8B Instruct on one node of 8 H100: Megatron-Core and DTensor, data parallelism only.
# Differs from the published run: Megatron-Core recomputes, and the engine's share is smaller, since gradients are float32.
source "$(dirname "$0")/published.sh"
shared=(policy.max_total_sequence_length=4096 policy.generation.vllm_cfg.tensor_parallel_size=1)
train megatron 1 llama-3.1-8b-instruct "${shared[@]}" policy.megatron_cfg.tensor_model_parallel_size=1 \
  policy.activation_checkpointing=true policy.generation.vllm_cfg.gpu_memory_utilization=0.28
train dtensor 1 llama-3.1-8b-instruct "${shared[@]}" policy.activation_checkpointing=false \
  policy.generation.vllm_cfg.gpu_memory_utilization=0.6
compare
