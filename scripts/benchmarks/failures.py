"""Plant a failure of rank 1 in each phase, and judge how the run ends. usage: failures RUNS TABLE.md"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cli.test_failures import PHASES, SAYS, judge, outcome

HEAD = """# One rank fails: what the run says, and how soon it is gone

smoke-tiny on the DTensor backend, 2 processes on gloo, with a reference and validation. Rank 1 raises an exception,
gets SIGKILL, or gets SIGSTOP, in each phase of a step; `reward` is while rollouts are scored (told as `generate`),
`loss` is between forward and backward of a microbatch (told as `train`). Wanted each time: exit status 1, one message
with rank, phase and cause, no traceback, no process left, and no checkpoint of a save that did not end. Seconds are
from the rank's failure until the command has ended; for SIGSTOP they hold the timeout, here 6 s (120 s in real runs).

    scripts/benchmarks/failures.sh

| phase | action | as wanted | seconds | message |
|---|---|---|---|---|
"""


def main(runs: Path, table: Path) -> int:
    runs.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    for phase in PHASES:
        for action in SAYS:
            found = outcome(runs.absolute() / f"{phase}-{action}", phase, action)
            wrong = judge(found, phase, action)
            failed += bool(wrong)
            said = next((x for x in found["said"].splitlines() if x.startswith("error:")), "nothing").replace("|", "/")
            rows.append(
                f"| {phase} | {action} | {'; '.join(wrong) or 'yes'} | {found['seconds']:.1f} | {said[7:110]} |"
            )
            print(rows[-1], flush=True)
            table.write_text(HEAD + "\n".join(rows) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
