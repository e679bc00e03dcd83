"""`rlctl runs` and the lines of docs/eval.md and docs/runs.md, on run directories made by hand."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import device
from rlctl.cli.app import run
from rlctl.device import Hardware
from rlctl.launch import local, run_directory
from rlctl.recipe import compose, derive
from rlctl.report.run import Run
from tests.unit.test_report import row, sample

HERE = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
DOCS = Path(__file__).parents[2] / "docs"


def make_run(path: Path, *, seed: int) -> None:
    """A finished run of two steps, with its recipe as training resolves it."""
    resolved = derive.derive(compose.compose("grpo", "smoke-tiny", [f"grpo.seed={seed}", "grpo.max_num_steps=2"]), HERE)
    resolved.recipe.run_dir = str(path)
    run_directory.create(path, resolved, hardware=HERE, command=["rlctl", "train", "grpo", "--recipe", "smoke-tiny"])
    rows = [row(1, 0.25), row(2, 0.5, **{"val/reward": 0.375})]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    dumps = {
        "rollouts/step_000001": [sample(0.0, "nothing"), sample(1.0, "a letter", group=1)],
        "rollouts/step_000002": [sample(i / 8, f"letter {i}", group=i) for i in range(8)],
        "validation/step_000002": [sample(0.375, "held out")],
    }
    dumps["rollouts/step_000002"][5]["truncated"] = True
    dumps["rollouts/step_000002"].append(sample(0, valid=False, group=8))
    for name, samples in dumps.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / f"{name}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """runs/first and runs/second, as a working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(device, "probe", lambda: HERE)
    for seed, name in enumerate(("first", "second")):
        make_run(Path("runs") / name, seed=seed)
    return tmp_path


@pytest.fixture
def ask(place, capsys):
    """Run a command that answers in JSON."""

    def answer(*arguments):
        assert run(["runs", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return answer


def test_list_has_each_run_with_its_state(ask):
    rows = {r["run"]: r for r in ask("list")}
    assert set(rows) == {"first", "second"}
    first = rows["first"]
    assert (first["status"], first["steps"], first["reward"], first["validation"]) == ("finished", 2, 0.5, 0.375)


def test_list_of_nothing_is_no_error(place, capsys):
    (place / "empty").mkdir()
    assert run(["runs", "list", "empty"]) == 0
    assert capsys.readouterr() == ("", "no runs in empty\n")


def test_show_answers_and_its_line_runs_it_again(place, capsys):
    assert run(["runs", "show", "runs/first"]) == 0
    said = capsys.readouterr().out
    assert "Did it learn?" in said and "Is it healthy?" in said and "What is slow?" in said
    again = re.search(r"^again +rlctl (.*)$", said, re.MULTILINE)[1]
    assert run([*shlex.split(again), "--dry-run", "--json"]) == 0
    resolved = json.loads(capsys.readouterr().out)["recipe"]["resolved"]
    before = compose.as_values(compose.load_resolved(Path("runs/first/recipe.yaml")))
    assert {k: v for k, v in resolved.items() if k != "run_dir"} == {k: v for k, v in before.items() if k != "run_dir"}


def test_a_report_is_written_where_it_says(place, capsys):
    assert run(["runs", "report", "runs/first"]) == 0
    assert capsys.readouterr().out == "runs/first/report.html\n"
    assert run(["runs", "report", "runs/first", "runs/second"]) == 0
    assert "grpo.seed" in Path(capsys.readouterr().out.strip()).read_text()


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        ((), [0, 1, 2, 3, 4]),
        (("--page", "2"), [5, 6, 7]),
        (("--sort", "-reward", "--limit", "2"), [7, 6]),
        (("--min-reward", "0.25", "--max-reward", "0.5"), [2, 3, 4]),
        (("--contains", "letter 3"), [3]),
        (("--group", "6"), [6]),
        (("--invalid",), [8]),
        (("--truncated",), [5]),
        (("--step", "1", "--sort=reward"), [0, 1]),
    ],
    ids=str,
)
def test_samples_are_filtered_sorted_and_paged(ask, arguments, groups):
    assert [s["group"] for s in ask("rollouts", "runs/first", *arguments)["samples"]] == groups


def test_held_out_samples_and_those_of_an_evaluation_are_read_alike(ask, place):
    assert [s["response"] for s in ask("rollouts", "runs/first", "--validation")["samples"]] == ["held out"]
    samples = (place / "runs/first/rollouts/step_000001.jsonl").read_text()
    (place / "runs/second/samples.jsonl").write_text(samples)
    assert ask("rollouts", "runs/second")["matching"] == 2


