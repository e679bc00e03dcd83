"""The functions that keys.py names: one value of theirs, seen beside others, becomes values of ours.

A rule takes (context, key, value, entry) and returns an Outcome. The two schedules are in schedules.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlctl.recipe.nemo_rl import keys, schedules
from rlctl.recipe.nemo_rl.outcome import Context, Outcome, ignored, left_open, mapped, refused, truth

UNBOUNDED = 1e6  # their weight has no bound; a ratio of a million is no mismatch but an error
NO_CLIPPING = 1e9  # a gradient norm that is never reached
ALL = 1_000_000
Rule = Callable[[Context, str, Any, keys.To], Outcome]


def algorithm(flat: Mapping[str, Any]) -> dict[str, str]:
    """The native algorithm that flags ask for, the flag, and a second flag that asks for another."""
    flags = {
        "loss_fn.sequence_level_importance_ratios": "gspo",
        "loss_fn.use_cispo": "cispo",
        "grpo.reward_shaping.enabled": "dapo",
        "grpo.overlong_filtering": "dapo",
    }
    said = [(key, name) for key, name in flags.items() if truth(flat.get(key))]
    chosen = said[0] if said else ("", "grpo")
    other = next((key for key, name in said if name != chosen[1]), "")
    return {"algorithm": chosen[1], "reason": chosen[0], "conflict": other}


def always(context: Context) -> dict[str, Any]:
    """What their code does without a key."""
    batching = ("policy.sequence_packing.enabled", "policy.dynamic_batching.enabled")
    packs = any(truth(context.get(key)) for key in batching)
    return {"policy.sequence_packing.enabled": packs, "env.name": "math"}


# --- one key --------------------------------------------------------------------------------------------------------


def plainly(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The same value under our name; null is their default, which is ours."""
    assert entry.key is not None
    return ignored("null: the default") if value is None else mapped({entry.key: value}, entry.note)


