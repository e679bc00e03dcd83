"""Model names: what each finds, and what is refused, without torch or network."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlctl.errors import ENVIRONMENT, USAGE, RlctlError
from rlctl.models import resolve as module
from rlctl.models.resolve import catalogue, check_assets, num_parameters, resolve

PUBLISHED = {  # parameters as the hub's model pages count them (a tied output layer once)
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b-instruct": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
}


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def model_folder(folder, *, tokenizer=True, template=True, **overrides):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(catalogue()["qwen3-0.6b"]["config"] | overrides))
    (folder / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"} if template else {}))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_catalogue_model_has_the_published_number_of_parameters(name):
    assert num_parameters(resolve(name).config) == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue())
def test_transformers_builds_each_catalogue_config_with_as_many_parameters(name):
    import torch
    import transformers

    config = resolve(name).config
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert built.num_parameters() == num_parameters(config)


def test_resolving_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from rlctl.models import resolve as r; r.num_parameters(r.resolve('llama-3.1-70b').config);"
        "assert not {'torch', 'transformers', 'megatron', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hub_id_of_the_catalogue_is_found_offline():
    source = resolve("meta-llama/Llama-3.1-70B")
    assert (source.hf_id, source.path, source.chat_template) == ("meta-llama/Llama-3.1-70B", None, False)


def test_a_cached_snapshot_beats_the_catalogue(empty_hub_cache):
    repository = empty_hub_cache / "models--Qwen--Qwen3-0.6B"
    snapshot = model_folder(repository / "snapshots" / "abc", max_position_embeddings=1234)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in ("qwen3-0.6b", "Qwen/Qwen3-0.6B"):
        source = resolve(name)
        assert (source.path, source.config["max_position_embeddings"]) == (snapshot, 1234)
    (snapshot / "model.safetensors").unlink()
    assert resolve("qwen3-0.6b").path is None, "a snapshot without weights is no model"


def test_a_local_directory_is_read(tmp_path):
    folder = model_folder(tmp_path / "mine", rms_norm_eps=0.5)
    source = resolve(str(folder))
    assert (source.path, source.config["rms_norm_eps"], source.chat_template) == (folder, 0.5, True)


def test_overrides_replace_keys_of_the_config():
    assert resolve("qwen3-8b", {"max_position_embeddings": 99}).config["max_position_embeddings"] == 99
    assert catalogue()["qwen3-8b"]["config"]["max_position_embeddings"] == 40960


@pytest.mark.parametrize(
    ("name", "status", "message", "hint"),
    [
        ("lama-3.1-70b", USAGE, "unknown model `lama-3.1-70b`", "`llama-3.1-70b`"),
        ("zzzz", USAGE, "unknown model `zzzz`", "known short names: llama-3.1-8b"),
        ("./nowhere", USAGE, "no model directory `./nowhere`", "check the path"),
        ("Qwen/Qwen3-8", ENVIRONMENT, "not in the local Hugging Face cache", "`Qwen/Qwen3-8B`"),
        ("nobody/nothing", ENVIRONMENT, "not in the local Hugging Face cache", "hf download nobody/nothing"),
    ],
)
def test_an_unknown_name_is_refused_with_the_mend(name, status, message, hint):
    with pytest.raises(RlctlError) as caught:
        resolve(name)
    assert caught.value.exit_status == status
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", '{"model_type": "gpt2"}', "has model_type `gpt2`, which is not supported"),
        ("config.json", '{"model_type": "llama", "hidden_size": 8}', "lacks intermediate_size"),
        ("model.safetensors", None, "no *.safetensors file"),
    ],
)
def test_a_broken_directory_is_refused(tmp_path, file, content, message):
    folder = model_folder(tmp_path / "mine")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(RlctlError) as caught:
        resolve(str(folder))
    assert caught.value.exit_status == USAGE
    assert message in caught.value.message


def test_a_base_model_without_chat_template_is_refused_unless_the_recipe_has_one():
    source = resolve("llama-3.1-70b")
    with pytest.raises(RlctlError, match="has no chat template") as caught:
        check_assets(source, tokenizer_name=None, chat_template=None)
    assert caught.value.exit_status == USAGE
    assert "policy.tokenizer.chat_template" in caught.value.hint
    check_assets(source, tokenizer_name=None, chat_template="{{ messages }}")
    check_assets(source, tokenizer_name="llama-3.1-70b-instruct", chat_template=None)


def test_a_directory_without_tokenizer_is_refused_unless_another_is_named(tmp_path):
    source = resolve(str(model_folder(tmp_path / "bare", tokenizer=False)))
    with pytest.raises(RlctlError, match="has no tokenizer"):
        check_assets(source, tokenizer_name=None, chat_template="{{ messages }}")
    with pytest.raises(RlctlError, match="no tokenizer `./nowhere`"):
        check_assets(source, tokenizer_name="./nowhere", chat_template=None)
    check_assets(source, tokenizer_name=str(model_folder(tmp_path / "whole")), chat_template=None)
    untemplated = model_folder(tmp_path / "untemplated", template=False)
    with pytest.raises(RlctlError, match="has no chat template"):
        check_assets(source, tokenizer_name=str(untemplated), chat_template=None)


def test_every_entry_names_its_origin_and_template():
    for name, entry in catalogue().items():
        assert entry["hf"] is not None or entry["made"] == "tiny", name
        assert isinstance(entry["chat_template"], bool), name
    assert module.resolve("smollm2-135m").made == "gguf"


def test_a_rope_override_without_effect_is_refused(tmp_path):
    """A config of transformers 5 has rope_parameters, which win over the older keys."""
    from tests import tiny

    folder = tiny.save("llama", tmp_path / "m")
    with pytest.raises(RlctlError, match="rope_theta has no effect"):
        resolve(str(folder), {"rope_theta": 5e5})
    changed = resolve(str(folder), {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert changed.config["rope_parameters"]["rope_theta"] == 5e5
