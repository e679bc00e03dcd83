"""What no check foresaw still ends in one `error:` and one `hint:`, or one document; closed streams harm nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.recipe import find

LIST = ["recipes", "list"]


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = line.replace("rlctl", f"{sys.executable} -m rlctl", 1)
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, check=False)


def broken(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(find, "directories", fail)


def test_a_defect_is_one_line_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, IndexError("list index\nout of range"))
    assert run(LIST) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: internal error: IndexError: list index out of range\nhint: run again with --debug and report it\n"
    )


def test_debug_shows_where_a_defect_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken(monkeypatch, IndexError("x"))
    assert run([*LIST, "--debug"]) == 1
    assert "raise failure" in capsys.readouterr().err


def test_json_tells_a_failure_of_the_machine_as_a_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, PermissionError(13, "Permission denied", "/data/x"))
    assert run([*LIST, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == "[Errno 13] Permission denied: '/data/x'" and err == ""


def test_a_removed_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = shell("cd gone && rmdir ../gone && rlctl train grpo --recipe ./x.yaml --recipe-dir . --json", tmp_path)
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_status"] == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_full_disk_under_stdout_is_told_on_stderr(option: str, tmp_path: Path) -> None:
    done = shell(f"rlctl recipes list {option} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: output cannot be written") and done.stderr.count("\n") == 2


def test_closed_stderr_leaves_the_document_alone(tmp_path: Path) -> None:
    done = shell("rlctl train grpo --recipe smoke-tiny --gpus-per-node 8 --json 2>&-", tmp_path)
    assert done.returncode == 3 and json.loads(done.stdout)["exit_status"] == 3


@pytest.mark.parametrize("closed", ["2>&-", "<&-", ">&-", "<&- >&- 2>&-"])
def test_any_closed_stream_leaves_the_status_alone(closed: str, tmp_path: Path) -> None:
    done = shell(f"rlctl train grpo --recipe smoke-tiny --dry-run {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []
