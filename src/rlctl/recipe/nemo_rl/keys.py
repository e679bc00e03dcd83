"""The closed table of NeMo RL's keys, v0.3 to August 2026, and what becomes of each.

- `To(key)`: the same thing under our name; `via` names the function of translate.py when more is to be done.
- `Ignore(reason)`: without effect here, whatever its value.
- `Only(values, feature)`: with one of these values nothing is to be done; another asks for a feature that rlctl lacks.
- `Open(reason)`: the user's to give, since it lies behind a network or inside their package.

A key that is not here is refused with the nearest that is. `FREE` names maps whose keys are not ours to judge. It does
not know values of other keys: what depends on them is translate.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class To:
    """Mapped."""

    key: str | None = None
    """Ours; None: the function says."""
    via: str | None = None
    note: str = ""
    """How the meanings differ."""


@dataclass(frozen=True, kw_only=True)
class Ignore:
    """Without effect here."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Only:
    """Accepted with these values, else refused."""

    values: tuple[Any, ...]
    feature: str


@dataclass(frozen=True, kw_only=True)
class Open:
    """Kept as it is, and named: the user gives it."""

    reason: str


Key = To | Ignore | Only | Open

OFF = (None, False, 0)
SPEED = Ignore(reason="changes speed or memory, not results")
LOGS = Ignore(reason="no such sink or option here; metrics.jsonl and TensorBoard have the figures")
RAY = Ignore(reason="belongs to Ray, which rlctl does not use")
RUNS = Ignore(reason="a run's files lie in its run directory: `--run-dir`")
LEGACY = Only(values=OFF, feature="the FSDP1 backend of v0.2")
ROUTER = Ignore(reason="a number format inside the router; rlctl takes Megatron's own")
OWN_ROWS = Open(reason="a data set behind a network is not read: give the prompts as data.train_path")
PROMPT_FILE = Open(reason="a template around each question: write it into the rows of data.train_path")
GENERATION_BATCH = Ignore(reason="only read by their other engines; rlctl's engines fill themselves")

