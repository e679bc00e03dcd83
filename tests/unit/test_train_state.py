"""Checkpoints appear whole, are found by number, are kept as asked, and are not taken when damaged."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlctl.checkpoint import train_state
from rlctl.config import Checkpointing
from rlctl.errors import RlctlError


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(folder, step, reward=0.0, size=3, **options):
    local = {"x": torch.full((size,), float(step))}
    trainer = {"seed": 1, "metrics": {"rollout/reward": reward}}
    return train_state.save(folder, step=step, local=local, trainer=trainer, options=Checkpointing(**options))


def kept(folder):
    return [int(p.name.removeprefix("step_")) for p in train_state.complete(folder)]


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path, 7)
    assert train_state.load(path)["x"].tolist() == [7.0] * 3
    assert train_state.read_trainer(path) == {"step": 7, "seed": 1, "metrics": {"rollout/reward": 0.0}}


def test_the_newest_stays_by_number_not_by_name(tmp_path):
    for step in (999_998, 1_000_001):
        save(tmp_path, step)
    assert kept(tmp_path) == [1_000_001]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep_top_k": 2}, [4, 5]),
        ({"keep_top_k": 2, "metric_name": "rollout/reward"}, [2, 4, 5]),
        ({"keep_top_k": 1, "metric_name": "rollout/reward", "higher_is_better": False}, [1, 5]),
        ({"keep_top_k": 9}, [1, 2, 3, 4, 5]),
    ],
)
def test_the_best_and_the_newest_are_kept(tmp_path, options, expected):
    for step, reward in enumerate((0.1, 0.9, 0.3, 0.7, 0.2), start=1):
        save(tmp_path, step, reward, **options)
    assert kept(tmp_path) == expected


def test_a_checkpoint_whose_step_has_no_such_metric_ranks_last(tmp_path):
    for step, reward in enumerate((0.1, None, 0.05), start=1):
        save(tmp_path, step, reward, keep_top_k=1, metric_name="rollout/reward")
    assert kept(tmp_path) == [1, 3]


def test_a_checkpoint_without_manifest_is_none(tmp_path):
    path = save(tmp_path, 1)
    (path / train_state.MANIFEST).unlink()
    (tmp_path / "checkpoints" / "step_000002.1f.partial").mkdir()
    assert train_state.complete(tmp_path) == []


def test_what_a_dead_run_left_is_removed_by_the_next_save(tmp_path):
    (tmp_path / "checkpoints" / "step_000001.1f.partial" / "policy").mkdir(parents=True)
    save(tmp_path, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = save(tmp_path, 1)
    file = path / "policy" / "rank_0.pt"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(RlctlError, match=r"rank_0\.pt"):
        train_state.load(path)


def test_another_number_of_processes_is_refused(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / train_state.MANIFEST).read_text())
    manifest["files"]["policy/rank_1.pt"] = manifest["files"]["policy/rank_0.pt"]
    (path / train_state.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RlctlError, match="saved by 2 processes, this run has 1"):
        train_state.load(path)


def test_a_full_disk_is_told_with_file_and_bytes_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    """/dev/full stands for the disk: each write to it fails as on a full one."""
    save(tmp_path, 1)
    opened = Path.open

    def on_full_disk(self, *args, **kwargs):
        return opened(Path("/dev/full") if self.name == "rank_0.pt" else self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(RlctlError) as caught:
        patched.setattr(Path, "open", on_full_disk)
        save(tmp_path, 2, size=100_000)
    assert caught.value.exit_status == 3
    assert "rank_0.pt`: No space left on device: it needs 400,000 bytes" in caught.value.message
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert train_state.load(tmp_path / "checkpoints" / "step_000001")["x"].tolist() == [1.0] * 3


def test_a_limit_on_files_is_told_too(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(RlctlError, match="Too many open files"):
            save(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_rewind_drops_what_came_after_the_step(tmp_path):
    lines = [json.dumps({"step": step}) + "\n" for step in (0, 1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "tra')
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").touch()
    train_state.rewind(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_rewind_to_nothing_drops_the_validation_at_the_start_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    train_state.rewind(tmp_path, train_state.NOTHING)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rewind_to_the_start_empties_a_log_that_ends_within_its_first_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    train_state.rewind(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
