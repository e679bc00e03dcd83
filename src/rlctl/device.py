"""THE place that knows whether the hardware is CUDA or the host's CPU. Everything else asks here.

On a host without CUDA, Megatron-Core runs unmodified once its "cuda" device becomes the CPU: `install_megatron_host`
wraps tensor constructors and a few torch.cuda entry points (no global mode: a TorchFunctionMode is off inside its own
handler, and so under backward hooks). It returns at once where CUDA is available.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import random
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlctl.lazy import dist, torch

_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for none
_MEGATRON_RANDOM = "megatron.core.tensor_parallel.random"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What this machine has, found without importing torch."""

    gpus: int
    gpu_name: str | None
    cpus: int
    memory_bytes: int


def probe() -> Hardware:
    """This machine's devices, honouring CUDA_VISIBLE_DEVICES and the process's CPU set."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(cards) if visible is None else min(len(cards), len([d for d in visible.split(",") if d.strip()]))
    name = None
    if cards:
        model = [line for line in cards[0].read_text().splitlines() if line.startswith("Model:")]
        name = model[0].split(":", 1)[1].strip() if model else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(memory, memory_limit_bytes() or memory)
    return Hardware(gpus=count, gpu_name=name, cpus=len(os.sched_getaffinity(0)), memory_bytes=memory)


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least memory limit of this process's control groups (version 2 or 1), as containers and Slurm set them.

    Args:
        root: where the control groups are mounted.

    Returns:
        None without a limit.
    """
    limits = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for number, controllers, path in groups:
        if number == "0":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in [top, *(top.joinpath(*path.split("/")[1 : end + 1]) for end in range(1, path.count("/") + 1))]:
            with contextlib.suppress(OSError, ValueError):  # no such file at the root, or `max`
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def is_accelerated() -> bool:
    """Whether computation runs on CUDA."""
    return torch.cuda.is_available()


def current() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if is_accelerated() else torch.device("cpu")


def mesh_type() -> str:
    """The device type of a DeviceMesh."""
    return "cuda" if is_accelerated() else "cpu"


def backend() -> str:
    """The process-group backend."""
    return "nccl" if is_accelerated() else "gloo"


def prepare_process() -> None:
    """Set up this process before Megatron or vLLM is imported: environment, threads, local device, host shim."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the trainer's process
    if probe().gpus == 0:
        # Megatron applies torch.compile at import, and vLLM at its first token.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_accelerated():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    install_megatron_host()


def init_process_group(timeout_seconds: float) -> None:
    """Join the world's process group; every collective is bounded by the timeout."""
    where = current() if is_accelerated() else None
    dist.init_process_group(backend(), timeout=timedelta(seconds=timeout_seconds), device_id=where)


def destroy_process_group() -> None:
    """Leave the process groups; without it gloo may abort at exit."""
    dist.barrier()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, torch and (through torch) the device."""
    random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The random states of this process: Python, numpy, torch, the device, and Megatron's where it is in use."""
    import numpy  # a tenth of a second, which dry runs need not wait for

    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if is_accelerated():
        state["device"] = torch.cuda.get_rng_state()
    if _MEGATRON_RANDOM in sys.modules:
        state["megatron"] = dict(sys.modules[_MEGATRON_RANDOM].get_cuda_rng_tracker().get_states())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set what `rng_state` gave."""
    import numpy  # see `rng_state`

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if is_accelerated():
        torch.cuda.set_rng_state(state["device"])
    if "megatron" in state:
        sys.modules[_MEGATRON_RANDOM].get_cuda_rng_tracker().set_states(state["megatron"])


def synchronize() -> None:
    """Wait for the device, so that a wall-clock phase is what it says."""
    if is_accelerated():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give freed device memory back, for the engine that shares the device."""
    if is_accelerated():
        torch.cuda.empty_cache()


def peak_memory_bytes() -> int:
    """Peak device memory of this process; on a host, its peak resident set."""
    if is_accelerated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- Megatron-Core on a host without CUDA ---------------------------------------------------------------------------

