"""A user's first contact: help, recipes, dry runs and the flagship line; light, quick, and machine-readable."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import device
from rlctl.cli.app import run
from rlctl.device import Hardware

GOLDEN = Path(__file__).parents[1] / "golden"
HERE = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
HEAVY = ("torch", "transformers", "megatron", "vllm")
FLAGSHIP = ["train", "grpo", "--model", "llama-3.1-70b", "--backend", "megatron"]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "probe", lambda: HERE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["recipes", "list"],
        ["recipes", "check"],
        ["recipes", "show", "smoke-tiny"],
        ["train", "grpo", "--recipe", "smoke-tiny", "--dry-run"],
        [*FLAGSHIP, "--dry-run"],
        FLAGSHIP,
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from rlctl.cli.app import run; status = run(sys.argv[1:])\n"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.returncode == (3 if arguments == FLAGSHIP else 0)


@pytest.mark.parametrize(("arguments", "seconds"), [(["--help"], 0.5), (FLAGSHIP, 2.0)])
def test_the_answer_comes_at_once(arguments: list[str], seconds: float) -> None:
    """In processor time, which does not depend on what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "rlctl", *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds


@pytest.mark.parametrize(
    "arguments", [[], ["train"], ["recipes"], ["recipes", "list"], ["recipes", "show"], ["recipes", "check"]]
)
def test_every_help_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--help"]) == 0
    assert "rlctl " in capsys.readouterr().out.split("Example")[1]


def test_the_flagship_line_says_what_it_needs(host: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FLAGSHIP) == 3
    out, err = capsys.readouterr()
    assert out == ""
    for line in (
        "recipe ",
        "model    llama-3.1-70b, 70.6B parameters",
        "layout ",
        "needs ",
        "here     no GPU, 2 CPU cores",
    ):
        assert line in err
    assert "torchrun --nnodes" in err and "rlctl train grpo --model smollm2-135m --backend megatron" in err
    assert err.count("error:") == err.count("hint:") == 1


def test_a_dry_run_prints_the_plan_on_stdout(host: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FLAGSHIP, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "torchrun --nnodes" in out and "refused here: this job needs" in out


def test_the_json_plan_resolves_again(host: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run([*FLAGSHIP, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"]["world"] == plan["needs"]["nodes"] * plan["needs"]["gpus_per_node"]
    assert plan["model"]["parameters"] == 70_553_706_496  # the sum of shapes in its published safetensors index
    (tmp_path / "again.yaml").write_text(json.dumps(plan["recipe"]["resolved"]))
    assert run(["train", "grpo", "--recipe", "again.yaml", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["resolved"] == plan["recipe"]["resolved"]


def test_show_prints_yaml_that_is_a_recipe(host: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["recipes", "show", "smoke-tiny", "grpo.seed=5"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 5" in shown
    (tmp_path / "shown.yaml").write_text(shown)
    assert run(["recipes", "show", "shown.yaml"]) == 0
    assert capsys.readouterr().out == shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"rlctl \d+\.\d+\.\d+\n", capsys.readouterr().out)
