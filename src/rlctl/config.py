"""The recipe: dataclasses of the common sections and their defaults. No logic.

Section and key names follow NeMo RL. An algorithm's, environment's or engine's own options live in its own file's
`Config`; recipe/compose.py merges them here: `grpo.*` = `Steps` + the algorithm's `Config.grpo`; `loss_fn.*` = the
algorithm's `Config.loss_fn`; `env.<name>.*` = the environment's `Config`; `policy.generation.vllm_cfg.*` = the vllm
engine's `Config`. A default of None means derived (recipe/derive.py), and shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True)
class Tokenizer:
    """Default: the model's own tokenizer and chat template."""

    name: str | None = None
    chat_template: str | None = None
    """A Jinja template or a file that holds one; needed for a base model without template."""


@dataclass(kw_only=True)
class Optimizer:
    """One optimizer for both backends: AdamW with fp32 state; biases and norms are not decayed."""

    name: Literal["adamw"] = "adamw"
    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(kw_only=True)
class Scheduler:
    """Learning rate by step; advances once per step (rollout phase) and never looks at max_num_steps."""

    warmup_steps: int = 0
    warmup_init_lr: float = 0.0
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int | None = None
    """Steps after warm-up until `min_lr`; required unless constant."""


@dataclass(kw_only=True)
class SequencePacking:
    """Whole sequences share one microbatch up to a hard token budget."""

    enabled: bool = True
    train_mb_tokens: int | None = None
    """Tokens in a training microbatch; derived: max_total_sequence_length * train_micro_batch_size."""
    logprob_mb_tokens: int | None = None


@dataclass(kw_only=True)
class MegatronConfig:
    """Megatron-Core. Degrees: None = derived."""

    enabled: bool = False
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    """Derived: on with tensor parallelism."""


@dataclass(kw_only=True)
class DTensorConfig:
    """PyTorch FSDP2 and DTensor over transformers' own model. `enabled` None = when Megatron is off."""

    enabled: bool | None = None
    tensor_parallel_size: int | None = None
    context_parallel_size: int | None = None


@dataclass(kw_only=True)
class Generation:
    """How rollouts are generated. `vllm_cfg` is the vllm engine's Config, typed there."""

    backend: Literal["vllm", "transformers"] | None = None
    """Derived: transformers for toy models (under 20M parameters) and where vLLM is absent, else vllm."""
    max_new_tokens: int | None = None
    """Derived: what max_total_sequence_length leaves after the prompt."""
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    vllm_cfg: Any = None
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Free-form: passed to vllm.LLM as they are."""


@dataclass(kw_only=True)
class PolicySection:
    """The model, how it is trained and how it generates."""

    model_name: str | None = None
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    """Free-form: patched into the Hugging Face config."""
    parallel: Literal["auto"] | None = None
    """`auto`: degrees that are not set, recompute and the engine's tensor-parallel size are those of the fastest layout
    that `rlctl plan` finds to fit; None: a degree that is not set is 1."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    max_total_sequence_length: int = 512
    """Prompt and response."""
    train_global_batch_size: int | None = None
    """Sequences in an optimizer update; derived: all of the step's."""
    train_micro_batch_size: int = 4
    logprob_batch_size: int | None = None
    """Sequences in a forward-only microbatch; derived: train_micro_batch_size."""
    max_grad_norm: float = 1.0
    activation_checkpointing: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    sequence_packing: SequencePacking = field(default_factory=SequencePacking)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    dtensor_cfg: DTensorConfig = field(default_factory=DTensorConfig)
    generation: Generation = field(default_factory=Generation)


@dataclass(kw_only=True)
class Steps:
    """`grpo.*`: the step counts that every RL algorithm reads."""

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 16
    max_num_steps: int = 1_000_000
    max_num_epochs: int = 1
    seed: int = 42
    val_period: int = 0
    """Steps between validations on held-out prompts; 0 = none."""
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: int | None = None
    """Held-out prompts that a validation takes, the first ones; None = all."""
    num_val_generations_per_prompt: int = 1


@dataclass(kw_only=True)
class Data:
    """Own prompts. Without `train_path`, the environment brings its own."""

    train_path: str | None = None
    """JSONL or parquet; one prompt a row."""
    val_path: str | None = None
    """Own held-out prompts, in the same columns; for validation and `rlctl eval`."""
    input_key: str = "question"
    """Column with the prompt: text, or a list of {role, content} messages."""
    output_key: str | None = None
    """Column with the reference answer; optional: the reward sees the whole row."""
    messages_key: str = "messages"
    """sft: column with a conversation, a list of {role, content}; every assistant's message is learned."""
    prompt_key: str = "prompt"
    """dpo: column with what both answers answer: text, or a list of {role, content}."""
    chosen_key: str = "chosen"
    """dpo: column with the preferred answer: text, or messages, with or without those of the prompt."""
    rejected_key: str = "rejected"
    system_prompt: str | None = None
    max_input_seq_length: int | None = None
    """Longer prompts are dropped at load, with their count; derived: max_total_sequence_length - 1."""
    shuffle: bool = True


