"""The main job end to end: real processes, a reward that rises, and an export that other tools load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(folder, *arguments):
    command = [sys.executable, "-m", "rlctl", "train", "grpo", "--recipe", "smoke-tiny", "--run-dir", str(folder)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module", params=["megatron", "dtensor"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / request.param
    done = run(folder, "--backend", request.param)
    assert done.returncode == 0, done.stderr
    return folder, done


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_reward_rises(trained):
    """From about 0.12 (letters among random bytes) by at least a half of what is missing."""
    rewards = [line["rollout/reward"] for line in metrics(trained[0])]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.5


def test_steps_are_numbered_from_one_and_the_ratio_starts_at_one(trained):
    lines = metrics(trained[0])
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["mismatch/max_logprob_error"] < 1e-5 for line in lines)
    assert all(line["train/ratio"] == pytest.approx(1.0) for line in lines)


def test_progress_goes_to_stderr_and_nothing_to_stdout(trained):
    assert trained[1].stdout == ""
    assert "reward" in trained[1].stderr


def test_the_export_loads_in_transformers_with_its_tokenizer(trained):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(trained[0] / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained[0] / "hf")
    assert tokenizer.chat_template
    assert model.config.vocab_size == len(tokenizer)


def test_the_last_step_has_a_complete_checkpoint(trained):
    manifest = list((trained[0] / "checkpoints").glob("step_*/manifest.json"))
    assert len(manifest) == 1
    assert json.loads(manifest[0].read_text())["step"] == len(metrics(trained[0]))


def test_rollouts_are_written_with_their_rewards(trained):
    rows = [json.loads(line) for line in (trained[0] / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    mean = sum(row["reward"] for row in rows) / 64
    assert mean == pytest.approx(metrics(trained[0])[0]["rollout/reward"], rel=1e-6)


def test_both_backends_follow_one_curve(tmp_path):
    """Same seed, same samples: fp32 rewards are equal step by step, and losses to 1e-4."""
    curves = []
    for backend in ("megatron", "dtensor"):
        assert run(tmp_path / backend, "--backend", backend, "grpo.max_num_steps=5").returncode == 0
        curves.append(metrics(tmp_path / backend))
    for one, other in zip(*curves, strict=True):
        assert one["rollout/reward"] == pytest.approx(other["rollout/reward"], abs=1e-6)
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-4)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
