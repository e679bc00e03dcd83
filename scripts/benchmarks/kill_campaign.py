"""Kill a run again and again, go on each time with `--resume auto`, and compare it with one that was left alone.

usage: kill_campaign.py RUNS TABLE.md KILLS SEED

1. For each backend, a run of STEPS steps that nothing disturbs.
2. The same run in another directory, killed KILLS times with SIGKILL: each attempt goes on from the one before.
3. The last attempt is left alone. Metrics (but time and memory), rollouts and exported weights must be the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

STEPS = 60
SAVE_PERIOD = 2
MOMENTS = ("start", "step", "save", "save")  # half of what is wanted is saving, which takes the least time
WAIT_SECONDS = 600.0
ROW = "| {} | {} | {} | {} | {} | {} | {} | {} | {} |"
HEAD = [
    ROW.format(
        "backend", "kill", "who", "aimed at", "steps logged", "newest checkpoint", "half-written left",
        "seconds until no process was left", "went on after",
    ),
    "|---" * 9 + "|",
]  # fmt: skip


def command(run_dir: Path, backend: str) -> list[str]:
    return [
        ".venv/bin/rlctl", "train", "grpo", "--recipe", "smoke-tiny", "--backend", backend, "--run-dir", str(run_dir),
        "--resume", "auto", f"grpo.max_num_steps={STEPS}", f"checkpointing.save_period={SAVE_PERIOD}",
        "logger.tensorboard=false",
    ]  # fmt: skip


def logged(run_dir: Path) -> int:
    """The last step in metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = [line for line in file.read_text().split("\n")[:-1] if line] if file.is_file() else []
    return json.loads(lines[-1])["step"] if lines else 0


def saved(run_dir: Path) -> int:
    """The step of the newest checkpoint with a manifest."""
    found = (run_dir / "checkpoints").glob("step_*/manifest.json")
    return max((int(p.parent.name.removeprefix("step_")) for p in found if p.parent.suffix == ""), default=0)


def partial(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("*.partial/policy/*.pt"))


def processes(run_dir: Path) -> dict[str, int]:
    """Process ids of the run by role: launcher, rank 0, rank 1, and what else names the run directory."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            environment = dict(v.partition(b"=")[::2] for v in (folder / "environ").read_bytes().split(b"\0"))
        except OSError:  # it ended meanwhile
            continue
        if os.fsencode(run_dir) not in arguments:
            continue
        if b"rlctl.launch.worker" in arguments and b"torch.distributed.run" not in arguments:
            found[f"rank {environment[b'RANK'].decode()}"] = int(folder.name)
        else:
            found["torchrun" if b"torch.distributed.run" in arguments else "launcher"] = int(folder.name)
    return found


def wait_for_moment(run_dir: Path, moment: str, attempt: subprocess.Popen, chance: random.Random) -> None:
    """Return when the kill is due."""
    if moment == "start":
        time.sleep(chance.uniform(0, 12))
        return
    due = max(saved(run_dir), logged(run_dir)) + chance.randint(1, 4)
    end = time.monotonic() + WAIT_SECONDS
    while attempt.poll() is None and (logged(run_dir) < due or (moment == "save" and not partial(run_dir))):
        assert time.monotonic() < end, f"the run did not get to step {due}"
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.3 if moment == "step" else 0.004))


def kill_once(run_dir: Path, backend: str, number: int, chance: random.Random) -> str:
    moment, who = chance.choice(MOMENTS), chance.choice(("launcher", "rank 0", "rank 1"))
    with (run_dir.parent / f"{run_dir.name}.console").open("ab") as console:
        attempt = subprocess.Popen(command(run_dir, backend), stdout=console, stderr=console)
    wait_for_moment(run_dir, moment, attempt, chance)
    victims = processes(run_dir)
    victim = who if who in victims else "launcher"
    os.kill(attempt.pid if victim == "launcher" else victims[victim], signal.SIGKILL)
    killed = time.monotonic()
    while processes(run_dir):
        assert time.monotonic() < killed + WAIT_SECONDS, "processes are left"
        attempt.poll()
        time.sleep(0.05)
    attempt.wait()
    gone = time.monotonic() - killed
    row = (logged(run_dir), saved(run_dir), "yes" if partial(run_dir) else "no", f"{gone:.1f}")
    print(backend, number, victim, moment, *row, flush=True)
    return ROW.format(backend, number, victim, moment, *row, "{}")


def comparable(run_dir: Path) -> dict[str, object]:
    """What must be equal."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "memory/"))} for line in lines]
    files = [p for name in ("hf", "rollouts") for p in (run_dir / name).rglob("*") if p.is_file()]
    return {"metrics": metrics} | {str(p.relative_to(run_dir)): p.read_bytes() for p in files}


def campaign(runs: Path, backend: str, kills: int, chance: random.Random) -> tuple[list[str], bool]:
    """The table's rows, and whether the runs are equal."""
    straight, disturbed = runs / f"{backend}-straight", runs / f"{backend}-killed"
    console = runs / f"{backend}-killed.console"
    subprocess.run(command(straight, backend), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = []
    for number in range(1, kills + 1):
        rows.append(kill_once(disturbed, backend, number, chance))
        if number > 1:
            rows[-2] = rows[-2].format(went_on(console))
        console.rename(runs / f"{backend}-{number}.console")
    with console.open("wb") as out:
        subprocess.run(command(disturbed, backend), check=True, stdout=out, stderr=out)
    rows[-1] = rows[-1].format(went_on(console))
    one, other = comparable(straight), comparable(disturbed)
    different = sorted(name for name in one | other if one.get(name) != other.get(name))
    print(backend, "different:", different or "nothing", flush=True)
    return rows, not different


def went_on(console: Path) -> str:
    """The step that an attempt said it went on from."""
    text = console.read_text(errors="replace")
    marker = "resuming after step "
    if marker in text:
        return text.split(marker)[1].split(",")[0]
    return "0" if re.search(r"^step +1/", text, re.MULTILINE) else "killed before it said"


def main(runs: Path, table: Path, kills: int, seed: int) -> int:
    runs.mkdir(parents=True)
    chance = random.Random(seed)
    rows, verdicts = [], []
    for backend in ("megatron", "dtensor"):
        mine, equal = campaign(runs, backend, kills, chance)
        rows += mine
        same = "equal the undisturbed run, byte for byte" if equal else "DIFFER from the undisturbed run"
        verdicts.append(f"- {backend}: after {kills} kills, metrics, rollouts and exported weights {same}.")
    text = table.read_text()
    start, end = "<!-- table -->\n", "<!-- end -->"
    before, after = text.split(start)[0], text.split(end)[1]
    body = "\n".join([*verdicts, "", *HEAD, *rows])
    table.write_text(f"{before}{start}{body}\n{end}{after}")
    return 0 if all("equal" in verdict for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