GRPO: dict[str, Key] = {
    "num_prompts_per_step": To(key="grpo.num_prompts_per_step"),
    "num_generations_per_prompt": To(
        key="grpo.num_generations_per_prompt",
        note="a group is a prompt's samples; theirs joins rows whose prompts are equal",
    ),
    "max_rollout_turns": Only(values=(None, 1), feature="several turns in the mathematics environment"),
    "max_num_steps": To(key="grpo.max_num_steps"),
    "max_num_epochs": To(key="grpo.max_num_epochs"),
    "seed": To(key="grpo.seed", note="the same seed draws other samples here"),
    "normalize_rewards": To(
        via="normalize",
        note="by the deviation of the group; their v0.3 leaves a sample out of its own, as the baseline",
    ),
    "use_leave_one_out_baseline": To(via="leave_one_out"),
    "advantage_clip_low": To(key="grpo.advantage_clip_low"),
    "advantage_clip_high": To(key="grpo.advantage_clip_high"),
    "val_period": To(key="grpo.val_period", note="held-out prompts come from data.val_path"),
    "val_start_at": Only(values=(None, -1, 0), feature="a first validation after some step (val_start_at)"),
    "val_at_start": To(key="grpo.val_at_start"),
    "val_at_end": To(key="grpo.val_at_end"),
    "max_val_samples": To(key="grpo.max_val_samples"),
    "val_batch_size": Ignore(reason="engines take all held-out prompts at once"),
    "val_num_generations_per_prompt": To(key="grpo.num_val_generations_per_prompt"),
    "stop_at_validation_metric": Only(values=(None,), feature="early stop on a validation metric"),
    "stop_at_validation_threshold": Only(values=(None,), feature="early stop on a validation metric"),
    "skip_reference_policy_logprobs_calculation": Ignore(reason="derived: there is no reference with a KL weight of 0"),
    "overlong_filtering": To(via="shaped", note="here a cut response has no part in its group's statistics either"),
    "use_dynamic_sampling": Only(values=OFF, feature="dynamic sampling (drawing prompts until groups differ)"),
    "dynamic_sampling_max_gen_batches": Ignore(reason="only read with use_dynamic_sampling"),
    "batch_multiplier": Only(values=(None, 1, 1.0), feature="dynamic sampling (batch_multiplier)"),
    "reward_shaping.enabled": To(via="shaped"),
    "reward_shaping.overlong_buffer_length": To(via="shaping"),
    "reward_shaping.overlong_buffer_penalty": To(via="shaping", note="here it never exceeds this value"),
    "reward_shaping.max_response_length": To(via="shaping"),
    "reward_shaping.stop_properly_penalty_coef": Only(values=(None,), feature="stop-properly penalty"),
    "reward_scaling.enabled": Only(values=OFF, feature="linear scaling of rewards"),
    "reward_scaling.source_min": Ignore(reason="only read with reward_scaling.enabled"),
    "reward_scaling.source_max": Ignore(reason="only read with reward_scaling.enabled"),
    "reward_scaling.target_min": Ignore(reason="only read with reward_scaling.enabled"),
    "reward_scaling.target_max": Ignore(reason="only read with reward_scaling.enabled"),
    "adv_estimator.name": Only(values=(None, "grpo"), feature="another advantage estimator by adv_estimator.name"),
    "adv_estimator.normalize_rewards": To(via="normalize"),
    "adv_estimator.use_leave_one_out_baseline": To(via="leave_one_out"),
    "adv_estimator.minus_baseline": Ignore(reason="only read by their reinforce_plus_plus estimator"),
    "adv_estimator.reward_weights": Only(values=(None,), feature="GDPO"),
    "calculate_advantages_on_gpu": SPEED,
    "seq_logprob_error_threshold": Only(values=(None,), feature="dropping sequences by log-probability error"),
    "invalid_tool_call_advantage": Only(values=(None,), feature="a fixed advantage for bad tool calls"),
    "malformed_thinking_advantage": Only(values=(None,), feature="a fixed advantage for malformed thinking"),
    "async_grpo.enabled": Only(values=OFF, feature="asynchronous GRPO with a replay buffer"),
    "async_grpo.max_trajectory_age_steps": Ignore(reason="only read with async_grpo.enabled"),
    "async_grpo.max_generation_failures": Ignore(reason="only read with async_grpo.enabled"),
    "async_grpo.in_flight_weight_updates": Ignore(reason="only read with async_grpo.enabled"),
    "async_grpo.recompute_kv_cache_after_weight_updates": Ignore(reason="only read with async_grpo.enabled"),
}

LOSS: dict[str, Key] = {
    "reference_policy_kl_penalty": To(
        via="kl_penalty", note="ours has the gradient of the KL itself; the k3 of their v0.3 has another"
    ),
    "reference_policy_kl_type": Only(values=(None, "k3"), feature="the KL estimators k1 and k2 in the loss"),
    "kl_input_clamp_value": Ignore(reason="a guard against overflow; ours is in algorithms/ops.py"),
    "kl_output_clamp_value": Ignore(reason="a guard against overflow; ours is in algorithms/ops.py"),
    "ratio_clip_min": To(key="loss_fn.ratio_clip_min"),
    "ratio_clip_max": To(key="loss_fn.ratio_clip_max"),
    "ratio_clip_c": To(via="dual_clip"),
    "token_level_loss": To(via="token_level"),
    "sequence_level_importance_ratios": To(via="sequence_ratio"),
    "use_on_policy_kl_approximation": Ignore(
        reason="always on here: the KL is weighted by the ratio to the policy that the tokens were judged with"
    ),
    "use_importance_sampling_correction": To(via="mismatch"),
    "truncated_importance_sampling_type": To(via="mismatch_bound"),
    "truncated_importance_sampling_ratio": To(via="mismatch_bound"),
    "truncated_importance_sampling_ratio_min": To(via="mismatch_bound"),
    "disable_ppo_ratio": To(via="one_update"),
    "force_on_policy_ratio": To(via="one_update"),
    "use_kl_in_reward": Only(values=OFF, feature="KL in the reward under grpo (rlctl has it in rloo and reinforce_pp)"),
    "use_cispo": To(via="cispo"),
    "positive_example_nll_weight": Only(values=OFF, feature="a likelihood term for rewarded answers"),
}

