"""Replies and chunks have OpenAI's form, and chunks joined are the whole reply."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from flashnext_drv.engine.requests import Reply, Token
from flashnext_drv.server import replies
from flashnext_drv.server.fields import ApiError, Fields
from flashnext_drv.server.parse import Delta

from . import texts

HEAD = replies.Head("chat", "chatcmpl-1", 1000, "micro")
TEXT_HEAD = replies.Head("completion", "cmpl-1", 1000, "micro")
DELTAS = [
    Delta("reasoning", "Hm"),
    Delta("reasoning", "m."),
    Delta("content", "It "),
    Delta("content", "is."),
    Delta("tool_call", "", 0, "call_0", "clock"),
    Delta("tool_call", "{}", 0),
]
DONE = Reply(
    (5, 6),
    "a" * 64,
    "b" * 64,
    "length",
    None,
    {"cached_tokens": 0, "prefilled": 3, "graph_replays": 4},
    {"submitted": 1.0, "done": 2.0},
    (1.5, 1.75),
    1,
    2,
)


def test_chunks_joined_are_the_whole_reply() -> None:
    chunks = [
        replies.chat_opening(HEAD),
        *replies.chat_chunks(HEAD, DELTAS),
        replies.chat_end(HEAD, "tool_calls"),
    ]
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == "chatcmpl-1"
        for name, value in chunk["choices"][0]["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for call in value:
                kept = calls.setdefault(call["index"], {"arguments": "", "name": ""})
                kept |= {key: call[key] for key in ("id", "type") if key in call}
                for key, more in call["function"].items():
                    kept[key] += more
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 7 + ["tool_calls"]
    whole = replies.chat_reply(HEAD, DELTAS, "tool_calls", usage=replies.usage(3, 2, 0, 1), runtime={})
    told = whole["choices"][0]["message"]
    assert message == {key: told[key] for key in ("role", "content", "reasoning_content")}
    assert told["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    ]
    assert calls == {0: {"id": "call_0", "type": "function", "name": "clock", "arguments": "{}"}}
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert (
        replies.chat_reply(HEAD, [], "stop", usage={}, runtime={})["choices"][0]["message"]["content"] == ""
    )
    assert (
        replies.chat_reply(HEAD, DELTAS[:1], "stop", usage={}, runtime={})["choices"][0]["message"]["content"]
        is None
    )


def test_tokens_are_told_even_when_no_text_is_certain() -> None:
    assert replies.chat_chunks(HEAD, []) == [] == replies.completion_chunks(TEXT_HEAD, [])
    for chunks in (
        replies.chat_chunks(HEAD, [], token_ids=[5]),
        replies.completion_chunks(TEXT_HEAD, [], token_ids=[5]),
    ):
        assert len(chunks) == 1 and chunks[0]["choices"][0]["token_ids"] == [5]
    last = replies.chat_chunks(HEAD, DELTAS[:3], {"content": []}, [5, 6])
    assert [("token_ids" in c["choices"][0], c["choices"][0]["logprobs"]) for c in last] == [
        (False, None),
        (False, None),
        (True, {"content": []}),
    ]
    assert replies.completion_chunks(TEXT_HEAD, DELTAS[2:4])[0]["choices"][0]["text"] == "It is."


def test_the_runtime_block_tells_what_ran() -> None:
    block = replies.runtime_block(DONE, 7, "sim")
    assert block["token_sha256"] == "a" * 64 and block["new_sha256"] == "b" * 64 and block["seed"] == 7
    assert (block["cached_tokens"], block["prefilled_tokens"], block["decoded_tokens"]) == (0, 3, 2)
    assert block["graph_replays"] == 4 and block["expert_hits"] is None and block["token_at"] == [1.5, 1.75]
    assert block["stamps"] == {"submitted": 1.0, "done": 2.0} and (block["live_min"], block["live_max"]) == (
        1,
        2,
    )
    assert json.dumps(block, allow_nan=False)
    chunk = replies.usage_chunk(HEAD, replies.usage(1, 1), block)
    assert chunk["choices"] == [] and chunk["runtime"] == block and chunk["usage"]["total_tokens"] == 2
    end = replies.completion_end(TEXT_HEAD, "stop", "x", runtime=block)
    assert end["choices"][0]["stop_reason"] == "x" and end["runtime"] == block


def test_logprobs_of_chats_have_bytes() -> None:
    half = texts.ids_of("é".encode())
    tokens = [Token(half[0], -0.5, ((half[0], -0.5), (7, -1.0))), Token(half[1], -math.inf, ())]
    told = replies.LogprobWriter(texts.text_model(), "chat", 1).write(tokens)
    assert [entry["bytes"] for entry in told["content"]] == [[0xC3], [0xA9]]
    assert told["content"][0]["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}]
    assert told["content"][1]["logprob"] == -9999.0 and told["content"][1]["top_logprobs"] == []


def test_logprobs_of_completions_have_places() -> None:
    ids = texts.ids_of("aéb".encode())
    tokens = [Token(i, -1.0 - n, ((7, -0.25),)) for n, i in enumerate(ids)]
    for cut in range(len(tokens) + 1):
        writer = replies.LogprobWriter(texts.text_model(), "completion", 1, 10)
        parts = [writer.write(tokens[:cut]), writer.write(tokens[cut:])]
        assert sum((part["text_offset"] for part in parts), []) == [10, 11, 11, 12]
        assert sum((part["tokens"] for part in parts), []) == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
        assert sum((part["top_logprobs"] for part in parts), [])[0] == {"<|endoftext|>": -0.25, "a": -1.0}
    assert replies.LogprobWriter(None, "completion", 0).write(tokens[:1]) == {
        "tokens": [f"token_id:{ids[0]}"],
        "token_logprobs": [-1.0],
        "top_logprobs": None,
        "text_offset": [0],
    }


def test_the_native_endpoint_tells_ids() -> None:
    head = replies.Head("ids", "gen-1", 1, "micro")
    tokens = [Token(5, -1.0, ((5, -1.0),)), Token(6, -2.0, ((5, -1.0),))]
    assert replies.generate_chunk(head, tokens)["tokens"] == [5, 6]
    whole = replies.generate_reply(head, tokens, "length", {}, {}, 1)
    assert whole["logprobs"] == [-1.0, -2.0] and whole["top_logprobs"] == [[[5, -1.0]], [[5, -1.0]]]
    assert replies.generate_end(head, "stop", {}, {})["finish_reason"] == "stop"
    assert replies.progress_chunk(head, 3, 9)["prompt_progress"] == {"total": 9, "cache": 0, "processed": 3}


def test_errors_have_the_form_of_openai() -> None:
    error = ApiError(429, "later", param="x", code="queue_full")
    assert error.body() == {
        "error": {"message": "later", "type": "rate_limit_error", "param": "x", "code": "queue_full"}
    }
    assert ApiError(500, "a").type == "server_error" and ApiError(418, "a").type == "invalid_request_error"
    with pytest.raises(ApiError, match="an object of 1 fields"):
        Fields({"a": {"b": 1}}).text("a")
