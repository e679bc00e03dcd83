"""Slurm: outside an allocation the job is submitted by sbatch; inside one, srun starts a task for each rank.

1. `submit` writes slurm.sh, whose one line is the same command with `--resume auto`: whoever starts it again, a requeue
   after a lost node or the user, goes on where the run was.
2. `run` is the supervisor in the allocation: it starts the step, passes requests to stop on, watches heartbeats, and
   ends the step with one message when a rank fails.
3. Before its time limit Slurm sends SIGUSR1 to the supervisor: the run saves, and the job goes back into the queue.

A task a rank, not torchrun on each node: Slurm then reports each rank's own end, and there is one process less to hang.
Slurm's srun kills at once on SIGTERM, so signals for ranks go through scancel.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config import Recipe
from rlctl.errors import ENVIRONMENT, FAILED, INTERRUPTED, RlctlError
from rlctl.launch import failure
from rlctl.launch.heartbeat import BEAT_SECONDS, Watch, phase_of
from rlctl.launch.local import console, die_with_parent

SCRIPT = "slurm.sh"
TASK = "rlctl.launch.slurm_task"
SECONDS_FOR_REPORTS = 5.0  # from the first rank's end until the rest is killed
SECONDS_FOR_STACKS = 2.0
QUERY_SECONDS = 30.0  # for squeue, scancel, sbatch and scontrol to answer


def in_allocation() -> bool:
    """Whether this process runs inside a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def need_allocation(verb: str) -> None:
    """Refuse what is not submitted by itself.

    Raises:
        RlctlError: this process is in no allocation.
    """
    if not in_allocation():
        raise RlctlError(
            f"`rlctl {verb} --launcher slurm` runs inside an allocation, and this is none",
            f"start it with salloc, or in a batch script: salloc --nodes=N rlctl {verb} ...",
            exit_status=ENVIRONMENT,
        )


def options(recipe: Recipe, run_dir: Path) -> list[str]:
    """Options of sbatch for a job."""
    cluster, slurm = recipe.cluster, recipe.cluster.slurm
    named = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
    output = str((run_dir / "logs").absolute()).replace("%", "%%")  # % begins a placeholder of Slurm's
    return [
        f"--job-name=rlctl-{run_dir.name}",
        *_size(recipe),
        *(f"--{key}={value}" for key, value in named.items() if value is not None),
        f"--signal=B:USR1@{slurm.stop_before_seconds}",
        "--requeue" if slurm.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={output}/slurm-%j.out",
        *(["--cpus-per-task=1"] if cluster.gpus_per_node is None else []),
        *slurm.options,
    ]


def _size(recipe: Recipe) -> list[str]:
    cluster = recipe.cluster
    per_node = cluster.gpus_per_node or cluster.procs
    gpus = [] if cluster.gpus_per_node is None else [f"--gpus-per-node={cluster.gpus_per_node}"]
    return [f"--nodes={cluster.num_nodes}", f"--ntasks-per-node={per_node}", *gpus]


def script(line: str) -> str:
    """The batch script of a command line after `rlctl`."""
    return f"#!/bin/bash\nexec {shlex.quote(sys.executable)} -m rlctl {line}\n"


def check(recipe: Recipe) -> None:
    """Judge what can be judged before a run directory exists.

    Raises:
        RlctlError: Slurm's commands are missing, or the allocation is too small.
    """
    absent = [name for name in ("sbatch", "srun", "scancel", "squeue", "scontrol") if shutil.which(name) is None]
    if absent:
        raise RlctlError(
            f"`--launcher slurm` needs Slurm's {', '.join(absent)}, which this machine does not have",
            "start on a login node of the cluster, or use `--launcher local` or `env`",
            exit_status=ENVIRONMENT,
        )
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"]) if "SLURM_JOB_NUM_NODES" in os.environ else None
    if in_allocation() and nodes is not None and nodes < recipe.cluster.num_nodes:
        raise RlctlError(
            f"this job needs {recipe.cluster.num_nodes} nodes, the allocation {os.environ['SLURM_JOB_ID']} has {nodes}",
            "ask for more with `salloc --nodes`, or lower `--nodes`",
            exit_status=ENVIRONMENT,
        )


def test_submission(recipe: Recipe, run_dir: Path) -> None:
    """Ask Slurm whether it would take the job; nothing is submitted.

    Raises:
        RlctlError: it would not; with its own words.
    """
    text = script("--version")
    _ask(["sbatch", "--test-only", *options(recipe, run_dir)], text=text)


