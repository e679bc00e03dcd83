"""What a recipe leaves open, filled in and checked before any process starts.

1. The model's config.json, by name.
2. The backend, the number of processes and the layout.
3. Batch sizes, token budgets and lengths, with every product check; then the algorithm's own options.
4. The generation engine and the task.
5. An override that could have no effect in the result is refused.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlctl import config, parallel, plugins
from rlctl.algorithms.base import GROUP_SIZES, source
from rlctl.device import Hardware
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.models import resolve
from rlctl.parallel import Layout
from rlctl.recipe import auto, bounds
from rlctl.recipe.compose import Composed, as_values

Backend = Literal["megatron", "dtensor"]
TOY_PARAMETERS = 20_000_000  # below, Hugging Face generate is as fast as vLLM and starts in a third of the time
DEFAULT_PROCESSES = 1


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe without open ends."""

    recipe: config.Recipe
    layout: Layout
    backend: Backend
    model: resolve.ModelSource
    parameters: int
    derived: Mapping[str, Any]
    """Keys that neither the recipe nor the command line set, and what they became."""
    layout_reason: str | None = None
    """Why this layout, where `policy.parallel` is `auto`."""

    @property
    def batch_size(self) -> int:
        """Sequences of a step."""
        return self.recipe.grpo.num_prompts_per_step * self.recipe.grpo.num_generations_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step."""
        assert self.recipe.policy.train_global_batch_size is not None
        return self.batch_size // self.recipe.policy.train_global_batch_size


def derive(composed: Composed, hardware: Hardware) -> Resolved:
    """Fill in and check a recipe.

    Args:
        composed: the validated recipe, with None where something is open.
        hardware: this machine.

    Raises:
        RlctlError: exit status 2 for what no machine could run, 3 for sizes that do not fit.
    """
    recipe = copy.deepcopy(composed.recipe)
    _check_positive(recipe)
    bounds.check(recipe)
    name = recipe.policy.model_name
    if name is None:
        raise RlctlError("no model is named", "give `--model NAME`; for a first try, `--model smollm2-135m`")
    model = resolve.resolve(name, recipe.policy.hf_config_overrides)
    _check_task(recipe)
    tokenizer = recipe.policy.tokenizer
    resolve.check_assets(model, tokenizer_name=tokenizer.name, chat_template=tokenizer.chat_template)
    backend = _backend(recipe)
    world, reason = _processes(recipe, composed, hardware), None
    auto.settle_gpu(recipe, hardware)
    if recipe.policy.parallel == "auto":
        reason = auto.settle(recipe, composed, backend=backend, hf_config=model.config, world=world)
    layout = _layout(recipe, backend, world=world)
    parallel.check(layout, model.config)
    _lengths(recipe, model)
    _batches(recipe, layout)
    plugins.load("algorithm", recipe.algorithm).Config(grpo=recipe.advantage, loss_fn=recipe.loss_fn).complete(recipe)
    parameters = resolve.num_parameters(model.config)
    _engine(recipe, parameters)
    _check_schedule(recipe)
    _check_effect(composed, recipe, backend)
    return Resolved(
        recipe=recipe, layout=layout, backend=backend, model=model, parameters=parameters,
        derived=_differences(as_values(composed.recipe), as_values(recipe)), layout_reason=reason,
    )  # fmt: skip


def _check_positive(recipe: config.Recipe) -> None:
    """Counts are at least 1; checked here, since a type cannot say so."""
    values = as_values(recipe)
    for section, names in {
        "grpo": (
            "num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "max_num_epochs",
            "max_val_samples", "num_val_generations_per_prompt",
        ),
        "policy": (
            "max_total_sequence_length",
            "train_global_batch_size",
            "train_micro_batch_size",
            "logprob_batch_size",
        ),
        "cluster": ("num_nodes", "gpus_per_node", "procs"),
        "checkpointing": ("save_period",),
    }.items():  # fmt: skip
        for name in names:
            if values[section][name] is not None and values[section][name] < 1:
                raise RlctlError(f"`{section}.{name}` is {values[section][name]}, it must be at least 1", "raise it")
    for section in ("megatron_cfg", "dtensor_cfg"):
        for name, value in values["policy"][section].items():
            if name.endswith("_size") and value is not None and value < 1:
                raise RlctlError(f"`policy.{section}.{name}` is {value}, it must be at least 1", "raise it")


def _check_task(recipe: config.Recipe) -> None:
    """Whether a task is named with what it needs; whether it works is launch/task_check.py's."""
    env, data = recipe.env, recipe.data
    if source(recipe.algorithm) != "rollouts":
        _check_data(recipe)
        return
    if env.name is None:
        known = ", ".join(n for n in plugins.names("environment") if n != "function")
        raise RlctlError(
            "no task is named",
            f"set `env.name` ({known}), or your own: data.train_path=my.jsonl env.reward=my_file.py:score",
        )
    if env.name == "function" and env.reward is None:
        raise RlctlError("environment `function` needs `env.reward`", "set env.reward=my_file.py:score")
    if env.name == "function" and data.train_path is None:
        raise RlctlError("`env.reward` needs prompts: `data.train_path` is not set", "set data.train_path=my.jsonl")


