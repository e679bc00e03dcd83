"""recipe/nemo_rl: what a NeMo RL file becomes. Their values are resolved by OmegaConf here, apart from our reader."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlctl.cli.app import run
from rlctl.errors import RlctlError
from rlctl.recipe import nemo_rl
from rlctl.recipe.compose import Composed, as_values, compose

OWN = Path(__file__).parents[1] / "recipes" / "nemo_rl"
FOLDER = os.environ.get("RLCTL_NEMO_RL_RECIPES")
THEIRS = sorted(Path(FOLDER).rglob("*.yaml")) if FOLDER else []
FILES = [OWN / "base.yaml", OWN / "megatron.yaml", *THEIRS]

COMMON = {  # theirs -> ours, equal as they are
    "grpo.num_prompts_per_step": "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt": "grpo.num_generations_per_prompt",
    "grpo.max_num_steps": "grpo.max_num_steps",
    "grpo.normalize_rewards": "grpo.normalize_rewards",
    "grpo.use_leave_one_out_baseline": "grpo.use_leave_one_out_baseline",
    "grpo.val_period": "grpo.val_period",
    "loss_fn.reference_policy_kl_penalty": "loss_fn.reference_policy_kl_penalty",
    "loss_fn.ratio_clip_min": "loss_fn.ratio_clip_min",
    "loss_fn.ratio_clip_max": "loss_fn.ratio_clip_max",
    "loss_fn.token_level_loss": "loss_fn.token_level_loss",
    "policy.train_global_batch_size": "policy.train_global_batch_size",
    "policy.train_micro_batch_size": "policy.train_micro_batch_size",
    "policy.max_total_sequence_length": "policy.max_total_sequence_length",
    "policy.precision": "policy.precision",
    "policy.generation.temperature": "policy.generation.temperature",
    "policy.generation.vllm_cfg.tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "cluster.gpus_per_node": "cluster.gpus_per_node",
    "cluster.num_nodes": "cluster.num_nodes",
}
DTENSOR = {
    "policy.optimizer.kwargs.lr": "policy.optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "policy.optimizer.weight_decay",
    "policy.optimizer.kwargs.eps": "policy.optimizer.eps",
    "policy.max_grad_norm": "policy.max_grad_norm",
    "policy.dtensor_cfg.tensor_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.activation_checkpointing": "policy.activation_checkpointing",
}
MEGATRON = {
    "policy.megatron_cfg.optimizer.lr": "policy.optimizer.lr",
    "policy.megatron_cfg.optimizer.weight_decay": "policy.optimizer.weight_decay",
    "policy.megatron_cfg.optimizer.adam_eps": "policy.optimizer.eps",
    "policy.megatron_cfg.optimizer.clip_grad": "policy.max_grad_norm",
    "policy.megatron_cfg.scheduler.lr_warmup_iters": "policy.scheduler.warmup_steps",
    "policy.megatron_cfg.scheduler.lr_warmup_init": "policy.scheduler.warmup_init_lr",
    "policy.megatron_cfg.scheduler.lr_decay_style": "policy.scheduler.decay_style",
    "policy.megatron_cfg.tensor_model_parallel_size": "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size": "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.context_parallel_size": "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.activation_checkpointing": "policy.activation_checkpointing",
}


def resolved(path: Path) -> Any:
    """Their file as their loader sees it, by OmegaConf alone."""
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("div", lambda a, b: a / b, replace=True)
    try:
        config, parents = OmegaConf.load(path), []
        while "defaults" in config:
            parent = path.parent / config.pop("defaults")
            parents.append(config)
            path, config = parent, OmegaConf.load(parent)
        for child in reversed(parents):
            config = OmegaConf.merge(config, child)
        return OmegaConf.to_container(config, resolve=True)
    finally:
        OmegaConf.clear_resolver("mul")
        OmegaConf.clear_resolver("div")


def at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values[name]
    return values


def accepted(path: Path) -> Composed:
    """Composed, or skipped where the file is refused: for a named feature, or a model that is not here."""
    try:
        return compose("grpo", str(path))
    except RlctlError as problem:
        assert path.parent != OWN, problem
        pytest.skip(problem.message)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_values_are_what_omegaconf_resolves(path: Path) -> None:
    ours, theirs = as_values(accepted(path).recipe), resolved(path)
    megatron = "megatron_cfg" in theirs["policy"] and theirs["policy"]["megatron_cfg"]["enabled"]
    for key, mine in (COMMON | (MEGATRON if megatron else DTENSOR)).items():
        assert at(ours, mine) == pytest.approx(float(at(theirs, key))) if mine.endswith("eps") else True
        if not mine.endswith("eps"):
            assert at(ours, mine) == at(theirs, key), key
    packs = any(theirs["policy"][k]["enabled"] for k in ("sequence_packing", "dynamic_batching"))
    assert ours["policy"]["sequence_packing"]["enabled"] is packs
    assert ours["policy"]["megatron_cfg"]["enabled"] is megatron
    if not megatron:
        assert list(ours["policy"]["optimizer"]["betas"]) == theirs["policy"]["optimizer"]["kwargs"]["betas"]


def test_schedules_and_budgets_of_both_spellings() -> None:
    torch_, megatron = (compose("grpo", str(OWN / f)).recipe.policy for f in ("base.yaml", "megatron.yaml"))
    assert (torch_.scheduler.warmup_steps, torch_.scheduler.decay_style) == (5, "constant")
    assert math.isclose(torch_.scheduler.warmup_init_lr, 0.1 * 2e-6)
    assert torch_.sequence_packing.train_mb_tokens == 1024
    assert torch_.generation.max_new_tokens == 256
    assert (megatron.scheduler.decay_steps, megatron.optimizer.min_lr) == (100 - 13, 3e-7)
    assert tuple(megatron.optimizer.betas) == (0.8, 0.98)
    assert (megatron.sequence_packing.train_mb_tokens, megatron.sequence_packing.logprob_mb_tokens) == (1536, 3072)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_an_imported_file_composes_to_the_same_recipe(path: Path, tmp_path: Path) -> None:
    mine = accepted(path)
    assert mine.translation is not None
    (tmp_path / "mine.yaml").write_text(nemo_rl.to_recipe(mine.translation))
    again = compose(mine.recipe.algorithm, str(tmp_path / "mine.yaml"))
    assert again.translation is None
    assert as_values(again.recipe) == as_values(mine.recipe)


def sections(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every map, with its dotted name and a dot."""
    yield prefix, values
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from sections(value, f"{prefix}{name}.")


