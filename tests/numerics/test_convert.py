"""Converting keeps every bit, both ways, and Megatron-Core itself reads and writes the same checkpoints."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rlctl.checkpoint import logits, safetensors, torch_dist
from rlctl.checkpoint.convert import Conversion, Options
from rlctl.checkpoint.verify import tensors_of
from rlctl.checkpoint.views import open_view
from rlctl.errors import RlctlError
from rlctl.models.materialize import materialize
from rlctl.models.resolve import num_parameters, resolve
from tests import distributed, tiny

CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "vocab_size": 251}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"num_hidden_layers": 3}),
    ("qwen3_moe", {"tie_word_embeddings": True}),
    ("mistral", {"vocab_size": 251}),
    ("mixtral", {}),
]


def stored(folder):
    """Bytes, dtype and shape by name, read by the safetensors library."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (tensor.dtype, tuple(tensor.shape), raw)
    return found


def convert(source, target, to, **options):
    return Conversion(source, target, Options(to=to, **options)).run()


def odd_bits(folder):
    """Write -0.0, infinities, subnormals and NaNs with a payload into every tensor, beside others."""
    import safetensors.torch

    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    special = {torch.float32: [-(2**31), 0x7F800001, -1, 1, 0x7F800000], torch.bfloat16: [-(2**15), 0x7F81, -1, 1]}
    for tensor in tensors.values():
        bits = special[tensor.dtype]
        whole = torch.int32 if tensor.dtype == torch.float32 else torch.int16
        tensor.view(whole).reshape(-1)[: len(bits)] = torch.tensor(bits, dtype=torch.int64).to(whole)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "overrides"), CASES, ids=str)
def test_there_and_back_every_bit_is_the_same(kind, overrides, dtype, tmp_path):
    """Also -0.0 and NaN payloads; config.json byte for byte; sources in many files."""
    source = tmp_path / "source"
    tiny.model(kind, **overrides).to(dtype).save_pretrained(source)
    odd_bits(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text("{ }\n")
    there = convert(source, tmp_path / "mcore", "mcore")
    back = convert(tmp_path / "mcore", tmp_path / "back", "hf", shard_bytes=50_000)
    again = convert(tmp_path / "back", tmp_path / "mcore2", "mcore")
    assert stored(source) == stored(tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert there.fingerprint == back.fingerprint == again.fingerprint
    assert there.verified
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_are_stacked_on_disk_are_the_same_model_and_come_back_stacked(kind, tmp_path):
    """Both layouts that transformers writes of one model convert to the same tensors."""
    model = tiny.model(kind)
    for name, original in (("apart", True), ("stacked", False)):
        model.save_pretrained(tmp_path / name, save_original_format=original)
        convert(tmp_path / name, tmp_path / f"{name}-mcore", "mcore")
        convert(tmp_path / f"{name}-mcore", tmp_path / f"{name}-back", "hf", shard_bytes=50_000)
        assert stored(tmp_path / name) == stored(tmp_path / f"{name}-back")
    assert stored(tmp_path / "apart").keys() != stored(tmp_path / "stacked").keys()
    views = [open_view(tmp_path / name) for name in ("apart", "stacked", "apart-mcore", "stacked-mcore")]
    first, *others = [tensors_of(view) for view in views]
    assert all(other == first for other in others)


def test_transformers_loads_what_came_back(tmp_path):
    import transformers

    source = tiny.save("llama", tmp_path / "source")
    convert(source, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf", shard_bytes=50_000)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def test_a_cast_rounds_as_torch_does_and_is_reported(tmp_path):
    source = tiny.save("qwen2", tmp_path / "source")
    report = convert(source, tmp_path / "mcore", "mcore", dtype="bfloat16")
    view = open_view(tmp_path / "mcore")
    before = safetensors.Reader(source)
    worst = 0.0
    for rule in view.rules:
        for name, tensor in zip(rule.sources, view.read(rule), strict=True):
            assert torch.equal(tensor, before.get(name).bfloat16())
            worst = max(worst, float((before.get(name).double() - tensor.double()).abs().max()))
    assert report.casts == len(before.names())
    assert report.cast_error == worst


def test_a_tied_head_that_repeats_the_embedding_is_accepted_and_written_back(tmp_path):
    source = tiny.save("llama", tmp_path / "source", tie_word_embeddings=True)
    add(source, "lm_head.weight", lambda t: t["model.embed_tokens.weight"].clone())
    convert(source, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    assert "lm_head.weight" in stored(source)
    assert stored(source) == stored(tmp_path / "back")


def test_a_tied_head_that_differs_is_refused(tmp_path):
    source = tiny.save("llama", tmp_path / "source", tie_word_embeddings=True)
    add(source, "lm_head.weight", lambda t: t["model.embed_tokens.weight"] + 1)
    with pytest.raises(RlctlError, match="differs from `model.embed_tokens.weight`"):
        convert(source, tmp_path / "mcore", "mcore")
    assert not (tmp_path / "mcore").exists()


@pytest.mark.slow
def test_a_converted_directory_is_a_model_and_is_converted_back_once(tmp_path, monkeypatch):
    """What `--model DST` reads: the Hugging Face view, in the cache."""
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    source = tiny.save("qwen3", tmp_path / "source")
    convert(source, tmp_path / "mcore", "mcore")
    model = resolve(str(tmp_path / "mcore"))
    assert model.config == json.loads((source / "config.json").read_text())
    folder = materialize(model)
    assert stored(folder) == stored(source)
    written = folder.stat().st_mtime_ns
    assert materialize(model) == folder
    assert folder.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_converted_directory_that_changed_is_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    convert(tiny.save("qwen3", tmp_path / "source"), tmp_path / "mcore", "mcore")
    flip(next((tmp_path / "mcore" / torch_dist.ITERATION).glob("*.distcp")), open_view(tmp_path / "source"))
    with pytest.raises(RlctlError, match=r"first `model\.norm\.weight`") as caught:
        materialize(resolve(str(tmp_path / "mcore")))
    assert caught.value.exit_status == 4


def flip(path, view):
    """One bit of the final norm."""
    content, value = bytearray(path.read_bytes()), view.reader.get("model.norm.weight").numpy().tobytes()
    assert content.count(value) == 1
    content[content.index(value)] ^= 1
    path.write_bytes(content)


def test_rotary_buffers_are_left_out_and_listed(tmp_path):
    source = tiny.save("llama", tmp_path / "source")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    add(source, name, lambda t: torch.ones(8))
    report = convert(source, tmp_path / "mcore", "mcore")
    assert any(name in line for line in report.plan.special)
    assert json.loads((tmp_path / "mcore" / "rlctl_manifest.json").read_text())["dropped"] == [name]


def add(folder, name, make):
    import safetensors.torch

    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors[name] = make(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.slow
def test_damaged_inputs_are_refused_or_right():
    """60 of the fuzzer's: never a wrong result, never a traceback."""
    path = Path(__file__).parents[2] / "scripts" / "benchmarks" / "convert_fuzz.py"
    spec = importlib.util.spec_from_file_location("convert_fuzz", path)
    fuzzer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzzer)
    outcomes, failed = fuzzer.run(60, seed=7)
    assert failed == []
    assert sum(outcomes.values()) == 60
    assert sum(n for (_, outcome), n in outcomes.items() if outcome == "refused") > 20


@pytest.mark.slow
def test_converting_imports_neither_transformer_engine_nor_triton_nor_apex(tmp_path):
    """Both ways, verified, in a process of its own; nor Megatron, nor transformers."""
    source = tiny.save("llama", tmp_path / "source")
    code = f"""
import sys
from rlctl.cli.app import run
assert run(["convert", "hf-to-mcore", {str(source)!r}, {str(tmp_path / "mcore")!r}]) == 0
assert run(["convert", "mcore-to-hf", {str(tmp_path / "mcore")!r}, {str(tmp_path / "back")!r}]) == 0
wrong = {{"transformer_engine", "triton", "apex", "flash_attn", "megatron", "transformers"}}
found = sorted(m for m in sys.modules if m.split(".")[0] in wrong)
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Megatron itself ------------------------------------------------------------------------------------------------


EXPERTS = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(source, its conversion) of a dense, a tied and a routed model; vocabularies that need padding at TP2."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    cases = {
        "llama": {"vocab_size": 251, "num_hidden_layers": 4}, "qwen2": {"tie_word_embeddings": True}, "qwen3_moe": {},
        "mixtral": {},
    }  # fmt: skip
    for kind, overrides in cases.items():
        source = tiny.save(kind, root / kind, **overrides)
        convert(source, root / f"{kind}-mcore", "mcore")
        made[kind] = (str(source), str(root / f"{kind}-mcore"))
    return made


@pytest.mark.slow
def test_megatron_loads_the_checkpoint_at_any_layout_with_the_bits_of_the_rules(pairs):
    """Every key that GPTModel asks for is there, extra states included."""
    layouts = [{}, {"tp": 2}, {"pp": 2}, {"ep": 2}]
    for kind, (source, mcore) in pairs.items():
        chosen = [layouts[1], layouts[3]] if kind in EXPERTS else layouts[:3]
        for results in distributed.run(
            "tests.numerics.convert_steps:load_both", 2, source, mcore, chosen, "return_all"
        ):  # fmt: skip
            for degrees, (same, not_asked, absent) in zip(chosen, results, strict=True):
                assert same, (kind, degrees)
                assert not absent, (kind, degrees)
                # an attention of Transformer Engine asks for these; the plain torch one does not
                assert all("core_attention._extra_state" in key for key in not_asked), (kind, degrees)


LOGITS = {  # (kind, processes) -> layouts
    ("llama", 2): [dict(tp=2), dict(pp=2), dict(pp=2, vpp=2)],
    ("qwen2", 2): [dict(tp=2), dict(pp=2)],
    ("qwen3_moe", 2): [dict(ep=2)],
    ("mixtral", 2): [dict(ep=2)],
    ("llama", 4): [dict(tp=2, pp=2)],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", LOGITS, ids=str)
def test_megatron_loads_the_checkpoint_and_has_the_logits_of_transformers(case, pairs):
    """`dist_checkpointing.load` into GPTModel, then Megatron's own schedule, in float32; vocabulary padded or not."""
    import transformers

    (kind, world), (source, mcore) = case, pairs[case[0]]
    tokens = torch.randint(251, (24,), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    ranks = distributed.run("tests.numerics.convert_steps:logits", world, mcore, source, tokens.tolist(), LOGITS[case])
    for i, degrees in enumerate(LOGITS[case]):
        found = [one[i] for one in ranks if one[i] is not None]
        assert len(found) == world // degrees.get("pp", 1), degrees
        for got in found:
            error = (got[:, : wanted.shape[1]] - wanted).abs().max() / wanted.abs().max()
            assert error < 1e-5, (kind, degrees, float(error))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_run_config_and_arguments_say_the_model_that_megatron_builds(kind, tmp_path):
    """Every key is a field of Megatron's config class or of the provider, with the value that loading is tested with.

    The provider's own fields: megatron/bridge/models/gpt_provider.py, `GPTModelProvider`.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.transformer import TransformerConfig

    from rlctl.models.build import transformer_config
    from rlctl.parallel import Layout

    own = {
        "_target_", "position_embedding_type", "rotary_base", "rotary_percent", "rope_scaling", "rope_scaling_factor",
        "seq_len_interpolation_factor", "seq_length", "share_embeddings_and_output_weights", "vocab_size",
        "should_pad_vocab",
    }  # fmt: skip
    source = tiny.save(kind, tmp_path / "source")
    convert(source, tmp_path / "mcore", "mcore")
    iteration = tmp_path / "mcore" / torch_dist.ITERATION
    model = yaml.safe_load((iteration / "run_config.yaml").read_text())["model"]
    arguments = vars(dist_checkpointing.load_common_state_dict(str(iteration))["args"])
    config = json.loads((source / "config.json").read_text())
    built = transformer_config(config, Layout(world=1), precision="float32", activation_checkpointing=False)
    assert {f.name for f in dataclasses.fields(TransformerConfig)} >= model.keys() - own
    for name in model.keys() - own - {"activation_func", "params_dtype"}:
        assert model[name] == getattr(built, name), name
    assert model["activation_func"]["_target_"] == "torch.nn.functional.silu"
    assert model["params_dtype"]["_target_"] == "torch.float32"
    assert model["vocab_size"] == config["vocab_size"]
    for name, field in {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}.items():
        assert arguments[name] == getattr(built, field)
    for name in arguments.keys() & vars(built).keys():
        assert arguments[name] == getattr(built, name), name
    assert arguments["untie_embeddings_and_output_weights"]
    assert arguments["no_save_optim"]
    assert arguments["no_save_rng"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_what_megatron_saved_exports_with_the_bits_it_was_given(pairs, kind, tmp_path):
    """Layers on an axis at TP2 x PP2 or EP2, and by name at PP2 or EP2; padding of the vocabulary is undone."""
    source = pairs[kind][0]
    by_name = {"non_homogeneous_layers": True}
    saves = [(4, {"tp": 2, "pp": 2}, None), (2, {"pp": 2}, by_name)]
    if kind == "qwen3_moe":
        saves = [(2, {"ep": 2}, None), (2, {"ep": 2}, by_name)]
    for i, (world, degrees, metadata) in enumerate(saves):
        saved = tmp_path / f"saved{i}"
        distributed.run("tests.numerics.convert_steps:save_by_megatron", world, source, str(saved), degrees, metadata)
        convert(saved, tmp_path / f"back{i}", "hf", like=type(tmp_path)(source))
        assert stored(type(tmp_path)(source)) == stored(tmp_path / f"back{i}")


@pytest.mark.slow
def test_logits_of_both_models_are_compared_whole_or_in_their_first_layers(tmp_path):
    """A wrong model is found with any number of layers; the check says how many it ran."""
    source, other = (tiny.save("mixtral", tmp_path / str(seed), seed=seed) for seed in range(2))
    report = convert(source, tmp_path / "mcore", "mcore", verify="logits", dtype="bfloat16")
    assert (report.logits.layers, report.logits.of_layers) == (2, 2)
    assert report.logits.error < 1e-5
    convert(other, tmp_path / "other", "mcore")
    enough_for_one = int(1.5 * 4 * 1.4 * num_parameters(tiny.config("mixtral", num_hidden_layers=1).to_dict()))
    with pytest.raises(RlctlError, match="logits of 1 of 2 layers differ") as caught:
        logits.check(source, tmp_path / "other", dtype=None, available=enough_for_one)
    assert caught.value.exit_status == 4


def test_a_record_that_is_damaged_or_missing_is_named(tmp_path):
    source = tiny.save("llama", tmp_path / "source")
    convert(source, tmp_path / "mcore", "mcore")
    path = next((tmp_path / "mcore" / torch_dist.ITERATION).glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(RlctlError, match=r"__0_0\.distcp.*at least"):
        open_view(tmp_path / "mcore")
