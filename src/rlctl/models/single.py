"""Megatron's GPTModel in one process without training: built, filled by Megatron's own loader or otherwise, and run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from rlctl import device
from rlctl.models.base import HfConfig
from rlctl.models.build import build_model
from rlctl.parallel import Layout

_TIMEOUT_SECONDS = 600.0


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone, and Megatron's state for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device.init_process_group(_TIMEOUT_SECONDS)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    device.destroy_process_group()


def load_checkpoint(model: Any, iteration: Path, *, layers_by_name: bool) -> None:
    """Fill a model as Megatron does; a key that the model asks for and the checkpoint lacks is an error.

    Args:
        model: a GPTModel.
        iteration: directory with `.metadata`.
        layers_by_name: whether the checkpoint names each layer, instead of stacking them on an axis.
    """
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": layers_by_name})
    loaded = dist_checkpointing.load(state, str(iteration), strict="raise_unexpected")
    model.load_state_dict({key: loaded[key] for key in state}, strict=True)  # beside them is the common state


def logits(hf: HfConfig, fill: Callable[[Any], None], tokens: torch.Tensor) -> torch.Tensor:
    """Of a float32 model.

    Args:
        hf: config.json.
        fill: sets the weights of the model, which are NaN before.
        tokens: [N] int64, one sequence.

    Returns:
        [N, V] float32.
    """
    model = build_model(hf, Layout(world=1), precision="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    fill(model)
    model.eval().to(device.current())
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device.current())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=len(tokens), max_seqlen_kv=len(tokens)
    )
    with torch.no_grad():
        out = model(
            input_ids=tokens[None].to(device.current()),
            position_ids=torch.arange(len(tokens), device=device.current())[None],
            attention_mask=None,
            packed_seq_params=packed,
        )
    return out.reshape(len(tokens), -1).float().cpu()
