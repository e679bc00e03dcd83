"""A run that stops and goes on is the run that never stopped, bit for bit (engine transformers, float32)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# with a reference, two updates a step, a warm-up and validation: all that a step depends on
SETTINGS = (
    "loss_fn.reference_policy_kl_penalty=0.05", "policy.train_global_batch_size=32", "policy.scheduler.warmup_steps=5",
    "grpo.val_period=2", "grpo.max_val_samples=8",
)  # fmt: skip
MACHINE_DEPENDENT = ("time/", "perf/", "memory/")


def command(run_dir, *arguments):
    base = [sys.executable, "-m", "rlctl", "train", "grpo", "--recipe", "smoke-tiny", "--run-dir", str(run_dir)]
    return [*base, *arguments]


def run(run_dir, *arguments):
    done = subprocess.run(
        command(run_dir, *arguments), capture_output=True, text=True, timeout=600, check=False, cwd=run_dir.parent
    )
    return done.returncode, done.stderr


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(MACHINE_DEPENDENT)} for line in lines]


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def responses(run_dir):
    lines = [line for path in sorted((run_dir / "rollouts").iterdir()) for line in path.read_text().splitlines()]
    return [(x["index"], x["sample"], x["response"]) for x in map(json.loads, lines)]


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    for folder in ("rollouts", "validation", "hf"):
        assert files(one / folder) == files(other / folder), folder
    assert files(one / "rollouts") and files(one / "hf")


LAYOUTS = {
    "megatron dp1": ("--backend", "megatron", "--procs", "1"),
    "megatron dp2": ("--backend", "megatron", "--procs", "2"),
    "megatron tp2": ("--backend", "megatron", "--procs", "2", "policy.megatron_cfg.tensor_model_parallel_size=2"),
    "dtensor dp1": ("--backend", "dtensor", "--procs", "1"),
    "dtensor dp2": ("--backend", "dtensor", "--procs", "2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_steps_are_three_and_three_more(layout, tmp_path):
    job = (*LAYOUTS[layout], *SETTINGS)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert run(straight, *job, "grpo.max_num_steps=6")[0] == 0
    assert run(stopped, *job, "grpo.max_num_steps=3", "--resume", "auto")[0] == 0
    status, told = run(stopped, *job, "grpo.max_num_steps=6", "--resume", "must")
    assert status == 0, told
    assert "resuming after step 3" in told
    assert [line["step"] for line in metrics(stopped)] == [1, 2, 3, 4, 5, 6]
    assert_same_run(straight, stopped)


def test_a_run_goes_on_in_other_layouts_and_on_the_other_backend(tmp_path):
    """Rollouts token for token, metrics to rounding: 2 steps at TP2, 2 at DP2, 2 on the DTensor backend alone."""
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    assert run(straight, *LAYOUTS["megatron dp1"], *SETTINGS, "grpo.max_num_steps=6")[0] == 0
    for steps, layout in ((2, "megatron tp2"), (4, "megatron dp2"), (6, "dtensor dp1")):
        status, told = run(moved, *LAYOUTS[layout], *SETTINGS, f"grpo.max_num_steps={steps}", "--resume", "auto")
        assert status == 0, told
        assert (steps == 2) != ("goes on as" in told)
    assert responses(moved) == responses(straight)
    for one, other in zip(metrics(moved), metrics(straight), strict=True):
        same = {name: value for name, value in other.items() if not name.startswith("packing/")}
        assert {name: one[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6)


def test_every_rank_of_another_launcher_takes_what_may_change(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    for steps in (2, 4):
        line = command(tmp_path / "run", f"grpo.max_num_steps={steps}", "--resume", "auto", "--launcher", "env")
        done = subprocess.run(
            [line[0], *torchrun, *line[1:]], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert "resuming after step 2" in done.stderr
