#!/usr/bin/env bash
# The published step of the base model Llama 3.1 70B on 8 nodes of 8 H100: Megatron-Core tp4 pp4, and DTensor tp8.
# Differs from the published run: Megatron-Core recomputes, and DTensor packs sequences instead of dynamic batches.
source "$(dirname "$0")/published.sh"
shared=(policy.max_total_sequence_length=4096 policy.generation.vllm_cfg.tensor_parallel_size=4)
train megatron 8 llama-3.1-70b "${shared[@]}" policy.megatron_cfg.tensor_model_parallel_size=4 \
  policy.megatron_cfg.pipeline_model_parallel_size=4 policy.activation_checkpointing=true \
  policy.generation.vllm_cfg.gpu_memory_utilization=0.52
train dtensor 8 llama-3.1-70b "${shared[@]}" policy.dtensor_cfg.tensor_parallel_size=8 \
  policy.activation_checkpointing=false policy.generation.vllm_cfg.gpu_memory_utilization=0.6
compare
