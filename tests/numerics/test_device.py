"""Megatron's host patches change nothing else in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

PROGRAM = """
import sys, torch
from rlctl import device
device.prepare_process()
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.zeros(2, device="cuda").device.type == "cpu"
with torch.device("meta"):
    assert torch.zeros(2).is_meta
torch.save(model(torch.arange(40)[None]).logits, sys.argv[2])
"""


@pytest.mark.slow
def test_transformers_loads_the_same_model_beside_the_patches(tmp_path):
    """Its meta-device loading re-initialises rotary frequencies; wrapped constructors once left them undefined."""
    import torch

    folder, out = tiny.save("llama", tmp_path / "m"), tmp_path / "logits"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), str(out)], check=True, cwd=root, capture_output=True)
    assert torch.equal(torch.load(out), tiny.model("llama")(torch.arange(40)[None]).logits)
