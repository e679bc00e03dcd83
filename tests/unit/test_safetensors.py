"""Model directories: read lazily, written whole or not at all."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from rlctl.checkpoint.safetensors import INDEX, Reader, write_model
from rlctl.errors import RlctlError
from tests import tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("model") / "m")


def buckets(reader):
    names = reader.names()
    for i in range(0, len(names), 3):
        yield [(name, reader.get(name)) for name in names[i : i + 3]]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000, 1])
def test_a_written_model_loads_in_transformers_with_the_same_bits(source, tmp_path, shard_bytes):
    import transformers

    write_model(tmp_path / "out", buckets(Reader(source)), source=source, shard_bytes=shard_bytes)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def test_the_index_names_exactly_what_the_files_hold(source, tmp_path):
    write_model(tmp_path / "out", buckets(Reader(source)), source=source, shard_bytes=50_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = {f.name for f in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert set(index["weight_map"]) == set(Reader(source).names())
    assert index["metadata"]["total_size"] == sum(Reader(source).get(n).nbytes for n in Reader(source).names())


def test_a_failure_leaves_no_directory(source, tmp_path):
    def broken():
        yield next(buckets(Reader(source)))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_model(tmp_path / "out", broken(), source=source)
    assert not (tmp_path / "out").exists()


def test_a_file_cut_short_is_refused_by_name(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RlctlError, match=r"model\.safetensors"):
        Reader(copy)


def test_a_file_that_the_index_names_must_exist(source, tmp_path):
    write_model(tmp_path / "out", buckets(Reader(source)), source=source, shard_bytes=50_000)
    next((tmp_path / "out").glob("*.safetensors")).unlink()
    with pytest.raises(RlctlError, match="is missing"):
        Reader(tmp_path / "out")


def test_a_tensor_that_is_not_there_is_named(source):
    with pytest.raises(RlctlError, match="no tensor `nothing`"):
        Reader(source).get("nothing")