def submit(recipe: Recipe, run_dir: Path, line: str) -> str:
    """Hand the job to Slurm; returns the job id.

    Args:
        recipe: resolved.
        run_dir: exists.
        line: the command line after `rlctl`, which resumes.

    Raises:
        RlctlError: Slurm refuses.
    """
    file = run_dir / SCRIPT
    file.write_text(script(line))
    file.chmod(0o755)
    return _ask(["sbatch", "--parsable", *options(recipe, run_dir), str(file)]).strip().partition(";")[0]


def run(run_dir: Path, recipe: Recipe) -> int:
    """Train in this allocation.

    Args:
        run_dir: made by run_directory.create, on storage that all nodes share.
        recipe: resolved.

    Returns:
        0, or 130 when interrupted, or when the ranks ended early in order.

    Raises:
        RlctlError: a rank failed; its own message and exit status, with its log in the hint.
    """
    name = f"rlctl-{uuid.uuid4().hex[:12]}"
    world = recipe.cluster.num_nodes * (recipe.cluster.gpus_per_node or recipe.cluster.procs or 1)
    has_gpus = recipe.cluster.gpus_per_node is not None
    command = [
        "srun", f"--job-name={name}", *_size(recipe), f"--ntasks={world}", "--distribution=block", "--overlap",
        "--kill-on-bad-exit=1", "--unbuffered", "--input=none", "--mpi=none", "--export=ALL",
        *(["--gpu-bind=none"] if has_gpus else []),
        sys.executable, "-u", "-m", TASK, str(run_dir.absolute()), _head_address(),
    ]  # fmt: skip
    (run_dir / "logs" / f"rendezvous_{name}.json").unlink(missing_ok=True)
    environment = os.environ | {"RLCTL_SLURM_STEP": name} | ({} if has_gpus else {"OMP_NUM_THREADS": "1"})
    log_file = run_dir / "logs" / "launcher.log"
    with log_file.open("wb") as log, console() as progress:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=progress, stderr=log, start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  this process has one thread
        )  # fmt: skip
        step = _Step(name=name, process=process, log=log_file)
        watch = Watch(
            run_dir / "logs", processes=world, stall_seconds=recipe.cluster.stall_timeout_seconds,
            alive=lambda state: True, dump=lambda states: step.dump(),
        )  # fmt: skip
        signals = _supervise(step, watch, run_dir)
    status = _judge(run_dir, step, signals)
    if status == INTERRUPTED and signal.SIGUSR1 in signals and recipe.cluster.slurm.requeue:
        _requeue()
    return status


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The running step."""

    name: str
    process: subprocess.Popen[Any]
    log: Path

    @functools.cached_property
    def id(self) -> str:
        """`JOB.STEP`."""
        job = os.environ["SLURM_JOB_ID"]
        shown = _ask(["squeue", "--steps", "--noheader", f"--jobs={job}", "--Format=StepID:64,StepName:64"])
        for line in shown.splitlines():
            number, _, name = line.strip().partition(" ")
            if name.strip() == self.name:
                return number
        raise RlctlError(f"Slurm does not show step `{self.name}` of job {job}", "see squeue --steps", exit_status=1)

    def signal(self, name: str) -> None:
        """Send a signal to every rank; nothing if the step has ended."""
        with contextlib.suppress(RlctlError):
            _ask(["scancel", f"--signal={name}", self.id])

    def dump(self) -> None:
        """Let every rank write its stacks."""
        self.signal("USR1")
        time.sleep(SECONDS_FOR_STACKS)

    def kill(self) -> None:
        """End every rank, and srun."""
        self.signal("KILL")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(QUERY_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def errors(self) -> str:
        """What srun said so far."""
        return self.log.read_text(errors="replace")


def _supervise(step: _Step, watch: Watch, run_dir: Path) -> list[int]:
    """Wait for the step; the signals that this process got meanwhile. Afterwards no rank is left.

    Raises:
        RlctlError: a rank shows no sign of life.
    """
    received: list[int] = []
    passed = 0
    failed_at: float | None = None
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda n, frame: received.append(n)) for number in numbers}
    try:
        while step.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.process.wait(BEAT_SECONDS)
            if len(received) > passed:
                _pass_on(step, again=passed > 0)
                passed = len(received)
            if failed_at is None and (failure.reports(run_dir) or _ends(step.errors())):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > SECONDS_FOR_REPORTS:
                break
            if step.process.poll() is None and (stalled := watch.look()):
                raise stalled
    finally:
        if step.process.poll() is None:
            _mark(step)
            step.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    return received


_KILLED_HERE = "rlctl: killing the step"


def _mark(step: _Step) -> None:
    """What srun says from here on is what this process did."""
    with step.log.open("a") as log:
        log.write(f"\n{_KILLED_HERE}\n")


def _pass_on(step: _Step, *, again: bool) -> None:
    if again:
        print("killing the ranks", file=sys.stderr, flush=True)
        _mark(step)
        step.signal("KILL")
    else:
        print("stopping the ranks; once more kills them", file=sys.stderr, flush=True)
        step.signal("TERM")


def _judge(run_dir: Path, step: _Step, signals: Sequence[int]) -> int:
    """The exit status of a step that ended.

    Raises:
        RlctlError: a rank failed.
    """
    if step.process.returncode == 0:
        return 0
    said = step.errors().partition(_KILLED_HERE)[0]
    lost = re.search(r"Node failure on (\S+)", said)
    if lost:
        raise RlctlError(
            f"node {lost[1]} failed",
            f"go on with `--resume auto` on other nodes; Slurm's words are in {step.log}",
            exit_status=FAILED,
        )
    ends = _ends(said)
    killed = [end for end in ends if not end.how.startswith(("Exited", "Terminated"))]
    if killed and not signals:
        rank, logs = killed[0].rank, run_dir / "logs"
        phase = phase_of(logs, rank)
        message = f"rank {rank} on node {killed[0].node} ended in phase `{phase}`: {killed[0].how}"
        if "Out Of Memory" in said or "oom" in killed[0].how.lower():
            raise failure.out_of_memory(run_dir, f"{message}, out of memory")
        hint = "the node may have run out of memory; " if killed[0].how == "Killed" else ""
        see = f"{hint}see {logs / f'rank_{rank}.log'}"
        raise RlctlError(message, see, exit_status=1, details=failure.details(logs, {rank: phase}))
    reports = failure.reports(run_dir)
    if reports:
        raise failure.told(reports[0])
    if len(signals) or (ends and all(end.how.endswith(f"exit code {INTERRUPTED}") for end in ends)):
        return INTERRUPTED
    if ends:
        rank, log = ends[0].rank, run_dir / "logs" / f"rank_{ends[0].rank}.log"
        raise RlctlError(f"rank {rank} on node {ends[0].node} ended: {ends[0].how}", f"see {log}", exit_status=1)
    words = " ".join(said.split())[-300:]
    raise RlctlError(f"srun failed: {words or step.process.returncode}", f"see {step.log}", exit_status=FAILED)


@dataclass(frozen=True, kw_only=True)
class _End:
    """How a rank ended, in srun's words: `Killed`, `Exited with exit code 1`."""

    node: str
    rank: int
    how: str


