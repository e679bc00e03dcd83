"""From the options of `rlctl plan` to predictions, as plain data and as text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl import parallel
from rlctl.algorithms.base import source
from rlctl.cli import job
from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.models import resolve
from rlctl.plan import interval, profile
from rlctl.plan.hardware import gpu as gpu_of
from rlctl.plan.memory import UNMODELLED_BYTES, Backend
from rlctl.plan.predict import PARTS, Choice, Prediction, Question, job_of, predict
from rlctl.plan.profile import constants
from rlctl.plan.search import Found, search
from rlctl.recipe import auto, compose, find

NODE = 8  # GPUs, where the accelerator's vendor builds servers of so many
_BAR = 30


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line said; None is not said."""

    model: str | None
    gpus: int
    gpu: str
    recipe: str | None
    backend: str | None
    recipe_dirs: tuple[Path, ...]
    overrides: tuple[str, ...]
    response_tokens: int | None
    prompt_tokens: int | None


def answer(request: Request) -> dict[str, Any]:
    """The whole answer, as JSON has it.

    Raises:
        RlctlError: an unknown GPU, model or recipe, or lengths that contradict the recipe.
    """
    composed, question = ask(request)
    recipe, config = composed.recipe, question.hf_config
    fitted = constants()
    given, refused = _given(composed, question)
    backends = [request.backend] if request.backend else ["megatron", "dtensor"]
    found = {name: search(question, name, fitted=fitted) for name in backends}  # type: ignore[arg-type]
    return {
        "recipe": composed.source.name,
        "model": {"name": recipe.policy.model_name, "parameters": resolve.num_parameters(config)},
        "gpus": request.gpus,
        "gpu": question.gpu.name,
        "profile": str(profile.path()) if profile.path() else None,
        "assumed": {
            "sequences": question.sequences, "prompts": question.prompts, "updates": question.updates,
            "prompt_tokens": question.lengths.prompt, "response_tokens": question.lengths.response,
            "response_limit": question.lengths.limit, "microbatch_tokens": question.microbatch_tokens,
            "gpu_memory_utilization": question.utilization, "precision": question.precision,
        },
        "given": as_data(question, predict(question, given, fitted=fitted)) if given else None,
        "given_refused": refused,
        "best": [as_data(question, p) for f in found.values() for p in f.best],
        "considered": {name: f.considered for name, f in found.items()},
        "why": _why(found),
    }  # fmt: skip


def ask(request: Request) -> tuple[compose.Composed, Question]:
    """The composed recipe, and its job with the layout left open.

    Raises:
        RlctlError: an unknown GPU, model or recipe, or lengths that contradict the recipe.
    """
    gpu_of(request.gpu)
    composed = _compose(request)
    recipe = composed.recipe
    if recipe.policy.model_name is None:
        raise RlctlError("no model is named", "give `--model NAME`, or a recipe that names one")
    config = resolve.resolve(recipe.policy.model_name, recipe.policy.hf_config_overrides).config
    question = auto.question_of(
        recipe, config, gpu_of(request.gpu), request.gpus, prompt_tokens=request.prompt_tokens,
        response_tokens=request.response_tokens,
    )  # fmt: skip
    return composed, question


