"""What runs in Megatron's processes for test_convert.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlctl import plugins
from rlctl.checkpoint.safetensors import Reader
from rlctl.checkpoint.shards import load_whole, shards
from rlctl.models.build import build_model
from rlctl.parallel import Layout


def build(folder: Path, *, vpp: int = 1, **degrees: int) -> list[Any]:
    """GPTModel's chunks on this rank, every weight NaN, so that one that is not loaded shows."""
    layout = Layout(world=dist.get_world_size(), **degrees)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        vpp if vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    config = json.loads((folder / "config.json").read_text())
    virtual = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    stages = range(vpp) if vpp > 1 else [None]
    chunks = [
        build_model(config, layout, precision="float32", vp_stage=stage, config_overrides=virtual) for stage in stages
    ]
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    return chunks


def load(chunks: list[Any], mcore: str, strict: str) -> Any:
    """Megatron's own loader, as Megatron-LM calls it: one state dict for each chunk."""
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(state, str(Path(mcore) / "iter_0000000"), strict=strict)
    states, *rest = loaded if strict == "return_all" else (loaded,)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(states[f"model{i}"], strict=True)
    return rest


def logits(mcore: str, hf: str, tokens: list[int], layouts: list[dict[str, int]]) -> list[torch.Tensor | None]:
    """By layout: [N, V] of the last pipeline stage, whole over tensor-parallel ranks; None on other stages."""
    return [_logits(build(Path(hf), **degrees), mcore, torch.tensor(tokens), degrees) for degrees in layouts]


def _logits(chunks: list[Any], mcore: str, tokens: torch.Tensor, degrees: dict[str, int]) -> torch.Tensor | None:
    load(chunks, mcore, "raise_unexpected")
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=len(tokens), max_seqlen_kv=len(tokens)
    )

    def step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        output = model(
            input_ids=next(iterator)[None],
            position_ids=torch.arange(len(tokens))[None],
            attention_mask=None,
            packed_seq_params=packed,
        )
        return output, lambda found, non_loss_data: found

    count = degrees.get("pp", 1)
    iterators = [iter([tokens] * count) for _ in chunks]
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=count,
            seq_length=len(tokens),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    part = found[0].reshape(len(tokens), -1).contiguous()
    parts = [torch.empty_like(part) for _ in range(degrees.get("tp", 1))]
    dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=1)


def bits(model: Any) -> dict[str, str]:
    return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in model.named_parameters()}


def load_both(hf: str, mcore: str, layouts: list[dict[str, int]], strict: str) -> list[Any]:
    """By layout: whether Megatron gives this rank the bits of the rules; keys not asked for; keys absent."""
    results = []
    for degrees in layouts:
        (by_rules,) = build(Path(hf), **degrees)
        config = json.loads((Path(hf) / "config.json").read_text())
        rules = plugins.load("model", config["model_type"]).rules(config)
        load_whole(shards(by_rules), rules, Reader(Path(hf)).get)
        wanted = bits(by_rules)
        (model,) = build(Path(hf), **degrees)
        # no key left out, extra states included: what an unmodified loader asks for
        not_asked, absent = load([model], mcore, strict)
        results.append((bits(model) == wanted and bool(wanted), sorted(not_asked), sorted(absent)))
    return results


def save_by_megatron(hf: str, target: str, degrees: dict[str, int], metadata: dict[str, Any] | None) -> None:
    """What Megatron-Core itself saves of a model."""
    (model,) = build(Path(hf), **degrees)
    config = json.loads((Path(hf) / "config.json").read_text())
    load_whole(shards(model), plugins.load("model", config["model_type"]).rules(config), Reader(Path(hf)).get)
    if dist.get_rank() == 0:
        Path(target).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), target)


def common_state(mcore: str) -> Any:
    """What Megatron reads first."""
    return dist_checkpointing.load_common_state_dict(str(Path(mcore) / "iter_0000000"))
