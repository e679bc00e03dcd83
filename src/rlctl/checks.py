"""Start-up self-checks: a small probe through the parts of a run, before its first step.

1. Names: the tokenizer's ids fit the model; the template opens a reply, begins once, and keeps what came before.
2. Reward: a known good reply scores fully.
3. Packing does not leak: other tokens in a neighbour change nothing.
4. On unchanged weights, engine and policy give a sampled token the same probability.
5. One update on all microbatches at once has the gradient of the same work cut in more of them.
6. After that update, which changes every weight, the engine has the new weights, head included.

Then state, random numbers and the engine's weights are as they were, bit for bit. A check that fails names what it
expected, what it found, and the likely cause. It does not know a backend or an engine.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl import device
from rlctl.algorithms.base import AlgorithmProtocol
from rlctl.config import Recipe
from rlctl.envs.base import EnvironmentProtocol
from rlctl.envs.render import Renderer
from rlctl.errors import CHECK_FAILED, RlctlError
from rlctl.generation.base import EngineProtocol, generate, request_seed
from rlctl.lazy import dist, torch
from rlctl.policy.base import PolicyProtocol, TrainState
from rlctl.types import Batch, Message, Prompt, Request, Rollout, Sampling, batch_from_rollouts

FILE = "checks.json"
NEW_TOKENS = 16  # of each probe reply, at most
GOLDS = 4  # prompts whose gold is scored
PROBE_LR = 1e-3  # Adam's first update moves each weight by this: enough to show a tensor that stayed behind
MAX_REPEATS = 256
# Engine against policy, per token. In float32 whole runs of a 135M model stayed below 3e-4; in bfloat16 the mean over
# tokens is near 0.01, and a mask or temperature that is wrong gives more than 0.3.
LOGPROB_LIMITS = {"float32": ("largest", 2e-3), "bfloat16": ("mean", 0.1)}
LEAK_LIMITS = {"float32": 1e-4, "bfloat16": 0.05}  # a leak moves logprobs by tenths at least
SPLIT_LIMITS = {"float32": 1e-4, "bfloat16": 0.05}  # relative, of loss and gradient norm


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The parts that are checked."""

    recipe: Recipe
    policy: PolicyProtocol
    algorithm: AlgorithmProtocol
    engine: EngineProtocol
    environment: EnvironmentProtocol
    renderer: Renderer
    prompts: Sequence[Prompt]
    publish: Callable[[], None]
    """Gives the engine the policy's weights."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One check's outcome, as checks.json has it."""

    name: str
    ok: bool
    expected: str
    found: str
    detail: str
    """The likely cause where it failed; else what the check could not see, if anything."""
    seconds: float = 0.0


def run(subject: Subject, run_dir: Path) -> list[Result]:
    """Do all checks, and write checks.json. Collective.

    Args:
        subject: the parts, with the engine holding the policy's weights.
        run_dir: rank 0 writes there.

    Returns:
        The results, the same on every rank.

    Raises:
        RlctlError: exit status 4; the first check that failed, after all were done.
    """
    random_state = device.rng_state()
    results = [_timed(check, subject) for check in (identity, template, gold)]
    batch = probe(subject)
    results += [_timed(check, subject, batch) for check in (packing, ratio)]
    results += _timed_all(update, subject, batch)
    device.set_rng_state(random_state)
    results = _first_rank(results)
    if dist.get_rank() == 0:
        text = json.dumps([asdict(result) for result in results], indent=1) + "\n"
        (run_dir / FILE).write_text(text)
    for result in results:
        if not result.ok:
            raise RlctlError(
                f"start-up check `{result.name}` failed: expected {result.expected}, found {result.found}",
                f"{result.detail}; all results are in {run_dir / FILE}, and `--no-checks` starts all the same",
                exit_status=CHECK_FAILED,
            )
    return results


def _first_rank(results: list[Result]) -> list[Result]:
    box = [results]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _timed(check: Callable[..., Result], *arguments: Any) -> Result:
    began = time.monotonic()
    result = check(*arguments)
    return Result(**(asdict(result) | {"seconds": time.monotonic() - began}))


def _timed_all(check: Callable[..., list[Result]], *arguments: Any) -> list[Result]:
    began = time.monotonic()
    results = check(*arguments)
    seconds = (time.monotonic() - began) / len(results)
    return [Result(**(asdict(result) | {"seconds": seconds})) for result in results]


# --- names, templates, rewards ----------------------------------------------------------------------------------------


def identity(subject: Subject) -> Result:
    """The tokenizer's ids are rows of the model's embedding."""
    tokenizer = subject.renderer.tokenizer
    rows = next(iter(subject.policy.weights().specs().values()))[0][0]  # the embedding comes first in every model
    largest = max(tokenizer.get_vocab().values(), default=0)
    end = tokenizer.eos_token_id
    fits = largest < rows and end is not None and end < rows
    return Result(
        name="identity",
        ok=fits,
        expected=f"token ids below {rows}, the embedding's rows, and an end-of-sequence token",
        found=f"ids up to {largest}, end of sequence {end}",
        detail="" if fits else "the tokenizer is of another model: see policy.tokenizer.name",
    )


