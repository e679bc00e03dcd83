"""A stand-in for rlctl.launch.worker: what each rank does is in RUN_DIR/behaviour.json."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from rlctl.launch import heartbeat


def main(run_dir: Path) -> None:
    rank = int(os.environ["RANK"])
    what = json.loads((run_dir / "behaviour.json").read_text())[rank]
    if what == "console":
        os.write(int(os.environ["RLCTL_CONSOLE_FD"]), f"line of rank {rank}\n".encode())
        print("noise of a library")
        return
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    (run_dir / f"pid_{rank}").write_text(str(os.getpid()))
    if what == "beat":
        heartbeat.Beat(run_dir / "logs", rank).says("train")
        time.sleep(300)
    if what in ("wait", "stubborn"):
        time.sleep(300)
    while not all((run_dir / f"pid_{other}").is_file() for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.05)
    if what == "fail":
        report = {"error": "the data ended", "hint": "add rows", "exit_status": 2, "traceback": "", "phase": "rollout"}
        report["details"] = ""
        (run_dir / "logs" / f"error_rank_{rank}.json").write_text(json.dumps(report))
        sys.exit(2)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
