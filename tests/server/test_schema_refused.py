"""Bodies of requests: what cannot be done is refused by the name of its field, with a way out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext_drv.server.fields import ApiError
from flashnext_drv.server.schema import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_generate,
    parse_tokenize,
)

from . import texts
from .texts import HELLO, chat, completion

NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", 2, "several times"),
        ("n", True, "several"),
        ("best_of", 3, "several times"),
        ("response_format", {"type": "json_object"}, "not constrained"),
        ("guided_json", {}, "not constrained"),
        ("functions", [], "use tools"),
        ("function_call", "auto", "tool_choice"),
        ("audio", {}, "text"),
        ("modalities", ["audio"], "text"),
        ("suffix", "x", "in front"),
        ("prompt_logprobs", 1, "new tokens"),
        ("store", True, "stored"),
        ("draft", True, "no drafts"),
        ("service_tier", "flex", "leave it out"),
        ("use_beam_search", True, "sample"),
        ("skip_special_tokens", False, "return_token_ids"),
        ("thinking_budget", 5, "max_tokens"),
        ("prediction", {}, "leave it out"),
    ],
)
def test_known_fields_that_are_not_built_name_a_way_out(name: str, value: Any, says: str) -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError, match=says) as caught:
            ask({name: value})
        error = caught.value
        assert (error.status, error.param, error.code) == (
            400,
            name,
            "unsupported_value",
        ) and name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", "1"),
        ("temperature", math.inf),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**32),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "5"),
        ("max_tokens", 0),
        ("max_tokens", 2**70),
        ("min_tokens", -1),
        ("min_tokens", 3000),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", ["x" * 257]),
        ("stop", "\ud800"),
        ("stop_token_ids", [512]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 3),
        ("stop_token_ids", [1] * 65),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("logit_bias", {"\u0661": 1}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "x"),
        ("repetition_penalty", 0),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("include_stop_str_in_output", "x"),
        ("ignore_eos", 1),
        ("user", 3),
        ("return_progress", True),
        ("unheard_of", 0),
        ("Temperature", 1),
        ("model", 5),
    ],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError) as caught:
            ask({name: value})
        error = caught.value
        assert error.status == 400 and str(error.param).startswith(name) and name in error.message
        assert len(error.message) < 400 and json.dumps(error.body()).isascii()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, 512]}, "prompt[1]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [1] * 2049}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_completions_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(fields)
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"prompt": "a"}, "prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ],
)
def test_bad_chats_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(fields)
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body: object) -> None:
    for parse in (parse_chat, parse_completion, parse_generate, parse_tokenize, parse_detokenize):
        with pytest.raises(ApiError, match="expected a JSON object"):
            parse(body, texts.model())


def test_another_model_is_not_found() -> None:
    assert chat().kind == "chat" and parse_chat({"messages": HELLO, "model": "micro"}, texts.model())
    with pytest.raises(ApiError, match="'micro'") as caught:
        parse_chat({"messages": HELLO, "model": "gpt"}, texts.model())
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert caught.value.body()["error"]["type"] == "not_found_error"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 600) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "ids",
        "max_tokens",
        "max_new_tokens",
        "temperature",
        "stop",
        "tools",
        "tool_choice",
        "logit_bias",
        "stream",
        "stream_options",
        "logprobs",
        "tokens",
        "chat_template_kwargs",
        "enable_thinking",
        "stop_token_ids",
        "x",
        "model",
        "echo",
    ]
)


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(NAMES, JSON, max_size=5),
    st.sampled_from([parse_chat, parse_completion, parse_generate, parse_tokenize, parse_detokenize]),
)
def test_no_body_fails_in_any_other_way(fields: dict[str, Any], parse: Any) -> None:
    start: dict[str, Any] = {"messages": HELLO} if parse is parse_chat else {}
    try:
        parse(start | fields, texts.model())
    except ApiError as error:
        assert error.status in (400, 404) and json.dumps(error.body(), allow_nan=False)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "judge", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["text"]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
            "messages[0].content[0].cache_control",
        ),
        ({"role": "user", "content": "a", "name": "Bob"}, "messages[0].name"),
        ({"role": "user", "content": "a", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "user", "content": "a", "mood": "good"}, "messages[0].mood"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "a"}}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
)
def test_bad_messages_are_named(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[message])
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [texts.CLOCK], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [texts.CLOCK], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [texts.CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [texts.CLOCK], "tool_choice": 3}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": ["clock"]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [texts.CLOCK, texts.CLOCK]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}]},
            "tools[0].function.parameters.properties",
        ),
        ({"tools": [texts.CLOCK], "tool_choice": "required", "enable_thinking": True}, "enable_thinking"),
        ({"tools": [texts.CLOCK], "tool_choice": "required", "reasoning_effort": "low"}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"enable_thinking": False, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs.tone"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_bad_tools_and_thinking_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(fields)
    assert caught.value.status == 400 and caught.value.param == param


def test_an_integer_too_long_to_print_is_named() -> None:
    with pytest.raises(ApiError, match="integer of 16610 bits"):
        completion(max_tokens=10**5000)
