"""Damage models at random and convert them: `convert_fuzz.py [COUNT] [SEED]`; one line a kind of damage.

1. Sources are tiny models of real config classes: Hugging Face files with and without an index, and Megatron's.
2. A conversion must be refused by RlctlError, or be right. Right is: every tensor has the bits that the safetensors
   library reads from the damaged source (of a Megatron checkpoint: the bits of the original, which its manifest knows),
   config.json is the source's, and transformers, if it takes that, builds a model of exactly these names and shapes.
3. Anything else is counted as wrong or as a traceback, printed, and makes the exit status 1.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from rlctl.checkpoint.convert import Conversion, Options
from rlctl.errors import RlctlError

ODD_VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 10**9, 10**30, 1.5, -0.5, 1e400, float("nan"), "", "x", "4", "silu",
    "llama3", [], [1], {}, {"rope_type": "linear"}, {"rope_type": "llama3", "factor": "x"}, {"rope_theta": "a"},
    {"type": 3},
]  # fmt: skip
Stored = dict[str, tuple[Any, tuple[int, ...], bytes]]


def stored(folder: Path) -> Stored:
    """Dtype, shape and bytes by name, read by the safetensors library."""
    found: Stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (tensor.dtype, tuple(tensor.shape), raw)
    return found


# --- sources --------------------------------------------------------------------------------------------------------


def make_sources(root: Path) -> list[tuple[Path, Path]]:
    """(source, the undamaged Hugging Face model that it is)."""
    fields: dict[str, Any] = dict(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    configs = {
        "llama": transformers.LlamaConfig(**fields, tie_word_embeddings=False),
        "qwen3": transformers.Qwen3Config(**fields, tie_word_embeddings=True),
        "mixtral": transformers.MixtralConfig(**fields, num_local_experts=2, num_experts_per_tok=1),
    }
    sources = []
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for kind, limit in (("one", "1GB"), ("many", "10KB")):
            folder = root / f"{name}-{kind}"
            model.save_pretrained(folder, max_shard_size=limit)
            sources.append((folder, folder))
        Conversion(folder, root / f"{name}-mcore", Options(to="mcore")).run()
        sources.append((root / f"{name}-mcore", folder))
    return sources


# --- damage ---------------------------------------------------------------------------------------------------------


def flip_bits(folder: Path, randomly: random.Random) -> None:
    path = _any_file(folder, randomly)
    content = bytearray(path.read_bytes())
    for _ in range(randomly.choice([1, 1, 3, 40])):
        content[randomly.randrange(len(content))] ^= 1 << randomly.randrange(8)
    path.write_bytes(content)


def overwrite(folder: Path, randomly: random.Random) -> None:
    path = _any_file(folder, randomly)
    content = bytearray(path.read_bytes())
    start = randomly.randrange(len(content))
    end = min(len(content), start + randomly.choice([1, 8, 100, 4096]))
    content[start:end] = randomly.randbytes(end - start) if randomly.random() < 0.5 else bytes(end - start)
    path.write_bytes(content)


def cut_or_grow(folder: Path, randomly: random.Random) -> None:
    path = _any_file(folder, randomly)
    content = path.read_bytes()
    grown = content + randomly.randbytes(randomly.choice([1, 8, 1000]))
    path.write_bytes(randomly.choice([content[: randomly.randrange(len(content))], grown]))


def remove_or_swap(folder: Path, randomly: random.Random) -> None:
    path, other = _any_file(folder, randomly), _any_file(folder, randomly)
    if randomly.random() < 0.5:
        path.unlink()
    else:
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)


def edit_header(folder: Path, randomly: random.Random) -> None:
    """One field of one tensor of a safetensors header, the rest of the file as it is."""
    paths = sorted(folder.rglob("*.safetensors"))
    if not paths:
        return flip_bits(folder, randomly)
    path = randomly.choice(paths)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = randomly.choice([n for n in header if n != "__metadata__"])
    field = randomly.choice(["dtype", "shape", "data_offsets", "name", "gone"])
    if field == "dtype":
        header[name]["dtype"] = randomly.choice(["F16", "BF16", "I32", "F64", "U8", "F8_E4M3", "X", None, 3])
    elif field in ("shape", "data_offsets"):
        values = header[name][field]
        values[randomly.randrange(len(values))] = randomly.choice([0, 1, -1, 10**12, "3", 2.5, None, values[0] * 2])
    elif field == "name":
        header[randomly.choice([*header, "other", name + "x"])] = header.pop(name)
    else:
        del header[name]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return None


def edit_index(folder: Path, randomly: random.Random) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return flip_bits(folder, randomly)
    index = json.loads(path.read_text())
    names = index["weight_map"]
    name = randomly.choice(list(names))
    odd = ["", "..", "../x", "nothing.safetensors", 3, None, *names.values()]
    how = randomly.randrange(4)
    if how == 0:
        names[name] = randomly.choice(odd)
    elif how == 1:
        del names[name]
    elif how == 2:
        names["other"] = randomly.choice(odd)
    else:
        index["weight_map"] = randomly.choice([[], {}, None, "x"])
    path.write_text(json.dumps(index))
    return None


def edit_config(folder: Path, randomly: random.Random) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(randomly.choice([1, 1, 2])):
        name = randomly.choice([*config, "rope_scaling", "attention_bias", "mlp_bias", "use_sliding_window"])
        if randomly.random() < 0.15:
            config.pop(name, None)
        else:
            config[name] = randomly.choice(ODD_VALUES)
    path.write_text(json.dumps(config))


def _any_file(folder: Path, randomly: random.Random) -> Path:
    return randomly.choice([f for f in sorted(folder.rglob("*")) if f.is_file() and f.stat().st_size])


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    flip_bits, overwrite, cut_or_grow, remove_or_swap, edit_header, edit_index, edit_config
]  # fmt: skip


# --- judgement ------------------------------------------------------------------------------------------------------


def judge(source: Path, original: Path, work: Path, options: dict[str, Any]) -> str:
    """`refused`, `right`, or what is wrong."""
    mcore = (source / "latest_checkpointed_iteration.txt").is_file() or (source / ".metadata").is_file()
    try:
        Conversion(source, work / "out", Options(to="hf" if mcore else "mcore", **options)).run()
    except RlctlError as error:
        return "refused" if error.hint and not (work / "out").exists() else "wrong: refused, but something is there"
    if not mcore:
        Conversion(work / "out", work / "back", Options(to="hf", **options)).run()
    back = work / ("out" if mcore else "back")
    wanted = stored(original if mcore else source)
    wanted = {name: value for name, value in wanted.items() if not name.endswith("rotary_emb.inv_freq")}
    if stored(back) != wanted:
        return "wrong: other tensors"
    if (back / "config.json").read_bytes() != ((original if mcore else source) / "config.json").read_bytes():
        return "wrong: another config"
    return "right" if _transformers_agrees(back, wanted) else "wrong: transformers builds another model"


def _transformers_agrees(folder: Path, wanted: Stored) -> bool:
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # a field that no weight depends on, e.g. `attention_dropout: {}`; it is in the source too
        return True
    count = sum(p.numel() for p in model.parameters())
    head = "lm_head.weight"
    stated = sum(_numel(s) for n, (_, s, _) in wanted.items() if not (config.tie_word_embeddings and n == head))
    names = {n: tuple(p.shape) for n, p in model.named_parameters() if ".experts" not in n and ".mlp.gate" not in n}
    return count == stated and all(wanted[n][1] == shape for n, shape in names.items())


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def run(count: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """(how often each (damage, outcome) was, the cases that failed)."""
    outcomes: Counter[tuple[str, str]] = Counter()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder))
        for i in range(count):
            randomly = random.Random(f"{seed} {i}")
            damage = DAMAGE[i % len(DAMAGE)]
            source, original = randomly.choice(sources)
            options = {"verify": randomly.choice(["none", "tensors"]), "workers": randomly.choice([1, 3])}
            with tempfile.TemporaryDirectory(dir=folder) as work:
                copy = Path(work) / "source"
                shutil.copytree(source, copy)
                damage(copy, randomly)
                try:
                    outcome = judge(copy, original, Path(work), options)
                except Exception:
                    outcome = "traceback"
                    failed.append(f"{i} {damage.__name__} {source.name}: {traceback.format_exc()}")
            if outcome.startswith("wrong"):
                failed.append(f"{i} {damage.__name__} {source.name}: {outcome}")
            outcomes[damage.__name__, outcome.partition(":")[0]] += 1
    return outcomes, failed


def main() -> int:
    """Print the table."""
    count, seed = (int(a) for a in [*sys.argv[1:], "1000", "0"][:2]) if len(sys.argv) != 2 else (int(sys.argv[1]), 0)
    outcomes, failed = run(count, seed)
    columns = ("refused", "right", "wrong", "traceback")
    print(f"| damage | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for damage in DAMAGE:
        print(f"| {damage.__name__} | {' | '.join(str(outcomes[damage.__name__, c]) for c in columns)} |")
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
