"""Data that are learned from: what a row may be, which tokens count, and what is refused."""

from __future__ import annotations

import json

import pytest

from rlctl import config
from rlctl.data import examples
from rlctl.device import Hardware
from rlctl.envs.render import Renderer
from rlctl.errors import RlctlError
from rlctl.models import tiny_tokenizer
from rlctl.recipe.compose import compose
from rlctl.recipe.derive import derive
from rlctl.supervised import Supervised
from rlctl.types import Message

HOST = Hardware(gpus=0, gpu_name=None, cpus=2, memory_bytes=25_000_000_000)
TURNS = [
    Message(role="system", content="s"),
    Message(role="user", content="ab"),
    Message(role="assistant", content="cd"),
    Message(role="user", content="e"),
    Message(role="assistant", content="fg"),
]
LOOP = "{% for m in messages %}"
OPENS = "{% if add_generation_prompt %}"
TEMPLATES = {  # of five families: how a turn is opened and closed, and what stands behind its end
    "chatml": (
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPENS
        + "<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n", "cd<|im_end|>",
         "\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n", "fg<|im_end|>", "\n"),
    ),
    "headers, no line feed behind": (  # as llama 3 writes
        "{{ bos_token }}" + LOOP + "[{{ m.role }}]\n\n{{ m.content }}<|im_end|>{% endfor %}" + OPENS
        + "[assistant]\n\n{% endif %}",
        ("<|begin|>[system]\n\ns<|im_end|>[user]\n\nab<|im_end|>[assistant]\n\n", "cd<|im_end|>",
         "[user]\n\ne<|im_end|>[assistant]\n\n", "fg<|im_end|>", ""),
    ),
    "answers without a header": (  # as mistral writes: instructions in brackets, the answer plain
        LOOP + "{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}[INST]{{ m.content }}[/INST]"
        "{% endif %}{% endfor %}",
        ("[INST]s[/INST][INST]ab[/INST]", "cd<|im_end|>", "[INST]e[/INST]", "fg<|im_end|>", ""),
    ),
    "closed by text": (  # no special token ends a turn: the end of the sequence is appended
        LOOP + "### {{ m.role }}\n{{ m.content }}\n{% endfor %}" + OPENS + "### assistant\n{% endif %}",
        ("### system\ns\n### user\nab\n### assistant\n", "cd\n", "### user\ne\n### assistant\n", "fg\n<|im_end|>", ""),
    ),
    "an empty thought in the last answer only": (
        LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}" + OPENS + "<|im_start|>assistant\n{% endif %}",
        None,
    ),
}  # fmt: skip


def renderer(template: str = tiny_tokenizer.CHAT_TEMPLATE) -> Renderer:
    made = tiny_tokenizer.build(288)
    made.chat_template = template
    return Renderer(made)


@pytest.mark.parametrize("name", [n for n, (_, parts) in TEMPLATES.items() if parts])
def test_exactly_the_answers_with_their_end_of_turn_are_in_the_mask(name: str) -> None:
    template, parts = TEMPLATES[name]
    made = renderer(template)
    for last_only in (False, True):
        tokens, mask = made.conversation(TURNS, last_only=last_only)
        runs: list[tuple[bool, list[int]]] = []
        for token, counts in zip(tokens, mask, strict=True):
            if not runs or runs[-1][0] != counts:
                runs.append((counts, []))
            runs[-1][1].append(token)
        told = [(counts, made.tokenizer.decode(run, skip_special_tokens=False)) for counts, run in runs]
        before, first, between, second, behind = parts
        want = [(False, before), (True, first), (False, between), (True, second)]
        if last_only:
            want = [(False, before + first + between), (True, second)]
        assert told == [*want, *([(False, behind)] if behind else [])]


def test_a_template_that_rewrites_an_earlier_answer_is_refused_where_it_would_be_learned() -> None:
    made = renderer(TEMPLATES["an empty thought in the last answer only"][0])
    with pytest.raises(RlctlError, match="rewrites earlier messages"):
        made.conversation(TURNS, last_only=False)
    tokens, mask = made.conversation(TURNS, last_only=True)
    answer = [t for t, counts in zip(tokens, mask, strict=True) if counts]
    assert made.tokenizer.decode(answer, skip_special_tokens=False) == "<think></think>fg<|im_end|>"