def _ends(said: str) -> list[_End]:
    """The ranks that srun saw end badly, in the order seen."""
    found = re.findall(r"^srun: error: (\S+): tasks? ([\d,\-]+): (.*)$", said, re.MULTILINE)
    return [_End(node=node, rank=int(re.split(r"[,\-]", ranks)[0]), how=how.strip()) for node, ranks, how in found]


def _head_address() -> str:
    """The address of the allocation's first node, which the others can reach."""
    names = _ask(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split()
    shown = _ask(["scontrol", "show", "node", names[0]])
    address = re.search(r"NodeAddr=(\S+)", shown)
    return address[1] if address else names[0]


def _requeue() -> None:
    print("the time limit is near: the job goes back into the queue", file=sys.stderr, flush=True)
    _ask(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])


def _ask(command: Sequence[str], *, text: str | None = None) -> str:
    """Run one of Slurm's commands; its output.

    Raises:
        RlctlError: it failed or did not answer.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RlctlError(
            f"`{command[0]}` did not answer in {QUERY_SECONDS:.0f} s", "see whether slurmctld is up: `scontrol ping`",
            exit_status=FAILED,
        ) from error  # fmt: skip
    if done.returncode:
        words = " ".join(done.stderr.replace(f"{command[0]}: ", "").replace("error: ", "").split())
        raise RlctlError(
            f"Slurm refuses: {words}",
            "see cluster.slurm.* and `sinfo`; more of sbatch's options go into cluster.slurm.options",
            exit_status=ENVIRONMENT,
        )
    return done.stdout