def _compose(request: Request) -> compose.Composed:
    """The recipe; chosen by model and size where it is not named, and never pinned to this machine."""
    overrides = list(request.overrides)
    algorithm = Recipe().algorithm
    if request.recipe is not None:
        algorithm = compose.algorithm_of(request.recipe, find.directories(request.recipe_dirs))
    if source(algorithm) != "rollouts":
        raise RlctlError(
            f"`rlctl plan` plans rollouts and training, and `{algorithm}` has no rollouts",
            f"`rlctl train {algorithm} --dry-run` says whether it fits",
        )
    nodes = max(1, request.gpus // NODE)
    return job.compose_request(
        job.Request(
            algorithm=algorithm, overrides=overrides, recipe=request.recipe, model=request.model,
            backend=request.backend, recipe_dirs=request.recipe_dirs, nodes=nodes, gpus_per_node=request.gpus // nodes,
        )
    )  # fmt: skip


def _given(composed: compose.Composed, question: Question) -> tuple[Choice | None, str | None]:
    """The recipe's own layout on that many GPUs (`policy.parallel: auto`: the chosen one), or why there is none."""
    recipe = composed.recipe
    backend: Backend = "megatron" if recipe.policy.megatron_cfg.enabled else "dtensor"
    if recipe.policy.parallel == "auto":
        pins = auto.pins_of(recipe, composed, backend)
        found = search(question, backend, fitted=constants(), pins=pins)
        if found.best:
            return found.best[0].choice, None
        return None, auto.refusal(question, backend, found, pins).message
    try:
        layout = parallel.layout_of(recipe, question.gpus)
        parallel.check(layout, question.hf_config)
    except RlctlError as problem:
        return None, problem.message
    return (
        Choice(
            backend=backend,
            layout=layout,
            recompute=recipe.policy.activation_checkpointing,
            generation_tp=recipe.policy.generation.vllm_cfg.tensor_parallel_size,
        ),
        None,
    )


def as_data(question: Question, found: Prediction) -> dict[str, Any]:
    """A prediction, as JSON has it."""
    choice, memory, step = found.choice, found.memory, found.step
    low, high = interval.of("rl step")
    seconds = None
    if step is not None:
        generation = step.generation
        seconds = {
            "generation": generation.total, "of it tail": generation.tail, "logprobs": step.logprobs,
            "training": step.training, "weight sync": step.sync, "total": step.total,
            "low": step.total / high, "high": step.total / low,
        }  # fmt: skip
    share = question.utilization * question.gpu.memory_bytes
    return {
        "backend": choice.backend,
        "layout": {**dataclasses.asdict(choice.layout), "dp": choice.layout.dp, "text": str(choice.layout)},
        "activation_checkpointing": choice.recompute,
        "generation_tp": choice.generation_tp,
        "fits": found.fits,
        "limit": found.limit,
        "memory_bytes": {
            **{name: getattr(memory, name) for name in PARTS}, "not modelled": UNMODELLED_BYTES,
            "training": memory.training,
            "generating": memory.generating(question.gpu.memory_bytes, utilization=question.utilization),
            "engine weights": memory.engine_weights, "kv cache": max(0, int(share) - memory.engine_weights),
            "host reference": memory.reference,
        },
        "seconds": seconds,
        "update_seconds": {name: value for name, value in vars(found.update).items() if value},
        "tokens_per_s_per_gpu": _rate(question, step.total) if step is not None else None,
        "training_interval": interval.bounds(job_of(question, choice)),
    }  # fmt: skip


def _rate(question: Question, seconds: float) -> float:
    return question.sequences * question.lengths.total / question.gpus / seconds


def _why(found: dict[str, Found]) -> str:
    """In one sentence: which backend wins, and by which phase."""
    leaders = {name: f.best[0] for name, f in found.items() if f.best}
    if not leaders:
        return "no layout of these GPUs fits; take more of them, larger ones, or shorter sequences"
    seconds = {name: p.step.total for name, p in leaders.items() if p.step is not None}
    first = min(seconds, key=lambda name: seconds[name])
    top = leaders[first]
    costs = {name: value for name, value in vars(top.update).items() if name not in ("matmul", "attention") and value}
    lost = max(costs, key=lambda name: costs[name])
    share = 100 * costs[lost] / top.update.total
    text = f"{first} {top.choice.layout} is fastest; {top.limit} takes most of the step"
    text += f", and in training {lost.replace('_', ' ')} costs {share:.0f} % besides the products"
    without = [name for name, f in found.items() if not f.best]
    return text + "".join(f"; no {name} layout fits" for name in without)


def text(answer: dict[str, Any]) -> str:
    """The answer for people."""
    model, assumed = answer["model"], answer["assumed"]
    lines = [
        f"{model['name']}, {model['parameters'] / 1e9:.2f} B parameters, on {answer['gpus']} x {answer['gpu']}, "
        f"recipe {answer['recipe']}",
        f"{assumed['sequences']} sequences a step in {assumed['updates']} updates; prompts of "
        f"{assumed['prompt_tokens']} "
        f"tokens, responses of {assumed['response_tokens']} on average, at most {assumed['response_limit']}",
    ]
    if answer["profile"] is not None:
        lines.append(f"constants of the profile {answer['profile']}")
    if answer["given"] is not None:
        lines += ["", "layout of the recipe", *_details(answer["given"])]
    else:
        lines += ["", f"the recipe's layout does not do: {answer['given_refused']}"]
    counts = ", ".join(f"{count} {name}" for name, count in answer["considered"].items())
    lines += ["", f"best of {counts} layouts"]
    lines += [f"  {_short(found)}" for found in answer["best"]]
    return "\n".join([*lines, "", answer["why"]])


def _short(found: dict[str, Any]) -> str:
    recompute = ", recompute" if found["activation_checkpointing"] else ""
    seconds = found["seconds"]
    return (
        f"{found['backend']:<8} {found['layout']['text']}, engine tp{found['generation_tp']}{recompute}: "
        f"{seconds['total']:.0f} s ({seconds['low']:.0f} to {seconds['high']:.0f}), "
        f"{found['memory_bytes']['training'] / 1e9:.0f} GB"
    )


def _details(found: dict[str, Any]) -> list[str]:
    memory, seconds = found["memory_bytes"], found["seconds"]
    lines = [f"  {found['backend']} {found['layout']['text']}, engine tp{found['generation_tp']}"]
    parts = {name: memory[name] / 1e9 for name in (*PARTS, "not modelled") if memory[name]}
    lines += _bars({**parts, "training": memory["training"] / 1e9, "generating": memory["generating"] / 1e9}, "GB")
    if seconds is not None:
        phases = {name: seconds[name] for name in ("generation", "of it tail", "logprobs", "training", "weight sync")}
        lines += _bars({**phases, "step": seconds["total"]}, "s")
        lines.append(f"  step: {seconds['low']:.0f} to {seconds['high']:.0f} s in 8 of 10 cases")
    verdict = f"fits; most of the step is {found['limit']}" if found["fits"] else f"does not fit: {found['limit']}"
    return [*lines, f"  {verdict}"]


def _bars(values: dict[str, float], unit: str) -> list[str]:
    most = max(values.values())
    return [
        f"    {name.replace('_', ' '):<13} {value:>8.1f} {unit:<2} {'#' * round(_BAR * value / most)}".rstrip()
        for name, value in values.items()
    ]
