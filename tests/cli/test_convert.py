"""`rlctl convert`: what it says, what it refuses, and what a kill or a full disk leaves behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from rlctl.cli.app import run
from tests import tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("model") / "source")


@pytest.fixture
def source(original, tmp_path):
    return shutil.copytree(original, tmp_path / "source")


def refusal(capfd, *arguments):
    """(exit status, error) of a command that must print one error and one hint, and no traceback."""
    capfd.readouterr()
    status = run([*map(str, arguments), "--json"])
    told = json.loads(capfd.readouterr().out)
    assert told["exit_status"] == status
    assert told["hint"]
    return status, told["error"]


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def split(folder):
    """The same tensors in two files and an index."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in files.items():
        safetensors.torch.save_file({n: tensors[n] for n in held}, folder / file, metadata={"format": "pt"})
    weight_map = {n: file for file, held in files.items() for n in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return list(files)


def test_both_ways_then_verify_and_inspect(source, tmp_path, capfd):
    mcore, back = tmp_path / "mcore", tmp_path / "back"
    assert run(["convert", "hf-to-mcore", str(source), str(mcore)]) == 0
    assert run(["convert", "mcore-to-hf", str(mcore), str(back)]) == 0
    assert run(["convert", "verify", str(mcore)]) == 0
    assert run(["convert", "verify", str(source), str(back)]) == 0
    capfd.readouterr()
    assert run(["convert", "inspect", str(mcore), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["format"] == "Megatron torch_dist"
    assert told["parameters"] == sum(
        t.numel() for t in safetensors.torch.load_file(source / "model.safetensors").values()
    )


def test_a_second_run_says_up_to_date_and_another_model_is_refused(source, tmp_path, capfd):
    assert run(["convert", "hf-to-mcore", str(source), str(tmp_path / "out")]) == 0
    capfd.readouterr()
    assert run(["convert", "hf-to-mcore", str(source), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["up_to_date"]
    edit(source, lambda t: t["model.norm.weight"].add_(1))
    status, error = refusal(capfd, "convert", "hf-to-mcore", source, tmp_path / "out")
    assert status == 2
    assert "something else" in error


def test_a_directory_that_is_no_conversion_is_left_alone(source, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    status, error = refusal(capfd, "convert", "hf-to-mcore", source, tmp_path / "out")
    assert status == 2
    assert "is no conversion" in error
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_dry_run_writes_nothing(source, tmp_path, capfd):
    assert run(["convert", "hf-to-mcore", str(source), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["read_bytes"] == sum(
        t.nbytes for t in safetensors.torch.load_file(source / "model.safetensors").values()
    )
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=str)
def test_what_does_not_fit_in_memory_is_refused_before_a_byte_is_written(source, tmp_path, flags, capfd):
    status = run(["convert", "hf-to-mcore", str(source), str(tmp_path / "out"), "--max-memory", "1MB", *flags])
    assert status == 3
    assert "`--max-memory` is 1,000,000" in capfd.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


LAST = "model.layers.1.mlp.up_proj.weight"
DAMAGE = {  # what is done to the source -> a part of the error
    "lost tensor": (lambda s: edit(s, lambda t: t.pop(LAST)), f"lacks 1 of 21 tensors of its config.json: `{LAST}`"),
    "extra tensor": (lambda s: edit(s, lambda t: t.update(extra=torch.ones(2))), "no place for: `extra`"),
    "other shape": (
        lambda s: edit(s, lambda t: t.update({LAST: torch.ones(96, 63)})),
        f"`{LAST}` has shape (96, 63), config.json asks for (96, 64)",
    ),
    "two dtypes": (lambda s: edit(s, lambda t: t.update({LAST: t[LAST].bfloat16()})), "they become one tensor"),
    "truncated": (
        lambda s: os.truncate(s / "model.safetensors", (s / "model.safetensors").stat().st_size - 100),
        "its header describes",
    ),
    "no header": (lambda s: os.truncate(s / "model.safetensors", 5), "cannot be read"),
    "missing shard": (lambda s: (s / split(s)[1]).unlink(), "is missing, but model.safetensors.index.json names it"),
    "tensor in two shards": (
        lambda s: [shutil.copy(s / f, s / f"other-{f}") for f in split(s)] and (s / INDEX).unlink(),
        "is in two files",
    ),
    "model type": (lambda s: edit_config(s, model_type="mamba"), "model_type `mamba`"),
    "rope type": (lambda s: edit_config(s, rope_parameters={"rope_type": "yarn"}), "rope type `yarn`"),
    "activation": (lambda s: edit_config(s, hidden_act="gelu"), "activation `gelu`"),
    "layers": (lambda s: edit_config(s, num_hidden_layers="two"), "num_hidden_layers is 'two'"),
    "config": (lambda s: (s / "config.json").write_text("{"), "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_source_is_refused_before_a_byte_is_written(name, source, tmp_path, capfd):
    damage, part = DAMAGE[name]
    damage(source)
    status, error = refusal(capfd, "convert", "hf-to-mcore", source, tmp_path / "out")
    assert status == 2
    assert part in error
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("side", ["mcore", "back"])
def test_verify_finds_one_flipped_bit_and_names_the_tensor(side, source, tmp_path, capfd):
    run(["convert", "hf-to-mcore", str(source), str(tmp_path / "mcore")])
    run(["convert", "mcore-to-hf", str(tmp_path / "mcore"), str(tmp_path / "back")])
    folder = tmp_path / "mcore" / "iter_0000000" if side == "mcore" else tmp_path / "back"
    path = next(p for p in folder.iterdir() if p.suffix in (".distcp", ".safetensors"))
    value = safetensors.torch.load_file(source / "model.safetensors")["model.norm.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    assert content.count(value) == 1
    content[content.index(value)] ^= 1
    path.write_bytes(content)
    for others in ([], [source]):
        status, error = refusal(capfd, "convert", "verify", tmp_path / side, *others)
        assert status == 4
        assert "1 of 21 tensors differ, first `model.norm.weight`" in error


def test_a_target_that_cannot_be_written_is_named(source, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    status, error = refusal(capfd, "convert", "hf-to-mcore", source, tmp_path / "file" / "out")
    assert status == 1
    assert "cannot write" in error


def command(*arguments, limit=None):
    """The command in a process of its own; `limit` bytes a file stand for a disk that fills."""
    code = "import resource, sys; from rlctl.cli.app import run\n"
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" if limit else ""
    code += f"sys.exit(run({[str(a) for a in arguments]!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["hf-to-mcore", "mcore-to-hf"])
def test_a_disk_that_fills_leaves_a_partial_that_resume_completes(direction, source, tmp_path, capfd):
    if direction == "mcore-to-hf":
        assert run(["convert", "hf-to-mcore", str(source), str(tmp_path / "mcore")]) == 0
        source = tmp_path / "mcore"
    process = command("convert", direction, source, tmp_path / "out", limit=200_000)
    _, told = process.communicate(timeout=100)
    assert process.returncode == 3, told
    assert "cannot write" in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()
    status, error = refusal(capfd, "convert", direction, source, tmp_path / "out")
    assert status == 2
    assert "did not end" in error
    assert run(["convert", direction, str(source), str(tmp_path / "out"), "--resume"]) == 0
    assert run(["convert", "verify", str(source), str(tmp_path / "out")]) == 0


@pytest.mark.slow
def test_a_conversion_that_is_killed_goes_on_and_ends_bit_equal(tmp_path):
    """Killed when the journal has a random number of lines; what it did not finish has another name."""
    source = tiny.save("llama", tmp_path / "source", num_hidden_layers=24, hidden_size=256, intermediate_size=1024)
    randomly = random.Random(0)
    resumed = []
    for i in range(2):
        out = tmp_path / f"out{i}"
        journal = tmp_path / f"out{i}.partial" / "journal.jsonl"
        process = command("convert", "hf-to-mcore", source, out, "--verify", "none")
        lines = randomly.randint(1, 120)
        while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < lines):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():  # it ended before the signal
            continue
        going_on = command("convert", "hf-to-mcore", source, out, "--resume", "--json")
        told, errors = going_on.communicate(timeout=100)
        assert going_on.returncode == 0, errors
        resumed.append(json.loads(told)["resumed_tensors"])
        assert run(["convert", "verify", str(source), str(out)]) == 0
        assert not (tmp_path / f"out{i}.partial").exists()
    assert any(n > 0 for n in resumed)


def test_resume_drops_what_is_damaged_and_refuses_a_source_that_changed(source, tmp_path, capfd, monkeypatch):
    from rlctl.checkpoint import torch_dist

    write, left = torch_dist.Writer.write, [9]

    def fail(self, rule, whole):
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(self, rule, whole)

    monkeypatch.setattr(torch_dist.Writer, "write", fail)
    assert run(["convert", "hf-to-mcore", str(source), str(tmp_path / "out")]) == 3
    monkeypatch.undo()
    file = next((tmp_path / "out.partial" / "iter_0000000").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    changed = shutil.copytree(tmp_path / "out.partial", tmp_path / "other.partial") and source / "model.safetensors"
    capfd.readouterr()
    assert run(["convert", "hf-to-mcore", str(source), str(tmp_path / "out"), "--resume", "--json"]) == 0
    assert 0 < json.loads(capfd.readouterr().out)["resumed_tensors"] < 13
    assert run(["convert", "verify", str(source), str(tmp_path / "out")]) == 0
    os.utime(changed)
    status, error = refusal(capfd, "convert", "hf-to-mcore", source, tmp_path / "other", "--resume")
    assert status == 2
    assert "begun with another source" in error
