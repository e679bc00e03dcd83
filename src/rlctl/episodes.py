"""Episodes against an engine: conversations are played to their rewards, whatever the order of completions.

1. The replica's first rank submits requests and polls; the replica's other ranks do the same, with the same requests.
2. A completion goes to its episode, whose steps and rewards run in a background event loop while the engine works.
3. An environment's answer becomes the next request; its reward, or its failure, ends the episode.

It knows no data set and no batch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlctl import config
from rlctl.envs.base import Episode
from rlctl.envs.pool import GRACE_SECONDS, START_TIMEOUT_SECONDS
from rlctl.envs.render import Renderer
from rlctl.errors import ENVIRONMENT, RlctlError
from rlctl.generation.base import EngineProtocol, request_seed
from rlctl.lazy import dist
from rlctl.types import INVALID_REWARD, Completion, Message, Prompt, Request, Rollout, Sampling


@dataclass(kw_only=True)
class Run:
    """An episode under way."""

    prompt: Prompt
    group: int
    sample: int
    draw: int
    """Tells this sample from every other of the same prompt in the step."""
    episode: Episode | None = None
    messages: list[Message] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    turn: int = 0
    truncated: bool = False
    parts: Mapping[str, float | None] = field(default_factory=dict)
    error: str | None = None

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens; those with logprobs were sampled."""
        self.tokens += tokens
        self.mask += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def hear(self, completion: Completion, text: str) -> Message:
        """Take a completion; returns it as a message."""
        assert len(completion.tokens) == len(completion.logprobs), completion.id
        self.extend(completion.tokens, completion.logprobs)
        self.version, self.turn = completion.version, self.turn + 1
        self.truncated = completion.finish_reason == "length"
        message = Message(role="assistant", content=text, tokens=completion.tokens)
        self.messages.append(message)
        return message

    async def advance(self, message: Message) -> Sequence[Message]:
        """The environment's answer; empty once the reward is there. A reply cut by length ends the episode."""
        assert self.episode is not None
        answer = await self.episode.step(message)
        if answer and not self.truncated:
            return answer
        return await self.score()

    async def score(self) -> Sequence[Message]:
        """Take the reward."""
        assert self.episode is not None
        self.parts = await self.episode.reward()
        return ()

    def rollout(self, weights: Mapping[str, float]) -> Rollout:
        """The scored episode."""
        parts = {name: part for name, part in self.parts.items() if part is not None and math.isfinite(part)}
        silent = [name for name in self.parts if name not in parts]
        error = self.error or (f"part `{silent[0]}` gave no vote" if silent else None)
        if error is None and not parts:
            error = "the environment gave no reward"
        total = sum(part * ({name: 1.0} | dict(weights))[name] for name, part in parts.items())
        return Rollout(
            prompt=self.prompt,
            group=self.group,
            sample=self.sample,
            tokens=tuple(self.tokens),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            version=self.version,
            messages=tuple(self.messages),
            reward=INVALID_REWARD if error else total,
            reward_parts=parts,
            valid=error is None,
            truncated=self.truncated,
            error=error,
        )


