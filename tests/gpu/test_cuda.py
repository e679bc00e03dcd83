"""The same claims as on the host, on one CUDA device: run by scripts/gpu_check.sh."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests import distributed, tiny
from tests.parity import dtensor_steps, oracle

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3  # CUDA's fp32 matrix products differ in order from the host's


@pytest.fixture(scope="module", autouse=True)
def needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_device_agrees_with_transformers_on_the_host(tmp_path, backend, kind):
    folder = tiny.save(kind, tmp_path / kind)
    batch, algorithm = dtensor_steps.batch(), dtensor_steps.algorithm()
    want = oracle.evaluate(folder, batch, algorithm, temperature=dtensor_steps.recipe().policy.generation.temperature)
    layout = (1, False) if backend == "megatron" else 1
    (got,) = distributed.run(f"tests.parity.{backend}_steps:step", 1, folder, layout, batch)
    assert oracle.error(got["scored"].logprobs, want.logprobs) < TOLERANCE
    assert oracle.loss_error(got["metrics"]["loss"], want) < TOLERANCE
    for name, gradient in want.gradients.items():
        assert oracle.error(got["gradients"][name].cpu(), gradient) < TOLERANCE, name


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_the_smoke_recipe_learns(tmp_path, backend):
    command = [sys.executable, "-m", "rlctl", "train", "grpo", "--recipe", "smoke-tiny", "--backend", backend]
    done = subprocess.run(
        [*command, "--gpus-per-node", "1", "--run-dir", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["rollout/reward"] for line in lines[-3:]) / 3 > 0.5
