"""What of a rollout is trained on, as tables: for five families of chat templates, every text and whether it counts."""

from __future__ import annotations

import itertools

import pytest

from rlctl.envs.render import Renderer
from rlctl.models import tiny_tokenizer
from rlctl.rollout import Colocated
from rlctl.types import Completion, Message, Prompt
from tests.unit import rollout_cases as cases

FAMILIES = {  # chat template, its prompt, what it writes between two replies for a tool's `r`, the end of a reply
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "headers": (  # as llama 3: a beginning, and nothing between turns
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
        "<|begin|>[user]\n\n{user}<|im_end|>[assistant]\n\n",
        "[tool]\n\nr<|im_end|>[assistant]\n\n",
        "<|im_end|>",
    ),
    "brackets": (  # as mistral: an answer has no header
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
        "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
        "<|begin|>[INST]{user}[/INST]",
        "[INST]r[/INST]",
        "<|im_end|>",
    ),
    "model's turn": (  # as gemma: another name for the assistant, and an end that is not the sequence's
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content }}<|reserved_0|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
        "<|begin|><|im_start|>user\n{user}<|reserved_0|>\n<|im_start|>model\n",
        "\n<|im_start|>tool\nr<|reserved_0|>\n<|im_start|>model\n",
        "<|reserved_0|>",
    ),
    "closed by text": (  # no special token ends a turn: the model ends it with the sequence's end
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}",
        "### user\n{user}\n### assistant\n",
        "\n### tool\nr\n### assistant\n",
        "<|im_end|>",
    ),
}
USER = "ab"


class Scripted(cases.LateEngine):
    """Gives the replies of a script, by turn; the last one again where there is none."""

    def __init__(self, script, tokenizer):
        super().__init__()
        self.script, self.tokenizer, self.turn = script, tokenizer, 0

    def complete(self, request):
        text = self.script[self.turn]
        self.turn += 1
        tokens = tuple(self.tokenizer(text.removesuffix("..."), add_special_tokens=False)["input_ids"])
        reason = "length" if text.endswith("...") else "stop"
        return Completion(id=0, tokens=tokens, logprobs=(-1.0,) * len(tokens), finish_reason=reason, version=0)


class Tool(cases.Dialogue):
    """One prompt; every reply but the last is answered by a tool."""

    def __init__(self, user, turns):
        super().__init__(turns=turns, size=1)
        self.user = user

    def dataset(self, split):
        return [Prompt(messages=(Message(role="user", content=self.user),), row={}, index=0)]

    def start(self, prompt):
        talk = super().start(prompt)
        step = talk.step

        async def answered(message):
            return [Message(role="tool", content="r") for _ in await step(message)]

        talk.step = answered
        return talk


def played(template, script, *, user=USER, pad_is_end=False, stops=()):
    """The rollout as [(text, whether it counts)], and whether it was cut."""
    tokenizer = tiny_tokenizer.build(288)
    tokenizer.chat_template = template
    if pad_is_end:
        tokenizer.pad_token = tokenizer.eos_token
    made = cases.recipe(prompts=1, samples=1)
    made.policy.generation.stop_token_ids = list(stops)
    rollouts = Colocated(made, Tool(user, len(script)), Scripted(script, tokenizer), Renderer(tokenizer))
    batch = rollouts.next(1)
    pairs = zip(batch.tokens.tolist(), batch.mask.tolist(), strict=True)
    runs = [(counts, [t for t, _ in run]) for counts, run in itertools.groupby(pairs, key=lambda pair: pair[1])]
    assert not batch.rollout_logprobs[~batch.mask].any()
    assert (batch.rollout_logprobs[batch.mask] == -1.0).all()
    return [(tokenizer.decode(run, skip_special_tokens=False), c) for c, run in runs], bool(batch.truncated[0])


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_of_turns_with_a_tool_exactly_the_replies_count_with_their_ends(family):
    template, prompt, tool, end = family
    told, cut = played(template, [f"cd{end}", f"e{end}", f"fg{end}"])
    assert told == [
        (prompt.format(user=USER), False), (f"cd{end}", True), (tool, False), (f"e{end}", True), (tool, False),
        (f"fg{end}", True),
    ]  # fmt: skip
    assert not cut


def test_padding_that_is_the_end_of_sequence_takes_no_end_out_of_the_mask(family):
    template, prompt, tool, end = family
    told, _ = played(template, [f"cd{end}", f"fg{end}"], pad_is_end=True)
    assert told == [(prompt.format(user=USER), False), (f"cd{end}", True), (tool, False), (f"fg{end}", True)]


def test_a_cut_reply_counts_without_an_end_and_is_the_last(family):
    template, prompt, tool, end = family
    assert played(template, [f"cd{end}", "fg..."]) == (
        [(prompt.format(user=USER), False), (f"cd{end}", True), (tool, False), ("fg", True)], True,
    )  # fmt: skip
    assert played(template, ["cd...", f"fg{end}"]) == ([(prompt.format(user=USER), False), ("cd", True)], True)


def test_an_empty_reply_counts_as_its_end_alone(family):
    template, prompt, tool, end = family
    told, cut = played(template, [end, f"fg{end}"])
    assert told == [(prompt.format(user=USER), False), (end, True), (tool, False), (f"fg{end}", True)]
    assert not cut


def test_special_tokens_inside_a_prompt_do_not_count(family):
    template, prompt, _, end = family
    user = f"a{end}b<|pad|><|im_start|>assistant\nc{end}"
    told, _ = played(template, [f"cd{end}"], user=user)
    assert told == [(prompt.format(user=user), False), (f"cd{end}", True)]


def test_special_tokens_that_the_model_writes_inside_a_reply_count(family):
    template, prompt, _, end = family
    told, _ = played(template, [f"c<|pad|><|im_start|>d{end}"])
    assert told == [(prompt.format(user=USER), False), (f"c<|pad|><|im_start|>d{end}", True)]


def test_a_reply_that_another_stop_token_ended_is_closed_by_the_template_outside_the_mask(family):
    template, prompt, tool, end = family
    closes = "" if "###" in template else end  # a template that closes by text has the line feed of `tool` for that
    told, cut = played(template, ["c;", f"fg{end}"], stops=[ord(";")])
    assert told == [(prompt.format(user=USER), False), ("c;", True), (closes + tool, False), (f"fg{end}", True)]
    assert not cut
