"""A policy as a Hugging Face directory: of a run at its end, or of a checkpoint, in the layout that it was saved in.

A checkpoint's export lies inside of it, as `hf/`, and goes with it. It does not know what the directory is for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlctl import device, plugins
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.checkpoint import identity, train_state
from rlctl.checkpoint.safetensors import write_model
from rlctl.config import Recipe
from rlctl.eval import EXPORT_FILE, HF
from rlctl.lazy import dist
from rlctl.log import RunLog
from rlctl.policy.base import PolicyProtocol
from rlctl.restore import backend_of, load


def write(policy: PolicyProtocol, folder: Path, *, model_dir: Path, tokenizer: Any) -> None:
    """Write the policy's weights, config and tokenizer; the directory appears whole. Collective.

    Args:
        policy: any backend.
        folder: what is there is replaced.
        model_dir: the model that training started from.
        tokenizer: of the run.
    """
    if dist.get_rank() == 0:
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_model(unfinished, policy.weights().whole(to=0), source=model_dir)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    else:
        for _ in policy.weights().whole(to=0):
            pass
    dist.barrier()


def of_checkpoint(recipe: Recipe, job: Path, log: RunLog) -> None:
    """Write `hf/` into a checkpoint, in an initialised process group of the run's own size.

    Args:
        recipe: the run's own, resolved.
        job: holds export.json.
        log: open.

    Raises:
        RlctlError: the checkpoint is damaged, or of another model, tokenizer or layout.
    """
    from rlctl.models.materialize import load_tokenizer, materialize  # transformers: only workers need it
    from rlctl.models.resolve import resolve

    checkpoint = Path(json.loads((job / EXPORT_FILE).read_text())["checkpoint"])
    with log.phase("start"):
        device.seed_everything(recipe.grpo.seed)
        assert recipe.policy.model_name is not None
        model_dir = materialize(resolve(recipe.policy.model_name), progress=log.say)
        stated = recipe.policy.tokenizer
        tokenizer = load_tokenizer(model_dir, name=stated.name, chat_template=stated.chat_template)
        backend = backend_of(recipe)
        needs_reference = "ref" in _algorithm(recipe).needs
        policy = plugins.load("backend", backend).Policy(recipe, model_dir, reference=needs_reference)
    trainer = train_state.read_trainer(checkpoint)
    now = identity.of_run(recipe, model_dir, tokenizer)  # what rewards may change: it is no part of the weights
    parts = ("model", "tokenizer")
    identity.check(checkpoint, *({part: hashes[part] for part in parts} for hashes in (trainer["identity"], now)))
    with log.phase("export"):
        log.say(f"exporting {checkpoint}")
        load(policy, checkpoint, trainer, now=(backend, str(policy.layout)))
        write(policy, checkpoint / HF, model_dir=model_dir, tokenizer=tokenizer)


def _algorithm(recipe: Recipe) -> AlgorithmProtocol:
    module = plugins.load("algorithm", recipe.algorithm)
    return module.Algorithm(module.Config(grpo=recipe.advantage, loss_fn=recipe.loss_fn))
