"""The benchmark's arithmetic: rollouts and their hash, fairness, figures, ratios, reports."""

from __future__ import annotations

import json

import pytest
import torch

from rlctl.bench import compare, fairness, report, work
from rlctl.bench.replay import digest, draw, load, parse_lengths, save
from rlctl.cli import bench
from rlctl.cli.app import run
from rlctl.errors import RlctlError
from tests import tiny


def rollouts(seed=0):
    lengths = parse_lengths("lognormal:3,0.5,40")
    return draw(lengths, prompts=3, group_size=4, longest=64, vocabulary=50, seed=seed)


def test_drawn_rollouts_keep_to_their_limits_and_the_distribution():
    batch = draw(parse_lengths("lognormal:3,0.5,1000"), prompts=500, group_size=4, longest=2000, vocabulary=50, seed=1)
    response = batch.sequence_sum(batch.mask.float())
    assert response.log().mean() == pytest.approx(3.0, abs=0.05)
    assert response.log().std() == pytest.approx(0.5, abs=0.05)
    assert not batch.mask[batch.offsets[:-1]].any()
    capped = rollouts()
    assert capped.lengths.max() <= 64 and capped.sequence_sum(capped.mask.float()).max() <= 40
    assert torch.equal(capped.truncated, capped.truncated & (capped.sequence_sum(capped.mask.float()) == 40))


def test_a_file_gives_back_the_same_hash_and_any_change_another(tmp_path):
    save([rollouts(), rollouts(1)], tmp_path / "r.safetensors")
    batches = load(tmp_path / "r.safetensors")
    assert digest(batches) == digest([rollouts(), rollouts(1)])
    rewards = batches[0].rewards.clone()
    rewards[0] += 1
    others = [[batches[1], batches[0]], batches[:1], [batches[0].replace(rewards=rewards), batches[1]]]
    assert len({digest(b) for b in [batches, *others]}) == 4


@pytest.mark.parametrize("text", ["normal:1,2,3", "lognormal:1,2", "lognormal:1,2,0", "lognormal:a,2,3"])
def test_another_distribution_of_lengths_is_refused(text):
    with pytest.raises(RlctlError, match="no distribution of lengths"):
        parse_lengths(text)


def test_what_is_no_file_of_rollouts_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    for name in ("text", "absent"):
        with pytest.raises(RlctlError, match="cannot read rollouts"):
            load(tmp_path / name)


def test_flops_of_a_step_are_those_that_torch_counts():
    """Matrix products of a transformers forward with eager attention; attention is causal, so half of it counts."""
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny.model("llama")
    model.set_attn_implementation("eager")
    batch = draw(parse_lengths("lognormal:3,0.1,30"), prompts=1, group_size=1, longest=64, vocabulary=256, seed=0)
    length = len(batch.tokens)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=batch.tokens[None], logits_to_keep=int(batch.mask.sum()))
    layers, heads, head_size = 2, 4, 16
    masked_half = layers * 2 * heads * head_size * length**2
    want = counter.get_total_flops() - masked_half
    got = work.step_flops(batch, model.config.to_dict(), 1) / 4
    assert got == pytest.approx(want, rel=1e-3)


def sides(*settings, backends=("dtensor", "megatron")):
    from rlctl.cli import job

    request = job.Request(algorithm="", recipe="smoke-tiny", procs=2)
    return bench._sides(request, backends, list(settings))


def differing(*settings):
    facts = {name: fairness.facts(r.recipe, r.layout) for name, r in sides(*settings).items()}
    return {difference.what for difference in fairness.differences(facts)}


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("policy.sequence_packing.enabled=false", "packing"),
        ("policy.precision=bfloat16", "precision"),
        ("policy.activation_checkpointing=true", "recompute"),
        ("policy.optimizer.weight_decay=0.1", "optimizer"),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", "layout (dp tp pp cp ep)"),
        ("policy.max_grad_norm=0.5", "gradient clipping"),
    ],
)
def test_a_setting_of_one_side_is_unfair_and_named(setting, what):
    assert what in differing(f"megatron:{setting}")


def test_the_same_recipe_on_both_sides_is_fair():
    assert differing() == set()


def test_a_key_of_one_backend_goes_to_its_side():
    from rlctl.cli import job

    request = job.Request(
        algorithm="", recipe="smoke-tiny", procs=2, overrides=["policy.megatron_cfg.tensor_model_parallel_size=2"]
    )
    found = bench._sides(request, ["dtensor", "megatron"], [])
    assert (found["dtensor"].layout.tp, found["megatron"].layout.tp) == (1, 2)


def result(seconds, *, missing=0.0):
    step = {"forward_backward": 0.7, "optimizer": 0.2, "weight_gather": 0.1}
    return {
        "steps": [{k: v * s for k, v in step.items()} | {"wall": s * (1 + missing)} for s in seconds],
        "real_tokens": [100] * len(seconds), "padded_tokens": [125] * len(seconds), "flops": [1e9] * len(seconds),
        "matmul_flops_per_second": 4e9, "peak_memory_bytes": 7, "weight_bytes": 1000, "memcpy_seconds": 0.001,
    }  # fmt: skip


def test_a_summary_has_the_figures_of_its_steps():
    found = compare.summary([result([1.0, 2.0, 3.0]), result([4.0])])
    step = found["phases"]["step"]
    assert (step["median"], step["n"]) == (2.5, 4)
    assert (step["p10"], step["p90"]) == pytest.approx((1.3, 3.7))
    assert found["tokens_per_second"] == pytest.approx(400 / 10)
    assert found["padding_share"] == pytest.approx(0.2)
    assert found["mfu"] == pytest.approx(4e9 / 10 / 4e9)
    assert found["unaccounted_share"] == pytest.approx(0)
    assert compare.summary([result([1.0], missing=0.05)])["unaccounted_share"] > compare.UNACCOUNTED


def test_the_interval_of_a_ratio_covers_noise_between_starts():
    found = compare.ratio([[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert found["low"] == 1.0 and found["high"] == 2.0
    assert compare.ratio([[2.0]], [[1.0]])["value"] == 2.0


def made_report(**changes):
    timing = compare.summary([result([1.0, 1.0]), result([1.0, 1.1])])
    side = {"facts": {}, "timing": timing}
    whole = {
        "bench_schema": 1, "model": "m", "rollouts": "abc",
        "machine": {"cpu": "c", "cpus": 2, "memory_bytes": 8e9, "gpus": 0},
        "recipe_hash": "r", "steps": 2, "repeats": 2, "verdict": "COMPARABLE", "algorithm": "grpo",
        "precision": "float32", "where": "2 CPU processes with gloo", "rollouts_source": "recorded",
        "rollouts_size": {"sequences": 4, "tokens": 9, "scored_tokens": 5}, "generation_and_reward_seconds": [0.1],
        "fairness": [], "parity": {}, "sides": {"dtensor": side}, "ratios": {}, "convergence": None,
    }  # fmt: skip
    return whole | changes


def test_a_slower_report_fails_and_an_equal_one_passes(tmp_path, capfd):
    slower = compare.summary([result([1.2, 1.2]), result([1.2, 1.3])])
    for name, made in (("a", made_report()), ("b", made_report(sides={"dtensor": {"facts": {}, "timing": slower}}))):
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    line = ["bench", "compare", str(tmp_path / "a.json")]
    assert run([*line, str(tmp_path / "a.json"), "--fail-over", "5%"]) == 0
    assert run([*line, str(tmp_path / "b.json"), "--fail-over", "5%"]) == 4
    assert run([*line, str(tmp_path / "b.json"), "--fail-over", "0.5"]) == 0
    assert "SLOWER" in capfd.readouterr().out


def test_reports_of_other_tokens_or_machines_are_not_comparable(tmp_path):
    found = compare.against(made_report(), made_report(rollouts="other"), fail_over=0.05)
    assert found["not_comparable"] == ["rollouts"]
    (tmp_path / "a.json").write_text(json.dumps(made_report(bench_schema=99)))
    with pytest.raises(RlctlError, match="has schema 99"):
        compare.load(tmp_path / "a.json")


def test_every_page_says_what_differs_and_where_it_ran():
    unfair = [{"what": "precision", "values": {"dtensor": "float32", "megatron": "bfloat16"}}]
    made = made_report(verdict="NOT COMPARABLE", fairness=unfair)
    for page in (report.markdown(made), report.html(made)):
        assert "NOT COMPARABLE: precision: dtensor float32, megatron bfloat16" in page
        assert "2 CPU processes with gloo" in page


def curve(losses, norms):
    return {
        "curve": [{"loss": x, "grad_norm": 1.0, "entropy": 1.0} for x in losses],
        "norms": [{"first": x, "second": y} for x, y in norms],
    }


def test_curves_that_part_are_told_with_step_and_tensor():
    a = curve([0.1, 0.2, 0.3], [(1.0, 1.0)] * 3)
    b = curve([0.1, 0.2, 0.31], [(1.0, 1.0), (1.0, 1.5), (1.0, 2.0)])
    found = compare.curves({"dtensor": a, "megatron": b}, tolerance=1e-4)
    assert (found["diverged_at"], found["figure"], found["first_tensor"]) == (3, "loss", "second after step 2")
    assert compare.curves({"dtensor": a, "megatron": a}, tolerance=1e-4)["diverged_at"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--compare", "dtensor"], "is one side"),
        (["--compare", "dtensor,trl2"], "`trl2` is no backend"),
        (["--compare", "dtensor,dtensor"], "names a backend twice"),
        (["--recipe", "smoke-tiny", "--set", "other:policy.precision=bfloat16"], "is no setting of a side"),
        (["--compare", "megatron", "--recipe", "smoke-tiny", "--sweep", "speed"], "`speed` is no knob"),
        (["--recipe", "smoke-tiny", "--lengths", "many"], "no distribution of lengths"),
        (["--recipe", "smoke-tiny", "--rollouts", "absent"], "no file `absent`"),
        (["compare", "absent.json", "absent.json"], "cannot read `absent.json`"),
        (["compare", "a", "b", "--fail-over", "much"], "is no share"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(arguments, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *arguments]) == 2
    assert says in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_key_after_bench_needs_no_verb():
    assert bench.normalized(["bench", "--compare", "a,b", "x.y=1"]) == ["bench", "run", "--compare", "a,b", "x.y=1"]
    assert bench.normalized(["bench", "x.y=1"]) == ["bench", "run", "x.y=1"]
    assert bench.normalized(["bench", "compare", "A", "B"]) == ["bench", "compare", "A", "B"]
    assert bench.normalized(["eval", "./compare"]) == ["eval", "./compare"]
