"""What a failed rank leaves, and how it is told: memory by part, the innermost frames, the last lines of logs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import torch

from rlctl.errors import RlctlError
from rlctl.launch import failure

PLAN = {"weights": 10, "optimizer": 40, "activations": 900, "kv cache": 100}


def run_dir(folder, plan=PLAN):
    (folder / "logs").mkdir()
    (folder / "environment.json").write_text(json.dumps({failure.MEMORY: {k: v * 10**7 for k, v in plan.items()}}))
    return folder


def leave(folder, error, phase="train"):
    try:
        raise error
    except BaseException as raised:
        status = failure.leave(raised, folder / "logs", rank=3, phase=phase)
    return status, failure.told(folder / "logs" / "error_rank_3.json")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError("none left")]
)
def test_a_rank_without_memory_is_told_with_the_planned_parts_and_the_key_that_lowers_the_largest(error, tmp_path):
    status, told = leave(run_dir(tmp_path), error)
    assert status == told.exit_status == 3
    assert told.message.startswith("rank 3 ran out of memory in phase `train`: ")
    lines = told.details.splitlines()
    assert lines[0] == "planned memory of the fullest rank, 10.50 GB:"
    assert [line.split()[-1] for line in lines[1:]] == ["activations", "cache", "optimizer", "weights"]
    assert "policy.train_micro_batch_size" in told.hint


@pytest.mark.parametrize(
    ("largest", "key"),
    [("kv cache", "gpu_memory_utilization"), ("optimizer", "more GPUs"), ("logits", "train_micro_batch_size")],
)
def test_the_mend_is_that_of_the_largest_part(largest, key, tmp_path):
    _, told = leave(run_dir(tmp_path, {"weights": 1, largest: 9}), MemoryError("x"))
    assert key in told.hint


def test_an_allocation_that_the_host_refuses_is_out_of_memory(tmp_path):
    """The real words of torch's allocator, under a limit on address space."""
    code = "import resource, torch; torch.ones(8); resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34)); "
    code += "torch.ones(1 << 36)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("RuntimeError: "), done.stderr
    _, told = leave(run_dir(tmp_path), RuntimeError(message.removeprefix("RuntimeError: ")))
    assert "ran out of memory" in told.message
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_an_unforeseen_error_is_told_with_its_innermost_calls(tmp_path):
    status, told = leave(run_dir(tmp_path), ZeroDivisionError("by zero"), phase="save")
    assert status == 1
    assert told.message == "rank 3 failed in phase `save`: ZeroDivisionError: by zero"
    assert told.details.splitlines()[0] == "rank 3, innermost call first:"
    assert "test_failure.py" in told.details.splitlines()[1]


def test_a_users_mistake_keeps_its_hint_and_needs_no_stack(tmp_path):
    _, told = leave(run_dir(tmp_path), RlctlError("a is 3", "make it 2", exit_status=4))
    assert (told.message, told.exit_status, told.details) == ("a is 3", 4, "")
    assert told.hint.startswith("make it 2 (log: ")


def test_details_hold_the_last_lines_and_the_main_threads_stack_apart(tmp_path):
    logs = run_dir(tmp_path) / "logs"
    code = "import faulthandler, sys, threading, time\n"
    code += "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    code += "def work(): faulthandler.dump_traceback(file=sys.stdout, all_threads=True)\n"
    code += "print('loaded 7 shards\\nworking\\n', flush=True)\nwork()\n"
    with (logs / "rank_1.log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    text = failure.details(logs, {1: "train", 0: "generate"})
    blocks = text.splitlines()
    assert blocks[:3] == [
        "rank 1, phase `train`, last lines of its log:", "    loaded 7 shards", "    working"
    ]  # fmt: skip
    assert blocks[3] == "rank 1, innermost call first:" and blocks[4].endswith("in work")
    assert "rank 0, phase `generate`, last lines of its log:\n    (nothing)" in text


def test_only_the_first_of_ranks_that_fail_together_tells_it(tmp_path):
    logs = run_dir(tmp_path) / "logs"
    assert [failure.is_first(logs) for _ in range(3)] == [True, False, False]
    failure.clear(logs)
    assert failure.is_first(logs)
