#!/usr/bin/env bash
# The published step of Llama 3.3 70B Instruct at 16,384 tokens on 16 nodes of 8 H100: Megatron-Core with context
# parallelism of 4. Its tensor and pipeline degrees are not published: those of the run at 4,096 tokens are taken.
# Differs from the published run: the engine's share of a GPU is smaller.
source "$(dirname "$0")/published.sh"
train megatron 16 llama-3.3-70b-instruct policy.max_total_sequence_length=16384 \
  policy.generation.vllm_cfg.tensor_parallel_size=4 policy.megatron_cfg.tensor_model_parallel_size=4 \
  policy.megatron_cfg.pipeline_model_parallel_size=4 policy.megatron_cfg.context_parallel_size=4 \
  policy.activation_checkpointing=false policy.generation.vllm_cfg.gpu_memory_utilization=0.55
compare