def template(subject: Subject) -> Result:
    """A prompt begins once, and the reply is opened behind it; the token that ends a reply is one that is sampled."""
    renderer, prompt = subject.renderer, subject.prompts[0]
    tokens, begin = renderer.prompt(prompt.messages), renderer.tokenizer.bos_token_id
    begins = 0 if begin is None else next((i for i, t in enumerate(tokens) if t != begin), len(tokens))
    closed, opened = (renderer.text(prompt.messages, opens=opens) for opens in (False, True))
    wrong = [f"{begins} begin-of-sequence tokens"] if begins > 1 else []
    wrong += [] if opened.startswith(closed) else ["the opening of a reply rewrites the messages before it"]
    answered = (*prompt.messages, Message(role="assistant", content="a"))
    wrong += (
        [] if renderer.text(answered, opens=False).startswith(closed) else ["a reply rewrites the messages before it"]
    )
    silent = "" if opened != closed else "the template writes nothing before a reply"
    ends = renderer.stop_token_ids or (renderer.tokenizer.eos_token_id,)
    return Result(
        name="template",
        ok=not wrong,
        expected="one beginning, and messages that stay as they are when a reply follows",
        found="; ".join(wrong) or f"{len(tokens)} tokens, replies end with {list(ends)}",
        detail=silent if not wrong else "see policy.tokenizer.chat_template, and whether the data hold special tokens",
    )


def gold(subject: Subject) -> Result:
    """A reply that is known to be right scores 1 in every part."""
    scores: list[float] = []
    texts = []
    for prompt in subject.prompts[:GOLDS]:
        text = subject.environment.gold(prompt)
        if text is not None:
            parts = asyncio.run(_score(subject, prompt, text))
            scores += [math.nan if part is None else part for part in parts.values()]
            texts.append(text)
    short = [t for t, s in zip(texts, scores, strict=False) if not s >= 1.0 - 1e-6]
    return Result(
        name="gold",
        ok=all(s >= 1.0 - 1e-6 for s in scores),
        expected="a reward of 1 for the reference answers",
        found=", ".join(f"{s:g}" for s in scores) or "no reference answers",
        detail=f"the grader does not take {short[0][:80]!r}" if short else "" if texts else "no answer is known here",
    )


async def _score(subject: Subject, prompt: Prompt, text: str) -> dict[str, float | None]:
    episode = subject.environment.start(prompt)
    try:
        await episode.step(Message(role="assistant", content=text, tokens=tuple(_encode(subject, text))))
        return await episode.reward()
    finally:
        episode.close()


