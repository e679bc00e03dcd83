"""recipe/compose.py: what a recipe becomes, and what is refused where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from rlctl import config
from rlctl.errors import RlctlError
from rlctl.recipe import compose as composing
from rlctl.recipe import find
from rlctl.recipe.compose import compose
from rlctl.recipe.overrides import Override, parse


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_no_recipe_gives_the_dataclass_defaults() -> None:
    recipe = compose("grpo").recipe
    assert dataclasses.asdict(recipe.policy.optimizer) == dataclasses.asdict(config.Optimizer())
    assert recipe.grpo == config.Steps()
    assert recipe.loss_fn.ratio_clip_max == 0.2
    assert recipe.advantage.use_leave_one_out_baseline is True


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_plus_signs_mean_nothing(prefix: str) -> None:
    assert compose("grpo", "smoke-tiny", [f"{prefix}grpo.seed=7"]).recipe.grpo.seed == 7


def test_an_override_reaches_every_kind_of_section() -> None:
    recipe = compose(
        "grpo",
        "smoke-tiny",
        [
            "policy.optimizer.betas=[0.8,0.95]",
            "grpo.normalize_rewards=false",
            "loss_fn.ratio_clip_max=0.28",
            "env.toy.wanted='a,b'",
            "env.reward_weights={wanted: 2}",
            "policy.generation.vllm_cfg.tensor_parallel_size=2",
            "policy.generation.vllm_kwargs.max_num_seqs=8",
            "policy.hf_config_overrides={rope_theta: 5.0e5}",
            "policy.generation.stop_token_ids=[1,2]",
            "policy.precision=bf16",
        ],
    ).recipe
    assert recipe.policy.optimizer.betas == (0.8, 0.95)
    assert recipe.advantage.normalize_rewards is False
    assert recipe.loss_fn.ratio_clip_max == 0.28
    assert recipe.env.options.wanted == "a,b"
    assert recipe.env.reward_weights == {"wanted": 2.0}
    assert recipe.policy.generation.vllm_cfg.tensor_parallel_size == 2
    assert recipe.policy.generation.vllm_kwargs == {"max_num_seqs": 8}
    assert recipe.policy.hf_config_overrides == {"rope_theta": 500000.0}
    assert recipe.policy.generation.stop_token_ids == [1, 2]
    assert recipe.policy.precision == "bfloat16"


def test_a_user_file_builds_on_a_packaged_recipe(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "defaults: [experiment/smoke-tiny, _self_]\ngrpo: {max_num_steps: 3}\n")
    recipe = compose("grpo", file).recipe
    assert (recipe.grpo.max_num_steps, recipe.policy.model_name) == (3, "tiny-llama")


def test_interpolation_sees_defaults_that_no_file_writes(tmp_path: Path) -> None:
    text = "rlctl_recipe: 1\npolicy: {max_total_sequence_length: 64}\ndata: {max_input_seq_length: '${policy.%s}'}\n"
    for key, expected in (("max_total_sequence_length", 64), ("train_micro_batch_size", 4)):
        assert compose("grpo", write(tmp_path, "a.yaml", text % key)).recipe.data.max_input_seq_length == expected


def test_own_recipes_hide_packaged_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "experiment/smoke-tiny.yaml", "# @package _global_\nrlctl_recipe: 1\ngrpo: {seed: 9}\n")
    monkeypatch.setenv("RLCTL_RECIPES", str(tmp_path))
    assert compose("grpo", "smoke-tiny").recipe.grpo.seed == 9


def test_an_unknown_key_in_an_inherited_file_is_located_there(tmp_path: Path) -> None:
    write(tmp_path, "policy/base.yaml", "max_grad_norm: 1.0\n\nmax_grad_norn: 2.0\n")
    file = write(
        tmp_path, "mine.yaml", "rlctl_recipe: 1\ndefaults: [policy: base, _self_]\n".replace(": base", ": base")
    )
    with pytest.raises(RlctlError) as caught:
        compose("grpo", file)
    assert "`policy.max_grad_norn`" in caught.value.message
    assert "policy/base.yaml:3" in caught.value.message
    assert "`policy.max_grad_norm`" in caught.value.hint


def test_a_missing_default_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "rlctl_recipe: 1\ndefaults: [experiment/nothing, _self_]\n")
    with pytest.raises(RlctlError, match="mine.yaml` does not compose: .*nothing"):
        compose("grpo", file)


def test_a_reward_given_on_the_command_line_replaces_the_task(tmp_path: Path) -> None:
    recipe = compose("grpo", "smoke-tiny", ["env.reward=a.py:f"]).recipe
    assert (recipe.env.name, recipe.env.reward) == ("function", "a.py:f")
    with pytest.raises(RlctlError, match="contradicts"):
        compose("grpo", "smoke-tiny", ["env.reward=a.py:f", "env.name=toy"])


def test_what_is_dumped_is_loaded_and_can_be_run_again(tmp_path: Path) -> None:
    recipe = compose("grpo", "smoke-tiny", ["loss_fn.ratio_clip_c=3", "env.toy.size=5", "grpo.seed=3"]).recipe
    composing.dump(recipe, tmp_path / "recipe.yaml")
    assert composing.load_resolved(tmp_path / "recipe.yaml") == recipe
    assert compose("grpo", str(tmp_path / "recipe.yaml")).recipe == recipe
    assert "advantage" not in yaml.safe_load((tmp_path / "recipe.yaml").read_text())


def test_a_flag_is_quoted_for_hydra() -> None:
    flag = Override(key="policy.model_name", value="it's a/b, c=d", text="--model ...")
    assert compose("grpo", "smoke-tiny", flags=[flag]).recipe.policy.model_name == "it's a/b, c=d"


@pytest.mark.parametrize(
    "text",
    ["~grpo.seed", "grpo.seed=1,2", "grpo.seed=range(3)", "hydra.mode=x", "seed", "=1", "env/x=1", "a@b=1", "a=[1"],
)
def test_what_hydra_would_take_for_something_else_is_refused(text: str) -> None:
    with pytest.raises(RlctlError) as caught:
        parse([text])
    assert caught.value.exit_status == 2


def test_values_keep_lists_maps_paths_and_colons() -> None:
    texts = ["a=[1,2]", "b={c: 1}", "d=/x y/z.jsonl", "e=my_file.py:score", "f='1,2'", "g=null", "h=-1.5e-3"]
    assert [o.value for o in parse(texts)] == [
        [1, 2],
        {"c": 1},
        "/x y/z.jsonl",
        "my_file.py:score",
        "1,2",
        None,
        -0.0015,
    ]


class TestChoice:
    """Which recipe a command line without `--recipe` means."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("1n8g-dtensor", "1n8g-megatron-tp2", "2n8g-megatron-tp4"):
            write(tmp_path, f"experiment/grpo-some-model-9b-{name}.yaml", "rlctl_recipe: 1\n")
        return tmp_path

    @pytest.mark.parametrize(
        ("said", "expected"),
        [
            ({}, "1n8g-dtensor"),
            ({"backend": "megatron"}, "1n8g-megatron-tp2"),
            ({"backend": "megatron", "nodes": 2}, "2n8g-megatron-tp4"),
            ({"backend": "megatron", "nodes": 5}, "1n8g-megatron-tp2"),
        ],
    )
    def test_the_smallest_that_fits_what_was_said(self, folder: Path, said: dict, expected: str) -> None:
        chosen = find.choose("grpo", [folder], model="some-model-9b", **{"backend": None} | said)
        assert chosen.name == f"grpo-some-model-9b-{expected}"

    def test_none_for_another_model_or_algorithm(self, folder: Path) -> None:
        for algorithm, model in (("grpo", "model-9b"), ("dpo", "some-model-9b")):
            assert find.choose(algorithm, [folder], model=model, backend=None).config == "config"
