"""A scripted engine and environment for rollouts, alone and in several processes."""

import asyncio
import random

from rlctl import config
from rlctl.algorithms import ops
from rlctl.algorithms.base import Refill
from rlctl.envs.render import Renderer
from rlctl.models import tiny_tokenizer
from rlctl.rollout import Colocated
from rlctl.types import Completion, Message, Prompt

END = 257


class LateEngine:
    """Completions depend on the request's seed alone; they come late, a few at a time, in a random order."""

    def __init__(self, ranks_per_replica=1, order=0):
        self.ranks_per_replica = ranks_per_replica
        self.submitted, self.version, self.polls, self.calls = [], 0, 0, []
        self._queue, self._rng = [], random.Random(order)

    def submit(self, requests):
        self.submitted += requests
        self._queue += requests

    def poll(self):
        self.polls += 1
        if not self._queue or self.polls % 3:
            return []
        self._rng.shuffle(self._queue)
        count = self._rng.randint(1, 3)
        done, self._queue = self._queue[:count], self._queue[count:]
        return [self.complete(r) for r in done]

    def complete(self, request):
        rng = random.Random(request.seed)
        length = rng.randint(1, 6)
        tokens = [rng.randint(97, 122) for _ in range(length)] + [END]
        cut = tokens[: request.max_new_tokens]
        return Completion(
            id=request.id, tokens=tuple(cut), logprobs=tuple(-t / 100 for t in cut),
            finish_reason="stop" if len(cut) == len(tokens) else "length", version=self.version,
        )  # fmt: skip

    def abort(self, ids):
        pass

    def load_weights(self, source, version):
        self.version = version
        self.calls.append("load")

    def sleep(self, what):
        self.calls.append(f"sleep {what}")

    def wake(self, what):
        self.calls.append(f"wake {what}")

    def close(self):
        pass


class Dialogue:
    """`turns` replies an episode; the reward is the length of all replies, 0.25 weighing what `b` says."""

    def __init__(self, turns=1, fails=lambda prompt, replies: None, size=6, delay=0.0):
        self.turns, self.fails, self.size, self.delay = turns, fails, size, delay
        self.closed = 0

    def dataset(self, split):
        return [
            Prompt(messages=(Message(role="user", content=f"number {i}"),), row={}, index=i) for i in range(self.size)
        ]

    def check(self, prompts):
        pass

    def start(self, prompt):
        return _Talk(self, prompt)


class _Talk:
    def __init__(self, owner, prompt):
        self.owner, self.prompt, self.replies = owner, prompt, []

    async def step(self, message):
        await asyncio.sleep(self.owner.delay * random.random())
        self.replies.append(message)
        more = len(self.replies) < self.owner.turns
        return [Message(role="user", content=f"and {len(self.replies)}")] if more else []

    async def reward(self):
        failed = self.owner.fails(self.prompt, self.replies)
        if isinstance(failed, Exception):
            raise failed
        return failed or {"a": float(sum(len(r.content) for r in self.replies)), "b": float(len(self.replies))}

    def close(self):
        self.owner.closed += 1


def recipe(prompts=3, samples=2, **fields):
    made = config.Recipe()
    made.grpo.num_prompts_per_step, made.grpo.num_generations_per_prompt = prompts, samples
    made.policy.max_total_sequence_length = 256
    for name, value in fields.items():
        section, _, key = name.partition("__")
        setattr(getattr(made, section), key, value)
    return made


def renderer():
    return Renderer(tiny_tokenizer.build(288))


def collect(made=None, environment=None, engine=None, **options):
    return Colocated(made or recipe(), environment or Dialogue(), engine or LateEngine(), renderer(), **options)


def as_lists(batch):
    return {
        name: getattr(batch, name).tolist()
        for name in ("tokens", "offsets", "mask", "rewards", "group", "valid", "rollout_logprobs", "version")
    }


def in_processes(cases):
    """Per case, one step of two turns: the batch, the dump, the stats, the first error, the episodes that ran here."""
    return [_one_step(*case) for case in cases]


def refilled(environment, engine=None, **options):
    """With dynamic sampling, and prompts of which every second one rewards all alike."""
    environment.fails = lambda prompt, replies: {"a": 1.0, "b": 0.0} if prompt.index % 2 else None
    refill = Refill(teaches=lambda b: ops.spread_groups(b.rewards, b.group, b.valid), max_rounds=9, batch_multiplier=1)
    return collect(recipe(data__shuffle=False), environment, engine, refill=refill, **options)


def _one_step(ranks_per_replica, prompts, odd):
    import torch.distributed as dist

    fails = (lambda prompt, replies: RuntimeError("down") if prompt.index % 2 else None) if odd else lambda *a: None
    environment = Dialogue(turns=2, fails=fails)
    engine = LateEngine(ranks_per_replica, order=dist.get_rank() // ranks_per_replica)
    if odd == "alike":
        rollouts = refilled(environment, engine)
    else:
        rollouts = collect(recipe(prompts=prompts, samples=1 if prompts == 1 else 2), environment, engine)
    batch = rollouts.next(1)
    dump = [(r.group, r.sample, r.tokens, r.reward) for r in rollouts.last]
    return as_lists(batch), dump, rollouts.stats, rollouts.first_error, environment.closed