POLICY: dict[str, Key] = {
    "model_name": To(via="model", key="policy.model_name"),
    "tokenizer.name": To(via="tokenizer"),
    "tokenizer.chat_template": To(via="chat_template"),
    "tokenizer.chat_template_kwargs": Only(values=(None,), feature="arguments of the chat template"),
    "tokenizer.use_fastokens": SPEED,
    "hf_config_overrides": To(via="free", key="policy.hf_config_overrides"),
    "train_global_batch_size": To(key="policy.train_global_batch_size", note="sequences of an update, in both"),
    "train_micro_batch_size": To(
        key="policy.train_micro_batch_size",
        note="sequences of a forward on each rank, in both; with packing only the tokens count",
    ),
    "generation_batch_size": GENERATION_BATCH,
    "logprob_batch_size": To(
        key="policy.logprob_batch_size", note="of a forward without gradient; results are the same"
    ),
    "logprob_chunk_size": SPEED,
    "max_total_sequence_length": To(
        key="policy.max_total_sequence_length", note="prompt and response; here a prompt leaves room for one token"
    ),
    "precision": To(via="precision"),
    "fsdp_offload_enabled": LEGACY,
    "activation_checkpointing_enabled": LEGACY,
    "refit_buffer_size_gb": SPEED,
    "offload_optimizer_for_logprob": SPEED,
    "make_sequence_length_divisible_by": Ignore(reason="derived from the layout: the pad unit of dry runs"),
    "max_grad_norm": To(via="grad_norm"),
    "optimizer": To(via="optimizer"),
    "optimizer.name": To(via="optimizer"),
    "optimizer.kwargs.lr": To(via="torch_optimizer", key="policy.optimizer.lr"),
    "optimizer.kwargs.weight_decay": To(
        via="torch_optimizer",
        key="policy.optimizer.weight_decay",
        note="here biases and norms are not decayed, as in Megatron; theirs with DTensor are",
    ),
    "optimizer.kwargs.betas": To(via="torch_optimizer", key="policy.optimizer.betas"),
    "optimizer.kwargs.eps": To(via="torch_optimizer", key="policy.optimizer.eps"),
    "optimizer.kwargs.foreach": SPEED,
    "optimizer.kwargs.fused": SPEED,
    "optimizer.kwargs.amsgrad": Only(values=OFF, feature="AMSGrad"),
    "scheduler": To(via="torch_scheduler", note="advances once a step, in both"),
    "dtensor_cfg._v2": Ignore(reason="which of their two workers; rlctl has one"),
    "dtensor_cfg.enabled": To(via="backend"),
    "dtensor_cfg.cpu_offload": Ignore(reason="parameters stay on the GPU; same results, `plan` says whether they fit"),
    "dtensor_cfg.sequence_parallel": Ignore(reason="rlctl has it on Megatron; same results, more activation memory"),
    "dtensor_cfg.activation_checkpointing": To(via="dtensor", key="policy.activation_checkpointing"),
    "dtensor_cfg.tensor_parallel_size": To(via="dtensor", key="policy.dtensor_cfg.tensor_parallel_size"),
    "dtensor_cfg.context_parallel_size": To(via="dtensor", key="policy.dtensor_cfg.context_parallel_size"),
    "dtensor_cfg.expert_parallel_size": Only(values=(None, 1), feature="expert parallelism on DTensor"),
    "dtensor_cfg.dp_replicate_size": Only(values=(None, 1), feature="hybrid sharding (dp_replicate_size)"),
    "dtensor_cfg.custom_parallel_plan": Only(values=(None,), feature="a custom tensor-parallel plan"),
    "dtensor_cfg.automodel_kwargs": Only(values=(None,), feature="arguments of NeMo AutoModel"),
    "dtensor_cfg.defer_fsdp_grad_sync": SPEED,
    "dtensor_cfg.moe_parallelizer": SPEED,
    "dtensor_cfg.clear_cache_every_n_steps": SPEED,
    "dtensor_cfg.env_vars": Ignore(reason="export variables where you start rlctl"),
    "dtensor_cfg.lora_cfg.enabled": Only(values=OFF, feature="LoRA"),
    "dynamic_batching.enabled": To(via="batching"),
    "dynamic_batching.train_mb_tokens": To(via="dynamic_budget", key="policy.sequence_packing.train_mb_tokens"),
    "dynamic_batching.logprob_mb_tokens": To(via="dynamic_budget", key="policy.sequence_packing.logprob_mb_tokens"),
    "dynamic_batching.sequence_length_round": SPEED,
    "sequence_packing.enabled": To(via="batching"),
    "sequence_packing.train_mb_tokens": To(via="packing_budget", key="policy.sequence_packing.train_mb_tokens"),
    "sequence_packing.logprob_mb_tokens": To(via="packing_budget", key="policy.sequence_packing.logprob_mb_tokens"),
    "sequence_packing.algorithm": Ignore(reason="where sequences are packed changes no result; rlctl has one way"),
    "sequence_packing.sequence_length_round": Ignore(reason="not read by their packer"),
    "sequence_packing.microbatch_order": SPEED,
    "sequence_packing.fuse_loss": SPEED,
    "draft.enabled": Only(values=OFF, feature="training a draft model"),
}
POLICY |= {
    f"dtensor_cfg.lora_cfg.{name}": Ignore(reason="only read with lora_cfg.enabled")
    for name in (
        "target_modules", "exclude_modules", "match_all_linear", "dim", "alpha", "dropout", "dropout_position",
        "lora_A_init", "use_triton",
    )
}  # fmt: skip
POLICY |= {
    f"draft.{name}": Ignore(reason="only read with draft.enabled")
    for name in ("model_name", "loss_weight", "num_layers", "aux_layer_indices")
}

