"""Small batches to check on: sampled replies, or rows of data."""

from __future__ import annotations

from rlctl.checks.base import Sampler, Subject
from rlctl.generation.base import generate, request_seed
from rlctl.lazy import dist
from rlctl.supervised import to_batch
from rlctl.types import Batch, Request, Rollout, Sampling, batch_from_rollouts

NEW_TOKENS = 16  # of each probe reply, at most


def sampled(subject: Subject, *, draw: int = 0) -> Batch:
    """Sampled replies to the first prompts, two for each, with rewards 1 and 0. The same on every rank. Collective.

    Args:
        subject: its engine samples.
        draw: another one gives other samples; the checks before the first step have 0 and 1.
    """
    recipe, renderer = subject.recipe, subject.renderer
    generation, pairs = recipe.policy.generation, max(2, subject.policy.layout.dp)
    room = recipe.policy.max_total_sequence_length
    stops = dict.fromkeys((*generation.stop_token_ids, *renderer.stop_token_ids))
    sampling = Sampling(temperature=generation.temperature, stop_token_ids=tuple(stops))
    prompts = [subject.sampler.prompts[(i // 2) % len(subject.sampler.prompts)] for i in range(2 * pairs)]
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
    done = [generate(subject.sampler.engine, requests)]
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


def rows(subject: Subject) -> Batch:
    """The shortest rows of data, at least two for each data-parallel rank. The same on every rank."""
    assert not isinstance(subject.source, Sampler)
    count = 2 * max(2, subject.policy.layout.dp)
    shortest = sorted(subject.source, key=lambda row: sum(len(tokens) for tokens, _ in row))
    return to_batch([shortest[i % len(shortest)] for i in range(count)])