def free(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """A map whose keys are not judged."""
    return mapped({entry.key: value}) if value else ignored("empty")  # type: ignore[dict-item]


# --- the algorithm --------------------------------------------------------------------------------------------------


def _implied(
    context: Context, key: str, value: Any, entry: keys.To, *, ours: str, fixed: Mapping[str, bool]
) -> Outcome:
    """An option that some algorithms have in one way only."""
    if value is None:
        return ignored("null: the default")
    if context.algorithm not in fixed:
        return mapped({ours: value}, entry.note)
    if value is fixed[context.algorithm]:
        return ignored(f"always so in `{context.algorithm}`")
    return refused(key, value, f"this in `{context.algorithm}`, which {context.reason} asks for")


def normalize(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Division by the group's deviation."""
    return _implied(context, key, value, entry, ours="grpo.normalize_rewards", fixed={"dapo": True})


def leave_one_out(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The baseline without the sample itself."""
    return _implied(context, key, value, entry, ours="grpo.use_leave_one_out_baseline", fixed={"dapo": False})


def token_level(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Mean over tokens or over sequences."""
    fixed = {"dapo": True, "cispo": True, "gspo": False}
    return _implied(context, key, value, entry, ours="loss_fn.token_level_loss", fixed=fixed)


def kl_penalty(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The weight of the KL to the reference; without weight it is nothing."""
    if not value and context.algorithm in ("dapo", "cispo"):
        return ignored(f"`{context.algorithm}` has no KL")
    return plainly(context, key, value, keys.To(key="loss_fn.reference_policy_kl_penalty", note=entry.note))


def dual_clip(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The bound for negative advantages."""
    return plainly(context, key, value, keys.To(key="loss_fn.ratio_clip_c"))


def chooses(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """A flag that makes grpo another algorithm."""
    if not truth(value):
        return ignored("off")
    if context.conflict == key:
        return refused(key, value, f"it together with {context.reason}")
    ours: dict[str, Any] = {"algorithm": context.algorithm}
    if key == "grpo.overlong_filtering":
        ours["grpo.overlong_filtering"] = True
    if context.algorithm == "dapo" and not truth(context.get("grpo.reward_shaping.enabled")):
        ours["grpo.reward_shaping.overlong_buffer_length"] = 0
    return mapped(ours, entry.note or f"the algorithm becomes `{context.algorithm}`")


def shaping(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The penalty near the limit."""
    if not truth(context.get("grpo.reward_shaping.enabled")):
        return ignored("only read with reward_shaping.enabled")
    return plainly(context, key, value, keys.To(key=key, note=entry.note))


def one_update(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """No ratio: with one update a step it is 1 anyway, and the gradient is the same."""
    if not truth(value):
        return ignored("off")
    sizes = [
        context.get(k)
        for k in ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size")
    ]
    if None in sizes or sizes[0] * sizes[1] != sizes[2]:
        return refused(key, value, "a loss without ratio over several updates of a step")
    return ignored("one update a step: the ratio is 1 here as well, with the same gradient")


def mismatch(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The weight for engine against trainer."""
    if not truth(value):
        return mapped({"loss_fn.correction": "observe"}, "measured, not corrected")
    kind = context.get("loss_fn.truncated_importance_sampling_type")
    bound = context.get("loss_fn.truncated_importance_sampling_ratio")
    by_sequence = context.algorithm == "gspo"
    presets = {"icepop": "icepop", "seq-mask-tis": "geo_mask", "tis": "seq_tis" if by_sequence else "token_tis"}
    if kind is None:
        preset = "seq_tis" if by_sequence else "token_tis"
        largest = UNBOUNDED if bound is None else bound
        return mapped({"loss_fn.correction": preset, "loss_fn.correction_max": largest})
    if kind not in presets or (by_sequence and kind != "tis") or bound is None:
        return refused(
            key, value, f"importance-sampling correction `{kind}` with {context.algorithm} and bound {bound}"
        )
    return mapped({"loss_fn.correction": presets[kind], "loss_fn.correction_max": bound})


def mismatch_bound(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The kind and its bounds; the correction's own key maps the kind and the upper one."""
    if value is None:
        return ignored("null: the default")
    if not truth(context.get("loss_fn.use_importance_sampling_correction")):
        return ignored("only read with use_importance_sampling_correction")
    if key.endswith("_min"):
        return mapped({"loss_fn.correction_min": value})
    ours = "loss_fn.correction" if key.endswith("_type") else "loss_fn.correction_max"
    parts = mismatch(context, "loss_fn.use_importance_sampling_correction", True, entry).ours
    return mapped({ours: parts[ours]}) if ours in parts else ignored("see use_importance_sampling_correction")


# --- the backend ----------------------------------------------------------------------------------------------------


def backend(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Which of the two trains."""
    megatron = truth(context.get("policy.megatron_cfg.enabled"))
    dtensor = context.get("policy.dtensor_cfg.enabled")
    if megatron and truth(dtensor):
        return refused(key, value, "two backends in one run (megatron_cfg and dtensor_cfg are both enabled)")
    if not megatron and dtensor is False:
        return refused(key, value, "a run without backend (megatron_cfg and dtensor_cfg are both off)")
    return mapped({key: truth(value)})


def sequence_parallel(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """No effect without tensor parallelism."""
    if (context.get("policy.megatron_cfg.tensor_model_parallel_size") or 1) == 1 or value is None:
        return ignored("no effect with tensor_model_parallel_size 1")
    return mapped({"policy.megatron_cfg.sequence_parallel": value})


def router(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """What a router of experts does in training; rlctl trains it and adds no balancing."""
    if not context.moe:
        return ignored("the model has no experts")
    features = {
        "freeze_moe_router": ((None, False), "a frozen router of experts"),
        "moe_router_load_balancing_type": ((None, "none"), "a loss that balances experts"),
        "moe_router_bias_update_rate": ((None, 0), "a router bias that balances experts"),
    }
    accepted, feature = features[key.rpartition(".")[2]]
    return ignored("as here") if value in accepted else refused(key, value, feature)


def precision(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The long word."""
    known = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    if value not in known:
        return refused(key, value, f"training in {value}")
    return mapped({"policy.precision": known[value]})


def optimizer(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """AdamW by name; the whole section null under DTensor has no learning rate."""
    if value == "torch.optim.AdamW":
        return mapped({"policy.optimizer.name": "adamw"})
    if value is None:
        return refused(key, value, "training without an optimizer")
    return refused(key, value, "an optimizer besides torch.optim.AdamW")


def grad_norm(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Megatron's own key wins there; null does not clip."""
    if context.backend == "megatron" and "policy.megatron_cfg.optimizer.clip_grad" in context.flat:
        return ignored("Megatron reads megatron_cfg.optimizer.clip_grad")
    return clip_grad(context, key, value, entry)


def clip_grad(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The largest gradient norm; null and 0 do not clip."""
    return mapped({"policy.max_grad_norm": float(value or NO_CLIPPING)}, "" if value else "no clipping")


def batching(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Dynamic batches become packs of the same budget: a batch's cut changes no result."""
    if not truth(value):
        return ignored("off")
    dynamic = key == "policy.dynamic_batching.enabled"
    if dynamic and truth(context.get("policy.sequence_packing.enabled")):
        return refused(key, value, "dynamic batching together with packing")
    note = "microbatches of about one length become packs of the same tokens: same results" if dynamic else ""
    return mapped({"policy.sequence_packing.enabled": True}, note)


def budget(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Tokens of a microbatch; left open where it is what rlctl derives, so that overrides of lengths go through."""
    section = key.rpartition(".")[0]
    if not truth(context.get(f"{section}.enabled")):
        return ignored(f"only read with {section}.enabled")
    size = "train_micro_batch_size" if key.endswith("train_mb_tokens") else "logprob_batch_size"
    sizes = (context.length, context.get(f"policy.{size}"))
    if None not in sizes and value == sizes[0] * sizes[1]:
        return ignored(f"derived alike: max_total_sequence_length x {size}")
    return plainly(context, key, value, entry)


# --- texts, lengths, generation -------------------------------------------------------------------------------------


def tokenizer(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Only another model's."""
    if value in (None, context.get("policy.model_name")):
        return ignored("the model's own, as here")
    return mapped({"policy.tokenizer.name": value})


def chat_template(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """`default` is the tokenizer's; null passes texts on without any."""
    if value == "default":
        return ignored("the tokenizer's own, as here")
    if value is None:
        return refused(key, value, "prompts without chat template (null there; `default` is the tokenizer's)")
    return mapped({"policy.tokenizer.chat_template": value})


def _length(ours: str, context: Context, value: Any) -> Outcome:
    if value is None or (context.length is not None and value >= context.length):
        return ignored("derived: what max_total_sequence_length allows, here one less")
    return mapped({ours: value})


def new_tokens(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Tokens of a response; theirs may be the whole length, which a prompt then shortens."""
    return _length("policy.generation.max_new_tokens", context, value)


def input_length(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Tokens of a prompt."""
    return _length("data.max_input_seq_length", context, value)


def model_length(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The limit of vLLM; left open where it is the whole length."""
    if value in (None, context.length):
        return ignored("derived alike: max_total_sequence_length")
    return mapped({"policy.generation.vllm_cfg.max_model_len": value})


def engine(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Only vLLM."""
    return mapped({key: "vllm"}) if value == "vllm" else refused(key, value, f"generation by {value}")


def engine_precision(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The policy's."""
    if value in (None, context.get("policy.precision")):
        return ignored("policy.precision, as here")
    return refused(key, value, "generation in another precision than training")


def validation_sampling(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """As in training."""
    if value in (None, context.get("policy.generation.temperature")):
        return ignored("as in training")
    return refused(key, value, "another temperature in validation")


def stop_ids(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Besides the model's own."""
    ids = [value] if isinstance(value, int) else value
    return mapped({key: ids}) if ids else ignored("none")


# --- data, checkpoints ----------------------------------------------------------------------------------------------


def data_set(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Own files come by their path; all others lie behind a network."""
    if value is None or value in ("ResponseDataset", "prompt_response_dataset", "openai_format"):
        return ignored("rows come from the file that is named beside it")
    return left_open(f"data set `{value}` is not downloaded: give its rows as data.train_path")


def _path(ours: str, value: Any) -> Outcome:
    if value is None:
        return ignored("none")
    if str(value).endswith((".jsonl", ".parquet")):
        return mapped({ours: str(value)})
    return left_open(f"`{value}` is no JSONL or parquet file: give {ours}")


def train_path(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Own prompts."""
    return _path("data.train_path", value)


def val_path(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Own held-out prompts."""
    return _path("data.val_path", value)


def column(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The column of a data set's rows; a part may not say another than the rest."""
    assert entry.key is not None
    others = {v for k in context.flat if k.startswith("data.") and k.endswith(key.rpartition(".")[2])
              for v in [context.get(k)] if v is not None}  # fmt: skip
    if len(others) > 1:
        return refused(key, value, "columns that are named differently for training and validation")
    return plainly(context, key, value, entry)


def system_prompt(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """The text of the file."""
    if value is None:
        return ignored("none")
    if not Path(str(value)).is_file():
        return refused(key, value, "that file: it is not here")
    return mapped({"data.system_prompt": Path(str(value)).read_text()})


def environment(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Mathematics."""
    if value in (None, "math"):
        return ignored("env.name is math")
    feature = keys.ENVIRONMENTS.get(value, f"the environment `{value}`")
    return refused(key, value, feature)


def metric(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Their metrics of a checkpoint, old and new spelling."""
    if value is None:
        return ignored("null: the newest are kept")
    known = {"reward": "reward", "accuracy": "reward"}
    for prefix, ours in (("val", "val/"), ("train", "rollout/")):
        name = str(value).removeprefix(prefix)
        if name[:1] in (":", "_", "/") and name[1:] in known:
            note = "their accuracy is the mean reward" if name[1:] == "accuracy" else ""
            return mapped({"checkpointing.metric_name": ours + known[name[1:]]}, note)
    names = ("val_reward", "val:accuracy", "val:reward", "train:reward")
    near = difflib.get_close_matches(str(value), names, n=1)
    return refused(key, value, "this metric" + (f" (did you mean `{near[0]}`?)" if near else ""))


def keep(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Null keeps all."""
    return mapped({key: ALL if value is None else value})


def model(context: Context, key: str, value: Any, entry: keys.To) -> Outcome:
    """Families that no file in models/ reads; what else is missing is told when the model is looked up."""
    feature = next((what for part, what in keys.FAMILIES.items() if part in str(value).lower()), None)
    return plainly(context, key, value, entry) if feature is None else refused(key, value, feature)


RULES: dict[str, Rule] = {
    "model": model, "free": free, "normalize": normalize, "leave_one_out": leave_one_out, "token_level": token_level,
    "kl_penalty": kl_penalty, "dual_clip": dual_clip, "sequence_ratio": chooses, "cispo": chooses, "shaped": chooses,
    "shaping": shaping, "one_update": one_update, "mismatch": mismatch, "mismatch_bound": mismatch_bound,
    "backend": backend, "dtensor": plainly, "megatron": plainly, "torch_optimizer": plainly,
    "sequence_parallel": sequence_parallel, "router": router, "precision": precision, "optimizer": optimizer,
    "grad_norm": grad_norm, "clip_grad": clip_grad, "batching": batching, "dynamic_budget": budget,
    "packing_budget": budget, "tokenizer": tokenizer, "chat_template": chat_template, "new_tokens": new_tokens,
    "input_length": input_length, "model_length": model_length, "engine": engine,
    "engine_precision": engine_precision, "validation_sampling": validation_sampling, "stop_ids": stop_ids,
    "data_set": data_set, "train_path": train_path, "val_path": val_path, "column": column,
    "system_prompt": system_prompt, "environment": environment, "metric": metric, "keep": keep,
    "torch_scheduler": schedules.torch_scheduler, "min_lr": schedules.min_lr,
    "megatron_betas": schedules.megatron_betas, "decay_ends": schedules.decay_ends,
    "megatron_decay": schedules.megatron_decay,
}  # fmt: skip
