"""What runs inside the processes of tests/numerics/test_supervised.py, and the plain loop that it is held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl import device, trainer
from rlctl.log import RunLog
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive

STEPS = 3
OVERRIDES = (
    f"grpo.max_num_steps={STEPS}", "checkpointing.enabled=false", "checkpointing.save_hf=false", "data.shuffle=false",
    "grpo.val_period=0", "grpo.val_at_start=true", "grpo.val_at_end=true", "policy.max_grad_norm=1.0",
)  # fmt: skip


def curves(folder: Path, algorithms: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """The metrics of a few steps, by `algorithm backend`; one start of processes serves all."""
    import torch.distributed as dist

    found = {}
    for algorithm in algorithms:
        for backend in ("dtensor", "megatron"):
            out = folder / f"{algorithm} {backend}"
            out.mkdir(exist_ok=True)
            switch = (f"policy.megatron_cfg.enabled={str(backend == 'megatron').lower()}",)
            world = (f"cluster.procs={dist.get_world_size()}",)
            recipe = derive(compose(algorithm, f"smoke-{algorithm}", (*OVERRIDES, *switch, *world)), device.probe())
            log = RunLog(out, writes=dist.get_rank() == 0, tensorboard=False, console=None)
            dist.barrier()
            assert trainer.train(recipe.recipe, out, log, stop=lambda seconds: False)
            log.close()
            dist.barrier()
            lines = (out / "metrics.jsonl").read_text().splitlines()
            found[out.name] = [json.loads(line) for line in lines]
    return found


def rows(name: str) -> list[dict[str, Any]]:
    """A packaged data file."""
    file = Path(__file__).parents[1] / "recipes" / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def encoded(tokenizer: Any, conversation: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Token ids and transformers' labels: -100 but on the last answer and the token that ends its turn."""
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)
    prompt = tokenizer.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True)
    start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    end = start + len(tokenizer(conversation[-1]["content"])["input_ids"]) + 1
    return ids, [t if start <= i < end else -100 for i, t in enumerate(ids)]


def padded(pairs: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """A batch for a transformers model."""
    import torch

    longest = max(len(ids) for ids, _ in pairs)
    fill = lambda values, by: [*values, *[by] * (longest - len(values))]  # noqa: E731
    return {
        "input_ids": torch.tensor([fill(ids, 0) for ids, _ in pairs]),
        "labels": torch.tensor([fill(labels, -100) for _, labels in pairs]),
        "attention_mask": torch.tensor([fill([1] * len(ids), 0) for ids, _ in pairs]),
    }


def plain_sft(model_dir: Path, rows_of_steps: list[list[Any]], held_out: list[Any]) -> list[float]:
    """Losses of transformers' own loss and torch's AdamW, then that on held-out rows."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for step in rows_of_steps:
        loss = model(**padded(step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model(**padded(held_out)).loss.item()]


def plain_dpo(model_dir: Path, rows_of_steps: list[list[Any]], held_out: list[Any], *, beta: float) -> list[float]:
    """The paper's equation 7 on transformers' logits, pair by pair, and torch's AdamW; rows are chosen, rejected."""
    import torch
    import transformers

    model, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    def likelihood(of: Any, ids: list[int], labels: list[int]) -> Any:
        table = of(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(table[i - 1, label] for i, label in enumerate(labels) if label != -100)

    def mean_loss(pairs: list[Any]) -> Any:
        losses = []
        for chosen, rejected in pairs:
            with torch.no_grad():
                start = [likelihood(reference, *one) for one in (chosen, rejected)]
            now = [likelihood(model, *one) for one in (chosen, rejected)]
            losses.append(-torch.log(torch.sigmoid(beta * ((now[0] - start[0]) - (now[1] - start[1])))))
        return sum(losses) / len(losses)

    found = []
    for step in rows_of_steps:
        loss = mean_loss(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        return [*found, mean_loss(held_out).item()]