MEGATRON: dict[str, Key] = {
    "enabled": To(via="backend"),
    "converter_type": Ignore(reason="the architecture is read from config.json"),
    "model_overrides": Only(values=(None,), feature="fields of Megatron's config by model_overrides"),
    "checkpoint.async_save": SPEED,
    "checkpoint.ckpt_assume_constant_structure": SPEED,
    "force_reconvert_from_hf": Ignore(reason="weights are read from Hugging Face at each start; nothing is cached"),
    "empty_unused_memory_level": SPEED,
    "use_fused_linear_logprobs": SPEED,
    "fused_linear_logprobs_chunk_size": SPEED,
    "activation_checkpointing": To(via="megatron", key="policy.activation_checkpointing"),
    "recompute_granularity": SPEED,
    "recompute_modules": SPEED,
    "cuda_graph_impl": SPEED,
    "cuda_graph_modules": SPEED,
    "cuda_graph_warmup_steps": SPEED,
    "fine_grained_activation_offloading": SPEED,
    "offload_modules": SPEED,
    "tensor_model_parallel_size": To(via="megatron", key="policy.megatron_cfg.tensor_model_parallel_size"),
    "pipeline_model_parallel_size": To(via="megatron", key="policy.megatron_cfg.pipeline_model_parallel_size"),
    "context_parallel_size": To(via="megatron", key="policy.megatron_cfg.context_parallel_size"),
    "expert_model_parallel_size": To(via="megatron", key="policy.megatron_cfg.expert_model_parallel_size"),
    "expert_tensor_parallel_size": To(via="megatron", key="policy.megatron_cfg.expert_tensor_parallel_size"),
    "num_layers_in_first_pipeline_stage": Only(values=(None,), feature="uneven pipeline stages"),
    "num_layers_in_last_pipeline_stage": Only(values=(None,), feature="uneven pipeline stages"),
    "pipeline_dtype": Ignore(reason="derived from policy.precision"),
    "sequence_parallel": To(via="sequence_parallel"),
    "freeze_moe_router": To(via="router"),
    "moe_router_dtype": ROUTER,
    "moe_router_load_balancing_type": To(via="router"),
    "moe_router_bias_update_rate": To(via="router"),
    "moe_permute_fusion": SPEED,
    "moe_enable_deepep": SPEED,
    "moe_token_dispatcher_type": SPEED,
    "moe_shared_expert_overlap": SPEED,
    "moe_grouped_gemm": SPEED,
    "moe_per_layer_logging": LOGS,
    "apply_rope_fusion": SPEED,
    "bias_activation_fusion": SPEED,
    "defer_fp32_logits": SPEED,
    "gradient_accumulation_fusion": SPEED,
    "use_gloo_process_groups": SPEED,
    "attention_backend": SPEED,
    "transformer_impl": SPEED,
    "use_fused_weighted_squared_relu": SPEED,
    "mtp_num_layers": Only(values=OFF, feature="multi-token prediction"),
    "mtp_loss_scaling_factor": Ignore(reason="only read with mtp_num_layers"),
    "mtp_use_repeated_layer": Ignore(reason="only read with mtp_num_layers"),
    "mtp_detach_heads": Ignore(reason="only read with mtp_num_layers"),
    "peft.enabled": Only(values=OFF, feature="LoRA"),
    "optimizer.optimizer": Only(values=(None, "adam"), feature="an optimizer besides AdamW"),
    "optimizer.lr": To(via="megatron", key="policy.optimizer.lr"),
    "optimizer.min_lr": To(via="min_lr"),
    "optimizer.weight_decay": To(via="megatron", key="policy.optimizer.weight_decay"),
    "optimizer.bf16": Ignore(reason="derived from policy.precision"),
    "optimizer.fp16": Only(values=OFF, feature="float16"),
    "optimizer.params_dtype": Only(values=(None, "float32"), feature="optimizer parameters below float32"),
    "optimizer.adam_beta1": To(via="megatron_betas"),
    "optimizer.adam_beta2": To(via="megatron_betas"),
    "optimizer.adam_eps": To(via="megatron", key="policy.optimizer.eps"),
    "optimizer.sgd_momentum": Ignore(reason="only read by SGD"),
    "optimizer.use_distributed_optimizer": Ignore(reason="derived; results are the same"),
    "optimizer.use_precision_aware_optimizer": SPEED,
    "optimizer.clip_grad": To(via="clip_grad"),
    "optimizer.optimizer_cpu_offload": SPEED,
    "optimizer.optimizer_offload_fraction": SPEED,
    "optimizer.overlap_cpu_optimizer_d2h_h2d": SPEED,
    "scheduler.start_weight_decay": To(via="decay_ends"),
    "scheduler.end_weight_decay": To(via="decay_ends"),
    "scheduler.weight_decay_incr_style": Only(values=(None, "constant"), feature="a schedule of the weight decay"),
    "scheduler.lr_decay_style": To(via="megatron_decay"),
    "scheduler.lr_decay_iters": To(via="megatron_decay", note="theirs counts the warm-up, ours what follows it"),
    "scheduler.lr_warmup_iters": To(via="megatron", key="policy.scheduler.warmup_steps"),
    "scheduler.lr_warmup_init": To(via="megatron", key="policy.scheduler.warmup_init_lr"),
    "distributed_data_parallel_config.grad_reduce_in_fp32": Ignore(reason="rlctl sums gradients as its backend does"),
    "distributed_data_parallel_config.overlap_grad_reduce": SPEED,
    "distributed_data_parallel_config.overlap_param_gather": SPEED,
    "distributed_data_parallel_config.average_in_collective": Ignore(reason="denominators are global here"),
    "distributed_data_parallel_config.use_custom_fsdp": Only(values=OFF, feature="Megatron's own FSDP"),
    "distributed_data_parallel_config.data_parallel_sharding_strategy": SPEED,
    "fp8_cfg.enabled": Only(values=OFF, feature="training in FP8"),
    "fp8_cfg.fp8": Ignore(reason="only read with fp8_cfg.enabled"),
    "fp8_cfg.fp8_recipe": Ignore(reason="only read with fp8_cfg.enabled"),
    "fp8_cfg.fp8_param": Ignore(reason="only read with fp8_cfg.enabled"),
    "env_vars": Ignore(reason="export variables where you start rlctl"),
}
MEGATRON |= {
    f"peft.{name}": Ignore(reason="only read with peft.enabled")
    for name in (
        "target_modules", "exclude_modules", "dim", "alpha", "dropout", "dropout_position", "lora_A_init_method",
        "lora_B_init_method", "a2a_experimental", "lora_dtype",
    )
}  # fmt: skip

