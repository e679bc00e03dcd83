"""What runs in Megatron's processes for test_convert.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from rlctl import plugins
from rlctl.checkpoint.safetensors import Reader
from rlctl.checkpoint.shards import load_whole, shards
from rlctl.models.build import build_model
from rlctl.parallel import Layout


def build(folder: Path, **degrees: int) -> Any:
    """GPTModel with every weight NaN, so that one that is not loaded shows."""
    layout = Layout(world=dist.get_world_size(), **degrees)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    config = json.loads((folder / "config.json").read_text())
    model = build_model(config, layout, precision="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def bits(model: Any) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in model.named_parameters()}


def load_both(hf: str, mcore: str, layouts: list[dict[str, int]], strict: str) -> list[Any]:
    """By layout: whether Megatron gives this rank the bits of the rules; keys not asked for; keys absent."""
    results = []
    for degrees in layouts:
        by_rules = build(Path(hf), **degrees)
        config = json.loads((Path(hf) / "config.json").read_text())
        rules = plugins.load("model", config["model_type"]).rules(config)
        load_whole(shards(by_rules), rules, Reader(Path(hf)).get)
        wanted = bits(by_rules)
        model = build(Path(hf), **degrees)
        # no key left out, extra states included: what an unmodified loader asks for
        loaded, not_asked, absent = dist_checkpointing.load(
            model.sharded_state_dict(), str(Path(mcore) / "iter_0000000"), strict=strict
        )
        model.load_state_dict(loaded, strict=False)
        results.append((bits(model) == wanted and bool(wanted), sorted(not_asked), sorted(absent)))
    return results


def save_by_megatron(hf: str, target: str, degrees: dict[str, int], metadata: dict[str, Any] | None) -> None:
    """What Megatron-Core itself saves of a model."""
    model = build(Path(hf), **degrees)
    config = json.loads((Path(hf) / "config.json").read_text())
    load_whole(shards(model), plugins.load("model", config["model_type"]).rules(config), Reader(Path(hf)).get)
    if dist.get_rank() == 0:
        Path(target).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), target)