def _check_data(recipe: config.Recipe) -> None:
    """Training on data: there must be some; what is about rollouts is settled, since nothing is generated."""
    kind, data, steps = source(recipe.algorithm), recipe.data, recipe.grpo
    assert kind != "rollouts"
    if data.train_path is None:
        row = "messages" if kind == "conversations" else "prompt, chosen and rejected"
        raise RlctlError(
            f"`{recipe.algorithm}` learns from data, and `data.train_path` is not set",
            f"set data.train_path=my.jsonl, with {row} in each row",
        )
    if (steps.val_period or steps.val_at_start or steps.val_at_end) and data.val_path is None:
        raise RlctlError("validation needs held-out rows: `data.val_path` is not set", "set data.val_path=held.jsonl")
    recipe.env = config.Env()
    recipe.grpo.num_generations_per_prompt = GROUP_SIZES[kind]
    recipe.policy.generation = config.Generation(vllm_cfg=recipe.policy.generation.vllm_cfg)


def _backend(recipe: config.Recipe) -> Backend:
    megatron, dtensor = recipe.policy.megatron_cfg, recipe.policy.dtensor_cfg
    if megatron.enabled and dtensor.enabled:
        raise RlctlError(
            "both policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are true",
            "set one of them to false, or choose with `--backend`",
        )
    if not megatron.enabled and dtensor.enabled is False:
        raise RlctlError(
            "neither policy.megatron_cfg.enabled nor policy.dtensor_cfg.enabled is true",
            "set one of them to true, or choose with `--backend`",
        )
    dtensor.enabled = not megatron.enabled
    return "megatron" if megatron.enabled else "dtensor"


def _processes(recipe: config.Recipe, composed: Composed, hardware: Hardware) -> int:
    """The world size; writes the derived numbers back."""
    cluster = recipe.cluster
    said_procs, said_gpus = composed.overridden("cluster.procs"), composed.overridden("cluster.gpus_per_node")
    if cluster.launcher == "env":
        return _launched(cluster, hardware)
    if said_procs and said_gpus and None not in (said_procs.value, said_gpus.value):
        raise RlctlError(
            f"`{said_procs.text}` contradicts `{said_gpus.text}`: processes are counted by GPUs where there are any",
            "keep one of them",
        )
    if said_procs and said_procs.value is not None and hardware.gpus:
        raise RlctlError(
            f"`{said_procs.text}` is for hosts without GPUs, this one has {hardware.gpus}",
            "use `--gpus-per-node`, or hide the GPUs with CUDA_VISIBLE_DEVICES=''",
            exit_status=ENVIRONMENT,
        )
    if said_procs and cluster.procs is not None:
        cluster.gpus_per_node = None
    elif cluster.gpus_per_node is None and hardware.gpus:
        cluster.gpus_per_node = hardware.gpus
    if cluster.gpus_per_node is None:
        cluster.procs = cluster.procs or DEFAULT_PROCESSES
        return cluster.num_nodes * cluster.procs
    cluster.procs = None
    return cluster.num_nodes * cluster.gpus_per_node


def _launched(cluster: config.Cluster, hardware: Hardware) -> int:
    """The world that another launcher made; its sizes are facts, and beat the recipe."""
    absent = [n for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if absent:
        raise RlctlError(
            f"`--launcher env` needs {', '.join(absent)} in the environment",
            "start under torchrun or a cluster's launcher, or use `--launcher local`",
            exit_status=ENVIRONMENT,
        )
    world = _number("WORLD_SIZE", 1, None)
    local = _number("LOCAL_WORLD_SIZE", 1, world) if "LOCAL_WORLD_SIZE" in os.environ else world
    _number("RANK", 0, world - 1)
    _number("LOCAL_RANK", 0, local - 1)
    _number("MASTER_PORT", 1, 65535)
    if world % local:
        raise RlctlError(
            f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world} (`--launcher env`)",
            "every node must start the same number of processes",
        )
    cluster.num_nodes = world // local
    cluster.gpus_per_node, cluster.procs = (local, None) if hardware.gpus else (None, local)
    return world