GENERATION: dict[str, Key] = {
    "backend": To(via="engine"),
    "max_new_tokens": To(via="new_tokens"),
    "temperature": To(key="policy.generation.temperature"),
    "top_p": Only(
        values=(None, 1, 1.0), feature="sampling by top_p (the trainer's probabilities would not be the engine's)"
    ),
    "top_k": Only(
        values=(None, -1, 0), feature="sampling by top_k (the trainer's probabilities would not be the engine's)"
    ),
    "val_temperature": To(via="validation_sampling"),
    "val_top_p": Only(values=(None, 1, 1.0), feature="other sampling in validation"),
    "val_top_k": Only(values=(None, -1, 0), feature="other sampling in validation"),
    "stop_token_ids": To(via="stop_ids"),
    "stop_strings": Only(values=(None,), feature="stop strings"),
    "port_range_low": RAY,
    "port_range_high": RAY,
    "refit_transport": SPEED,
    "vllm_cfg.async_engine": Ignore(reason="the engine always takes and gives requests one by one"),
    "vllm_cfg.precision": To(via="engine_precision"),
    "vllm_cfg.tensor_parallel_size": To(key="policy.generation.vllm_cfg.tensor_parallel_size"),
    "vllm_cfg.pipeline_parallel_size": Only(values=(None, 1), feature="pipeline parallelism in vLLM"),
    "vllm_cfg.expert_parallel_size": Only(values=(None, 1), feature="expert parallelism in vLLM"),
    "vllm_cfg.gpu_memory_utilization": To(key="policy.generation.vllm_cfg.gpu_memory_utilization"),
    "vllm_cfg.max_model_len": To(via="model_length"),
    "vllm_cfg.enforce_eager": To(key="policy.generation.vllm_cfg.enforce_eager"),
    "vllm_cfg.load_format": Ignore(reason="weights come from the trainer before the first request"),
    "vllm_cfg.kv_cache_dtype": Only(values=(None, "auto"), feature="a key-value cache below the model's precision"),
    "vllm_cfg.logprobs_mode": Only(values=(None, "processed_logprobs"), feature="raw log-probabilities of vLLM"),
    "vllm_cfg.use_tqdm": LOGS,
    "vllm_cfg.use_deep_gemm": Only(values=OFF, feature="FP8 generation"),
    "vllm_cfg.num_first_layers_in_bf16": Only(values=OFF, feature="FP8 generation"),
    "vllm_cfg.num_last_layers_in_bf16": Only(values=OFF, feature="FP8 generation"),
    "vllm_cfg.enable_vllm_metrics_logger": LOGS,
    "vllm_cfg.vllm_metrics_logger_interval": LOGS,
    "vllm_cfg.reset_encoder_cache_after_weight_update": Ignore(reason="there is no encoder"),
    "vllm_cfg.skip_tokenizer_init": Ignore(reason="derived: the engine takes and gives token ids"),
    "vllm_kwargs": To(via="free", key="policy.generation.vllm_kwargs"),
    "mcore_generation_config": Ignore(reason="only read by generation.backend megatron"),
    "colocated.enabled": Only(values=(None, True), feature="generation on GPUs of its own"),
    "colocated.resources.gpus_per_node": Ignore(reason="only read with colocated.enabled false"),
    "colocated.resources.num_nodes": Ignore(reason="only read with colocated.enabled false"),
}