@dataclass(kw_only=True)
class Env:
    """What rewards. `options` (written `env.<name>.key`) is the environment's Config, typed in its file."""

    name: str | None = None
    """A file in envs/; derived: `function` when `reward` is given."""
    reward: str | None = None
    """`file.py:function` of (prompt, completion, row) -> float or {part: float}."""
    reward_style: Literal["rlctl", "trl", "verl"] = "rlctl"
    reward_timeout_seconds: float = 30.0
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weight of each reward part; 1.0 where not named."""
    options: Any = None


@dataclass(kw_only=True)
class Checkpointing:
    """What is saved, and when."""

    enabled: bool = True
    save_period: int = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_top_k: int = 1
    """Checkpoints that are kept: the best by `metric_name`, else the newest. The newest always stays besides."""
    metric_name: str | None = None
    """A name in metrics.jsonl, e.g. `val/reward`; a checkpoint of a step without it ranks last."""
    higher_is_better: bool = True
    optimizer_format: Literal["auto", "same_layout", "reshardable"] = "auto"
    """`same_layout`: each rank's part, quickest. `reshardable`: whole tensors, from which any layout, number of
    processes and backend can go on. `auto`: reshardable at the last step, same_layout before."""
    checkpoint_must_save_by: str | None = None
    """DD:HH:MM:SS after the start of the processes: the run saves and stops before that, with exit status 130."""
    save_hf: bool = True
    """Export the final policy to `hf/`, loadable by transformers and vLLM."""


@dataclass(kw_only=True)
class Checks:
    """Self-checks (checks/), at the start and later."""

    enabled: bool = True
    stop_above_mismatch: float | None = None
    """The run ends, with exit status 4, where `mismatch/token_mult_prob_error` of a step is above it, e.g. 1.5."""
    sync_probe_period: int = 0
    """Steps between probes of whether the engine has the policy's weights, on a few samples; 0 = none after the start.
    Every step's own samples tell it too, in `mismatch/`, without a limit."""


@dataclass(kw_only=True)
class Wandb:
    """`logger.wandb.*`: has an effect with `logger.wandb_enabled`."""

    project: str = "rlctl"
    name: str | None = None
    """None: the name of the run directory."""


@dataclass(kw_only=True)
class Mlflow:
    """`logger.mlflow.*`: has an effect with `logger.mlflow_enabled`."""

    experiment_name: str = "rlctl"
    run_name: str | None = None
    """None: the name of the run directory."""
    tracking_uri: str | None = None
    """None: MLFLOW_TRACKING_URI, else a folder of the run directory."""


@dataclass(kw_only=True)
class Logger:
    """What shows a run, and metric sinks besides metrics.jsonl."""

    console: Literal["auto", "plain"] = "auto"
    """auto: a live display where standard error is a terminal; plain: one line a step everywhere."""
    tensorboard: bool = True
    wandb_enabled: bool = False
    wandb: Wandb = field(default_factory=Wandb)
    mlflow_enabled: bool = False
    mlflow: Mlflow = field(default_factory=Mlflow)
    rollouts_period: int = 1
    """Steps between rollout dumps; 0 = none."""


@dataclass(kw_only=True)
class Slurm:
    """`cluster.slurm.*`: read by `--launcher slurm` when it submits."""

    partition: str | None = None
    account: str | None = None
    time: str | int | None = None
    """As sbatch takes it: minutes, or e.g. `04:00:00`; None: the partition's limit."""
    stop_before_seconds: int = 300
    """How long before its time limit the run saves and goes back into the queue. Slurm may be 60 s early."""
    requeue: bool = True
    """Into the queue again after a lost node and at the time limit; the run goes on from its newest checkpoint."""
    options: list[str] = field(default_factory=list)
    """More of sbatch's own, e.g. ["--qos=high", "--exclusive"]."""


@dataclass(kw_only=True)
class Cluster:
    """Processes. `procs` counts them on a host without GPUs."""

    num_nodes: int = 1
    gpus_per_node: int | None = None
    """Derived: the GPUs of this machine; experiment recipes set it."""
    procs: int | None = None
    gpu_kind: str | None = None
    """E.g. `h100` (plan/hardware.yaml): what the plan judges by. Derived: what is here; set it for others."""
    launcher: Literal["local", "slurm", "env"] = "local"
    slurm: Slurm = field(default_factory=Slurm)
    stall_timeout_seconds: float = 120.0
    """A process without a sign of life for so long ends the run."""
    collective_timeout_seconds: float = 1800.0
    """How long a rank waits in a collective for the others; one rank's generation may end long after another's."""


@dataclass(kw_only=True)
class Recipe:
    """A resolved recipe, as written to the run directory's recipe.yaml. `algorithm` names a file in algorithms/."""

    rlctl_recipe: int = 1
    algorithm: str = "grpo"
    policy: PolicySection = field(default_factory=PolicySection)
    grpo: Steps = field(default_factory=Steps)
    loss_fn: Any = None
    advantage: Any = None
    """The algorithm's part of `grpo.*`; not written by users under this name."""
    data: Data = field(default_factory=Data)
    env: Env = field(default_factory=Env)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    checks: Checks = field(default_factory=Checks)
    logger: Logger = field(default_factory=Logger)
    cluster: Cluster = field(default_factory=Cluster)
    run_dir: str | None = None
