"""`rlctl eval`: what it refuses, and an evaluation of a run for real."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from rlctl import device
from rlctl.cli.app import run
from rlctl.device import Hardware
from rlctl.launch import evaluation, local
from rlctl.recipe import compose


@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    """Run a command line that must be refused; its error and hint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    here = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
    monkeypatch.setattr(device, "probe", lambda: here)
    monkeypatch.setattr(local, "run", lambda *args, **kwargs: pytest.fail("a job was started"))

    def tell(*arguments):
        status = run(["eval", *arguments])
        out, err = capsys.readouterr()
        assert out == "" and err.count("error:") == err.count("hint:") == 1 and "Traceback" not in err
        return status, err

    return tell


def test_a_model_without_a_task_is_refused_with_the_tasks(told):
    status, said = told("smollm2-135m")
    assert status == 2
    assert "no task is named" in said and "arithmetic, math, reasoning_gym:TASK, toy" in said


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("smollm2-135", "--tasks", "arithmetic"), 2, "did you mean `smollm2-135m`"),
        (("tiny-llama", "--tasks", "arithmetics"), 2, "did you mean `arithmetic`"),
        (("tiny-llama", "--tasks", "toy:letters"), 2, "has no tasks of its own"),
        (("tiny-llama", "--tasks", "toy", "--checkpoint", "best"), 2, "is for runs"),
        (("tiny-llama", "--tasks", "toy", "grpo.max_val_samples=0"), 2, "must be at least 1"),
        (("tiny-llama", "--tasks", "toy", "--samples", "0"), 2, "samples"),
        (("tiny-llama", "--recipe", "smoke-tinny"), 2, "did you mean `smoke-tiny`"),
        (("./no_such", "--tasks", "toy"), 2, "no model directory `./no_such`"),
        (("tiny-llama", "env.reward=r.py:score", "data.train_path=a.jsonl"), 2, "data.val_path is not set"),
        (("qwen3-32b", "--tasks", "arithmetic", "--procs", "3"), 3, "engines of 4 processes"),
        (("qwen2.5-32b-instruct", "--tasks", "arithmetic"), 3, "GB"),
    ],
    ids=str,
)
def test_mistakes_are_told(told, tmp_path, arguments, status, text):
    (tmp_path / "a.jsonl").write_text('{"question": "3+4?"}\n')
    (tmp_path / "r.py").write_text("def score(prompt, completion, row):\n    return 1.0\n")
    found, said = told(*arguments)
    assert (found, text in said) == (status, True), said


def make_run(folder, rows, *, checkpoints=(), exported=False, **checkpointing):
    """A run directory with checkpoints that hold nothing but their manifest."""
    folder.mkdir()
    recipe = compose.as_values(compose.compose("grpo", "smoke-tiny").recipe)
    recipe["checkpointing"] |= checkpointing
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = [folder / f"checkpoints/step_{step:06d}/manifest.json" for step in checkpoints]
    for place in [*places, *([folder / "hf/config.json"] if exported else [])]:
        place.parent.mkdir(parents=True)
        place.write_text("{}")
    return str(folder)


