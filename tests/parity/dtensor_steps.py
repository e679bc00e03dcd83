"""What the DTensor parity tests run inside their processes: every layout of a world in one start."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from rlctl import config
from rlctl.algorithms import grpo
from rlctl.config import Recipe
from rlctl.errors import RlctlError
from rlctl.policy.dtensor import Policy
from rlctl.types import Batch

VOCABULARY = 251  # of the smallest model: odd, so that two ranks hold unequal parts
FIRST_TOKEN = 7  # of every sequence


def recipe(*, tp: int = 1, **policy: Any) -> Recipe:
    """fp32, microbatches of about two sequences, Adam's eps large enough that rounding does not show."""
    made = Recipe()
    section = made.policy
    section.precision = "float32"
    section.max_total_sequence_length = 32
    section.train_micro_batch_size = 2
    section.dtensor_cfg.tensor_parallel_size = tp
    section.optimizer.lr, section.optimizer.eps, section.optimizer.weight_decay = 1e-2, 1e-3, 0.1
    section.generation.temperature = 0.8
    for name, value in policy.items():
        setattr(section, name, value)
    return made


def algorithm() -> Any:
    options = grpo.Config()
    options.loss_fn.reference_policy_kl_penalty = 0.1
    return grpo.Algorithm(options)


def batch(sequences: int = 7, seed: int = 0) -> Batch:
    """Unequal lengths, holes in the mask, one invalid sequence; old, ref, advantages and weights are set."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(4, 30) for _ in range(sequences)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    n = int(offsets[-1])
    tokens = torch.randint(0, VOCABULARY, (n,), generator=generator)
    tokens[offsets[:-1]] = FIRST_TOKEN
    valid = torch.arange(sequences) != 2
    mask = torch.rand(n, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    made = Batch(
        tokens=tokens,
        offsets=offsets,
        mask=mask & torch.repeat_interleave(valid, offsets.diff()),
        rewards=torch.randn(sequences, generator=generator),
        group=torch.arange(sequences) // 4,
        valid=valid,
        truncated=torch.zeros(sequences, dtype=torch.bool),
        rollout_logprobs=torch.zeros(n),
        version=torch.zeros(n, dtype=torch.int32),
        old_logprobs=-4.5 + torch.randn(n, generator=generator),
        ref_logprobs=-4.5 + torch.randn(n, generator=generator),
    )
    made = made.replace(advantages=algorithm().advantages(made))
    return made.replace(loss_weights=algorithm().loss_weights(made))


def step(model_dir: Path, tp: int, made: Batch, *, steps: int = 3) -> dict[str, Any]:
    """Everything about one model in one layout."""
    learner = Policy(recipe(tp=tp), model_dir)
    scored = learner.forward(made, outputs=("logprobs", "entropy"))
    metrics = learner.backward(made, algorithm())
    found = dict(learner.gradients())
    for _ in range(steps):
        learner.train_step(made, algorithm())
    weights = {name: t for bucket in learner.weights().whole(bucket_bytes=1 << 16) for name, t in bucket}
    return dict(scored=scored, metrics=metrics, gradients=found, weights=weights, specs=learner.weights().specs())


def every(folders: dict[str, Path], layouts: list[int]) -> dict[tuple[str, int], dict[str, Any]]:
    """Every model in every layout; layouts are tensor-parallel sizes of this world."""
    made = batch()
    return {(name, tp): step(folder, tp, made) for name, folder in folders.items() for tp in layouts}


def variants() -> dict[str, dict[str, Any]]:
    """Settings that must not change a result."""
    packing = config.SequencePacking
    return {
        "one sequence a microbatch": dict(train_micro_batch_size=1, sequence_packing=packing(enabled=False)),
        "three sequences a microbatch": dict(train_micro_batch_size=3, sequence_packing=packing(enabled=False)),
        "packed to 40 tokens": dict(sequence_packing=packing(train_mb_tokens=40)),
        "all packed in one": dict(sequence_packing=packing(train_mb_tokens=4000)),
        "activation checkpointing": dict(activation_checkpointing=True),
    }


def gradients(learner: Policy, made: Batch, rule: Any = None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return learner.backward(made, rule or algorithm()), dict(learner.gradients())


def in_every_variant(folder: Path) -> dict[str, Any]:
    made = batch()
    return {name: gradients(Policy(recipe(**v), folder), made) for name, v in variants().items()}


def layer_runs(folder: Path, *, checkpointing: bool) -> int:
    """How often the first layer's norm runs in one forward and backward."""
    learner = Policy(recipe(activation_checkpointing=checkpointing, train_micro_batch_size=8), folder)
    runs: list[None] = []
    learner.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(None))
    learner.backward(batch(), algorithm())
    return len(runs)


