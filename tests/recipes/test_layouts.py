"""The main job end to end in layouts other than data parallelism: fp32, the same seed, one curve."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LAYOUTS = {
    "data": [],
    "pipeline": ["policy.megatron_cfg.pipeline_model_parallel_size=2"],
    "context": ["policy.megatron_cfg.context_parallel_size=2", "policy.activation_checkpointing=true"],
}


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """layout -> lines of metrics.jsonl, and the exported weights."""
    from safetensors.torch import load_file

    found = {}
    for name, degrees in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("runs") / name
        command = [sys.executable, "-m", "rlctl", "train", "grpo", "--recipe", "smoke-tiny", "--procs", "2"]
        # Adam's eps: with the default, rounding of gradients near 0 would be whole steps
        command += ["--run-dir", str(folder), "grpo.max_num_steps=3", "policy.optimizer.eps=1e-3", *degrees]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[name] = lines, load_file(folder / "hf" / "model.safetensors")
    return found


@pytest.mark.parametrize("name", ["pipeline", "context"])
def test_a_layout_follows_the_curve_of_data_parallelism(curves, name):
    alone, split = curves["data"][0], curves[name][0]
    assert len(split) == len(alone) == 3
    for one, other in zip(split, alone, strict=True):
        assert one["rollout/reward"] == pytest.approx(other["rollout/reward"], abs=1e-6)
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-4)
        assert one["train/entropy"] == pytest.approx(other["train/entropy"], rel=1e-5)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["pipeline", "context"])
def test_a_layout_exports_the_weights_of_data_parallelism(curves, name):
    alone, split = curves["data"][1], curves[name][1]
    assert split.keys() == alone.keys()
    for tensor, want in alone.items():
        assert (split[tensor] - want).abs().max() < 1e-5 * want.abs().max(), tensor
