"""Generation with vLLM, in the trainer's own processes.

1. Each rank holds one vLLM worker. A replica is `tensor_parallel_size` consecutive ranks, whatever the trainer's
   layout; its ranks get the same requests in the same calls, step together, and give the same completions.
2. Weights come as whole Hugging Face tensors through vLLM's own reload; each worker keeps its part.
3. Logprobs are of the distribution that was drawn from, after temperature and filters.

What vLLM would change behind the trainer's back (random states, environment, thread settings, the default process
group) is put back. It knows nothing about text.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlctl import device
from rlctl.config import Recipe
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.generation import requests as rules
from rlctl.generation import weights
from rlctl.generation.base import WeightSource
from rlctl.lazy import dist, torch
from rlctl.models.base import head_dim
from rlctl.parallel import num_experts
from rlctl.types import Completion, Request


@dataclass(kw_only=True)
class Config:
    """`policy.generation.vllm_cfg.*`."""

    tensor_parallel_size: int = 1
    """Ranks of a replica."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU's memory for weights and key-value cache, besides what training holds."""
    max_model_len: int | None = None
    """Tokens of prompt and completion; derived: policy.max_total_sequence_length."""
    enforce_eager: bool | None = None
    """No compilation, no graphs. Derived: on a host without GPU, where compiling gains nothing."""
    kv_cache_bytes: int = 1 << 29
    """Key-value cache of each rank on a host without GPU."""


class Engine:
    """One rank's part of a replica."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        """Start vLLM and load the model.

        Args:
            recipe: precision, config overrides, lengths and `policy.generation` are read.
            model_dir: Hugging Face directory.

        Raises:
            RlctlError: exit status 3: vLLM is absent, processes do not divide, or it cannot start with this memory.
        """
        options = recipe.policy.generation.vllm_cfg or Config()
        self.ranks_per_replica = options.tensor_parallel_size
        _check_replicas(self.ranks_per_replica)
        config = rules.hf_config(recipe, model_dir)
        self._expected = weights.expected(config)
        self._vocabulary = config["vocab_size"]
        self._max_length = options.max_model_len or recipe.policy.max_total_sequence_length
        self._ends = rules.end_tokens(recipe, model_dir)
        self._joined_world = dist.is_initialized()
        self._version = 0
        self._running: dict[int, Request] = {}
        self._asleep: set[str] = set()
        arguments = _arguments(recipe, options, model_dir) | recipe.policy.generation.vllm_kwargs
        with _undisturbed():
            self._vllm = _import_vllm()
            _check_host_limits(config)
            self._engine = _start(self._vllm, arguments)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        rules.check(requests, unfinished=list(self._running), vocabulary=self._vocabulary, max_length=self._max_length)
        for request in requests:
            prompt = {"prompt_token_ids": list(request.prompt_tokens)}
            self._engine.add_request(str(request.id), prompt, self._sampling_params(request))
            self._running[request.id] = request

    def poll(self) -> list[Completion]:
        """Step until some requests end."""
        done: list[Completion] = []
        with _undisturbed():
            while self._running and not done:
                ended = [output for output in self._engine.step() if int(output.request_id) in self._running]
                done = [self._completion(output) for output in ended if output.finished]
        return done

    def abort(self, ids: Sequence[int]) -> None:
        """Drop requests; they are not reported."""
        dropped = [i for i in ids if self._running.pop(i, None) is not None]
        self._engine.abort_request([str(i) for i in dropped])

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Take the policy's weights, and forget what was computed with the old ones.

        Raises:
            RlctlError: exit status 4, naming the first tensor that is missing, repeated, unknown or of another shape.
        """
        assert not self._running, "weights change between requests only"

        def take(tensors: Iterator[weights.NamedTensor]) -> None:
            self._engine.collective_rpc("rlctl_load_weights", args=(tensors,))

        with _undisturbed():
            weights.load(source, take, expecting=self._expected)
            forgotten = self._engine.reset_prefix_cache()  # vLLM's reload does not
        assert forgotten, "vLLM kept key-value blocks of the old weights"
        self._version = version

    def sleep(self, what: Literal["weights", "kv_cache"]) -> None:
        """Free GPU memory. vLLM suspends both kinds at once; `poll` needs both awake again."""
        if device.is_accelerated() and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """The reverse of `sleep`."""
        if what in self._asleep:
            self._engine.wake_up(tags=[what])
            self._asleep.remove(what)

    def close(self) -> None:
        """Shut vLLM down and leave its process groups; the trainer's stay."""
        if self._engine is None:
            return
        with _undisturbed(), _keep_world() if self._joined_world else contextlib.nullcontext():
            self._engine.engine_core.shutdown()
        self._engine = None

    def _sampling_params(self, request: Request) -> Any:
        sampling = request.sampling
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,  # the engine was started without tokenizer: all stops are listed here
            stop_token_ids=sorted(self._ends | set(sampling.stop_token_ids)),
            logprobs=0,  # the sampled token's only
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any) -> Completion:
        request = self._running.pop(int(output.request_id))
        answer = output.outputs[0]
        tokens = tuple(answer.token_ids)
        logprobs = [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]
        if request.sampling.temperature == 0:
            logprobs = [0.0] * len(tokens)  # vLLM reports temperature 1; greedy draws from one token
        return Completion(
            id=request.id,
            tokens=tokens,
            logprobs=tuple(logprobs),
            finish_reason=answer.finish_reason,
            version=self._version,
        )


