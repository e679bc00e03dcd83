"""`policy.parallel: auto`: the degrees that are open become those of the fastest layout that fits (plan/search.py).

Recompute and the engine's tensor-parallel size are chosen with them: a layout that fits needs all three. What the
recipe or the command line sets is kept. For recompute and the engine, whose defaults are `false` and 1, only another
value, or an override, counts as set.
"""

from __future__ import annotations

from typing import Any

from rlctl import config, plugins
from rlctl.algorithms.base import source
from rlctl.device import Hardware
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.plan import hardware as gpus
from rlctl.plan.hardware import Gpu
from rlctl.plan.memory import Backend
from rlctl.plan.predict import Prediction, Question
from rlctl.plan.profile import constants
from rlctl.plan.rl import Lengths
from rlctl.plan.search import Found, Pins, search
from rlctl.recipe.compose import Composed

PAD_UNIT = 128  # the largest that a searched layout pads to: 2 * cp 8 * tp 8
_RECOMPUTE, _ENGINE = "policy.activation_checkpointing", "policy.generation.vllm_cfg.tensor_parallel_size"
_DEGREES = {
    "megatron": {
        "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
    },
    "dtensor": {"tp": "tensor_parallel_size", "cp": "context_parallel_size"},
}  # fmt: skip


def settle_gpu(recipe: config.Recipe, hardware: Hardware) -> None:
    """Write the kind of GPU that is here to `cluster.gpu_kind`, where the job is for GPUs and it is known.

    Raises:
        RlctlError: exit status 3: the recipe names another kind than the GPUs here; 2: an unknown kind.
    """
    cluster = recipe.cluster
    if cluster.gpus_per_node is None:
        return
    here = gpus.kind_of(hardware.gpu_name) if hardware.gpu_name and cluster.launcher != "slurm" else None
    if cluster.gpu_kind is None:
        cluster.gpu_kind = here
        return
    cluster.gpu_kind = gpus.gpu(cluster.gpu_kind).name
    if here is not None and here != cluster.gpu_kind:
        raise RlctlError(
            f"`cluster.gpu_kind` is {cluster.gpu_kind}, and this machine has {hardware.gpu_name}",
            "leave it out: it is for machines that cannot be looked at from here",
            exit_status=ENVIRONMENT,
        )


def settle(
    recipe: config.Recipe, composed: Composed, *, backend: Backend, hf_config: dict[str, Any], world: int
) -> str:
    """Write the chosen layout into the recipe.

    Args:
        recipe: `cluster` settled; changed in place.
        composed: what was overridden.
        backend: whose degrees are chosen.
        hf_config: the model's config.json.
        world: GPUs.

    Returns:
        Why this layout, in one line.

    Raises:
        RlctlError: exit status 3 when no layout fits; 2 when nothing can be planned.
    """
    if source(recipe.algorithm) != "rollouts":
        raise RlctlError(
            f"`policy.parallel: auto` plans rollouts and training, and `{recipe.algorithm}` has no rollouts",
            f"leave it out, and set the degrees under policy.{backend}_cfg",
        )
    if recipe.cluster.gpus_per_node is None:
        raise RlctlError(
            "`policy.parallel: auto` plans for GPUs, and this job runs in processes on a host",
            "set policy.parallel=null to have data parallelism alone, or say where it runs: "
            "`--gpus-per-node 8 cluster.gpu_kind=h100`",
        )
    if recipe.cluster.gpu_kind is None:
        raise RlctlError(
            "`policy.parallel: auto` needs the kind of GPU, and it is not known here",
            f"set cluster.gpu_kind to {', '.join(gpus.names())}",
        )
    question = question_of(recipe, hf_config, gpus.gpu(recipe.cluster.gpu_kind), world)
    pins = pins_of(recipe, composed, backend)
    found = search(question, backend, fitted=constants(), pins=pins)
    if not found.best:
        raise refusal(question, backend, found, pins)
    write(recipe, backend, found.best[0])
    return why(found, pins)