@pytest.mark.parametrize("file", ["base.yaml", "megatron.yaml"])
@pytest.mark.parametrize("change", ["a key added to every map", "every value renamed", "every section renamed"])
def test_a_key_that_was_added_or_renamed_anywhere_is_refused_by_its_name(
    change: str, file: str, tmp_path: Path
) -> None:
    values, names = resolved(OWN / file), []
    if change == "every section renamed":
        values = {f"{name}_qzx": section for name, section in values.items()}
        names = [f"{name}." for name in values]
    else:
        for prefix, section in [*sections(values)]:
            leaves = [name for name, value in section.items() if not (isinstance(value, dict) and value)]
            for name in leaves if change == "every value renamed" else ["qzx"]:
                new = f"{name}_qzx"
                section[new] = section.pop(name) if change == "every value renamed" else 1
                names.append(f"{prefix}{new}`")
    assert len(names) > (60 if change == "every value renamed" else 6)
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(values))
    told = "\n".join(line.outcome.note for line in nemo_rl.translate(tmp_path / "changed.yaml").refused)
    assert [name for name in names if f"`{name}" not in told] == []


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("loss_fn.reference_policy_kl_type", "k2", "k1 and k2"),
        ("policy.optimizer", None, "policy.optimizer"),
        ("grpo.use_dynamic_sampling", True, "dynamic sampling"),
        ("grpo.async_grpo", {"enabled": True}, "asynchronous"),
        ("policy.generation.top_p", 0.9, "top_p"),
        ("policy.generation.colocated.enabled", False, "GPUs of its own"),
        ("policy.model_name", "google/gemma-3-1b-it", "gemma3"),
        ("grpo.normalize_rewards", "false", "grpo.normalize_rewards"),
        ("policy.megatron_cfg.enabled", True, "two backends"),
        ("grpo.seeed", 1, "grpo.seed"),
        ("sft", {"max_num_steps": 1}, "sft"),
    ],
)
def test_a_feature_that_is_not_here_is_refused_by_its_name(key: str, value: Any, named: str, tmp_path: Path) -> None:
    values = resolved(OWN / "base.yaml")
    *place, name = key.split(".")
    (at(values, ".".join(place)) if place else values)[name] = value
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(RlctlError) as told:
        nemo_rl.translate(tmp_path / "x.yaml").require()
    assert told.value.exit_status == 2
    assert named in told.value.message + told.value.hint


def test_check_tells_each_key_and_what_is_left_to_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "check", str(OWN / "base.yaml"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    by_name = {key["theirs"]: key for key in row["keys"]}
    assert by_name["grpo.seed"]["ours"] == {"grpo.seed": 7}
    assert (
        by_name["data.dataset_name"]["status"] == "open"
        and "OpenMathInstruct-2" in by_name["data.dataset_name"]["note"]
    )
    assert all(key["note"] for key in row["keys"] if key["status"] == "ignored")
    assert row["recipe"]["policy"]["train_global_batch_size"] == 32


def test_a_flag_of_theirs_chooses_the_algorithm_and_check_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gspo.yaml"
    file.write_text(
        f"defaults: {OWN / 'base.yaml'}\n"
        "loss_fn: {sequence_level_importance_ratios: true, token_level_loss: false, reference_policy_kl_penalty: 0.0}\n"
    )
    assert run(["recipes", "check", str(file)]) == 0
    assert "algorithm `gspo`, which loss_fn.sequence_level_importance_ratios asks for" in capsys.readouterr().out


def test_a_refused_file_ends_check_with_2_after_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"defaults: {OWN / 'base.yaml'}\ngrpo: {{use_dynamic_sampling: true}}\n")
    assert run(["recipes", "check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert "REFUSED grpo.use_dynamic_sampling" in out and "dynamic sampling" in err
    assert run(["recipes", "check", str(file), "--json"]) == 2
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ok"] is False and any(key["status"] == "refused" for key in row["keys"])
