"""What a model's directory holds, from its config, headers and manifest; no weight is read."""

from __future__ import annotations

import math
from typing import Any

from rlctl.checkpoint.views import View, read_manifest
from rlctl.models.base import rope, tied


def describe(view: View) -> dict[str, Any]:
    """Format, sizes and special cases of a model; `tensors` lists all by Hugging Face name."""
    manifest = read_manifest(view.folder)
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": str(view.dtype(name, rule)).removeprefix("torch."), "shape": list(shape), "megatron": rule.key}
        for rule in view.rules
        for name, shape in zip(rule.sources, rule.source_shapes, strict=True)
    }
    sizes = [math.prod(s) * view.dtype(n, r).itemsize for r in view.rules
             for n, s in zip(r.sources, r.source_shapes, strict=True)]  # fmt: skip
    return {
        "format": {"hf": "Hugging Face safetensors", "mcore": "Megatron torch_dist"}[view.kind],
        "model_type": view.config["model_type"],
        "layers": view.config["num_hidden_layers"],
        "parameters": sum(math.prod(t["shape"]) for t in tensors.values()),
        "bytes": sum(sizes),
        "dtypes": sorted({t["dtype"] for t in tensors.values()}),
        "vocabulary": view.config["vocab_size"],
        "tied_embeddings": tied(view.config),
        "rope": rope(view.config)["rope_type"],
        "repeated": [f"{name} = {of}" for name, of in view.repeated.items()],
        "stacked": list(view.stacked),
        "not_read": view.dropped,
        "fingerprint": None if manifest is None else manifest["fingerprint"],
        "converted_by": None if manifest is None else [f"{n} {v}" for n, v in manifest["versions"].items()],
        "tensors": tensors,
    }