def data(folder, *rows, **fields) -> config.Data:
    (folder / "my.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return config.Data(train_path=str(folder / "my.jsonl"), **fields)


ASK = [{"role": "user", "content": "q"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": ASK, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": [*ASK, GOOD], "rejected": [*ASK, BAD]},
    ],
)
def test_a_pair_may_be_texts_answers_or_whole_conversations(row, tmp_path) -> None:
    (found,) = examples.load(data(tmp_path, row, system_prompt="s"), "preferences")
    said = [[(m.role, m.content) for m in c] for c in found.conversations]
    start = [("system", "s"), ("user", "q")]
    assert said == [[*start, ("assistant", "good")], [*start, ("assistant", "bad")]]


@pytest.mark.parametrize(
    ("kind", "row", "told"),
    [
        ("preferences", {"prompt": "q", "chosen": "a", "rejectd": "b"}, r"my.jsonl:1: no column `rejected` \(data.rej"),
        ("preferences", {"prompt": "q", "chosen": "", "rejected": "b"}, "`chosen` holds '', which is no answer"),
        ("preferences", {"prompt": "other", "chosen": [*ASK, GOOD], "rejected": "b"}, "is no answer to the prompt"),
        ("conversations", {"messages": ASK}, "which is no conversation to learn"),
        ("conversations", {"messages": [GOOD]}, "which is no conversation to learn"),
        ("conversations", {"text": "a"}, r"no column `messages` \(data.messages_key\)"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named_by_its_line(kind, row, told, tmp_path) -> None:
    with pytest.raises(RlctlError, match=told) as caught:
        examples.load(data(tmp_path, row), kind)
    assert caught.value.exit_status == 2 and caught.value.hint


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dpo smoke-tiny", "`dpo` learns from data, and `data.train_path` is not set"),
        ("sft smoke-sft env.name=toy", "`env.name=toy` has no effect: `sft` generates nothing"),
        ("sft smoke-sft policy.generation.temperature=0.5", "has no effect: `sft` generates nothing"),
        ("sft smoke-sft data.chosen_key=x", "`sft` learns from conversations"),
        ("grpo smoke-tiny data.chosen_key=x", "`grpo` learns from rollouts"),
        ("dpo smoke-dpo policy.train_micro_batch_size=1", "a pair of answers shares a microbatch"),
        ("dpo smoke-dpo policy.sequence_packing.train_mb_tokens=100", "a pair may have 128 tokens"),
        ("dpo smoke-dpo policy.train_global_batch_size=5", "updates of whole groups"),
        ("sft smoke-sft data.val_path=null", "`data.val_path` is not set"),
    ],
)
def test_what_could_not_train_or_has_no_effect_is_refused_before_anything_starts(line, told) -> None:
    algorithm, recipe, *overrides = line.split()
    with pytest.raises(RlctlError, match=told):
        derive(compose(algorithm, recipe, overrides), HOST)


def test_long_rows_are_dropped_pairs_stay_together_and_a_step_is_what_the_order_says(tmp_path) -> None:
    rows = [{"prompt": "q", "chosen": str(i), "rejected": "x" * (99 if i == 1 else 2)} for i in range(5)]
    made = data(tmp_path, *rows)
    settings = [f"data.train_path={made.train_path}", "grpo.num_prompts_per_step=2", "data.shuffle=false"]
    recipe = derive(compose("dpo", "smoke-dpo", settings), HOST).recipe
    source = Supervised(recipe, renderer())
    assert source.dropped == 1
    batch = source.next(2)  # rows 3 and 4; row 1 is gone
    text = "".join(source.renderer.decode([int(t)]) for t in batch.tokens[batch.mask])
    assert text == "3xx4xx"
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert source.num_steps == 20  # ten epochs of two steps