def _number(name: str, least: int, most: int | None) -> int:
    """An environment variable that a launcher set.

    Raises:
        RlctlError: it is no such number.
    """
    text = os.environ[name]
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least or (most is not None and int(text) > most):
        raise RlctlError(
            f"{name}={text!r} in the environment is not a number of {limits} (`--launcher env`)",
            "it is set by torchrun or a cluster's launcher; see what started this process",
        )
    return int(text)


def _layout(recipe: config.Recipe, backend: Backend, *, world: int) -> Layout:
    """The degrees of the backend in use, written back where they were open."""
    if backend == "dtensor":
        dtensor = recipe.policy.dtensor_cfg
        dtensor.tensor_parallel_size = dtensor.tensor_parallel_size or 1
        dtensor.context_parallel_size = dtensor.context_parallel_size or 1
        if dtensor.context_parallel_size > 1:
            raise RlctlError(
                f"the dtensor backend has no context parallelism (size {dtensor.context_parallel_size})",
                "set policy.dtensor_cfg.context_parallel_size=1, or use `--backend megatron`",
            )
        return parallel.layout_of(recipe, world)
    megatron = recipe.policy.megatron_cfg
    for name, value in vars(megatron).items():
        if name.endswith("_size") and value is None:
            setattr(megatron, name, 1)
    layout = parallel.layout_of(recipe, world)
    megatron.sequence_parallel = layout.sp
    if layout.sp and layout.tp == 1:
        raise RlctlError(
            "policy.megatron_cfg.sequence_parallel has no effect with tensor_model_parallel_size 1",
            "set tensor_model_parallel_size above 1, or leave sequence_parallel out",
        )
    return layout


def _lengths(recipe: config.Recipe, model: resolve.ModelSource) -> None:
    policy, generation, data = recipe.policy, recipe.policy.generation, recipe.data
    total, positions = policy.max_total_sequence_length, model.config["max_position_embeddings"]
    if total > positions:
        raise RlctlError(
            f"policy.max_total_sequence_length is {total}, model `{model.name}` has {positions} positions",
            f"set it to at most {positions}",
            exit_status=ENVIRONMENT,
        )
    if generation.max_new_tokens is None:
        generation.max_new_tokens = total - 1
    if data.max_input_seq_length is None:
        data.max_input_seq_length = total - 1
    for key, value in (
        ("policy.generation.max_new_tokens", generation.max_new_tokens),
        ("data.max_input_seq_length", data.max_input_seq_length),
    ):
        if not 1 <= value < total:
            raise RlctlError(
                f"`{key}` is {value}; prompt and response share policy.max_total_sequence_length {total}",
                f"set it to 1 ... {total - 1}",
            )


