"""Checkpoints appear whole, are found by number, and are not taken when damaged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlctl.checkpoint import train_state
from rlctl.errors import RlctlError


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(folder, step):
    return train_state.save(folder, step=step, local={"x": torch.full((3,), float(step))}, trainer={"seed": 1})


def test_what_is_saved_is_loaded(tmp_path):
    local, trainer = train_state.load(save(tmp_path, 7))
    assert local["x"].tolist() == [7.0] * 3
    assert trainer == {"step": 7, "seed": 1}


def test_the_newest_stays_by_number_not_by_name(tmp_path):
    for step in (999_998, 1_000_001):
        save(tmp_path, step)
    assert [p.name for p in train_state.complete(tmp_path)] == ["step_1000001"]


def test_a_checkpoint_without_manifest_is_none(tmp_path):
    path = save(tmp_path, 1)
    (path / train_state.MANIFEST).unlink()
    (tmp_path / "checkpoints" / "step_000002.partial").mkdir()
    assert train_state.complete(tmp_path) == []


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = save(tmp_path, 1)
    file = path / "policy" / "rank_0.pt"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(RlctlError, match=r"rank_0\.pt"):
        train_state.load(path)
