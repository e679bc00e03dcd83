"""What a job resolved to, what it needs and what is here: as plain data, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.launch import commands
from rlctl.launch.needs import Needs, breakdown, fits
from rlctl.plan import hardware as gpus
from rlctl.recipe.compose import Composed, as_values
from rlctl.recipe.derive import Resolved
from rlctl.recipe.places import short


def plan(
    composed: Composed,
    resolved: Resolved,
    need: Needs,
    *,
    here: Hardware,
    refused: RlctlError | None,
    arguments: Sequence[str],
) -> dict[str, Any]:
    """The whole answer, as JSON has it.

    Args:
        composed: where the recipe came from.
        resolved: the job.
        need: its memory.
        here: this machine.
        refused: why it cannot run here.
        arguments: the command line after `rlctl`.
    """
    recipe, cluster = resolved.recipe, resolved.recipe.cluster
    parts = breakdown(resolved, need)
    return {
        "recipe": {"name": composed.source.name, "path": str(composed.source.path), "resolved": as_values(recipe)},
        "derived": dict(resolved.derived),
        "model": {"name": resolved.model.name, "hf_id": resolved.model.hf_id, "parameters": resolved.parameters},
        "backend": resolved.backend,
        "layout": {
            **vars(resolved.layout),
            "dp": resolved.layout.dp,
            "text": str(resolved.layout),
            "why": resolved.layout_reason,
        },
        "batch": {"sequences": resolved.batch_size, "updates_per_step": resolved.updates_per_step},
        "memory": {
            "parts": parts,
            "rank_bytes": need.rank_bytes,
            "node_bytes": need.node_bytes,
            "fits": _fits(resolved, need),
        },
        "needs": {"nodes": cluster.num_nodes, "gpus_per_node": cluster.gpus_per_node, "procs": cluster.procs},
        "here": vars(here),
        "refused": {"error": refused.message, "hint": refused.hint} if refused else None,
        "commands": {
            "run": commands.start(resolved, arguments),
            "small": commands.small(resolved),
        },
    }


def _fits(resolved: Resolved, need: Needs) -> list[str]:
    """Accelerators with enough memory."""
    return [kind for kind in gpus.names() if fits(resolved, need, memory_bytes=gpus.gpu_memory_bytes(kind))]


def text(plan: dict[str, Any]) -> str:
    """The plan for people."""
    return "\n".join([*_what(plan), "", *_memory(plan), "", *_where(plan)])


def derived(plan: dict[str, Any]) -> list[str]:
    """Lines on the keys that nobody set."""
    lines = [
        f"  {key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in plan["derived"].items()
    ]
    return ["", "derived; set a key to pin it", *lines]


def built(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Lines on the ranks that were built at true size (plan/build.py)."""
    lines = []
    for rank in ranks:
        size = f"{_count(rank['parameters'])} parameters, {rank['weight_bytes'] / 1e9:.2f} GB"
        lines.append(f"  rank {rank['rank']}, stage {rank['stage']}: {size}")
    return ["", "built at true size, as planned", *lines] if ranks else []


def summary(plan: dict[str, Any]) -> str:
    """What a run resolved to, before it starts."""
    return "\n".join(_what(plan))


def _what(plan: dict[str, Any]) -> list[str]:
    recipe = plan["recipe"]["resolved"]
    policy, grpo, generation = recipe["policy"], recipe["grpo"], recipe["policy"]["generation"]
    packing = policy["sequence_packing"]
    tokens = f", {packing['train_mb_tokens']} tokens a microbatch" if packing["enabled"] else ""
    updates = plan["batch"]["updates_per_step"]
    tp = (
        f", tensor parallel {generation['vllm_cfg']['tensor_parallel_size']}" if generation["backend"] == "vllm" else ""
    )
    new = f", at most {generation['max_new_tokens']} new" if generation["backend"] is not None else ""
    generates = generation["backend"] is not None
    what = "rows x {} sequences" if not generates else "prompts x {} samples"
    steps = f"at most {grpo['max_num_steps']} steps, {grpo['max_num_epochs']} epoch{'s' * (grpo['max_num_epochs'] > 1)}"
    return [
        _row("recipe", f"{plan['recipe']['name']} ({short(Path(plan['recipe']['path']))})"),
        _row("model", f"{plan['model']['name']}, {_count(plan['model']['parameters'])} parameters"),
        _row("backend", f"{plan['backend']}, {policy['precision']}"),
        _row("layout", f"{plan['layout']['text']} on {_processes(plan['needs'])}"),
        *([_row("", plan["layout"]["why"])] if plan["layout"]["why"] else []),
        _row(
            "batch",
            f"{grpo['num_prompts_per_step']} {what.format(grpo['num_generations_per_prompt'])} = "
            f"{plan['batch']['sequences']} sequences, {updates} update{'s' * (updates > 1)} a step{tokens}",
        ),
        _row("lengths", f"{policy['max_total_sequence_length']} tokens{new}"),
        *([_row("engine", generation["backend"] + tp)] if generates else []),
        _row("task" if generates else "data", f"{recipe['env']['name'] or recipe['data']['train_path']}, {steps}"),
    ]


def _memory(plan: dict[str, Any]) -> list[str]:
    memory, on_host = plan["memory"], plan["needs"]["procs"] is not None
    unit = "process" if on_host else "GPU"
    rows = [f"  {name:<14}{_gigabytes(size)}" for name, size in memory["parts"].items() if size]
    kinds = "" if on_host else f"   fits: {', '.join(memory['fits']) or 'no GPU that rlctl knows'}"
    return [
        f"memory of the fullest {unit}, upper bound",
        *rows,
        f"  {'at peak':<14}{_gigabytes(memory['rank_bytes'])}{kinds}",
    ]


def _where(plan: dict[str, Any]) -> list[str]:
    needs, here, memory = plan["needs"], plan["here"], plan["memory"]
    if needs["procs"] is None:
        wanted = f"{needs['nodes'] * needs['gpus_per_node']} GPUs with {memory['rank_bytes'] / 1e9:.1f} GB each"
    else:
        wanted = f"{memory['node_bytes'] / 1e9:.1f} GB for {_processes(needs)}"
    has = f"{here['gpus']} GPUs ({here['gpu_name']})" if here["gpus"] else "no GPU"
    each = f", on each of {needs['nodes']} nodes ({commands.HEAD}: the first node)" if needs["nodes"] > 1 else ""
    return [
        _row("needs", wanted),
        _row("here", f"{has}, {here['cpus']} CPU cores, {here['memory_bytes'] / 1e9:.1f} GB of memory"),
        "",
        f"run it{each}",
        f"  {plan['commands']['run']}",
        *(["try it small, here", f"  {plan['commands']['small']}"] if plan["refused"] else []),
    ]


def _processes(needs: dict[str, Any]) -> str:
    each, what = (needs["gpus_per_node"], "GPU") if needs["procs"] is None else (needs["procs"], "CPU process")
    many = f"{each} {what}{('es' if what.endswith('s') else 's') if each > 1 else ''}"
    return f"{needs['nodes']} nodes x {many}" if needs["nodes"] > 1 else many


def _row(label: str, value: str) -> str:
    return f"{label:<9}{value}"


def _count(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return str(parameters)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:8.2f} GB"
