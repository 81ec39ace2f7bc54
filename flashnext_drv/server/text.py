"""A pack's text side: its tokenizer, chat template and stop ids, and ids back to text that is never split.

Called by schema.py (prompts), replies.py (texts of tokens) and parse.py (Detokenizer).  What must stay true:
text comes from bytes, never from the tokenizer's own decoder, so any cut of a token stream gives the same
text; a pack without tokenizer.json has no TextModel at all.  Needs the extra `server` (tokenizers, jinja2)
when a TextModel is made, not when this module is imported.  All of it may be used from several threads.

Source: the byte alphabet is that of byte-level BPE (GPT-2's table); file names and fields are those that
published packs carry.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError, UsageError
from .template import ChatTemplate, packages_missing

__all__ = ["Detokenizer", "TextModel"]

# Marks that a reply is split by: they stay in the text even where a pack calls them special.
_MARKS: Final = frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>"))
_RANGES: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, (1 << 32) - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
_STOP_NAMES: Final = ("<|im_end|>", "<|endoftext|>")
_ADVICE: Final = "fetch the file again, or remove it to serve token ids only"


class TextModel:
    """Tokenizer, template and generation defaults of one pack.

    n_tokens: ids the tokenizer knows, 0..n_tokens-1 (the model's vocabulary may be larger).  stop_ids: ids
    that end a reply.  defaults: temperature, top_p, top_k, min_p, repetition_penalty as far as
    generation_config.json names them.  template: None when the pack has no chat template.
    """

    def __init__(
        self,
        tokenizer_json: str,
        config: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        template: str | None = None,
        *,
        source: str = "tokenizer.json",
    ) -> None:
        """tokenizer_json: text of that file.  config, generation: the parsed tokenizer_config.json and
        generation_config.json.  template: the chat template.  Raises CheckpointError."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise packages_missing(error) from error
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
            self._tokenizer.no_truncation()  # files carry what their trainer used; a prompt is never cut
            self._tokenizer.no_padding()
            byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer_json).get("decoder"))
            added = self._tokenizer.get_added_tokens_decoder()
            vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        except Exception as error:  # the binding raises plain Exception for every malformed file
            raise CheckpointError(
                "the tokenizer cannot be read", file=source, because=str(error), do=_ADVICE
            ) from error
        if not byte_level:
            raise CheckpointError(
                "the tokenizer is not byte-level",
                file=source,
                because="text is put together from the bytes of tokens",
                do="use a pack of the family, or remove the file to serve token ids only",
            )
        self.n_tokens = max(vocab.values(), default=-1) + 1
        self._bytes: list[bytes] = [b""] * self.n_tokens
        self._hidden: set[int] = set()
        letters = _byte_alphabet()
        for token, token_id in vocab.items():
            if token_id in added:
                self._bytes[token_id] = token.encode()
                if added[token_id].special and token not in _MARKS:
                    self._hidden.add(token_id)
            else:
                parts = [letters.get(char) for char in token]
                self._bytes[token_id] = (
                    token.encode() if None in parts else bytes(p for p in parts if p is not None)
                )
        self.stop_ids = self._stops(config or {}, generation or {}, vocab)
        self.defaults = _defaults(generation or {}, source)
        self.template = None if template is None else ChatTemplate(template, config or {}, source)

    @classmethod
    def load(cls, folder: str | Path) -> TextModel | None:
        """The text side of the pack in `folder`; None when it has no tokenizer.json.

        The template is chat_template.jinja, else the field chat_template of tokenizer_config.json.  Raises
        CheckpointError when a file is there and cannot be used.
        """
        folder = Path(folder)
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.is_file():
            return None
        config = _json_of(folder / "tokenizer_config.json")
        generation = _json_of(folder / "generation_config.json")
        jinja = folder / "chat_template.jinja"
        template = _text_of(jinja) if jinja.is_file() else _template_of(config.get("chat_template"))
        return cls(_text_of(tokenizer), config, generation, template, source=str(tokenizer))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the names of special tokens in it become those tokens, nothing is added around it.

        Raises UsageError for text that is no Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the text is not valid Unicode", because=str(error.reason)) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; nothing for ids that the tokenizer does not know."""
        return self._bytes[token_id] if 0 <= token_id < self.n_tokens else b""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes) of one token by itself, special ones too; incomplete sequences show as U+FFFD."""
        raw = self.token_bytes(token_id)
        return raw.decode(errors="replace"), raw

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is special and stays out of replies."""
        return token_id in self._hidden

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; invalid sequences as U+FFFD.  special: show special tokens too."""
        return b"".join(self.token_bytes(i) for i in ids if special or i not in self._hidden).decode(
            errors="replace"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text through the pack's template.

        generation: end with the opening of the assistant's turn.  variables: further names the template
        reads, such as enable_thinking.  Raises UsageError: no template, or the template refuses the messages.
        """
        if self.template is None:
            raise UsageError(
                "the pack has no chat template",
                do="write the prompt yourself and use /v1/completions, or add chat_template.jinja",
            )
        return self.template.render(messages, tools, generation, variables or {})

    def _stops(
        self, config: Mapping[str, Any], generation: Mapping[str, Any], vocab: Mapping[str, int]
    ) -> frozenset[int]:
        found: set[int] = set()
        listed = generation.get("eos_token_id")
        for value in listed if isinstance(listed, list) else [listed]:
            if type(value) is int and value >= 0:
                found.add(value)
        name = config.get("eos_token")
        name = name.get("content") if isinstance(name, Mapping) else name
        found.update(vocab[each] for each in (name, *_STOP_NAMES) if isinstance(each, str) and each in vocab)
        return frozenset(found)


class Detokenizer:
    """Ids to text, piece by piece; bytes of an unfinished character wait for the next token.

    The pieces joined are `TextModel.decode` of all ids, however they were cut.  special: show special tokens.
    """

    def __init__(self, text: TextModel, *, special: bool = False) -> None:
        self._text = text
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became complete with `ids`."""
        raw = b"".join(self._text.token_bytes(i) for i in ids if self._special or not self._text.is_hidden(i))
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """Letter of the tokenizer's files -> byte: printable Latin-1 is itself, the rest follows at 256."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _defaults(generation: Mapping[str, Any], source: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise CheckpointError(
                "generation_config.json has an impossible field",
                file=source,
                field=name,
                value=repr(value),
                because=f"expected a number {least:g}..{most:g}",
                do="fetch the file again, or correct it",
            )
        out[name] = value
    if generation.get("do_sample") is False:
        out["temperature"] = 0.0
    return out


def _template_of(field: object) -> str | None:
    """The template of tokenizer_config.json: a text, or a list of named ones of which `default` counts."""
    if isinstance(field, list):
        named = {each.get("name"): each.get("template") for each in field if isinstance(each, Mapping)}
        field = named.get("default")
    return field if isinstance(field, str) else None


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise CheckpointError(
            "file cannot be read", file=str(path), because=str(error.strerror), do="check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError("file is not UTF-8", file=str(path), because=str(error), do=_ADVICE) from error


def _json_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        raw = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("file is not JSON", file=str(path), because=str(error), do=_ADVICE) from error
    if not isinstance(raw, dict):
        raise CheckpointError("file holds no JSON object", file=str(path), do=_ADVICE)
    return raw
