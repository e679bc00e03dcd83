"""One rank of a large job, built alone: torch's `fake` process group at the true size, parameters on the meta device.

Megatron itself judges the layout, and its module has the true local shapes, without memory or other processes.
It must be the first user of torch in its process (`prepare`), and the process must not see a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _device

from rlctl import device
from rlctl.models.base import HfConfig
from rlctl.parallel import Layout


def prepare() -> None:
    """Set up this process: Megatron's device is the host, and torch.device("meta") still reaches its constructors."""
    _device._device_constructors()  # cached by identity: must be computed before device.py wraps the constructors
    device.prepare_process()
    warnings.filterwarnings("ignore")


@contextlib.contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """Be a rank of a job that does not exist.

    Yields:
        The rank's coordinates: pipeline, tensor, expert, expert-tensor.
    """
    # Megatron touches CUDA at import: only after `prepare`.
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        yield (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_on_meta(hf: HfConfig, layout: Layout, *, precision: str) -> Any:
    """The model of the rank that this process is (`rank_of`), without memory."""
    from rlctl.models.build import build_model  # imports Megatron: only after `prepare`

    with torch.device("meta"):
        # Megatron's explicit device would beat the context; with CPU initialisation it names none
        model = build_model(hf, layout, precision=precision, config_overrides={"use_cpu_initialization": True})
    assert all(p.is_meta for p in model.parameters())
    return model