OTHER: dict[str, Key] = {
    "checkpointing.enabled": To(key="checkpointing.enabled"),
    "checkpointing.checkpoint_dir": RUNS,
    "checkpointing.metric_name": To(via="metric"),
    "checkpointing.higher_is_better": To(key="checkpointing.higher_is_better"),
    "checkpointing.keep_top_k": To(via="keep"),
    "checkpointing.save_period": To(key="checkpointing.save_period"),
    "checkpointing.checkpoint_must_save_by": To(key="checkpointing.checkpoint_must_save_by"),
    "checkpointing.model_save_format": Ignore(reason="rlctl writes its own checkpoints, and `hf/` at the end"),
    "checkpointing.save_consolidated": Ignore(reason="rlctl writes its own checkpoints, and `hf/` at the end"),
    "checkpointing.save_optimizer": Only(values=(None, True), feature="checkpoints without optimizer"),
    "checkpointing.ft_save_period": Only(values=(None,), feature="more frequent saves for fault tolerance"),
    "checkpointing.ft_keep_latest_k": Ignore(reason="only read with ft_save_period"),
    "checkpointing.pretrained_checkpoint": Only(values=(None,), feature="a Megatron checkpoint as the start"),
    "data.max_input_seq_length": To(via="input_length"),
    "data.dataset_name": To(via="data_set"),
    "data.prompt_file": PROMPT_FILE,
    "data.system_prompt_file": To(via="system_prompt"),
    "data.shuffle": To(key="data.shuffle"),
    "data.num_workers": SPEED,
    "data.seed": Ignore(reason="the order comes from grpo.seed"),
    "data.split": OWN_ROWS,
    "data.add_system_prompt": Ignore(reason="only read by their sliding puzzle"),
    "data.add_bos": Ignore(reason="only read by SFT"),
    "data.add_eos": Ignore(reason="only read by SFT"),
    "data.add_generation_prompt": Ignore(reason="only read by SFT"),
    "data.use_multiple_dataloader": Only(values=OFF, feature="mixing data sets"),
    "data.train_data_path": To(via="train_path"),
    "data.val_data_path": To(via="val_path"),
    "data.input_key": To(via="column", key="data.input_key"),
    "data.output_key": To(via="column", key="data.output_key"),
    "data.default.prompt_file": PROMPT_FILE,
    "data.default.system_prompt_file": To(via="system_prompt"),
    "data.default.processor": Ignore(reason="rows are read as they are: data.input_key, data.output_key"),
    "data.default.env_name": To(via="environment"),
    "data.default.input_key": To(via="column", key="data.input_key"),
    "data.default.output_key": To(via="column", key="data.output_key"),
    "env.math.num_workers": Ignore(reason="of their whole cluster; here each rank has its own: env.math.workers"),
    "env.math.math_verify_impl": Only(values=(None, "hf_math_verify"), feature="another verifier of mathematics"),
    "env.math.verifier_type": Only(values=(None, "math"), feature="another verifier of mathematics"),
    "env.should_use_nemo_gym": Only(values=OFF, feature="NeMo Gym environments"),
    "logger.log_dir": RUNS,
    "logger.num_val_samples_to_print": Ignore(reason="every sample is in the run directory: `rlctl runs rollouts`"),
    "logger.tensorboard_enabled": To(key="logger.tensorboard"),
    "logger.wandb_enabled": LOGS,
    "logger.mlflow_enabled": LOGS,
    "logger.swanlab_enabled": LOGS,
    "logger.monitor_gpus": LOGS,
    "logger.gpu_monitoring.collection_interval": LOGS,
    "logger.gpu_monitoring.flush_interval": LOGS,
    "cluster.gpus_per_node": To(key="cluster.gpus_per_node"),
    "cluster.num_nodes": To(key="cluster.num_nodes"),
    "cluster.master_port_range_low": RAY,
    "cluster.master_port_range_high": RAY,
    "cluster.segment_size": Ignore(reason="give it to Slurm: cluster.slurm.options"),
    "data_plane.enabled": Only(values=OFF, feature="the TransferQueue data plane"),
    "on_policy_distillation": Only(values=(None,), feature="on-policy distillation"),
}
for _part in ("train", "validation"):
    OTHER |= {
        f"data.{_part}.dataset_name": To(via="data_set"),
        f"data.{_part}.data_path": To(via="train_path" if _part == "train" else "val_path"),
        f"data.{_part}.input_key": To(via="column", key="data.input_key"),
        f"data.{_part}.output_key": To(via="column", key="data.output_key"),
        f"data.{_part}.prompt_file": PROMPT_FILE,
        f"data.{_part}.system_prompt_file": To(via="system_prompt"),
        f"data.{_part}.processor": Ignore(reason="rows are read as they are: data.input_key, data.output_key"),
        f"data.{_part}.env_name": To(via="environment"),
        f"data.{_part}.split": OWN_ROWS,
        f"data.{_part}.subset": OWN_ROWS,
        f"data.{_part}.seed": Ignore(reason="the order comes from grpo.seed"),
        f"data.{_part}.split_validation_size": Only(
            values=(None, 0, 0.0), feature="cutting held-out rows from the training file (give data.val_path)"
        ),
    }
