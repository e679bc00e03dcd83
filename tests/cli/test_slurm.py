"""`--launcher slurm`: what is submitted, how srun's words are read, and real runs on two nodes of a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlctl.config import Cluster, Recipe, Slurm
from rlctl.launch import slurm

ROOT = Path(__file__).parents[2]
JOB = ("train", "grpo", "--recipe", "smoke-tiny", "--launcher", "slurm", "--nodes", "2", "--procs", "1")
LONG = ("checkpointing.save_period=1000", "grpo.max_num_epochs=1000", "logger.tensorboard=false")


def recipe(**keys):
    return Recipe(cluster=Cluster(launcher="slurm", **keys))


def test_sbatch_gets_nodes_tasks_and_what_the_recipe_says():
    wanted = recipe(num_nodes=8, gpus_per_node=4, slurm=Slurm(partition="p", time="1-00:00:00", options=["--qos=high"]))
    options = slurm.options(wanted, Path("runs/a"))
    for option in ("--nodes=8", "--ntasks-per-node=4", "--gpus-per-node=4", "--partition=p", "--time=1-00:00:00"):
        assert option in options
    assert options[-1] == "--qos=high"
    assert not [o for o in options if o.startswith("--account")]


def test_a_percent_sign_in_a_path_is_not_a_placeholder_of_slurms():
    options = slurm.options(recipe(procs=1), Path("/x/50%j"))
    assert "--output=/x/50%%j/logs/slurm-%j.out" in options


def test_the_script_keeps_arguments_with_spaces_whole(tmp_path):
    file = tmp_path / "s.sh"
    file.write_text(slurm.script("train 'a b' \"c'd\"").replace(sys.executable, "printf '<%s>'"))
    assert subprocess.run(["bash", file], capture_output=True, text=True, check=True).stdout.endswith("<a b><c'd>")


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("srun: error: n1: task 1: Killed\n", [("n1", 1, "Killed")]),
        ("srun: error: n0: tasks 0-1: Exited with exit code 4\n", [("n0", 0, "Exited with exit code 4")]),
        ("srun: error: n3: tasks 8,11: Bus error\n", [("n3", 8, "Bus error")]),
        ("srun: Terminating StepId=10.0\nslurmstepd: error: *** STEP\n", []),
    ],
)  # fmt: skip
def test_srun_words_say_which_rank_ended_and_how(said, ends):
    assert [(e.node, e.rank, e.how) for e in slurm._ends(said)] == ends


def test_a_machine_without_slurm_is_told_so(tmp_path):
    environment = os.environ | {"PATH": str(tmp_path)}
    environment.pop("SLURM_JOB_ID", None)
    done = subprocess.run(
        [sys.executable, "-m", "rlctl", *JOB, "--run-dir", "r", "--json"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "needs Slurm's sbatch, srun" in json.loads(done.stdout)["error"]
    assert not (tmp_path / "r").exists()


def test_a_dry_run_prints_the_submission_without_slurm(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlctl", *JOB, "--dry-run", "--json", "--run-dir", "r 1"],
        env=os.environ | {"PATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    line, script = json.loads(done.stdout)["commands"]["run"].splitlines()
    assert line.startswith("sbatch ") and "--nodes=2" in line and line.endswith("'r 1/slurm.sh'")
    assert script.endswith("--run-dir 'r 1' --resume auto")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes; the variable that makes Slurm's commands find them is set meanwhile."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("Slurm is not installed here, or this is not root: scripts/slurm_two_nodes.sh install")
    folder = tmp_path_factory.mktemp("slurm")
    script = ROOT / "scripts" / "slurm_two_nodes.sh"
    before = os.environ.get("SLURM_CONF")
    subprocess.run([script, "start", folder], check=True, capture_output=True)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    yield
    subprocess.run(["scancel", "--user=root"], check=False)
    subprocess.run([script, "stop", folder], check=True)
    os.environ.pop("SLURM_CONF")
    if before is not None:
        os.environ["SLURM_CONF"] = before


def submit(run_dir, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "rlctl", *JOB, *LONG, "--run-dir", str(run_dir), *arguments],
        capture_output=True, text=True, check=False, cwd=run_dir.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def metrics(run_dir):
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [{k: v for k, v in x.items() if not k.startswith(("time/", "memory/", "perf/"))} for x in lines]


def said(run_dir):
    """What a person would look at when a job does not go on."""
    asked = (["scontrol", "show", "job"], ["sinfo", "--Node", "--long"], ["scontrol", "show", "node"])
    answers = [subprocess.run(line, capture_output=True, text=True, check=False).stdout for line in asked]
    return "\n".join([f.read_text()[-1500:] for f in (run_dir / "logs").glob("*.out")] + answers)


def wait(what, run_dir):
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end, said(run_dir)
        time.sleep(0.2)


def state(job):
    query = ["squeue", "--noheader", f"--jobs={job}", "--Format=StateCompact"]
    shown = subprocess.run(query, capture_output=True, text=True, check=False)
    return shown.stdout.strip()


@pytest.mark.slow
def test_a_job_survives_scancel_and_a_requeue_with_the_numbers_of_one_that_ran_through(cluster, tmp_path):
    run_dir, steps = tmp_path / "a run", "grpo.max_num_steps=100000"
    job = submit(run_dir, steps)
    wait(lambda: len(metrics(run_dir)) >= 2, run_dir)
    subprocess.run(["scancel", job], check=True)
    wait(lambda: not state(job), run_dir)
    cancelled = len(metrics(run_dir))
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"step_{cancelled:06d}"]

    job = submit(run_dir, steps, "--resume", "auto")
    wait(lambda: len(metrics(run_dir)) >= cancelled + 2, run_dir)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)  # as Slurm does before the time limit
    wait(lambda: state(job) == "PD", run_dir)
    requeued = len(metrics(run_dir))
    assert (run_dir / "checkpoints" / f"step_{requeued:06d}" / "manifest.json").is_file()
    time.sleep(3)  # in the second of the requeue Slurm answers `Job credential revoked`; by itself it waits two minutes
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=True)
    wait(lambda: len(metrics(run_dir)) >= requeued + 2, run_dir)
    subprocess.run(["scancel", job], check=True)
    wait(lambda: not state(job), run_dir)

    last = len(metrics(run_dir))
    straight = tmp_path / "straight"
    local = [a for a in JOB if a not in ("--launcher", "slurm", "--nodes", "2", "--procs", "1")]
    subprocess.run(
        [sys.executable, "-m", "rlctl", *local, "--procs", "2", *LONG, f"grpo.max_num_steps={last}",
         "--run-dir", straight],
        check=True, capture_output=True,
    )  # fmt: skip
    assert metrics(run_dir) == metrics(straight)


@pytest.mark.slow
def test_a_killed_rank_and_a_lost_node_end_the_job_with_one_message(cluster, tmp_path):
    down = ["scontrol", "update", "nodename=n1", "state=down", "reason=test"]
    for name, happen, told in (
        ("kill", lambda pid: os.kill(pid, signal.SIGKILL), "error: rank 1 on node n1 ended in phase `.*`: Killed"),
        ("down", lambda pid: subprocess.run(down, check=True), "error: node n1 failed"),
    ):
        run_dir = tmp_path / name
        process = subprocess.Popen(
            ["salloc", "--nodes=2", "--ntasks-per-node=1", "--quiet", sys.executable, "-m", "rlctl", *JOB, *LONG,
             "--run-dir", str(run_dir), "grpo.max_num_steps=100000"], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait(lambda run_dir=run_dir: len(metrics(run_dir)) >= 2, run_dir)
        pid = json.loads((run_dir / "logs" / "heartbeat_rank_1.json").read_text())["pid"]
        happen(pid)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1, said
        (line,) = [line for line in said.splitlines() if line.startswith("error:")]
        assert re.fullmatch(told, line), said
        wait(lambda pid=pid: not Path(f"/proc/{pid}").exists(), run_dir)
