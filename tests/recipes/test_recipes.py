"""All packaged recipes: composed, named, headed, no longer than needed. GPU ones: also test_experiment_build.py."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from rlctl.cli import job
from rlctl.device import Hardware
from rlctl.recipe import find
from rlctl.recipe.compose import as_values, compose
from rlctl.recipe.derive import derive

SOURCES = {s.name: s for s in find.listing([find.packaged()])}
EXPERIMENT = {  # what a reader looks for in an experiment, whether or not it is the default
    "rlctl_recipe", "policy.precision", "policy.optimizer.lr", "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt", "cluster.num_nodes", "policy.generation.vllm_cfg.tensor_parallel_size",
}  # fmt: skip
HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)


def leaves(values: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_a_name_follows_the_convention(name: str) -> None:
    assert name.startswith("smoke-") or find.parts(name) is not None


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_opens_with_purpose_hardware_launch_and_expected_result(name: str) -> None:
    head = SOURCES[name].path.read_text().split("rlctl_recipe")[0]
    for word in ("# Purpose: ", "# Hardware: ", "# Launch", "# Expected: "):
        assert f"\n{word}" in head


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_writes_only_what_differs_from_the_defaults_or_defines_the_experiment(name: str) -> None:
    written = leaves(yaml.safe_load(SOURCES[name].path.read_text()))
    defaults = leaves(as_values(compose("grpo").recipe))
    same = {k: v for k, v in written.items() if k in defaults and defaults[k] == v}
    assert set(same) <= EXPERIMENT


@pytest.mark.parametrize("name", SOURCES)
def test_the_launch_line_in_the_head_starts_this_recipe(name: str) -> None:
    head = SOURCES[name].path.read_text().split("rlctl_recipe")[0].replace("\n#  ", "")
    line = re.search(r"rlctl (train .*)", head)
    assert line is not None
    words = shlex.split(line[1])
    options = dict(zip(words, words[1:], strict=False))
    request = job.Request(
        algorithm=words[1],
        recipe=options.get("--recipe"),
        model=options.get("--model"),
        backend=options.get("--backend"),
    )
    assert job.compose_request(request).source.name == name


def test_every_backend_of_the_demo_model_has_a_recipe_for_a_host() -> None:
    for backend in ("megatron", "dtensor"):
        source = find.choose("grpo", [find.packaged()], model="smollm2-135m", backend=backend)
        resolved = derive(compose("grpo", source.name), HOST)
        assert (resolved.backend, resolved.layout.world, resolved.recipe.env.name) == (backend, 2, "arithmetic")


def test_the_backends_differ_in_nothing_else() -> None:
    megatron, dtensor = (
        leaves(as_values(compose("grpo", f"grpo-smollm2-135m-1n0g-{b}").recipe)) for b in ("megatron", "dtensor")
    )
    assert {k for k in megatron if megatron[k] != dtensor[k]} == {"policy.megatron_cfg.enabled"}


def test_six_keys_make_a_complete_recipe(tmp_path) -> None:
    (tmp_path / "my.jsonl").write_text('{"question": "1+1?"}\n')
    (tmp_path / "six.yaml").write_text(
        f"rlctl_recipe: 1\nrun_dir: {tmp_path}/out\n"
        "policy:\n  model_name: tiny-llama\n  max_total_sequence_length: 64\n"
        f"  megatron_cfg: {{enabled: true}}\ndata: {{train_path: {tmp_path}/my.jsonl}}\nenv: {{reward: 'f.py:score'}}\n"
    )
    resolved = derive(compose("grpo", str(tmp_path / "six.yaml")), HOST)
    assert (resolved.backend, resolved.recipe.env.name, resolved.recipe.run_dir) == (
        "megatron",
        "function",
        f"{tmp_path}/out",
    )