ROWS = [
    {"step": 1, "rollout/reward": 0.9, "train/loss": 0.1}, {"step": 2, "rollout/reward": 0.2, "val/reward": 0.5},
    {"step": 3, "rollout/reward": 0.8}, {"step": 4, "rollout/reward": 0.7, "val/reward": 0.4, "train/loss": 0.3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (None, ("hf", 4)), ("last", ("hf", 4)), ("2", ("checkpoints/step_000002/hf", 2)),
        ("best", ("checkpoints/step_000002/hf", 2)),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_of_a_run_is_its_export_or_its_checkpoint(tmp_path, asked, chosen):
    run_dir = make_run(tmp_path / "a", ROWS, checkpoints=(1, 2, 3), exported=True)
    found = evaluation.find_target(run_dir, asked)
    assert (found.model, found.step) == (f"{run_dir}/{chosen[0]}", chosen[1])


def test_best_goes_by_one_metric_and_says_which(tmp_path):
    """Validation reward is never compared with training reward: step 1's 0.9 is not step 2's 0.5."""
    why = "best val/reward: 0.5, of steps 2, 4"
    assert evaluation.find_target(make_run(tmp_path / "a", ROWS, checkpoints=(1, 2, 4)), "best").why == why
    found = evaluation.find_target(make_run(tmp_path / "b", ROWS, checkpoints=(1, 3)), "best")
    assert (found.step, found.why) == (1, "best rollout/reward: 0.9, of steps 1, 3")
    stated = {"metric_name": "train/loss", "higher_is_better": False}
    found = evaluation.find_target(make_run(tmp_path / "c", ROWS, checkpoints=(1, 2, 4), **stated), "best")
    assert (found.step, found.why) == (1, "best train/loss: 0.1, of steps 1, 4")


def test_a_step_that_a_run_does_not_have_is_refused_with_those_it_has(told, tmp_path):
    assert "has no checkpoint and no exported model" in told(make_run(tmp_path / "a", ROWS))[1]
    run_dir = make_run(tmp_path / "b", ROWS, checkpoints=(2, 4))
    assert "steps that it has: 2, 4" in told(run_dir, "--checkpoint", "3")[1]
    assert "is no step" in told(run_dir, "--checkpoint", "beast")[1]
    status, said = told(f"{run_dir}/checkpoints/step_000002")
    assert status == 2 and f"write `{run_dir} --checkpoint 2`" in said


def test_a_checkpoint_is_exported_by_the_local_launcher_only(told, tmp_path):
    run_dir = make_run(tmp_path / "a", ROWS, checkpoints=(2,))
    status, said = told(run_dir, "--launcher", "env")
    assert status == 2 and f"rlctl eval {run_dir} --checkpoint 2" in said


def test_a_checkpoint_that_this_machine_cannot_load_is_refused_before_workers_start(told, tmp_path):
    run_dir = make_run(tmp_path / "a", ROWS, checkpoints=(2,))
    recipe = yaml.safe_load((tmp_path / "a" / "recipe.yaml").read_text())
    recipe["cluster"] |= {"gpus_per_node": 8, "procs": None}
    (tmp_path / "a" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status, said = told(run_dir)
    assert status == 3 and "its checkpoint needs 1 nodes with 8 processes each" in said


def rlctl(folder, *arguments):
    command = [sys.executable, "-m", "rlctl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run with validation before, during and after it."""
    folder = tmp_path_factory.mktemp("eval")
    steps = [
        "grpo.max_num_steps=3",
        "grpo.val_period=2",
        "grpo.val_at_start=true",
        "grpo.val_at_end=true",
        "grpo.max_val_samples=8",
    ]
    steps += ["checkpointing.save_period=2", "checkpointing.keep_top_k=2"]
    done = rlctl(folder, "train", "grpo", "--recipe", "smoke-tiny", "--run-dir", "run", *steps)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_validations_are_logged_and_dumped_when_due(trained):
    lines = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val/reward" in line] == [0, 2, 3]
    for step in (0, 2, 3):
        dump = (trained / "run" / "validation" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rewards = [json.loads(row)["reward"] for row in dump]
        assert len(rewards) == 8
        logged = next(line for line in lines if line["step"] == step)["val/reward"]
        assert sum(rewards) / 8 == pytest.approx(logged, rel=1e-6)


@pytest.mark.slow
def test_the_exported_model_scores_as_the_last_validation(trained):
    """Same prompts, same seeds, fp32: the same samples, drawn by another number of processes."""
    done = rlctl(trained, "eval", "run", "--procs", "1", "--run-dir", "measured", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["results"][0]
    last = json.loads((trained / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["reward"]["value"] == pytest.approx(last["val/reward"], abs=1e-6)
    replies = [
        [json.loads(line)["response"] for line in (trained / name).read_text().splitlines()]
        for name in ("measured/samples.jsonl", "run/validation/step_000003.jsonl")
    ]
    assert replies[0] == replies[1]

    (trained / "measured" / "results.json").unlink()
    whole = (trained / "measured" / "samples.jsonl").read_text()
    (trained / "measured" / "samples.jsonl").write_text(whole[: whole.index('"index": 3') + 5])  # a write cut short
    again = rlctl(trained, "eval", "run", "--procs", "1", "--run-dir", "measured")
    assert "3 of 8 prompts were sampled before; 5 are left" in again.stderr
    assert (trained / "measured" / "samples.jsonl").read_text() == whole
    assert json.loads((trained / "measured" / "results.json").read_text())["reward"] == result["reward"]
    other = rlctl(trained, "eval", "run", "--procs", "1", "--run-dir", "measured", "--samples", "2")
    assert other.returncode == 2 and "holds an evaluation with samples 1, not 2" in other.stderr


@pytest.mark.slow
def test_the_checkpoint_of_a_step_scores_as_the_validation_after_that_step(trained):
    """Its model is exported by the training backend (Megatron, two processes) and sampled by one process."""
    done = rlctl(trained, "eval", "run", "--checkpoint", "2", "--procs", "1", "--run-dir", "earlier", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["step"] == 2
    replies = [
        [json.loads(line)["response"] for line in (trained / name).read_text().splitlines()]
        for name in ("earlier/samples.jsonl", "run/validation/step_000002.jsonl", "run/validation/step_000003.jsonl")
    ]
    assert replies[0] == replies[1] != replies[2]
    assert not list((trained / "run" / "eval").iterdir())


@pytest.mark.slow
def test_a_megatron_checkpoint_scores_as_the_model_it_was_converted_from(trained, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(trained / "cache"))
    for arguments in (
        ("convert", "hf-to-mcore", "run/hf", "megatron", "--verify", "none"),
        ("eval", "megatron", "--recipe", "run/recipe.yaml", "--procs", "1", "--run-dir", "converted"),
    ):
        done = rlctl(trained, *arguments)
        assert done.returncode == 0, done.stderr
    samples = [(trained / name / "samples.jsonl").read_text() for name in ("converted", "measured")]
    assert samples[0] == samples[1]


@pytest.mark.slow
def test_a_run_ends_with_its_report(trained):
    text = (trained / "run" / "report.html").read_text()
    assert "class='finished'" in text and "Validation reward went from" in text