def question_of(
    recipe: config.Recipe,
    hf_config: dict[str, Any],
    gpu: Gpu,
    world: int,
    *,
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
) -> Question:
    """A recipe's job, its layout left open.

    Args:
        recipe: composed; what is derived later may be open.
        hf_config: the model's config.json.
        gpu: what it runs on.
        world: how many of them.
        prompt_tokens: mean; None: an eighth of the longest sequence.
        response_tokens: mean; None: half of a response's limit.

    Raises:
        RlctlError: the lengths contradict the recipe.
    """
    policy, generation, steps = recipe.policy, recipe.policy.generation, recipe.grpo
    total, packing = policy.max_total_sequence_length, recipe.policy.sequence_packing
    prompt = prompt_tokens or max(1, total // 8)
    limit = min(generation.max_new_tokens or total - 1, total - prompt)
    response = response_tokens or max(1, limit // 2)
    if prompt >= total or response > limit:
        raise RlctlError(
            f"a prompt of {prompt} and a mean response of {response} tokens exceed "
            f"policy.max_total_sequence_length {total}" + (f" or the limit of {limit}" if prompt < total else ""),
            "lower `--prompt-tokens` or `--response-tokens`, or raise policy.max_total_sequence_length",
        )
    sequences = steps.num_prompts_per_step * steps.num_generations_per_prompt
    algorithm = plugins.load("algorithm", recipe.algorithm)
    needs = algorithm.Algorithm(algorithm.Config(grpo=recipe.advantage, loss_fn=recipe.loss_fn)).needs
    padded = -(-total // PAD_UNIT) * PAD_UNIT * policy.train_micro_batch_size
    return Question(
        hf_config=hf_config,
        gpu=gpu,
        gpus=world,
        precision=policy.precision,
        microbatch_tokens=(packing.train_mb_tokens if packing.enabled else None) or padded,
        longest=total,
        sequences=sequences,
        prompts=steps.num_prompts_per_step,
        updates=max(1, sequences // (policy.train_global_batch_size or sequences)),
        lengths=Lengths(prompt=prompt, response=response, limit=limit),
        reference="ref" in needs,
        utilization=generation.vllm_cfg.gpu_memory_utilization,
    )


def pins_of(recipe: config.Recipe, composed: Composed, backend: Backend) -> Pins:
    """What the recipe or the command line settles of a layout."""
    policy, section = recipe.policy, vars(getattr(recipe.policy, f"{backend}_cfg"))
    degrees = {short: section[name] for short, name in _DEGREES[backend].items()}
    tp = policy.generation.vllm_cfg.tensor_parallel_size
    is_said = policy.activation_checkpointing or composed.overridden(_RECOMPUTE) is not None
    return Pins(
        **degrees,
        sp=policy.megatron_cfg.sequence_parallel if backend == "megatron" else None,
        recompute=policy.activation_checkpointing if is_said else None,
        generation_tp=tp if tp > 1 or composed.overridden(_ENGINE) or policy.generation.backend == "transformers"
        else None,
    )  # fmt: skip


def keys(backend: Backend) -> dict[str, str]:
    """The recipe key of each degree that a search settles."""
    named = {short: f"policy.{backend}_cfg.{name}" for short, name in _DEGREES[backend].items()}
    if backend == "megatron":
        named["sp"] = "policy.megatron_cfg.sequence_parallel"
    return named | {"generation_tp": _ENGINE, "recompute": _RECOMPUTE}


def write(recipe: config.Recipe, backend: Backend, found: Prediction) -> None:
    """Write a choice into a recipe."""
    choice, section = found.choice, getattr(recipe.policy, f"{backend}_cfg")
    for short, name in _DEGREES[backend].items():
        setattr(section, name, getattr(choice.layout, short))
    recipe.policy.activation_checkpointing = choice.recompute
    recipe.policy.generation.vllm_cfg.tensor_parallel_size = choice.generation_tp


def settings(backend: Backend, found: Prediction) -> list[str]:
    """A choice as `key=value` arguments."""
    layout, experts = found.choice.layout, found.choice.layout.ep > 1
    shown = ["tp", "pp", "cp", *(["ep"] if experts else [])] if backend == "megatron" else ["tp"]
    said = [f"policy.{backend}_cfg.{_DEGREES[backend][short]}={getattr(layout, short)}" for short in shown]
    if backend == "megatron" and layout.tp > 1:
        said.append("policy.megatron_cfg.sequence_parallel=true")
    return [
        *said,
        f"policy.activation_checkpointing={str(found.choice.recompute).lower()}",
        f"policy.generation.vllm_cfg.tensor_parallel_size={found.choice.generation_tp}",
    ]


def why(found: Found, pins: Pins) -> str:
    """What speaks for the first of the best, against the next."""
    first = found.best[0]
    assert first.step is not None
    text = (
        f"fastest of {found.considered} layouts that fits, as predicted: {first.step.total:.1f} s a step, most of it "
        f"{first.limit}; {first.memory.training / 1e9:.1f} GB"
    )
    others = [f"{o.choice.layout}{' with recompute' * o.choice.recompute}: {o.step.total:.1f} s"
              for o in found.best[1:] if o.step is not None]  # fmt: skip
    text += f"; next {', '.join(others)}" if others else ""
    return text + (f"; set: {pins}" if str(pins) != "nothing" else "")


def refusal(question: Question, backend: Backend, found: Found, pins: Pins) -> RlctlError:
    """No layout does: which memory is too small, and what would mend it."""
    where = f"{question.gpus} x {question.gpu.name}"
    if found.closest is None:
        return RlctlError(
            f"no {backend} layout divides this model, {question.sequences // question.updates} sequences an update and "
            f"{where} (set: {pins})",
            "unset a degree, or change the number of GPUs or of sequences",
            exit_status=ENVIRONMENT,
        )
    closest = found.closest
    return RlctlError(
        f"none of {found.considered} {backend} layouts fits {where} (set: {pins}); the closest, "
        f"{closest.choice.layout}: {closest.limit}",
        "take more GPUs or larger ones, shorter sequences or smaller microbatches, or unset what is set",
        exit_status=ENVIRONMENT,
    )
