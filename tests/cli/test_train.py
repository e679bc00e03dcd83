"""`rlctl train` for real: a tiny model, two processes, few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.recipe.compose import load_resolved

pytestmark = pytest.mark.slow

SHORT = ["train", "grpo", "--recipe", "smoke-tiny", "grpo.max_num_steps=2"]


def rlctl(arguments: list[str], cwd: Path, *, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *before, "-m", "rlctl", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_a_run_leaves_its_directory_and_tells_its_steps(tmp_path: Path) -> None:
    done = rlctl([*SHORT, "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    run_dir = tmp_path / answer["run_dir"]
    assert run_dir.parent.name == "runs" and run_dir.name.startswith("smoke-tiny-")
    assert answer["last_step"]["step"] == 2
    assert (run_dir / "command.txt").read_text() == f"rlctl {' '.join([*SHORT, '--json'])}\n"
    assert json.loads((run_dir / "environment.json").read_text())["packages"]["rlctl"]
    assert load_resolved(run_dir / "recipe.yaml").grpo.max_num_steps == 2
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("reward") >= 2


def test_own_data_and_reward_train(tmp_path: Path) -> None:
    rows = [{"question": f"Write {c}", "answer": c} for c in "abcdefgh"]
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_file.py").write_text(
        "def score(prompt, completion, row):\n    return {'hit': float(row['answer'] in completion)}\n"
    )
    own = [
        "--model", "tiny-llama", "--backend", "dtensor", "data.train_path=my.jsonl", "data.output_key=answer",
        "env.reward=my_file.py:score", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4",
        "policy.max_total_sequence_length=64", "policy.precision=float32", "grpo.max_num_steps=2", "--run-dir", "out",
    ]  # fmt: skip
    done = rlctl(["train", "grpo", *own], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_torchrun_of_another_launcher_works_the_same(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    done = rlctl([*SHORT, "--launcher", "env", "--run-dir", "out"], tmp_path, before=torchrun)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


def test_without_a_launcher_of_ours_the_first_rank_that_fails_tells_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion, row):\n    raise ValueError('no score today')\n")
    (tmp_path / "my.jsonl").write_text('{"question": "What is 3 + 4?", "answer": "7"}\n' * 64)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    own = ["--model", "tiny-llama", "--backend", "dtensor", "data.train_path=my.jsonl", "env.reward=mine.py:score"]
    line = ["train", "grpo", *own, "--launcher", "env", "--run-dir", "out", "policy.max_total_sequence_length=64"]
    done = rlctl([*line, "grpo.num_prompts_per_step=4"], tmp_path, before=torchrun)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(told) == 2, done.stderr
    assert "none of 64 rollouts has a reward" in told[0] and "no score today" in told[0]
