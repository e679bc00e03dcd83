"""Algorithms' options: derived from the recipe, refused where they cannot be, and written down in docs/algorithms.md.

RLCTL_UPDATE_GOLDEN=1 writes the page's tables of options anew.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl import plugins
from rlctl.algorithms.base import source
from rlctl.algorithms.correction import RULES
from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.recipe.compose import as_values, compose
from rlctl.recipe.derive import Resolved, derive

HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ALGORITHMS = [name for name in plugins.names("algorithm") if source(name) == "rollouts"]


def resolved(algorithm: str, *overrides: str) -> Resolved:
    return derive(compose(algorithm, "smoke-tiny", overrides), HOST)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_smoke_recipe_takes_every_algorithm_and_resolves_to_itself(name: str) -> None:
    job = resolved(name)
    assert job.recipe.algorithm == name
    again = derive(compose(name, "smoke-tiny").__class__(recipe=job.recipe, source=None, overrides=()), HOST)  # type: ignore[arg-type]
    assert again.derived == {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_shows_its_bounds_and_a_written_bound_wins(name: str) -> None:
    job = resolved(name, "loss_fn.correction=icepop", "loss_fn.correction_max=9")
    assert (job.recipe.loss_fn.correction_min, job.recipe.loss_fn.correction_max) == (0.5, 9.0)
    assert job.derived["loss_fn.correction_min"] == 0.5
    for preset, rule in RULES.items():
        config = plugins.load("algorithm", name).Config()
        config.loss_fn.correction = preset
        config.complete(job.recipe)
        assert (config.loss_fn.correction_min, config.loss_fn.correction_max) == (rule.low, rule.high)


def test_the_mismatch_is_observed_unless_switched_off() -> None:
    for name in ALGORITHMS:
        assert plugins.load("algorithm", name).Config().loss_fn.correction == "observe"
    loss = as_values(resolved("grpo", "loss_fn.correction=off").recipe)["loss_fn"]
    assert (loss["correction_min"], loss["correction_max"]) == (None, None)


def test_lengths_come_from_the_response_limit() -> None:
    job = resolved("dr_grpo")
    assert job.recipe.loss_fn.length_normalizer == 16
    assert job.derived["loss_fn.length_normalizer"] == 16
    assert resolved("dr_grpo", "loss_fn.length_normalizer=5").recipe.loss_fn.length_normalizer == 5
    shaping = resolved("dapo").recipe.advantage.reward_shaping
    assert (shaping.max_response_length, shaping.overlong_buffer_length) == (16, 3)


@pytest.mark.parametrize(
    ("algorithm", "override", "status", "message"),
    [
        ("dr_grpo", "grpo.normalize_rewards=true", 2, "unknown key `grpo.normalize_rewards`"),
        ("dapo", "loss_fn.reference_policy_kl_penalty=0.1", 2, "unknown key `loss_fn.reference_policy_kl_penalty`"),
        ("gspo", "loss_fn.token_level_loss=true", 2, "unknown key `loss_fn.token_level_loss`"),
        ("rloo", "loss_fn.ratio_clip_min=0.1", 2, "unknown key `loss_fn.ratio_clip_min`"),
        ("grpo", "loss_fn.correction=tis", 2, "`loss_fn.correction` must be"),
        ("grpo", "loss_fn.ratio_clip_min=1.5", 2, "`loss_fn.ratio_clip_min` is 1.5, it must be above 0 and below 1"),
        ("grpo", "loss_fn.ratio_clip_max=0", 2, "`loss_fn.ratio_clip_max` is 0, it must be above 0"),
        ("grpo", "loss_fn.ratio_clip_c=0.5", 2, "`loss_fn.ratio_clip_c` is 0.5, it must be above 1"),
        ("grpo", "loss_fn.reference_policy_kl_penalty=-1", 2, "must not be negative"),
        ("grpo", "grpo.advantage_clip_high=-1", 2, "`grpo.advantage_clip_high` is -1, it must be above 0"),
        ("grpo", "grpo.num_generations_per_prompt=1", 2, "compares a prompt's samples"),
        ("dr_grpo", "loss_fn.length_normalizer=0", 2, "`loss_fn.length_normalizer` is 0, it must be above 0"),
        ("dapo", "grpo.reward_shaping.overlong_buffer_length=17", 2, "a response has at most 16 tokens"),
        ("rloo", "policy.train_global_batch_size=32", 2, "rloo makes one update a step"),
    ],
)
def test_what_cannot_be_is_refused(algorithm: str, override: str, status: int, message: str) -> None:
    with pytest.raises(RlctlError) as caught:
        resolved(algorithm, override)
    assert message in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_status == status


def test_one_sample_a_prompt_is_for_reinforce_pp() -> None:
    assert resolved("reinforce_pp", "grpo.num_generations_per_prompt=1").batch_size == 8


def _options(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{prefix}.{field.name}")
        else:
            yield f"{prefix}.{field.name}", value


def _shown(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else f"{value}"
    )


def table(name: str) -> str:
    """The options of an algorithm, as the page shows them."""
    config = plugins.load("algorithm", name).Config()
    rows = [*_options(config.grpo, "grpo"), *_options(config.loss_fn, "loss_fn")]
    lines = [f"| `{key}` | {_shown(value)} |" for key, value in rows]
    return "\n".join(["| key | default |", "| --- | --- |", *lines]) + "\n"


def test_the_page_shows_every_option_with_its_default() -> None:
    text = PAGE.read_text()
    if "RLCTL_UPDATE_GOLDEN" in os.environ:
        pattern = r"(<!-- options: (\w+) -->\n)(?:\n?\|.*\n)*"
        text = re.sub(pattern, lambda m: f"{m[1]}\n{table(m[2])}", text)
        PAGE.write_text(text)
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == re.findall(r"<!-- options: (\w+) -->", text)
    assert sorted(re.findall(r"<!-- options: (\w+) -->", text)) == plugins.names("algorithm")
    for name in plugins.names("algorithm"):
        assert f"<!-- options: {name} -->\n\n{table(name)}" in text


def test_the_page_shows_every_preset_with_its_bounds() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d.]+|null) \| ([\d.]+|null) \|", PAGE.read_text(), re.MULTILINE)
    want = {("off", "null", "null")} | {(n, _shown(r.low), _shown(r.high)) for n, r in RULES.items()}
    assert set(rows) == want