class WorkerExtension:
    """Methods that vLLM mixes into its worker."""

    model_runner: Any
    vllm_config: Any
    model_config: Any

    def rlctl_load_weights(self, tensors: Iterator[weights.NamedTensor]) -> None:
        """Replace the model's weights."""
        # Deferred, as the whole of vLLM: this file's Config is read without it.
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors)
        if self.model_config.hf_config.tie_word_embeddings and not device.is_accelerated():
            _repack_projection(self.model_runner.get_model())


def _repack_projection(model: Any) -> None:
    """Rebuild the packed copy of a tied output projection.

    vLLM's CPU layers compute with a packed copy of their weight, and a reload packs only layers that are in the stream.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _check_replicas(ranks: int) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % ranks:
        fits = ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
        raise RlctlError(
            f"{world} processes do not divide by policy.generation.vllm_cfg.tensor_parallel_size={ranks}",
            f"choose {fits}",
            exit_status=ENVIRONMENT,
        )


def _check_host_limits(config: dict[str, Any]) -> None:
    """Refuse what vLLM accepts at start on a host without GPU, and later gets wrong."""
    if device.is_accelerated():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, known = head_dim(config), CPUAttentionBackend.get_supported_head_sizes()
    problem = None
    if size not in known:
        problem = f"attention needs a head_dim of {', '.join(map(str, known))}, this model has {size}"
    if num_experts(config):
        problem = "experts keep their old weights when new ones are loaded"  # packed copies, as of a tied projection
    if problem is not None:
        raise RlctlError(
            f"vLLM on a host without GPU cannot serve this model: {problem}",
            "set policy.generation.backend=transformers",
            exit_status=ENVIRONMENT,
        )


def _import_vllm() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module("vllm.sampling_params")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise RlctlError(
            "the engine `vllm` is not installed",
            "install the extra: pip install 'rlctl[cpu]' (with GPUs: 'rlctl[gpu]'), "
            "or set policy.generation.backend=transformers",
            exit_status=ENVIRONMENT,
        ) from error
    return vllm


def _arguments(recipe: Recipe, options: Config, model_dir: Path) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    accelerated = device.is_accelerated()
    memory = {"gpu_memory_utilization": options.gpu_memory_utilization, "enable_sleep_mode": True}
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's: its stop tokens and temperature come with each request
        "dtype": recipe.policy.precision,
        "hf_overrides": recipe.policy.hf_config_overrides,
        "max_model_len": options.max_model_len or recipe.policy.max_total_sequence_length,
        "enforce_eager": not accelerated if options.enforce_eager is None else options.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher" if dist.is_initialized() else "uni",
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        "seed": 0,  # every request brings its own
        **(memory if accelerated else {"kv_cache_memory_bytes": options.kv_cache_bytes}),
    }


def _start(vllm: Any, arguments: dict[str, Any]) -> Any:
    try:
        return vllm.LLM(**arguments).llm_engine
    except (ValueError, TypeError, torch.OutOfMemoryError) as error:
        raise RlctlError(
            f"vLLM does not start: {str(error).strip().splitlines()[0]}",
            "see policy.generation.vllm_cfg (tensor_parallel_size, max_model_len, gpu_memory_utilization, "
            "kv_cache_bytes) and vllm_kwargs, or set policy.generation.backend=transformers",
            exit_status=ENVIRONMENT,
        ) from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put back what vLLM sets for a process of its own: random states, environment, torch.set_num_threads."""
    import numpy as np  # with torch, which the caller has by now

    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    devices = [device.current()] if device.is_accelerated() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        importlib.import_module("torch").set_num_threads = set_num_threads  # type: ignore[attr-defined]
        if torch.get_num_threads() != threads:
            set_num_threads(threads)
        for name in [n for n in os.environ if not n.startswith("VLLM_") and n not in kept]:
            del os.environ[name]
        os.environ.update(kept)


@contextlib.contextmanager
def _keep_world() -> Iterator[None]:
    """Let vLLM's shutdown leave its own process groups only, not the trainer's default one."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    clean_up = core.cleanup_dist_env_and_memory

    def leave(shutdown_ray: bool = False) -> None:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None

    core.cleanup_dist_env_and_memory = leave
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = clean_up
