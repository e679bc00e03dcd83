"""Whether Megatron-Core's logits of a checkpoint are those of transformers, in float32.

1. A process of its own runs both models, one after the other, so that their memory and Megatron's state end with it.
2. A whole model is loaded by Megatron's own `dist_checkpointing.load`, one of the first layers through the rules.
3. The error is max|a - b| / max|b| over the logits of one random sequence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.checkpoint import fit
from rlctl.checkpoint.views import McoreView, read_config
from rlctl.errors import CHECK_FAILED, ENVIRONMENT, FAILED, RlctlError
from rlctl.lazy import torch
from rlctl.models.resolve import num_parameters

TOLERANCE = 1e-4  # float32, other orders of summation; a wrong weight is off by 1e-2 and more
_TOKENS = 64
_SEED = 0
_BYTES = 4  # of a float32
_SLACK = 1.4  # of a model's bytes, for loading it


@dataclass(frozen=True, kw_only=True)
class Logits:
    """What was compared."""

    layers: int
    of_layers: int
    error: float
    tokens: int


def layers_that_fit(config: dict[str, Any], available: int) -> int:
    """How many layers' logits a memory of so many bytes allows; at most all.

    Raises:
        RlctlError: exit status 3; not even one.
    """
    sizes = [num_parameters(config | {"num_hidden_layers": n}) for n in (1, 2)]
    outer, layer = 2 * sizes[0] - sizes[1], sizes[1] - sizes[0]
    fitting = int((available / (_BYTES * _SLACK) - outer) // layer)
    if fitting < 1:
        needed = int(sizes[0] * _BYTES * _SLACK)
        raise RlctlError(
            f"`--verify logits` needs {needed:,} bytes of memory for one layer, {available:,} are available",
            "use `--verify tensors`",
            exit_status=ENVIRONMENT,
        )
    return min(fitting, config["num_hidden_layers"])


def check(hf: Path, mcore: Path, *, dtype: str | None, available: int) -> Logits:
    """Compare, in a process of its own.

    Args:
        hf: Hugging Face directory.
        mcore: Megatron checkpoint of the same model.
        dtype: that the weights were cast to on the way; None: not cast.
        available: bytes of memory for a model.

    Raises:
        RlctlError: exit status 4 for logits that differ, 3 for no memory, 1 if a model does not run.
    """
    config = read_config(hf)
    layers = layers_that_fit(config, available)
    command = [sys.executable, "-m", __name__, str(hf), str(mcore), str(dtype), str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RlctlError(
            f"comparing logits ended with status {done.returncode}: {last}",
            "use `--verify tensors`",
            exit_status=FAILED,
        )
    found = Logits(**json.loads(done.stdout.splitlines()[-1]))
    if not found.error <= TOLERANCE:
        raise RlctlError(
            f"logits of {found.layers} of {found.of_layers} layers differ by {found.error:.1e} of the largest, more "
            f"than {TOLERANCE:.0e}: Megatron-Core with `{mcore}`, transformers with `{hf}`",
            "convert again from the original; if it stays, report it",
            exit_status=CHECK_FAILED,
        )
    return found


def available_bytes(limit: int | None) -> int:
    """Memory for a model: what is free, within `--max-memory`."""
    free = fit.free_memory_bytes()
    return free if limit is None else min(free, limit - fit.resident_bytes())


def _compare(hf: Path, mcore: Path, dtype: str | None, layers: int) -> Logits:
    config = read_config(hf)
    whole, short = config["num_hidden_layers"], config | {"num_hidden_layers": layers}
    count = min(_TOKENS, config["max_position_embeddings"])
    tokens = torch.randint(config["vocab_size"], (count,), generator=torch.Generator().manual_seed(_SEED))
    wanted = _transformers(hf, tokens, dtype, layers)
    got = _megatron(mcore, hf, short, tokens, dtype=dtype, whole=layers == whole)[:, : config["vocab_size"]]
    error = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    return Logits(layers=layers, of_layers=whole, error=error, tokens=count)


def _transformers(hf: Path, tokens: Any, dtype: str | None, layers: int) -> Any:
    import transformers  # heavy, and not needed by other conversions

    config = transformers.AutoConfig.from_pretrained(hf)
    config.num_hidden_layers = layers
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf, config=config, dtype="auto" if dtype is None else dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.float().eval()(tokens[None], use_cache=False).logits[0]


def _megatron(mcore: Path, hf: Path, config: dict[str, Any], tokens: Any, *, dtype: str | None, whole: bool) -> Any:
    # Megatron: heavy, and not needed by other conversions
    from rlctl.checkpoint.shards import load_whole, shards
    from rlctl.models import single

    view = McoreView(mcore, hf)
    by_name = {name: rule for rule in view.rules for name in rule.sources}

    def read(name: str) -> Any:
        rule = by_name[name]
        return view.read(rule)[rule.sources.index(name)]

    def fill(model: Any) -> None:
        if whole:
            named = any(".layers.0." in key for key in view.reader.tensors)
            single.load_checkpoint(model, view.iteration, layers_by_name=named)
        else:
            load_whole(shards(model), view.rules, read)
        if dtype is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(getattr(torch, dtype)))

    with single.one_process():
        return single.logits(config, fill, tokens)


if __name__ == "__main__":
    from rlctl import device

    device.prepare_process()
    stated = None if sys.argv[3] == "None" else sys.argv[3]
    print(json.dumps(vars(_compare(Path(sys.argv[1]), Path(sys.argv[2]), stated, int(sys.argv[4])))))