def _encode(subject: Subject, text: str) -> list[int]:
    return list(subject.renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


# --- logprobs ---------------------------------------------------------------------------------------------------------


def probe(subject: Subject, *, draw: int = 0) -> Batch:
    """Sampled replies to the first prompts, two for each, with rewards 1 and 0. The same on every rank. Collective.

    Args:
        subject: its engine samples.
        draw: another one gives other samples.
    """
    recipe, renderer = subject.recipe, subject.renderer
    generation, pairs = recipe.policy.generation, max(2, subject.policy.layout.dp)
    room = recipe.policy.max_total_sequence_length
    stops = dict.fromkeys((*generation.stop_token_ids, *renderer.stop_token_ids))
    sampling = Sampling(temperature=generation.temperature, stop_token_ids=tuple(stops))
    prompts = [subject.prompts[(i // 2) % len(subject.prompts)] for i in range(2 * pairs)]
    tokens = [renderer.prompt(prompt.messages)[: room - 1] for prompt in prompts]
    requests = [
        Request(
            id=i,
            prompt_tokens=tuple(ids),
            max_new_tokens=min(NEW_TOKENS, room - len(ids)),
            seed=request_seed(recipe.grpo.seed, -1 - draw, i // 2, i),
            sampling=sampling,
        )
        for i, ids in enumerate(tokens)
    ]
    done = [generate(subject.engine, requests)]
    dist.broadcast_object_list(done, src=0)  # replicas may differ in a bit, and then in a token
    rollouts = []
    for i, (ids, completion) in enumerate(zip(tokens, done[0], strict=True)):
        rollouts.append(
            Rollout(
                prompt=prompts[i], group=i // 2, sample=i % 2, tokens=(*ids, *completion.tokens),
                mask=(*[False] * len(ids), *[True] * len(completion.tokens)),
                logprobs=(*[0.0] * len(ids), *completion.logprobs), version=0, messages=prompts[i].messages,
                reward=float(i % 2), reward_parts={}, valid=True, truncated=False,
            )
        )  # fmt: skip
    return batch_from_rollouts(rollouts)


def ratio(subject: Subject, batch: Batch) -> Result:
    """Engine and policy agree on the sampled tokens."""
    return _agreement(
        subject, batch, name="ratio",
        cause="a mask that is off by one, another temperature than the engine's, or weights that were not synced",
    )  # fmt: skip


def _agreement(subject: Subject, batch: Batch, *, name: str, cause: str) -> Result:
    which, limit = LOGPROB_LIMITS[subject.recipe.policy.precision]
    gap = (subject.policy.forward(batch).logprobs - batch.rollout_logprobs)[batch.mask].abs()
    found = float(gap.max() if which == "largest" else gap.mean())
    return Result(
        name=name,
        ok=found <= limit,
        expected=f"the {which} difference of logprobs between engine and policy at most {limit:g}",
        found=f"{found:.2g} over {len(gap)} tokens",
        detail=cause if not found <= limit else "",
    )


def packing(subject: Subject, batch: Batch) -> Result:
    """Tokens of one sequence change nothing in another."""
    limit = LEAK_LIMITS[subject.recipe.policy.precision]
    even = batch.sequence % 2 == 0
    vocabulary = int(batch.tokens.max()) + 1
    other = torch.where(even, (batch.tokens + 1) % vocabulary, batch.tokens)
    before, after = (subject.policy.forward(b).logprobs for b in (batch, batch.replace(tokens=other)))
    gap = float((before - after)[batch.mask & ~even].abs().max())
    return Result(
        name="packing",
        ok=gap <= limit,
        expected=f"logprobs that depend on their own sequence alone, within {limit:g}",
        found=f"a change of {gap:.2g} when other sequences change",
        detail="attention or positions cross sequences of a pack: see policy.sequence_packing" if gap > limit else "",
    )


# --- an update --------------------------------------------------------------------------------------------------------


def update(subject: Subject, batch: Batch) -> list[Result]:
    """What an update shows: its gradient under another split, and that the engine follows. All is put back after."""
    policy, algorithm = subject.policy, subject.algorithm
    if "old" in algorithm.needs:
        batch = batch.replace(old_logprobs=policy.forward(batch).logprobs)
    if "ref" in algorithm.needs:
        batch = batch.replace(ref_logprobs=policy.forward(batch, weights="reference").logprobs)
    batch = batch.replace(advantages=algorithm.advantages(batch))
    batch = batch.replace(loss_weights=algorithm.loss_weights(batch))
    before = policy.forward(batch).logprobs
    kept = _snapshot(policy.state().local)
    policy.set_lr(0.0)
    whole = policy.train_step(batch, algorithm)
    policy.load_state(TrainState(local=_snapshot(kept)))
    policy.set_lr(PROBE_LR)
    parts = policy.train_step(_repeated(batch, _repeats(subject, batch)), algorithm)
    results = [_split(subject, whole, parts)]
    moved = float((policy.forward(batch).logprobs - before)[batch.mask].abs().max())
    subject.publish()
    synced = _agreement(
        subject, probe(subject, draw=1), name="weight sync",
        cause="a weight did not reach the engine: see tied embeddings, the output head, and the loader's names",
    )  # fmt: skip
    _, limit = LOGPROB_LIMITS[subject.recipe.policy.precision]
    blind = f"the update moved logprobs by {moved:.2g} only" if moved < 10 * limit else ""
    results.append(Result(**(asdict(synced) | {"detail": synced.detail or blind})))
    policy.load_state(TrainState(local=kept))
    subject.publish()
    return results


def _split(subject: Subject, whole: Mapping[str, float], parts: Mapping[str, float]) -> Result:
    limit = SPLIT_LIMITS[subject.recipe.policy.precision]
    gaps = {name: abs(parts[name] - whole[name]) for name in ("loss", "grad_norm")}
    scale = {"loss": max(abs(whole["loss"]), 1.0), "grad_norm": max(whole["grad_norm"], 1e-12)}
    wrong = [name for name in gaps if not gaps[name] <= limit * scale[name]]
    return Result(
        name="split",
        ok=not wrong,
        expected=f"loss and gradient norm that do not depend on microbatches, within {limit:g}",
        found=f"gradient norm {whole['grad_norm']:.6g} and {parts['grad_norm']:.6g}, loss {whole['loss']:.6g} and "
        f"{parts['loss']:.6g}",
        detail="gradients are scaled by the number of microbatches, or reduced twice" if wrong else "",
    )


def _repeats(subject: Subject, batch: Batch) -> int:
    """How often the batch makes a microbatch more on each data-parallel rank than it takes once."""
    policy, dp = subject.recipe.policy, subject.policy.layout.dp
    if policy.sequence_packing.enabled:
        assert policy.sequence_packing.train_mb_tokens is not None
        needed = dp * policy.sequence_packing.train_mb_tokens / len(batch.tokens)
    else:
        needed = dp * policy.train_micro_batch_size / len(batch)
    return min(math.ceil(needed) + 1, MAX_REPEATS)


def _repeated(batch: Batch, times: int) -> Batch:
    """The same loss and gradient from `times` copies: each token weighs that much less."""
    chosen = torch.arange(len(batch)).repeat(times)
    made = batch.select(chosen)
    copies = torch.arange(times).repeat_interleave(len(batch))
    assert made.loss_weights is not None
    return made.replace(
        group=made.group + copies * (int(batch.group.max()) + 1), loss_weights=made.loss_weights / times
    )


def _snapshot(value: Any) -> Any:
    """A copy on the host that nothing changes."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _snapshot(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(part) for part in value)
    return copy.deepcopy(value)