def with_fewer_sequences_than_ranks(folder: Path) -> Any:
    return gradients(Policy(recipe(), folder), batch(1))


def with_whole_groups(folder: Path) -> Any:
    rule = algorithm()
    rule.unit = "group"
    return gradients(Policy(recipe(train_micro_batch_size=4), folder), batch(), rule)


def around_reference(folder: Path, tp: int) -> dict[str, torch.Tensor]:
    learner, made = Policy(recipe(tp=tp), folder, reference=True), batch()
    found = {"initial": learner.forward(made).logprobs}
    learner.train_step(made, algorithm())
    found["policy"] = learner.forward(made).logprobs
    found["reference"] = learner.forward(made, weights="reference").logprobs
    found["policy again"] = learner.forward(made).logprobs
    return found


def after_reload(folder: Path, tp: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's state after three steps; and after two, a reload into a new policy, and one."""
    straight, made = Policy(recipe(tp=tp), folder), batch()
    for _ in range(2):
        straight.train_step(made, algorithm())
    saved = straight.state()
    straight.train_step(made, algorithm())
    resumed = Policy(recipe(tp=tp), folder)
    resumed.load_state(saved)
    resumed.train_step(made, algorithm())
    return dict(straight.state().local), dict(resumed.state().local)


def buckets_to_rank_1(folder: Path) -> tuple[int, list[str]]:
    buckets = list(Policy(recipe(), folder).weights().whole(bucket_bytes=1 << 14, to=1))
    return len(buckets), [name for bucket in buckets for name, _ in bucket]


def in_bfloat16(folder: Path) -> dict[str, Any]:
    learner, made = Policy(recipe(precision="bfloat16"), folder), batch()
    metrics, found = gradients(learner, made)
    learner.set_lr(1e-6)  # far below the spacing of bfloat16
    before = learner.state().local
    learner.train_step(made, algorithm())
    after = learner.state().local
    weights = {name: t for bucket in learner.weights().whole() for name, t in bucket}
    return dict(metrics=metrics, gradients=found, before=before, after=after, weights=weights)


def with_infinite_weights(folder: Path) -> tuple[str, bool]:
    learner, made = Policy(recipe(), folder), batch()
    before = learner.state().local
    made = made.replace(loss_weights=made.loss_weights * torch.inf)
    try:
        learner.train_step(made, algorithm())
    except RlctlError as error:
        after = learner.state().local
        return error.message, all(torch.equal(before[k], after[k]) for k in before if k != "layout")
    return "no error", False


def refused(folder: Path, **settings: Any) -> tuple[str, str]:
    """Message and hint of the error that building the policy raises."""
    made = recipe()
    for name, value in settings.items():
        setattr(made.policy.dtensor_cfg, name, value)
    try:
        Policy(made, folder)
    except RlctlError as error:
        return error.message, error.hint
    return "no error", ""


def everything_else(folders: dict[str, Path]) -> dict[str, Any]:
    """What needs two processes, in one start."""
    plain, heads = folders["llama"], folders["qwen3-tied"]
    return {
        "variants": in_every_variant(plain),
        "layer runs": {on: layer_runs(plain, checkpointing=on) for on in (False, True)},
        "few": with_fewer_sequences_than_ranks(plain),
        "groups": with_whole_groups(plain),
        "reference": {tp: around_reference(heads, tp) for tp in (1, 2)},
        "reload": {tp: after_reload(heads, tp) for tp in (1, 2)},
        "buckets": buckets_to_rank_1(plain),
        "bfloat16": in_bfloat16(plain),
        "infinite": with_infinite_weights(plain),
        "experts": refused(folders["qwen3_moe"]),
        "no plan": refused(folders["opt"], tensor_parallel_size=2),
        "context parallel": refused(plain, context_parallel_size=2),
        "wrong weights": refused(folders["mixed"]),
        "wrong shapes": refused(folders["narrow"]),
        "unequal head": refused(folders["unequal head"]),
    }
