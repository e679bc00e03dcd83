"""What runs inside the process of tests/unit/test_checks.py: runs that are broken on purpose, and their checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rlctl import device, parts, progress, trainer
from rlctl.checks import probes, startup
from rlctl.checks.base import snapshot
from rlctl.errors import RlctlError
from rlctl.log import RunLog
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive


def build(folder: Path, backend: str, *overrides: str, algorithm: str = "grpo") -> parts.Run:
    settings = [
        "cluster.procs=1",
        "checkpointing.enabled=false",
        f"policy.megatron_cfg.enabled={backend == 'megatron'}",
    ]
    name = "smoke-tiny" if algorithm == "grpo" else f"smoke-{algorithm}"
    recipe = derive(compose(algorithm, name, [*settings, *overrides]), device.probe()).recipe
    log = RunLog(folder, writes=True, tensorboard=False, console=None)
    return parts.build(recipe, folder, log)


@contextlib.contextmanager
def mask_shifted_by_one(run: parts.Run) -> Iterator[None]:
    real = run.policy.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(batch, *args, **kwargs)
        return replace(out, logprobs=out.logprobs.roll(1) * batch.mask)

    with patch.object(run.policy, "forward", forward):
        yield


@contextlib.contextmanager
def attention_leaks(run: parts.Run) -> Iterator[None]:
    """Packed sequences run as one: positions and boundaries do not begin anew."""
    module = type(run.policy).__module__
    from rlctl.policy.packing import build_microbatch

    def joined(*args: Any, **kwargs: Any) -> Any:
        made = build_microbatch(*args, **kwargs)
        tokens = made.tokens.shape[1]
        return replace(
            made, position_ids=torch.arange(tokens)[None], cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32)
        )

    with patch(f"{module}.build_microbatch", joined):
        yield


@contextlib.contextmanager
def head_stays_behind(run: parts.Run) -> Iterator[None]:
    real = run.engine.load_weights

    class WithoutHead:
        def __init__(self, source: Any) -> None:
            self.source = source

        def specs(self) -> Any:
            return self.source.specs()

        def whole(self, *args: Any, **kwargs: Any) -> Iterator[list]:
            for bucket in self.source.whole(*args, **kwargs):
                yield [(n, first.setdefault(n, t.clone()) if "lm_head" in n else t) for n, t in bucket]

    first: dict[str, torch.Tensor] = {}
    with patch.object(run.engine, "load_weights", lambda source, version: real(WithoutHead(source), version)):
        progress.restore(run)  # the engine's first head is the one that stays
        yield


@contextlib.contextmanager
def engine_samples_at_another_temperature(run: parts.Run) -> Iterator[None]:
    with patch.object(probes, "Sampling", lambda **options: trainer_sampling(**(options | {"temperature": 0.7}))):
        yield


def trainer_sampling(**options: Any) -> Any:
    from rlctl.types import Sampling

    return Sampling(**options)


@contextlib.contextmanager
def prompts_begin_twice(run: parts.Run) -> Iterator[None]:
    renderer = run.rollouts.renderer
    real, begin = renderer.prompt, renderer.tokenizer.eos_token_id
    before, renderer.tokenizer.bos_token = renderer.tokenizer.bos_token, renderer.tokenizer.eos_token
    with patch.object(renderer, "prompt", lambda messages: [begin, begin, *real(messages)]):
        yield
    renderer.tokenizer.bos_token = before


@contextlib.contextmanager
def template_rewrites_earlier_messages(run: parts.Run) -> Iterator[None]:
    renderer = run.rollouts.renderer
    real = renderer.text
    with patch.object(renderer, "text", lambda messages, *, opens: f"{len(messages)} {real(messages, opens=opens)}"):
        yield


@contextlib.contextmanager
def grader_does_not_take_gold(run: parts.Run) -> Iterator[None]:
    with patch.object(run.rollouts.environment, "gold", lambda prompt: "#"):
        yield


@contextlib.contextmanager
def gradient_grows_with_microbatches(run: parts.Run) -> Iterator[None]:
    module = type(run.policy).__module__
    from rlctl.policy.loss import weighted_loss

    counts: list[int] = []
    real = run.policy._microbatches

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        counts.append(len(found))
        return found

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return weighted_loss(*args, **kwargs) * counts[-1]

    with patch.object(run.policy, "_microbatches", counted), patch(f"{module}.weighted_loss", scaled):
        yield


@contextlib.contextmanager
def tokenizer_of_a_larger_vocabulary(run: parts.Run) -> Iterator[None]:
    tokenizer = run.rollouts.renderer.tokenizer
    with patch.object(type(tokenizer), "get_vocab", lambda self: {"a": 0, "far": 99_999}):
        yield


@contextlib.contextmanager
def labels_one_ahead(run: parts.Run) -> Iterator[None]:
    real = run.policy.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        behind_first = torch.ones_like(batch.mask).index_fill(0, batch.offsets[:-1], False)
        out = real(batch.replace(mask=behind_first), *args, **kwargs)
        return replace(out, logprobs=out.logprobs.roll(-1) * batch.mask)

    with patch.object(run.policy, "forward", forward):
        yield


@contextlib.contextmanager
def reference_of_other_weights(run: parts.Run) -> Iterator[None]:
    real = run.policy.forward

    def forward(batch: Any, *, weights: str = "policy", **kwargs: Any) -> Any:
        out = real(batch, weights=weights, **kwargs)
        return replace(out, logprobs=out.logprobs * 1.01) if weights == "reference" else out

    with patch.object(run.policy, "forward", forward):
        yield


def _with_rows(run: parts.Run, change: Any) -> Any:
    return patch.object(run.rollouts, "rows", [[change(*sequence) for sequence in row] for row in run.rollouts.rows])


@contextlib.contextmanager
def rows_begin_twice(run: parts.Run) -> Iterator[None]:
    begin = run.rollouts.renderer.tokenizer.bos_token_id
    with _with_rows(run, lambda tokens, mask: ([begin, begin, *tokens], [False, False, *mask])):
        yield


@contextlib.contextmanager
def answers_end_outside_the_mask(run: parts.Run) -> Iterator[None]:
    def cut(tokens: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        last = max(i for i, counts in enumerate(mask) if counts)
        return tokens, [counts and i < last for i, counts in enumerate(mask)]

    with _with_rows(run, cut):
        yield


@contextlib.contextmanager
def answers_are_not_learned(run: parts.Run) -> Iterator[None]:
    with _with_rows(run, lambda tokens, mask: (tokens, [False] * len(mask))):
        yield


FAULTS = {
    "ratio": [mask_shifted_by_one, engine_samples_at_another_temperature],
    "packing": [attention_leaks],
    "weight sync": [head_stays_behind],
    "template": [prompts_begin_twice, template_rewrites_earlier_messages],
    "gold": [grader_does_not_take_gold],
    "split": [gradient_grows_with_microbatches],
    "identity": [tokenizer_of_a_larger_vocabulary],
}
DATA_FAULTS = {  # of dpo, which has a reference
    "identity": [tokenizer_of_a_larger_vocabulary],
    "rows": [rows_begin_twice, answers_end_outside_the_mask, answers_are_not_learned],
    "packing": [attention_leaks],
    "alignment": [mask_shifted_by_one, labels_one_ahead],
    "reference": [reference_of_other_weights],
    "split": [gradient_grows_with_microbatches],
}


def outcomes(folder: Path, backend: str) -> dict[str, dict[str, Any]]:
    """By algorithm: fault -> the check that told it; `sound` -> what the sound run says."""
    found = {}
    for algorithm, table in (("grpo", FAULTS), ("dpo", DATA_FAULTS)):
        (folder / algorithm).mkdir()
        run = build(folder / algorithm, backend, algorithm=algorithm)
        progress.restore(run)
        told = {"sound": _checked(run)}
        for faults in table.values():
            for fault in faults:
                with fault(run):
                    told[fault.__name__] = _checked(run)
                progress.restore(run)
        found[algorithm] = told | {"sound again": _checked(run)}
        if algorithm == "grpo":
            found["later"] = _later(run)
    (folder / "unchanged").mkdir()
    return found | {"unchanged": unchanged(folder / "unchanged", backend)}


def _later(run: parts.Run) -> dict[str, str]:
    """The weight-sync probe after an update: of a sound run, of a head that stays behind, without a new sync."""
    found = {}
    for name in ("sound", "head", "nothing"):
        with head_stays_behind(run) if name == "head" else contextlib.nullcontext():
            _one_update(run)
            if name != "nothing":
                run.rollouts.publish(run.policy.weights(), version=1)
            found[name] = _told(lambda: startup.sync(trainer._subject(run, 1), step=1))
    return found


def _one_update(run: parts.Run) -> None:
    batch = probes.sampled(trainer._subject(run, 0))
    batch = batch.replace(ref_logprobs=torch.zeros(len(batch.tokens)))
    batch = batch.replace(advantages=run.algorithm.advantages(batch), loss_weights=run.algorithm.loss_weights(batch))
    run.policy.set_lr(1e-3)
    run.policy.train_step(batch, run.algorithm)


def _checked(run: parts.Run) -> str:
    return _told(lambda: trainer.check(run, progress.Progress()))


def _told(check: Callable[[], None]) -> str:
    try:
        check()
    except RlctlError as error:
        return f"{error.exit_status} {error.message}"
    return "passed"


def unchanged(folder: Path, backend: str) -> dict[str, bool]:
    """What checks leave as it was."""
    run = build(folder, backend, "loss_fn.reference_policy_kl_penalty=0.1")
    progress.restore(run)
    for step in range(2):  # without and with an optimizer's state
        before, random_before = snapshot(run.policy.state().local), torch.get_rng_state()
        trainer.check(run, progress.Progress(step=step))
        same = {
            "state": _equal(before, run.policy.state().local),
            "random": torch.equal(random_before, torch.get_rng_state()),
        }
        if not all(same.values()):
            return same
        _one_update(run)
        progress.restore(run)
    return same


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