class Player:
    """Plays the episodes of one phase on one replica."""

    def __init__(
        self, recipe: config.Recipe, engine: EngineProtocol, renderer: Renderer, replica: Replica, step: int
    ) -> None:
        generation = recipe.policy.generation
        self._engine, self._renderer, self._replica, self._step = engine, renderer, replica, step
        self._run_seed, self._room = recipe.grpo.seed, recipe.policy.max_total_sequence_length
        self._most = generation.max_new_tokens
        stops = dict.fromkeys((*generation.stop_token_ids, *renderer.stop_token_ids))
        self._sampling = Sampling(temperature=generation.temperature, stop_token_ids=tuple(stops))
        # What an environment may need for one answer: a worker's start, and the call.
        self._patience = recipe.env.reward_timeout_seconds + START_TIMEOUT_SECONDS + GRACE_SECONDS

    def follow(self) -> None:
        """Do to the engine what the replica's first rank does."""
        while (order := self._replica.agree(None)) is not None:
            self._work(order)

    def lead(self, runs: Sequence[Run], *, progress: Callable[[int, int], None] | None = None) -> None:
        """Play every run to its reward or its error; `progress` is told how many are done, and of how many."""
        playing: dict[int, Run] = {}  # request id -> whose completion the engine owes
        waiting: dict[concurrent.futures.Future, Run] = {}  # whose environment is at work
        requests = [self._request(i, run) for i, run in enumerate(runs)]
        ids = {id(run): i for i, run in enumerate(runs)}
        with _background_loop() as loop:
            while requests or playing or waiting:
                if progress is not None:
                    progress(len(runs) - len(requests) - len(playing) - len(waiting), len(runs))
                playing |= {r.id: runs[r.id] for r in requests}
                for completion in self._turn(requests) if playing else ():
                    run = playing.pop(completion.id)
                    if completion.finish_reason == "abort":
                        run.error = "the engine dropped its request"
                        continue
                    message = run.hear(completion, self._renderer.decode(completion.tokens))
                    waiting[asyncio.run_coroutine_threadsafe(run.advance(message), loop)] = run
                requests = []
                for run, answer in self._settled(waiting, blocks=not playing):
                    if not answer:
                        continue
                    if self._goes_on(run, answer):
                        requests.append(self._request(ids[id(run)], run))
                    else:
                        waiting[asyncio.run_coroutine_threadsafe(run.score(), loop)] = run
        self._replica.agree_to_stop()
        for run in runs:
            assert run.episode is not None
            run.episode.close()

    def _turn(self, requests: list[Request]) -> list[Completion]:
        """Hand requests to the engine, and let it work."""
        self._replica.agree(requests)
        return self._work(requests)

    def _work(self, requests: list[Request]) -> list[Completion]:
        if requests:
            self._engine.submit(requests)
        return self._engine.poll()

    def _request(self, number: int, run: Run) -> Request:
        room = self._room - len(run.tokens)
        return Request(
            id=number,
            prompt_tokens=tuple(run.tokens),
            max_new_tokens=room if self._most is None else min(room, self._most),
            seed=request_seed(self._run_seed, self._step, run.prompt.index, run.draw, run.turn),
            sampling=self._sampling,
        )

    def _goes_on(self, run: Run, answer: Sequence[Message]) -> bool:
        """Append the environment's answer, unless it leaves no room for a reply."""
        tokens = self._renderer.reply(run.messages, answer, run.tokens[-1])
        run.truncated = len(run.tokens) + len(tokens) >= self._room
        if not run.truncated:
            run.extend(tokens)
            run.messages += answer
        return not run.truncated

    def _settled(
        self, waiting: dict[concurrent.futures.Future, Run], *, blocks: bool
    ) -> Iterator[tuple[Run, Sequence[Message]]]:
        """Runs whose environment answered. Its failure is the run's error; only a user's mistake stops the job."""
        if not waiting:
            return
        timeout = self._patience if blocks else 0.0
        done, _ = concurrent.futures.wait(waiting, timeout, return_when=concurrent.futures.FIRST_COMPLETED)
        if blocks and not done:
            for future, run in waiting.items():
                future.cancel()
                run.error = f"no answer from the environment within {self._patience:g} s"
            waiting.clear()
        for future in sorted(done, key=lambda f: (waiting[f].group, waiting[f].sample)):
            run = waiting.pop(future)
            try:
                answer = future.result()
            except RlctlError:
                raise
            except Exception as error:  # an episode's failure is no vote, by design
                run.error = str(error) or type(error).__name__
                continue
            yield run, answer


class Replica:
    """The consecutive ranks that share an engine; the first one leads."""

    def __init__(self, size: int) -> None:
        self.size = size
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if world % size:
            raise RlctlError(
                f"{world} processes do not divide into engines of {size}",
                "change policy.generation.vllm_cfg.tensor_parallel_size or the number of processes",
                exit_status=ENVIRONMENT,
            )
        self.index, self.count, self.leads = rank // size, world // size, rank % size == 0
        self._group = None
        if size > 1:
            groups = [dist.new_group(list(range(e * size, (e + 1) * size))) for e in range(self.count)]
            self._group = groups[self.index]

    def agree(self, order: list[Request] | None) -> list[Request] | None:
        """The first rank's requests, on each rank of the replica; None ends the phase."""
        if self.size == 1:
            return order
        box = [order]
        dist.broadcast_object_list(box, src=self.index * self.size, group=self._group)
        return box[0]

    def agree_to_stop(self) -> None:
        """Let the other ranks leave the phase."""
        self.agree(None)


@contextlib.contextmanager
def _background_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, so that environments go on while the engine computes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)
        if not thread.is_alive():  # an environment that blocks the loop keeps its thread until the process ends
            loop.close()
