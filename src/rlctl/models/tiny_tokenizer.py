"""The byte-level tokenizer of the tiny model: id b is byte b, then the special tokens. Any text round-trips."""

from __future__ import annotations

from typing import Any

BEGIN, END, PAD, TURN = "<|begin|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
SPECIAL = (BEGIN, END, PAD, TURN)  # ids 256, 257, 258, 259
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte value."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def build(vocab_size: int) -> Any:
    """The transformers tokenizer; rows of the vocabulary without a meaning are reserved special tokens.

    Args:
        vocab_size: of the model; every id below it decodes to something.
    """
    # Heavy, and needed only where a model is made.
    import tokenizers
    import transformers

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - len(vocabulary) - len(SPECIAL))]
    core.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in (*SPECIAL, *reserved)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