_CONSTRUCTORS: dict[str, str] = {
    "torch": "empty zeros ones full tensor as_tensor arange linspace eye rand randn randint randperm "
    "empty_like zeros_like ones_like full_like rand_like randn_like",
    "Tensor": "new_empty new_zeros new_ones new_full new_tensor",
}
_installed = False


def install_megatron_host() -> None:
    """Make Megatron's "cuda" the CPU, once per process. A no-op where CUDA is available."""
    global _installed  # noqa: PLW0603  patches are per process
    if _installed or is_accelerated():
        return
    _installed = True
    warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
    _patch_tensors()
    _patch_cuda_module()
    _patch_megatron()


def _on_host(value: Any) -> Any:
    """A device argument, with every CUDA device replaced by the CPU."""
    is_cuda = type(value) is int or (isinstance(value, (str, torch.device)) and str(value).startswith("cuda"))
    return torch.device("cpu") if is_cuda else value


def _wrap(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return wrapped


def _patch_tensors() -> None:
    """Constructors, moves, and the type names that Megatron's optimizers compare as strings."""
    # `with torch.device("meta")` (transformers' loading) keeps a table of constructors, built at its first use: the
    # unwrapped ones must be in it, since they are what the wrappers call.
    importlib.import_module("torch.utils._device")._device_constructors()
    module = importlib.import_module("torch")  # the real one: an attribute set on the lazy proxy would stay there
    for owner, names in ((module, _CONSTRUCTORS["torch"]), (torch.Tensor, _CONSTRUCTORS["Tensor"])):
        for name in names.split():
            setattr(owner, name, _wrap(getattr(owner, name)))
    to, type_ = torch.Tensor.to, torch.Tensor.type

    def host_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        return to(self, *map(_on_host, args), **kwargs)

    def host_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return type_(self, *args, **kwargs) if args or kwargs else type_(self).replace("torch.", "torch.cuda.")

    torch.Tensor.to = host_to  # type: ignore[method-assign, assignment]
    torch.Tensor.type = host_type  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_cuda_module() -> None:
    """torch.cuda as one device with one stream and the CPU's random state."""

    class Event(torch.cpu.Event):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    class Stream(torch.cpu.Stream):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            pass

    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_stream, cuda.stream, cuda.Stream, cuda.Event = (
        torch.cpu.current_stream,
        torch.cpu.stream,
        Stream,
        Event,
    )
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _patch_megatron() -> None:
    """What looks behind torch.cuda, and the optimizer that Megatron expects from Transformer Engine."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    modules: Any = (optimizer, distrib_optimizer, megatron_random, token_dispatcher)
    optimizer, distrib_optimizer, megatron_random, token_dispatcher = modules
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(megatron_random.__name__).setLevel(
        logging.ERROR
    )  # "CPU RNG state changed within GPU RNG context"

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = (
        to_cpu  # split sizes must leave torch although the tensor is no CUDA tensor
    )
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    optimizer.Adam = distrib_optimizer.Adam = _fused_adam()


def _fused_adam() -> type:
    """AdamW with the state of Transformer Engine's FusedAdam (the step count lives in the group), for checkpoints."""
    from torch.optim.adamw import adamw

    class FusedAdam(torch.optim.Optimizer):
        def __init__(  # noqa: PLR0913, PLR0917  the signature that Megatron calls
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 0.0,
            adam_w_mode: bool = True,
            capturable: bool = False,
        ) -> None:
            assert adam_w_mode
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["step"] = group["step"] + 1 if "step" in group else 1
                params = [p for p in group["params"] if p.grad is not None]
                states = [self.state[p] for p in params]
                for param, state in zip(params, states, strict=True):
                    if not state:
                        state |= {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                adamw(
                    params,
                    [p.grad for p in params],
                    [s["exp_avg"] for s in states],
                    [s["exp_avg_sq"] for s in states],
                    [],
                    [torch.tensor(group["step"] - 1.0) for _ in params],
                    amsgrad=False,
                    maximize=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )

    return FusedAdam
