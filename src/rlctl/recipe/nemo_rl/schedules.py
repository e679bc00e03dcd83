"""Both spellings of a learning-rate schedule as ours: torch's list of schedulers, and Megatron's.

Ours (policy/schedule.py): from `warmup_init_lr` linearly to `lr` over `warmup_steps`, then constant, or to `min_lr`
over `decay_steps`. A schedule that this cannot say exactly is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.recipe.nemo_rl import keys
from rlctl.recipe.nemo_rl.outcome import Context, Outcome, ignored, mapped, plain, refused

KWARGS = {  # torch.optim.lr_scheduler, by class
    "LinearLR": {"start_factor", "end_factor", "total_iters"},
    "ConstantLR": {"factor", "total_iters"},
    "CosineAnnealingLR": {"T_max", "eta_min"},
}
MODULE = "torch.optim.lr_scheduler."


def torch_scheduler(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """A list of schedulers whose last entry has the milestones, or a single scheduler; null is constant."""
    if value is None:
        return ignored("null: a constant rate")
    parts = [value] if isinstance(value, Mapping) else list(value)
    wrong = _wrong_key(key, parts)
    if wrong is not None:
        return wrong
    milestones = [m for p in parts if "milestones" in p for m in p["milestones"]]
    stages = [(p["name"].removeprefix(MODULE), _numbers(p)) for p in parts if "name" in p]
    lr = context.get("policy.optimizer.kwargs.lr")
    ours = None if lr is None else _stages(stages, milestones, lr, context.get("grpo.max_num_steps"))
    if ours is None:
        shown = ", ".join(name for name, _ in stages)
        return refused(
            key, f"{shown} at {milestones}", "a schedule besides warm-up and then constant, linear or cosine"
        )
    return mapped({f"policy.{k}": v for k, v in ours.items()}, entry.note)


def _wrong_key(key: str, parts: list[Any]) -> Outcome | None:
    """The first key inside the list that no scheduler has."""
    for part in parts:
        if not isinstance(part, Mapping):
            return refused(key, part, "a schedule of this form")
        name = str(part["name"]).removeprefix(MODULE) if "name" in part else ""
        known = {"name", "kwargs"} if "name" in part else {"milestones"}
        inside = part["kwargs"] if isinstance(part.get("kwargs"), Mapping) else {}
        if name and name not in KWARGS:
            return refused(key, part["name"], f"this scheduler; it has {', '.join(KWARGS)}")
        extra = [f"{key}.{k}" for k in part if k not in known]
        extra += [f"{key}.kwargs.{k}" for k in inside if k not in KWARGS[name]]
        if extra:
            allowed = [*sorted(known), *sorted(KWARGS[name] if name else ())]
            note = f"unknown key `{extra[0]}`"
            return Outcome(status="refused", note=note, hint=f"keys of `{name or key}`: {', '.join(allowed)}")
    return None


def _numbers(part: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = part["kwargs"] if isinstance(part.get("kwargs"), Mapping) else {}
    return {k: plain(k, v) for k, v in kwargs.items()}


def _stages(
    stages: list[tuple[str, dict[str, Any]]], milestones: list[int], lr: float, steps: int | None
) -> dict[str, Any] | None:
    """Warm-up, then one more stage; None where ours cannot say it.

    Torch's defaults: LinearLR from 1/3 to 1 over 5, ConstantLR 1/3 over 5.
    """
    if len(milestones) != len(stages) - 1 or len(stages) > 2 or not stages:
        return None
    warmup: dict[str, Any] = {}
    first, given = stages[0]
    linear = {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5} | given
    if first == "LinearLR" and linear["end_factor"] == 1:
        if milestones and milestones[0] < linear["total_iters"]:
            return None
        if milestones and milestones[0] > linear["total_iters"] and stages[1][0] != "ConstantLR":
            return None
        warmup = {
            "scheduler.warmup_steps": linear["total_iters"], "scheduler.warmup_init_lr": lr * linear["start_factor"],
        }  # fmt: skip
        stages = stages[1:]
    elif len(stages) > 1:
        return None
    if not stages:
        return warmup | {"scheduler.decay_style": "constant"}
    after = _decay(*stages[0], lr, steps, warmup.get("scheduler.warmup_steps", 0))  # ours, just written
    return None if after is None else warmup | after


def _decay(name: str, given: dict[str, Any], lr: float, steps: int | None, warmup: int) -> dict[str, Any] | None:
    """What follows the warm-up."""
    if name == "ConstantLR":
        constant = {"factor": 1 / 3, "total_iters": 5} | given
        return {"scheduler.decay_style": "constant"} if constant["factor"] == 1 else None
    if name == "LinearLR":
        linear = {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5} | given
        if linear["start_factor"] != 1 or not 0 <= linear["end_factor"] < 1:
            return None
        least, length = lr * linear["end_factor"], linear["total_iters"]
        return {"scheduler.decay_style": "linear", "scheduler.decay_steps": length, "optimizer.min_lr": least}
    cosine = {"eta_min": 0.0} | given
    if "T_max" not in cosine or steps is None or steps > warmup + cosine["T_max"]:
        return None  # torch's rises again after T_max
    return {
        "scheduler.decay_style": "cosine", "scheduler.decay_steps": cosine["T_max"],
        "optimizer.min_lr": cosine["eta_min"],
    }  # fmt: skip


def _style(context: Context) -> Any:
    return context.get("policy.megatron_cfg.scheduler.lr_decay_style")


def min_lr(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Where a decay ends."""
    if value is None or _style(context) in (None, "constant"):
        return ignored("no effect without a decay")
    return mapped({"policy.optimizer.min_lr": value})


def megatron_betas(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Both in one; Megatron's defaults where one is absent."""
    first = context.get("policy.megatron_cfg.optimizer.adam_beta1")
    second = context.get("policy.megatron_cfg.optimizer.adam_beta2")
    return mapped({"policy.optimizer.betas": [0.9 if first is None else first, 0.999 if second is None else second]})


def decay_ends(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """A weight decay that stays."""
    if value in (None, context.get("policy.megatron_cfg.optimizer.weight_decay")):
        return ignored("the weight decay itself")
    return refused(key, value, "a schedule of the weight decay")


def megatron_decay(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Style and length; Megatron's length has the warm-up in it."""
    style = _style(context)
    if key.endswith("style"):
        if style not in (None, "constant", "linear", "cosine"):
            return refused(key, value, f"a decay of style `{style}`")
        return mapped({"policy.scheduler.decay_style": style or "constant"})
    if style in (None, "constant"):
        return ignored("no effect with a constant rate")
    warmup = context.get("policy.megatron_cfg.scheduler.lr_warmup_iters") or 0
    if value is None:
        return refused(key, value, "a decay over the whole run: write the number of steps")
    if value <= warmup:
        return refused(key, value, f"a decay that ends within the {warmup} steps of warm-up")
    return mapped({"policy.scheduler.decay_steps": value - warmup}, entry.note)
