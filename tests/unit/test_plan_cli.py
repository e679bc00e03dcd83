"""`rlctl plan` as a user meets it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.plan import rows

FILE = Path(rows.__file__).parent / "data" / "measured.csv"
LINE = ["plan", "--model", "llama-3.1-70b", "--gpu", "h100"]


def asked(arguments, capfd) -> tuple[int, dict]:
    status = run([*arguments, "--json"])
    return status, json.loads(capfd.readouterr().out)


def test_a_plan_has_memory_seconds_and_the_best_layouts_of_both_backends(capfd):
    status, answer = asked([*LINE, "--gpus", "64", "--backend", "megatron"], capfd)
    assert answer["gpus"] == 64
    assert status == (0 if answer["given"]["fits"] else 3)
    assert [b["backend"] for b in answer["best"]] == ["megatron"] * 3
    for found in answer["best"]:
        seconds, memory = found["seconds"], found["memory_bytes"]
        phases = sum(seconds[name] for name in ("generation", "logprobs", "training", "weight sync"))
        assert seconds["low"] < seconds["total"] < seconds["high"]
        assert seconds["total"] == pytest.approx(phases)
        assert max(memory["training"], memory["generating"]) <= 80e9


def test_the_text_names_each_phase(capfd):
    assert run([*LINE, "--gpus", "64"]) == 0
    shown = capfd.readouterr().out
    for word in ("generation", "of it tail", "logprobs", "training", "weight sync", "8 of 10 cases", "fastest"):
        assert word in shown


def test_a_job_that_does_not_fit_exits_3_and_names_the_limit(capfd):
    status, answer = asked([*LINE, "--gpus", "8", "--backend", "dtensor"], capfd)
    assert status == 3
    assert not answer["given"]["fits"]
    assert "GB" in answer["given"]["limit"]


def test_longer_responses_take_longer(capfd):
    short, long = (
        asked([*LINE, "--gpus", "64", "--backend", "megatron", "--response-tokens", n], capfd)[1]["best"][0]
        for n in ("500", "2000")
    )
    assert long["seconds"]["total"] > short["seconds"]["total"]
    assert long["seconds"]["generation"] > short["seconds"]["generation"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "llama-3.1-8b", "--gpus", "8"], "`--gpu` is not given"),
        (["plan", "--model", "llama-3.1-8b", "--gpu", "h100"], "`--gpus` is not given"),
        (["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "h10"], "unknown GPU `h10`"),
        (["plan", "--model", "llama-3.1-9b", "--gpus", "8", "--gpu", "h100"], "unknown model `llama-3.1-9b`"),
        (["plan", "--gpus", "8", "--gpu", "h100"], "no model is named"),
        ([*LINE, "--gpus", "64", "--response-tokens", "999999"], "mean response of 999999"),
        (["plan", "--rows", "x.csv", "--gpus", "8"], "`--rows` takes everything from the file"),
    ],
)
def test_a_mistake_is_exit_2(arguments, message, capfd):
    assert run(arguments) == 2
    shown = capfd.readouterr().err
    assert message in shown
    assert "hint:" in shown


def test_rows_are_predicted_in_order(tmp_path, capfd):
    with FILE.open() as source:
        table = list(csv.DictReader(source))[:20]
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, table[0].keys())
        writer.writeheader()
        writer.writerows(table)
    status, answers = asked(["plan", "--rows", str(file)], capfd)
    assert status == 0
    assert [a["row_id"] for a in answers] == [r["row_id"] for r in table]
    assert run(["plan", "--rows", str(file)]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 21


def test_rows_of_a_file_without_a_column_are_refused(tmp_path, capfd):
    file = tmp_path / "rows.csv"
    file.write_text("row_id,model\nA,llama3-8b\n")
    assert run(["plan", "--rows", str(file)]) == 2
    assert "has no hardware" in capfd.readouterr().err
    assert run(["plan", "--rows", str(tmp_path / "absent.csv")]) == 1


def test_a_plan_loads_nothing_heavy():
    code = (
        "import sys\nfrom rlctl.cli.app import run\n"
        "run(['plan', '--model', 'llama-3.1-70b', '--gpus', '64', '--gpu', 'h100'])\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'vllm') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]"