def test_what_is_damaged_is_left_out_and_named(place, capsys):
    with (place / "runs/first/rollouts/step_000002.jsonl").open("a") as file:
        file.write('{"group": 9, "samp')
    assert run(["runs", "rollouts", "runs/first", "--limit", "1"]) == 0
    out, err = capsys.readouterr()
    assert "letter 0" in out and "left out: rollouts/step_000002.jsonl:10: no end of line" in err
    assert "page 1 of 8, 8 samples match; next: --page 2" in err
    (place / "runs/second/recipe.yaml").write_text("policy: [")
    assert run(["runs", "list"]) == 0
    out, err = capsys.readouterr()
    assert "first" in out and "second" not in out and "left out: `runs/second/recipe.yaml` cannot be read" in err


def test_what_a_model_wrote_cannot_move_the_cursor(place, capsys):
    (place / "runs/first/rollouts/step_000003.jsonl").write_text(json.dumps(sample(1.0, "a\x1b[2Jb\u202ec")) + "\n")
    assert run(["runs", "rollouts", "runs/first"]) == 0
    assert "a\ufffd[2Jb\ufffdc" in capsys.readouterr().out


def test_hundreds_of_runs_are_listed_without_reading_their_metrics_whole(place, ask, monkeypatch):
    monkeypatch.setattr(Run, "rows", property(lambda self: pytest.fail("metrics.jsonl was read whole")))
    for i in range(200):
        shutil.copytree(place / "runs/first", place / f"runs/sweep/{i}", symlinks=True)
    rows = ask("list")
    assert len(rows) == 202 and {r["reward"] for r in rows} == {0.5} and {r["steps"] for r in rows} == {2}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "runs/third"), "no run directory `runs/third`"),
        (("show", "runs"), "has no recipe.yaml"),
        (("list", "nowhere"), "no directory `nowhere`"),
        (("rollouts", "runs/first", "--step", "7"), "steps with samples: 1, 2"),
        (("rollouts", "runs/first", "--sort", "length"), "--sort"),
        (("report", "runs/first", "--out", "no/such/file.html"), "cannot write the report"),
        (("shwo", "runs/first"), "did you mean `show`"),
    ],
    ids=str,
)
def test_mistakes_are_told(place, capsys, arguments, text):
    status = run(["runs", *arguments])
    out, err = capsys.readouterr()
    assert (status, out) == (1 if "--out" in arguments else 2, "")
    assert text in err and err.count("error:") == err.count("hint:") == 1


@pytest.mark.parametrize(
    "arguments", [["eval"], ["runs"], ["runs", "list"], ["runs", "show"], ["runs", "report"], ["runs", "rollouts"]]
)
def test_every_help_has_an_example(arguments, capsys):
    assert run([*arguments, "--help"]) == 0
    assert "rlctl " in capsys.readouterr().out.split("Example")[1]


@pytest.mark.parametrize(
    "arguments",
    [["runs", "list"], ["runs", "report", "runs/first", "runs/second"], ["eval", "smollm2-135m"]],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(place, arguments):
    code = (
        "import sys; from rlctl.cli.app import run; run(sys.argv[1:])\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'vllm') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


def _doc_lines():
    for page in (DOCS / "eval.md", DOCS / "runs.md"):
        for line in re.findall(r"^    rlctl (.+)$", page.read_text(), re.MULTILINE):
            if not line.startswith("train"):  # planned by tests/cli/test_docs.py
                yield pytest.param(shlex.split(line), id=f"{page.name}: {line}")


RESULTS = {
    "target": "m", "task": "t", "step": None, "samples": 1, "pass_reward": 1.0, "prompts": 1, "reward_parts": {},
    "pass_at_k": {},
    "reward": {"value": 1.0, "low": 0.0, "high": 1.0, "method": "wilson", "prompts": 1},
    "response_tokens": 1.0, "truncated_share": 0.0, "invalid": 0,
}  # fmt: skip


@pytest.mark.parametrize("arguments", _doc_lines())
def test_a_line_of_the_docs_is_taken(arguments, place, monkeypatch, capfd):
    """As it stands there; of an evaluation all but the workers runs."""
    (place / "my_file.py").write_text("def score(prompt, completion, row):\n    return 1.0\n")
    for name in ("my.jsonl", "held_out.jsonl"):
        (place / name).write_text('{"question": "3 + 4?"}\n')
    if "runs/measured" in arguments and arguments[0] == "runs":
        make_run(place / "runs" / "measured", seed=2)
    (place / "runs/first/hf").mkdir()
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 288, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    (place / "runs/first/hf/config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (place / "runs/first/hf" / name).touch()
    monkeypatch.setattr(
        local, "run", lambda folder, **_: (folder / "results.json").write_text(json.dumps(RESULTS)) and 0
    )
    assert run(arguments) == 0, capfd.readouterr().err
