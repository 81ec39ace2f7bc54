"""The text side of a synthetic pack: a small byte-level BPE tokenizer, a chat template, generation defaults.

Called by `flashnext-drv synth --tokenizer` and by tests of the server.  What must stay true: the same model
gives the same bytes; every id of the model's vocabulary is a token, special ones at the distances from the
end of sequence that the published family has; any bytes can be written; the template is our own, in the
family's form (ChatML, <think>, tools in <function=...> tags).

Source: places and names of special tokens, and the form of turns, are facts of the published models.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

from ..errors import CapacityError, UsageError
from .config import ModelConfig

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "text_files", "write_text"]

# Name, distance from <|endoftext|> (the model's end of sequence), whether replies leave it out.
SPECIAL_TOKENS: Final = (
    ("<|endoftext|>", 0, True),
    ("<|im_start|>", 1, True),
    ("<|im_end|>", 2, True),
    ("<tool_call>", 14, False),
    ("</tool_call>", 15, False),
    ("<tool_response>", 22, False),
    ("</tool_response>", 23, False),
    ("<think>", 24, False),
    ("</think>", 25, False),
)

CHAT_TEMPLATE: Final = """\
{%- set thinking = enable_thinking is not defined or enable_thinking %}
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort else 'xhigh' %}
{%- set ns = namespace(head='') %}
{%- if thinking and effort in ('minimal', 'low') %}
    {%- set ns.head = 'Think briefly.' %}
{%- elif thinking and effort in ('high', 'xhigh', 'max') %}
    {%- set ns.head = 'Think thoroughly.' %}
{%- elif thinking and effort != 'medium' %}
    {{- raise_exception('reasoning_effort ' ~ effort ~ ' is unknown') }}
{%- endif %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.head = ns.head ~ ('\\n\\n' if ns.head else '') ~ messages[0].content %}
{%- endif %}
{%- if tools %}
    {%- set ns.head = ns.head ~ ('\\n\\n' if ns.head else '') ~ '# Tools\\n\\n<tools>' %}
    {%- for tool in tools %}
        {%- set ns.head = ns.head ~ '\\n' ~ (tool | tojson) %}
    {%- endfor %}
    {%- set ns.head = ns.head ~ '\\n</tools>\\n\\nCall a tool like this:\\n<tool_call>\\n<function=NAME>\\n'
        ~ '<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>' %}
{%- endif %}
{%- if ns.head %}
    {{- '<|im_start|>system\\n' ~ ns.head ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' or message.role == 'user' %}
        {%- if not (loop.first and message.role == 'system') %}
            {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' ~ (message.reasoning_content or '') | trim }}
        {{- '\\n</think>\\n\\n' }}
        {{- message.content }}
        {%- for call in message.tool_calls or () %}
            {{- '\\n\\n' if loop.first and message.content else '\\n' if not loop.first else '' }}
            {{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' ~ key ~ '>\\n' ~ (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- raise_exception('role ' ~ message.role ~ ' is unknown') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' ~ ('' if thinking else '\\n</think>\\n\\n') }}
{%- endif %}
"""

# What the merges are learned from.
_SAMPLE: Final = """\
The river begins as a small stream in the hills and grows on its way to the sea. Where it passes the town, the
water is slow and clear; children throw stones from the bridge and count the rings. An old man who lives near
the mill says that the water remembers everything it has seen, and that whoever listens long enough will hear
it tell of mountains, of rain, and of the people who have stood at its banks. Nobody knows how old he is.
In the morning the market opens. There are apples, bread, cheese and flowers; there is always somebody who
wants to sell a horse. A teacher explains to her class why the tide comes and goes: the moon pulls at the
water, the earth turns beneath it, and so the sea rises two times a day. One of the children asks what would
happen if there were no moon. She thinks about it for a while, and then she answers that the nights would be
darker, the days would be shorter, and the stories would have to be about something else.
When you write a program, first say what it must do, then how you will know that it does. A function takes
values and returns a value; a test calls the function and compares. If the test fails, read what it says.
def add(left, right):
    return left + right

for index in range(10):
    print(index, add(index, 1))

The answer is: 0 1 2 3 4 5 6 7 8 9 10, and the sum of them is 55. Please call the function with the name of
the city, and then tell me about the weather there. Thank you, that is all I wanted to know.
"""
_LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLUCMFWYPVBGKJQXZ0123456789"
_SPACE: Final = "\u0120"  # how byte-level BPE writes a space


def text_files(config: ModelConfig) -> dict[str, str]:
    """Name and text of each file of the text side.

    Raises UsageError when the vocabulary has no room for 256 bytes and the special tokens.
    """
    names = [name for name, _, _ in SPECIAL_TOKENS]
    generation = {
        "bos_token_id": config.eos_id,
        "pad_token_id": config.eos_id,
        "eos_token_id": [config.eos_id + 2, config.eos_id],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
    }
    tokenizer_config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": names[2],
        "pad_token": names[0],
        "unk_token": None,
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": _json(_tokenizer(config.vocab, config.eos_id)),
        "tokenizer_config.json": _json(tokenizer_config, indent=1),
        "generation_config.json": _json(generation, indent=1),
    }


def write_text(folder: str | Path, config: ModelConfig) -> None:
    """Write `text_files` beside the pack's other files.  Raises UsageError, CapacityError."""
    try:
        for name, text in text_files(config).items():
            (Path(folder) / name).write_bytes(text.encode())
    except OSError as error:
        raise CapacityError(
            "the tokenizer cannot be written",
            folder=str(folder),
            because=str(error.strerror),
            do="give a folder on a disk with room",
        ) from error


def _tokenizer(vocab_size: int, eos_id: int) -> dict[str, Any]:
    special = {eos_id + distance: (name, hidden) for name, distance, hidden in SPECIAL_TOKENS}
    letters = _alphabet()
    if eos_id < 0 or max(special) >= vocab_size or vocab_size < len(letters) + len(special):
        raise UsageError(
            "the vocabulary has no room for a byte-level tokenizer",
            vocab=vocab_size,
            eos_id=eos_id,
            do=f"use at least {len(letters) + len(special)} ids, and an end of sequence 26 below the last",
        )
    tokens = [*letters]
    merges: list[tuple[str, str]] = []
    known = set(tokens)
    for left, right in _merges():
        if len(tokens) + len(special) == vocab_size:
            break
        if left + right not in known:
            merges.append((left, right))
            tokens.append(left + right)
            known.add(left + right)
    free = (i for i in range(vocab_size) if i not in special)
    vocab = dict(zip(tokens, free, strict=False)) | {name: i for i, (name, _) in special.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **plain, "special": hidden} for i, (name, hidden) in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": [list(pair) for pair in merges],
        },
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge: first those that the sample has twice or more, the most frequent first; then letter by
    letter whatever can be spelled, so that there are enough for any vocabulary."""
    yield from _learned()
    letters = _SPACE + _LETTERS
    for length in (2, 3, 4):
        for spelled in product(letters, repeat=length):
            yield "".join(spelled[:-1]), spelled[-1]


def _learned() -> Iterator[tuple[str, str]]:
    byte_of = dict(enumerate(_alphabet()))
    words = Counter(tuple(byte_of[byte] for byte in word.encode()) for word in _words(_SAMPLE))
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            return
        yield best
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            merged[_merged(word, best)] += count
        words = merged


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


def _words(text: str) -> Iterator[str]:
    """Runs of one class, a space in front belonging to the run: what the pre-tokenizer makes of this text."""
    word = ""
    for char in text:
        if word and (_class(word[-1]) != _class(char) and word != " "):
            yield word
            word = ""
        word += char
    if word:
        yield word


def _class(char: str) -> int:
    return 0 if char.isalpha() else 1 if char.isdigit() else 2 if char.isspace() else 3


def _alphabet() -> list[str]:
    """The letter that stands for each byte: printable Latin-1 for itself, the rest from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


def _json(data: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(data, ensure_ascii=False, indent=indent) + "\n"
