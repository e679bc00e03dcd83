"""Messages to tokens: one beginning, no second tokenisation, and conversations that go on at token level."""

import pytest

from rlctl.envs.render import Renderer
from rlctl.errors import RlctlError
from rlctl.models import tiny_tokenizer
from rlctl.types import Message

VOCABULARY = 288
CHATML = tiny_tokenizer.CHAT_TEMPLATE.replace("{{ bos_token }}", "")
STRIPS_HISTORY = (  # like templates that show an answer's opening tag in the last turn only
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template=tiny_tokenizer.CHAT_TEMPLATE):
    made = tiny_tokenizer.build(VOCABULARY)
    made.chat_template = template
    return made


def user(text):
    return Message(role="user", content=text)


def assistant(text):
    return Message(role="assistant", content=text)


def test_a_prompt_is_the_templates_text_with_one_beginning():
    ids = Renderer(tokenizer()).prompt([user("hi")])
    assert ids.count(256) == 1
    assert ids[0] == 256
    assert tokenizer().decode(ids) == "<|begin|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def with_beginning(template):
    """A tokenizer that puts its beginning before every text, as Llama's does."""
    import tokenizers

    made = tokenizer(template)
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 256)]
    )
    assert made("a")["input_ids"] == [256, 97]
    return made


@pytest.mark.parametrize("template", [tiny_tokenizer.CHAT_TEMPLATE, CHATML])
def test_a_beginning_is_added_exactly_where_the_template_leaves_it_out(template):
    ids = Renderer(with_beginning(template)).prompt([user("hi")])
    assert ids.count(256) == 1
    assert ids[0] == 256


def test_no_beginning_is_invented_for_a_tokenizer_that_uses_none():
    assert 256 not in Renderer(tokenizer(CHATML)).prompt([user("hi")])


def test_two_beginnings_are_refused():
    with pytest.raises(RlctlError, match="begins with '<|begin|>' twice"):
        Renderer(tokenizer("{{ bos_token }}" + tiny_tokenizer.CHAT_TEMPLATE)).prompt([user("hi")])


def test_a_tokenizer_without_template_is_refused():
    with pytest.raises(RlctlError, match="no chat template") as caught:
        Renderer(tokenizer(None))
    assert "policy.tokenizer.chat_template" in caught.value.hint


def test_a_template_that_refuses_the_roles_is_the_users_to_know():
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    renderer = Renderer(tokenizer(strict))
    with pytest.raises(RlctlError, match="refuses a conversation of system, user: TemplateError: no system"):
        renderer.prompt([Message(role="system", content="s"), user("u")])


def test_the_templates_end_of_turn_is_a_stop_token():
    assert Renderer(tokenizer()).stop_token_ids == (257,)
    closes_with_text = CHATML.replace("<|im_end|>", "[end]")
    assert Renderer(tokenizer(closes_with_text)).stop_token_ids == ()


def test_decoding_leaves_special_tokens_out():
    assert Renderer(tokenizer()).decode([104, 105, 257]) == "hi"


def test_a_continued_conversation_is_what_the_template_renders_whole():
    """With a reply that encodes to itself, token-level continuation and one rendering agree."""
    renderer = Renderer(tokenizer())
    history, answer = [user("2+2?"), assistant("5")], [user("no")]
    tokens = renderer.prompt(history[:1]) + [ord("5"), 257]
    assert tokens + renderer.reply(history, answer, 257) == renderer.prompt([*history, *answer])


def test_sampled_tokens_are_never_encoded_again():
    """A reply sampled as an invalid byte decodes to a replacement character; the continuation does not touch it."""
    renderer = Renderer(tokenizer())
    sampled = [0xFF, 257]
    text = renderer.decode(sampled)
    assert text == "\ufffd"
    added = renderer.reply([user("q"), assistant(text)], [user("again")], 257)
    assert tokenizer().decode(added) == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_stopped_otherwise_is_closed_by_the_template():
    added = Renderer(tokenizer()).reply([user("q"), assistant("x")], [user("again")], ord("x"))
    assert added[0] == 257


def test_a_template_that_rewrites_history_cannot_continue_a_conversation():
    renderer = Renderer(tokenizer(STRIPS_HISTORY))
    with pytest.raises(RlctlError, match="rewrites earlier messages"):
        renderer.reply([user("q"), assistant("x")], [user("again")], 257)
