"""`policy.parallel: auto` and the preflight: layouts that fit, pins that stay, mends that mend."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rlctl import device
from rlctl.cli.app import run
from rlctl.device import Hardware
from rlctl.errors import RlctlError
from rlctl.launch import local, preflight
from rlctl.launch.needs import fits, needs
from rlctl.plan import hardware, search
from rlctl.plan.predict import Choice, exceeds
from rlctl.plan.steptime import constants
from rlctl.recipe import auto
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import Resolved, derive
from rlctl.recipe.overrides import Override

HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
H100 = Hardware(gpus=8, gpu_name="NVIDIA H100 80GB HBM3", cpus=96, memory_bytes=10**12)
TEMPLATE = "policy.tokenizer.chat_template='{{ messages }}'"
DEFAULTS = (
    TEMPLATE, "policy.max_total_sequence_length=4096", "policy.train_micro_batch_size=1", "policy.precision=bfloat16",
)  # fmt: skip


def job(*overrides: str, model: str, nodes: int = 1, hardware: Hardware = H100, auto: bool = True) -> Resolved:
    keys = [o.split("=")[0] for o in overrides]
    said = [*(o for o in DEFAULTS if o.split("=")[0] not in keys), *overrides]
    flags = {"policy.model_name": model, "cluster.num_nodes": nodes, "cluster.gpus_per_node": 8}
    flags |= {"policy.parallel": "auto"} if auto else {}
    settings = [Override(key=k, value=v, text=f"{k}={v}") for k, v in flags.items()]
    return derive(compose("grpo", "smoke-tiny", said, flags=settings), hardware)


BACKENDS = {
    "megatron": (),
    "dtensor": ("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "nodes", "more"),
    [
        ("llama-3.1-8b", 1, ()),
        ("llama-3.1-70b", 8, ()),
        ("llama-3.1-70b", 8, ("policy.max_total_sequence_length=16384",)),
        ("qwen3-30b-a3b", 4, ("loss_fn.reference_policy_kl_penalty=0.01",)),
        ("qwen3-32b", 4, ("policy.max_total_sequence_length=1000", "policy.train_micro_batch_size=3")),
    ],
)
def test_the_chosen_layout_fits_by_the_exact_count_and_says_why(backend, model, nodes, more):
    chosen = job(*BACKENDS[backend], *more, model=model, nodes=nodes)
    assert fits(chosen, needs(chosen), memory_bytes=80e9)
    assert preflight.refuse(chosen, needs(chosen)) is None
    assert chosen.layout_reason.startswith("fastest of ")
    assert more or f"{needs(chosen).memory.training / 1e9:.1f} GB" in chosen.layout_reason
    assert chosen.derived["cluster.gpu_kind"] == "h100"
    key = f"policy.{backend}_cfg." + ("tensor_model_parallel_size" if backend == "megatron" else "tensor_parallel_size")
    assert chosen.derived[key] == chosen.layout.tp


def test_the_search_passes_over_no_layout_that_fits():
    """Every choice is counted exactly; none that fits and is faster than the found ones is left out."""
    recipe = job(model="llama-3.1-70b", nodes=8, auto=False).recipe
    config = job(model="llama-3.1-70b", nodes=8, auto=False).model.config
    question = auto.question_of(recipe, config, hardware.gpu("h100"), 64)
    fitted, pins = constants(), search.Pins(generation_tp=8)
    found = search.search(question, "megatron", fitted=fitted, pins=pins)
    fitting = []
    for layout in search._layouts(question, "megatron", pins):
        for recompute in (False, True):
            choice = Choice(backend="megatron", layout=layout, recompute=recompute, generation_tp=8)
            if exceeds(question, choice) is None:
                fitting.append((search._learning_seconds(question, choice, fitted), choice))
    fitting.sort(key=lambda pair: pair[0])
    assert 10 < len(fitting) < found.considered, "some fit and some do not: else this shows nothing"
    assert [p.choice for p in found.best] == [choice for _, choice in fitting[: search.BEST]]


def test_what_is_set_stays():
    free = job(model="llama-3.1-70b", nodes=8)
    other = 8 if free.layout.tp != 8 else 4
    pinned = job(
        f"policy.megatron_cfg.tensor_model_parallel_size={other}", "policy.activation_checkpointing=true",
        "policy.generation.vllm_cfg.tensor_parallel_size=4", model="llama-3.1-70b", nodes=8,
    )  # fmt: skip
    assert pinned.layout.tp == other
    assert pinned.recipe.policy.activation_checkpointing is True
    assert pinned.recipe.policy.generation.vllm_cfg.tensor_parallel_size == 4
    assert f"set: tp {other}, recompute True, engine tp 4" in pinned.layout_reason
    without = job("policy.megatron_cfg.sequence_parallel=false", model="llama-3.1-70b", nodes=8)
    assert not without.layout.sp


def test_a_resolved_layout_resolves_to_itself():
    chosen = job(model="qwen3-30b-a3b", nodes=4)
    again = derive(compose("grpo", "smoke-tiny").__class__(recipe=chosen.recipe, source=None, overrides=()), H100)  # type: ignore[arg-type]
    assert again.recipe == chosen.recipe


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        ((), {"hardware": HOST}, "needs the kind of GPU"),
        (("cluster.gpu_kind=h200",), {}, "this machine has NVIDIA H100 80GB HBM3"),
        (("cluster.gpu_kind=h101",), {"hardware": HOST}, "unknown GPU `h101`"),
        (("policy.megatron_cfg.pipeline_model_parallel_size=3",), {}, "no megatron layout divides"),
        ((), {"model": "llama-3.1-70b"}, "none of .* megatron layouts fits 8 x h100"),
    ],
)
def test_a_layout_that_cannot_be_planned_is_refused(overrides, settings: dict[str, Any], message):
    with pytest.raises(RlctlError, match=message):
        job(*overrides, **({"model": "llama-3.1-8b"} | settings))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_a_driver_name_is_a_kind_or_unknown(name, kind):
    assert hardware.kind_of(name) == kind


@pytest.mark.parametrize(
    ("overrides", "settings", "limit", "mend"),
    [
        (("policy.sequence_packing.train_mb_tokens=65536", "policy.megatron_cfg.tensor_model_parallel_size=8"),
         {"model": "llama-3.1-8b"}, "the largest part is activations", "activation_checkpointing=true"),
        (("policy.activation_checkpointing=true",), {"model": "llama-3.1-70b", "nodes": 8},
         "training needs .* GB of 80 GB", "another layout of these GPUs fits"),
        (("policy.generation.vllm_cfg.gpu_memory_utilization=0.9", "policy.megatron_cfg.tensor_model_parallel_size=8",
          "policy.activation_checkpointing=true"),
         {"model": "llama-3.1-8b"}, "the policy keeps .* GB and the engine takes 72.0 GB", "gpu_memory_utilization="),
        (("policy.megatron_cfg.tensor_model_parallel_size=8", "policy.megatron_cfg.pipeline_model_parallel_size=4",
          "policy.activation_checkpointing=true"),
         {"model": "llama-3.1-70b", "nodes": 4}, "the engine's weights, 141.1 GB", "vllm_cfg.tensor_parallel_size=4"),
        ((), {"model": "llama-3.1-70b"}, "training needs", None),
    ],
)  # fmt: skip
def test_the_preflight_names_the_limit_and_its_mend_mends(overrides, settings: dict[str, Any], limit, mend):
    wrong = job(*overrides, auto=False, **settings)
    problem = preflight.refuse(wrong, needs(wrong))
    assert problem is not None and problem.exit_status == 3
    assert re.search(limit, problem.message), problem.message
    if mend is None:
        assert problem.hint.startswith("take more GPUs")
        return
    assert mend in problem.hint, problem.hint
    changes = [word.rstrip(";,") for word in problem.hint.split() if "=" in word]
    keys = {change.split("=")[0] for change in changes}
    kept = [o for o in overrides if o.split("=")[0] not in keys]
    mended = job(*kept, *changes, auto=False, **settings)
    assert preflight.refuse(mended, needs(mended)) is None


def test_train_exits_3_on_what_does_not_fit_and_goes_on_with_force(monkeypatch, capfd):
    monkeypatch.setattr(device, "probe", lambda: H100)
    monkeypatch.setattr(local, "run", lambda *_, **__: pytest.fail("started"))
    line = ["train", "grpo", "--recipe", "smoke-tiny", "policy.model_name=llama-3.1-70b", TEMPLATE, "--json"]
    assert run(line) == 3
    told = json.loads(capfd.readouterr().out)
    assert "does not fit h100" in told["error"] and "--force" in told["hint"]
    assert run([*line, "--dry-run"]) == 0
    assert "does not fit h100" in json.loads(capfd.readouterr().out)["refused"]["error"]
    assert run([*line, "--dry-run", "--force"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["refused"] is None
    assert "--force: dp8 tp1 does not fit h100" in shown.err
