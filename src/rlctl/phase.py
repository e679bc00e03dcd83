"""A rollout phase: its prompts, the batch that every rank has, and the text of the rollouts that were played here.

Phases of one step are joined, groups are chosen from them, and what is left is written for people. It knows no engine.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.envs.render import Renderer
from rlctl.lazy import torch
from rlctl.types import Batch, Declared, Message, Prompt, Rollout, concatenate

METRICS = {
    "rollout/reward": Declared(
        meaning="what the run is for",
        formula="mean over rollouts with a vote of the weighted sum of reward parts",
        reduce=None,
        healthy="rises; judge by val/reward where there is one",
    ),
    "rollout/reward/<part>": Declared(
        meaning="a part of the reward, before its weight; only of rewards with several",
        formula="mean over rollouts with a vote",
        reduce=None,
        healthy="the part that is the task rises too, not only the format's",
    ),
    "rollout/reward_std": Declared(
        meaning="spread of rewards over all rollouts of the step",
        formula="population deviation",
        reduce=None,
        healthy="above 0; near 0 nothing is left to compare",
    ),
    "rollout/response_length": Declared(
        meaning="sampled tokens of a rollout, over all its turns",
        formula="mean over rollouts with a vote",
        reduce=None,
        healthy="steady or slowly rising; runs away towards the limit: see rollout/truncated_share",
    ),
    "rollout/total_length": Declared(
        meaning="all tokens of a rollout: prompt, replies of the environment, sampled ones",
        formula="mean over rollouts with a vote",
        reduce=None,
        healthy="well below policy.max_total_sequence_length",
    ),
    "rollout/truncated_share": Declared(
        meaning="share of rollouts that met the length limit",
        formula="mean over rollouts with a vote",
        reduce=None,
        healthy="below 0.05; above it the limit decides the reward",
    ),
    "rollout/invalid_share": Declared(
        meaning="share of rollouts without a vote: the environment failed, hung or gave no number",
        formula="1 - rollouts with a vote / all",
        reduce=None,
        healthy="0",
    ),
    "rollout/invalid": Declared(meaning="their number", formula="count", reduce=None, healthy="0"),
}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What was generated. A group is its prompt's position in `prompts`."""

    prompts: Sequence[Prompt]
    batch: Batch
    own: Sequence[Rollout]
    """Of this rank's replica, with their text; every one of them is in `batch`."""

    def rollouts(self, renderer: Renderer) -> list[Rollout]:
        """All of them, for a dump. Other replicas' text is decoded again from their tokens."""
        mine = {(r.group, r.sample): r for r in self.own}
        seen: Counter[int] = Counter()
        found = []
        for i, group in enumerate(self.batch.group.tolist()):
            key = (group, seen[group])
            seen[group] += 1
            found.append(mine[key] if key in mine else self._decoded(i, key, renderer))
        return found

    def _decoded(self, i: int, key: tuple[int, int], renderer: Renderer) -> Rollout:
        batch, prompt = self.batch, self.prompts[key[0]]
        rows = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        tokens, start = batch.tokens[rows].tolist(), len(renderer.prompt(prompt.messages))
        valid = bool(batch.valid[i])
        return Rollout(
            prompt=prompt,
            group=key[0],
            sample=key[1],
            tokens=tuple(tokens),
            mask=tuple(batch.mask[rows].tolist() if valid else (t >= start for t in range(len(tokens)))),
            logprobs=tuple(batch.rollout_logprobs[rows].tolist()),
            version=int(batch.version[rows][-1]),
            messages=(*prompt.messages, Message(role="assistant", content=renderer.decode(tokens[start:]))),
            reward=float(batch.rewards[i]),
            reward_parts={name: float(part[i]) for name, part in batch.reward_parts.items()},
            valid=valid,
            truncated=bool(batch.truncated[i]),
            error=None if valid else "see the log of its rank",
        )


def joined(phases: Sequence[Phase]) -> Phase:
    """One phase of several, in order; groups are numbered on."""
    shifts = [0]
    for phase in phases:
        shifts.append(shifts[-1] + len(phase.prompts))
    pairs = list(zip(phases, shifts, strict=False))
    return Phase(
        prompts=[prompt for phase in phases for prompt in phase.prompts],
        batch=concatenate([phase.batch.replace(group=phase.batch.group + shift) for phase, shift in pairs]),
        own=[replace(rollout, group=rollout.group + shift) for phase, shift in pairs for rollout in phase.own],
    )


def chosen(phase: Phase, groups: Sequence[int]) -> Phase:
    """Some groups of a phase, in the order given and numbered anew."""
    number = {group: i for i, group in enumerate(groups)}
    sequences = torch.cat([(phase.batch.group == group).nonzero().flatten() for group in groups])
    batch = phase.batch.select(sequences)
    return Phase(
        prompts=[phase.prompts[group] for group in groups],
        batch=batch.replace(group=torch.tensor([number[g] for g in batch.group.tolist()], dtype=torch.int64)),
        own=[replace(r, group=number[r.group]) for r in phase.own if r.group in number],
    )


def statistics(batch: Batch) -> dict[str, float]:
    """What is logged of a phase. Means are over rollouts with a vote."""
    valid = batch.valid
    rewards = batch.rewards[valid].double()
    sampled = batch.sequence_sum(batch.mask.long())[valid].double()
    parts = {f"rollout/reward/{name}": float(part[valid].mean()) for name, part in batch.reward_parts.items()}
    return {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/response_length": float(sampled.mean()),
        "rollout/total_length": float(batch.lengths[valid].double().mean()),
        "rollout/truncated_share": float(batch.truncated[valid].double().mean()),
        "rollout/invalid_share": 1.0 - float(valid.double().mean()),
        "rollout/invalid": float(len(batch) - int(valid.sum())),
        **(parts if len(parts) > 1 else {}),
    }


def write_rollouts(path: Path, rollouts: Sequence[Rollout], tokenizer: Any) -> None:
    """Write one JSON line a rollout; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as out:
        for rollout in rollouts:
            out.write(as_line(rollout, tokenizer))
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(path)


def as_line(rollout: Rollout, tokenizer: Any) -> str:
    """A rollout as a JSON line, for people and for `rlctl runs rollouts`."""
    start = rollout.mask.index(True) if True in rollout.mask else len(rollout.tokens)
    line = {
        "group": rollout.group,
        "sample": rollout.sample,
        "index": rollout.prompt.index,
        "prompt": [{"role": m.role, "content": m.content} for m in rollout.prompt.messages],
        "response": tokenizer.decode(rollout.tokens[start:], skip_special_tokens=True),
        "reward": rollout.reward if rollout.valid else None,
        "reward_parts": dict(rollout.reward_parts),
        "valid": rollout.valid,
        "truncated": rollout.truncated,
        "error": rollout.error,
        "response_tokens": sum(rollout.mask),
        "version": rollout.version,
    }
    return json.dumps(line, ensure_ascii=False) + "\n"