def _batches(recipe: config.Recipe, layout: Layout) -> None:
    policy, packing = recipe.policy, recipe.policy.sequence_packing
    group = recipe.grpo.num_generations_per_prompt
    total = recipe.grpo.num_prompts_per_step * group
    update = policy.train_global_batch_size = policy.train_global_batch_size or total
    if total % update or update % group:
        fits = [str(n * group) for n in range(1, total // group + 1) if total % (n * group) == 0]
        raise RlctlError(
            f"policy.train_global_batch_size {update} does not cut a step's {total // group} prompts x {group} samples "
            f"= {total} sequences into updates of whole groups",
            f"choose {', '.join(fits)}",
            exit_status=ENVIRONMENT,
        )
    if update < layout.dp:
        raise RlctlError(
            f"an update of {update} sequences is smaller than {layout.dp} data-parallel ranks",
            f"raise grpo.num_prompts_per_step to {-(-layout.dp // group)} or more, or use fewer processes",
            exit_status=ENVIRONMENT,
        )
    policy.logprob_batch_size = policy.logprob_batch_size or policy.train_micro_batch_size
    together = group if source(recipe.algorithm) == "preferences" else 1  # a pair shares a microbatch
    if policy.train_micro_batch_size < together:
        raise RlctlError(
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size}, and a pair of answers shares a "
            "microbatch",
            f"set it to {together} or more",
        )
    if not packing.enabled:
        return
    length = policy.max_total_sequence_length
    padded = -(-length // layout.pad_unit) * layout.pad_unit  # what a sequence of that length takes in a microbatch
    packing.train_mb_tokens = packing.train_mb_tokens or padded * policy.train_micro_batch_size
    packing.logprob_mb_tokens = packing.logprob_mb_tokens or padded * policy.logprob_batch_size
    for key, least in (("train_mb_tokens", length * together), ("logprob_mb_tokens", length)):
        if getattr(packing, key) < least:
            what = "a sequence" if least == length else "a pair"
            raise RlctlError(
                f"policy.sequence_packing.{key} is {getattr(packing, key)}, {what} may have {least} tokens",
                f"set it to {least} or more",
                exit_status=ENVIRONMENT,
            )


def _engine(recipe: config.Recipe, parameters: int) -> None:
    generation = recipe.policy.generation
    if source(recipe.algorithm) != "rollouts":
        return
    if generation.backend is None:
        has_vllm = importlib.util.find_spec("vllm") is not None
        generation.backend = "vllm" if has_vllm and parameters >= TOY_PARAMETERS else "transformers"


def _check_schedule(recipe: config.Recipe) -> None:
    scheduler = recipe.policy.scheduler
    if scheduler.decay_style != "constant" and scheduler.decay_steps is None:
        raise RlctlError(
            f"policy.scheduler.decay_style `{scheduler.decay_style}` needs policy.scheduler.decay_steps",
            "set how many steps after warm-up the decay takes",
        )
    if scheduler.decay_style == "constant" and scheduler.decay_steps is not None:
        raise RlctlError(
            "policy.scheduler.decay_steps has no effect with decay_style `constant`",
            "leave it out, or set decay_style to linear or cosine",
        )


def _check_effect(composed: Composed, recipe: config.Recipe, backend: Backend) -> None:
    """A recipe may carry settings for both backends and engines; what the command line says must matter."""
    other: Backend = "dtensor" if backend == "megatron" else "megatron"
    engine, packing, task = recipe.policy.generation.backend, recipe.policy.sequence_packing.enabled, recipe.env.name
    unused = {f"policy.{other}_cfg.": f"the backend is {backend}"}
    unused |= {f"env.{name}.": f"the environment is {task}" for name in plugins.names("environment") if name != task}
    if engine != "vllm":
        unused |= {f"policy.generation.{key}": f"the engine is {engine}" for key in ("vllm_cfg", "vllm_kwargs")}
    unused |= _unused_by_source(recipe.algorithm)
    if recipe.cluster.gpus_per_node is None:
        unused["cluster.gpu_kind"] = "processes run on a host"
    if not packing:
        unused |= {f"policy.sequence_packing.{key}_mb_tokens": "packing is off" for key in ("train", "logprob")}
    for override in composed.overrides:
        why = next((unused[prefix] for prefix in unused if override.key.startswith(prefix)), None)
        if why is not None and override.key != f"policy.{other}_cfg.enabled":
            raise RlctlError(f"`{override.text}` has no effect: {why}", "leave it out")


def _unused_by_source(algorithm: str) -> dict[str, str]:
    """Keys without effect, by what an algorithm learns from."""
    kind = source(algorithm)
    columns = {
        "rollouts": ("input_key", "output_key", "max_input_seq_length"),
        "conversations": ("messages_key",),
        "preferences": ("prompt_key", "chosen_key", "rejected_key"),
    }
    others = [name for other, names in columns.items() if other != kind for name in names]
    unused = {f"data.{name}": f"`{algorithm}` learns from {kind}" for name in others}
    if kind != "rollouts":
        generated = (
            "env.",
            "policy.generation.",
            "grpo.num_generations_per_prompt",
            "grpo.num_val_generations_per_prompt",
            "logger.rollouts_period",
            "checks.stop_above_mismatch",
            "checks.sync_probe_period",
        )
        unused |= dict.fromkeys(generated, f"`{algorithm}` generates nothing")
    return unused


def _differences(before: Any, after: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(after, dict) and isinstance(before, dict):
        found: dict[str, Any] = {}
        for key, value in after.items():
            found |= _differences(before.get(key), value, f"{prefix}{key}.")
        return found
    return {} if before == after else {prefix.rstrip("."): after}
