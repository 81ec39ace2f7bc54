"""The text side of the synthetic micro pack, made in memory, and what tests of the server's texts share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.synth_models import MODELS
from flashnext_drv.model.synth_text import CHAT_TEMPLATE, text_files
from flashnext_drv.server.parse import Delta
from flashnext_drv.server.schema import Ask, Model, parse_chat, parse_completion
from flashnext_drv.server.text import TextModel

JSON_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}call: <tool_call>{{ tools[0].function.name }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "wind": {"type": "boolean"},
                "more": {"type": "object"},
            },
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@cache
def config() -> ModelConfig:
    return ModelConfig.from_json(MODELS["micro"].config_json(None))


@cache
def text_model(template: str | None = CHAT_TEMPLATE) -> TextModel:
    files = {
        name: text if name == "tokenizer.json" else json.loads(text)
        for name, text in text_files(config()).items()
    }
    return TextModel(
        files["tokenizer.json"], files["tokenizer_config.json"], files["generation_config.json"], template
    )


@cache
def model(template: str | None = CHAT_TEMPLATE) -> Model:
    return Model.of("micro", config().vocab, 2048, config().eos_id, text_model(template))


@cache
def bare_model() -> Model:
    """Of a pack without a tokenizer."""
    return Model.of("micro", config().vocab, 2048, config().eos_id)


def ids_of(raw: bytes) -> list[int]:
    """Any bytes as ids, one a byte."""
    text = text_model()
    byte = {text.token_bytes(i): i for i in reversed(range(text.n_tokens)) if len(text.token_bytes(i)) == 1}
    return [byte[bytes([value])] for value in raw]


def pieces(whole: Sequence[Any], cuts: Iterable[int]) -> list[Any]:
    """`whole` cut at these places, wherever they lie."""
    places = sorted({cut % (len(whole) + 1) for cut in cuts})
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def joined(deltas: Iterable[Delta]) -> list[tuple[str, str, int, str, str]]:
    """Deltas with neighbours of one kind (and one call) put together."""
    out: list[tuple[str, str, int, str, str]] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last is not None and last[0] == delta.kind and last[2] == delta.index and not delta.name:
            out[-1] = (last[0], last[1] + delta.text, *last[2:])
        else:
            out.append((delta.kind, delta.text, delta.index, delta.id, delta.name))
    return out


def run_pieces(push: Callable[[Any], list[Delta]], parts: Iterable[Any]) -> list[Delta]:
    return [delta for part in parts for delta in push(part)]


HELLO = [{"role": "user", "content": "Hello"}]


def chat(body: dict[str, Any] | None = None, of: Model | None = None, **fields: Any) -> Ask:
    return parse_chat({"messages": HELLO} | (body or {}) | fields, of or model())


def completion(body: dict[str, Any] | None = None, of: Model | None = None, **fields: Any) -> Ask:
    return parse_completion({"prompt": [5, 6]} | (body or {}) | fields, of or model())


def prompt_of(ask: Ask) -> str:
    return text_model().decode(ask.prompt_ids, special=True)
