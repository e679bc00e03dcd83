"""`rlctl doctor`: what is amiss is named with its mend, and decides the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rlctl import device
from rlctl.cli.app import run
from rlctl.launch import doctor


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_this_machine_is_ready_and_nothing_heavy_was_imported():
    code = "import sys; from rlctl.cli.app import run; s = run(['doctor', '--json']); "
    code += "heavy = [m for m in ('torch', 'transformers', 'megatron', 'vllm') if m in sys.modules]; "
    code += "print(heavy, file=sys.stderr); sys.exit(s)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == 0, told
    assert done.stderr.strip() == "[]"
    assert told["ready"] and {"name", "state", "value", "mend"} == set(told["checks"][0])
    assert {"torch", "megatron-core", "engine", "memory", "network", "model hub"} <= {c["name"] for c in told["checks"]}


def test_a_package_that_is_absent_or_of_another_version_makes_the_machine_unready(monkeypatch, capsys):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: {"torch": "2.9.1", "safetensors": None}.get(n, real(n)))
    assert run(["doctor"]) == 3
    said = capsys.readouterr()
    assert "missing torch" in said.out and "rlctl needs ==2.13.0" in said.out
    assert "not installed" in said.out and "scripts/setup.sh" in said.out
    assert said.err.strip() == "not ready: safetensors, torch"


def test_every_finding_that_is_not_ok_has_a_mend_and_no_other(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: _Usage())
    findings = doctor.examine()
    assert all(bool(f.mend) == (f.state != "ok") for f in findings)
    found = by_name(findings)
    assert found["engine"].state == found["/dev/shm"].state == found["disk, runs"].state == "warn"


class _Usage:
    total = free = used = 1 << 20


def test_an_unreachable_hub_is_a_warning_within_a_bounded_wait(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://127.0.0.1")
    found = by_name(doctor.examine())["model hub"]
    assert found.state == "warn" and "not reached" in found.value and "directories" in found.mend


def test_an_import_that_fails_is_named_with_its_last_words(monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "vllm.py").write_text("raise ImportError('libfoo.so.1 is missing')")
    for name in ("torch", "megatron", "transformers"):  # quick ones, to try the broken one only
        (tmp_path / "broken" / name).mkdir()
        (tmp_path / "broken" / name / "__init__.py").write_text("")
    (tmp_path / "broken" / "megatron" / "core.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    code = "from rlctl import device; device.prepare_process = lambda: None"
    (tmp_path / "broken" / "sitecustomize.py").write_text(code)
    found = by_name(doctor.examine(imports=True))
    assert found["import torch"].state == "ok"
    assert found["import vllm"].state == "missing" and "libfoo.so.1 is missing" in found["import vllm"].value


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "1000"}, 1000),
        ("0::/a/b", {"a/b/memory.max": "500", "a/memory.max": "1000"}, 500),
        ("0::/", {"memory.max": "700"}, 700),
        ("0::/a", {}, None),
        ("4:cpu,memory:/j", {"memory/j/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/j", {"memory/j/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_least_limit_of_the_control_groups_counts(line, files, limit, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    real = device.Path.read_text
    groups = lambda self, *a, **k: line + "\n" if str(self) == "/proc/self/cgroup" else real(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(device.Path, "read_text", groups)
    assert device.memory_limit_bytes(tmp_path) == limit


WORLD = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "2"), ("RANK", "x"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "-1"), ("MASTER_PORT", "70000"),
     ("LOCAL_WORLD_SIZE", "3"), ("WORLD_SIZE", "3")],
)  # fmt: skip
def test_what_another_launcher_set_wrongly_is_named(name, value, monkeypatch, capsys):
    for variable, fine in (WORLD | {name: value}).items():
        monkeypatch.setenv(variable, fine)
    line = ["train", "grpo", "--recipe", "smoke-tiny", "--launcher", "env", "--run-dir", "new", "--dry-run"]
    assert run(line) == 2
    assert f"{name}=" in capsys.readouterr().err.splitlines()[0]