for _sink, _names in {
    "wandb": ("project", "name", "entity", "id", "group", "notes", "tags"),
    "tensorboard": ("log_dir",),
    "mlflow": ("experiment_name", "run_name", "tracking_uri", "artifact_location"),
    "swanlab": ("project", "name"),
}.items():
    OTHER |= {f"logger.{_sink}": LOGS} | {f"logger.{_sink}.{name}": LOGS for name in _names}

for _name, _feature, _keys in (
    ("sft", "a reader of their sft files (write a native recipe for `rlctl train sft`)", ()),
    (
        "dpo", "a reader of their dpo files (write a native recipe for `rlctl train dpo`)",
        ("reference_policy_kl_penalty", "preference_average_log_probs", "sft_average_log_probs",
         "preference_loss_weight", "sft_loss_weight", "preference_loss", "gt_reward_scale"),
    ),
):  # fmt: skip
    _common = (
        "max_num_epochs", "max_num_steps", "val_period", "val_batches", "val_global_batch_size", "val_micro_batch_size",
        "val_at_start", "val_at_end", "seed",
    )  # fmt: skip
    OTHER |= {f"{_name}.{key}": Only(values=(), feature=_feature) for key in (*_common, *_keys)}

KEYS: dict[str, Key] = (
    {f"grpo.{k}": v for k, v in GRPO.items()}
    | {f"loss_fn.{k}": v for k, v in LOSS.items()}
    | {f"policy.{k}": v for k, v in POLICY.items()}
    | {f"policy.megatron_cfg.{k}": v for k, v in MEGATRON.items()}
    | {f"policy.generation.{k}": v for k, v in GENERATION.items()}
    | OTHER
)

FREE = (
    "policy.hf_config_overrides", "policy.generation.vllm_kwargs", "policy.generation.mcore_generation_config",
    "policy.dtensor_cfg.env_vars", "policy.megatron_cfg.env_vars", "policy.megatron_cfg.model_overrides",
    "policy.dtensor_cfg.automodel_kwargs", "policy.tokenizer.chat_template_kwargs",
)  # fmt: skip

ENVIRONMENTS = {  # theirs besides `math`: refused by name
    "sliding_puzzle_game": "their sliding puzzle environment",
    "nemo_gym": "NeMo Gym environments",
    "code": "their code environment",
    "code_jaccard": "their code similarity environment",
    "reward_model": "reward models",
    "vlm": "multimodal models",
    "clevr-cogent": "multimodal models",
    "geometry3k": "multimodal models",
    "retriever": "their retrieval tool",
    "math_multi_reward": "their mathematics environment with several rewards",
}

FAMILIES = {  # parts of model names, in small letters: refused by name
    "gemma-3": "the gemma3 architecture",
    "gemma3": "the gemma3 architecture",
    "-vl-": "multimodal models",
    "smolvlm": "multimodal models",
    "llava": "multimodal models",
}

ALGORITHMS = {  # a section at the top that makes a file one of another algorithm
    "rm": "training of reward models",
    "ppo": "PPO with a critic",
    "distillation": "distillation",
    "value": "a critic",
    "eval": "their evaluation files (`rlctl eval MODEL --tasks ...`)",
    "reward_penalties": "penalties of NeMo Gym",
}
