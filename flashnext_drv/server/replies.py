"""What replies and stream chunks look like, as plain dicts in OpenAI's form.

Called by answers.py.  What must stay true: functions of their arguments alone; a chunk holds one kind of
delta, so the order of what was said is the order of chunks; numbers are finite, so every dict can be written
as JSON.

    chat         chat_opening, chat_chunks ..., chat_end [, usage_chunk]     or chat_reply
    completion   completion_chunks ..., completion_end [, usage_chunk]       or completion_reply
    ids          generate_chunk ..., generate_end                            or generate_reply
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..engine.requests import Reply, Token
from .parse import Delta
from .text import Detokenizer, TextModel

__all__ = [
    "Head",
    "LogprobWriter",
    "chat_chunks",
    "chat_end",
    "chat_opening",
    "chat_reply",
    "completion_chunks",
    "completion_end",
    "completion_reply",
    "generate_chunk",
    "generate_end",
    "generate_reply",
    "progress_chunk",
    "runtime_block",
    "usage",
    "usage_chunk",
]

_LOWEST: Final = -9999.0  # stands for a logprob of minus infinity, as OpenAI's does
_HITS: Final = ("expert_hits", "expert_misses")
_CHUNK: Final = {"chat": "chat.completion.chunk", "completion": "text_completion", "ids": "generation.chunk"}
_WHOLE: Final = {"chat": "chat.completion", "completion": "text_completion", "ids": "generation"}

Logprobs = Mapping[str, Any] | None


@dataclass(frozen=True)
class Head:
    """What all pieces of one reply begin with.  kind: as Ask.kind.  created: seconds since 1970."""

    kind: str
    id: str
    created: int
    model: str

    def chunk(self) -> dict[str, Any]:
        return {"id": self.id, "object": _CHUNK[self.kind], "created": self.created, "model": self.model}

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "object": _WHOLE[self.kind], "created": self.created, "model": self.model}


def usage(prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """Tokens: of the prompt, of the reply with its stop id, of the prompt from a cache, of the reasoning."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def runtime_block(reply: Reply, seed: int, device: str = "") -> dict[str, Any]:
    """What the engine did for a reply.

    token_sha256 over prompt and new ids, new_sha256 over the new ones; stamps and token_at are seconds of the
    server's perf_counter.  expert_hits and expert_misses are None where all experts are on the device.
    """
    counters = reply.counters
    return {
        "token_sha256": reply.sha256,
        "new_sha256": reply.new_sha256,
        "seed": seed,
        "device": device,
        "finish": reply.finish,
        "cached_tokens": counters.get("cached_tokens", 0),
        "prefilled_tokens": counters.get("prefilled"),
        "decoded_tokens": len(reply.tokens),
        "graph_replays": counters.get("graph_replays"),
        "eager_rounds": counters.get("eager_rounds"),
        **{name: counters.get(name) for name in _HITS},
        "counters": dict(counters),
        "stamps": dict(reply.stamps),
        "token_at": list(reply.token_at),
        "live_min": reply.live_min,
        "live_max": reply.live_max,
    }


def chat_opening(head: Head) -> dict[str, Any]:
    """The first chunk: who speaks."""
    return _chat_chunk(head, {"role": "assistant", "content": ""})


def chat_chunks(
    head: Head, deltas: Sequence[Delta], logprobs: Logprobs = None, token_ids: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """A chunk for each delta; logprobs and ids of the tokens that brought them stand in the last, in one
    without text when no text became certain."""
    out = [_chat_chunk(head, _delta(delta)) for delta in deltas]
    if not out and (logprobs is not None or token_ids):
        out = [_chat_chunk(head, {})]
    return _with_tokens(out, logprobs, token_ids)


def chat_end(head: Head, finish: str, stop_reason: str | int | None = None, **more: Any) -> dict[str, Any]:
    """The chunk that says why it ended.  more: fields beside `choices`, such as usage or runtime."""
    chunk = _chat_chunk(head, {}) | more
    chunk["choices"][0] |= {"finish_reason": finish, "stop_reason": stop_reason}
    return chunk


def chat_reply(
    head: Head,
    deltas: Iterable[Delta],
    finish: str,
    *,
    usage: Mapping[str, Any],
    runtime: Mapping[str, Any],
    logprobs: Logprobs = None,
    token_ids: Sequence[int] | None = None,
    prompt_ids: Sequence[int] | None = None,
    stop_reason: str | int | None = None,
) -> dict[str, Any]:
    """A whole chat reply.  deltas: all of them.  token_ids, prompt_ids: told when given."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(deltas),
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop_reason,
    }
    return _whole(head, choice, usage, runtime, token_ids, prompt_ids)


def completion_chunks(
    head: Head, deltas: Sequence[Delta], logprobs: Logprobs = None, token_ids: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """One chunk with what became certain, none when there is nothing to tell."""
    text = "".join(delta.text for delta in deltas)
    out = [_text_chunk(head, text)] if text or logprobs is not None or token_ids else []
    return _with_tokens(out, logprobs, token_ids)


def completion_end(
    head: Head, finish: str, stop_reason: str | int | None = None, **more: Any
) -> dict[str, Any]:
    """The chunk that says why it ended.  more: fields beside `choices`."""
    chunk = _text_chunk(head, "") | more
    chunk["choices"][0] |= {"finish_reason": finish, "stop_reason": stop_reason}
    return chunk


def completion_reply(
    head: Head,
    text: str,
    finish: str,
    *,
    usage: Mapping[str, Any],
    runtime: Mapping[str, Any],
    logprobs: Logprobs = None,
    token_ids: Sequence[int] | None = None,
    prompt_ids: Sequence[int] | None = None,
    stop_reason: str | int | None = None,
) -> dict[str, Any]:
    """A whole completion.  text: with the echo in front, where that was asked for."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop_reason,
    }
    return _whole(head, choice, usage, runtime, token_ids, prompt_ids)


def generate_chunk(head: Head, tokens: Sequence[Token], logprobs: int | None = None) -> dict[str, Any]:
    """New ids of the native endpoint."""
    return head.chunk() | _plain_tokens(tokens, logprobs)


def generate_end(
    head: Head, finish: str, usage: Mapping[str, Any], runtime: Mapping[str, Any]
) -> dict[str, Any]:
    """The last chunk of the native endpoint."""
    return head.chunk() | {"tokens": [], "finish_reason": finish, "usage": usage, "runtime": runtime}


def generate_reply(
    head: Head,
    tokens: Sequence[Token],
    finish: str,
    usage: Mapping[str, Any],
    runtime: Mapping[str, Any],
    logprobs: int | None = None,
) -> dict[str, Any]:
    """A whole reply of the native endpoint."""
    return (
        head.whole()
        | _plain_tokens(tokens, logprobs)
        | {"finish_reason": finish, "usage": usage, "runtime": runtime}
    )


def usage_chunk(head: Head, usage: Mapping[str, Any], runtime: Mapping[str, Any] | None) -> dict[str, Any]:
    """The last chunk of a stream that asked for usage: no choice in it."""
    chunk = head.chunk() | {"choices": [], "usage": usage}
    return chunk if runtime is None else chunk | {"runtime": runtime}


def progress_chunk(head: Head, done: int, total: int) -> dict[str, Any]:
    """Rows of the prompt that are in the state, in llama.cpp's words."""
    told = {"prompt_progress": {"total": total, "cache": 0, "processed": done}}
    return head.chunk() | ({} if head.kind == "ids" else {"choices": []}) | told


class LogprobWriter:
    """Logprobs of a reply's tokens in the form of its endpoint; keeps where the text is.

    text: None for a pack without tokenizer, whose tokens are called token_id:N.  first_offset: characters
    that stand before the first token (the echo).
    """

    def __init__(self, text: TextModel | None, kind: str, n_top: int, first_offset: int = 0) -> None:
        self._text = text
        self._chat = kind == "chat"
        self._n_top = n_top
        self._offset = first_offset
        self._detokenizer = None if text is None else Detokenizer(text)

    def write(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Of further tokens, in order."""
        if self._chat:
            return {"content": [self._entry(token) for token in tokens], "refusal": None}
        names, offsets = [], []
        for token in tokens:
            names.append(self._name(token.id))
            offsets.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push((token.id,)))
        top = [{self._name(i): _finite(p) for i, p in reversed(token.top[: self._n_top])} for token in tokens]
        for found, token in zip(top, tokens, strict=True):
            found.setdefault(self._name(token.id), _finite(token.logprob))
        return {
            "tokens": names,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": top if self._n_top else None,
            "text_offset": offsets,
        }

    def _entry(self, token: Token) -> dict[str, Any]:
        top = [self._alternative(i, p) for i, p in token.top[: self._n_top]]
        return self._alternative(token.id, token.logprob) | {"top_logprobs": top}

    def _alternative(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        if self._text is None:
            return {"token": f"token_id:{token_id}", "logprob": _finite(logprob), "bytes": None}
        text, raw = self._text.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def _name(self, token_id: int) -> str:
        """One name a token: its text, or its bytes where they are no text."""
        if self._text is None:
            return f"token_id:{token_id}"
        text, raw = self._text.token_text(token_id)
        return text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else _LOWEST


def _chat_chunk(head: Head, delta: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return head.chunk() | {"choices": [choice]}


def _text_chunk(head: Head, text: str) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return head.chunk() | {"choices": [choice]}


def _with_tokens(
    chunks: list[dict[str, Any]], logprobs: Logprobs, token_ids: Sequence[int] | None
) -> list[dict[str, Any]]:
    if chunks:
        choice = chunks[-1]["choices"][0]
        choice["logprobs"] = logprobs
        if token_ids is not None:
            choice["token_ids"] = list(token_ids)
    return chunks


def _whole(
    head: Head,
    choice: dict[str, Any],
    usage: Mapping[str, Any],
    runtime: Mapping[str, Any],
    token_ids: Sequence[int] | None,
    prompt_ids: Sequence[int] | None,
) -> dict[str, Any]:
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    told = head.whole() | {"choices": [choice], "usage": usage, "runtime": runtime}
    return told if prompt_ids is None else told | {"prompt_token_ids": list(prompt_ids)}


def _plain_tokens(tokens: Sequence[Token], logprobs: int | None) -> dict[str, Any]:
    told: dict[str, Any] = {"tokens": [token.id for token in tokens]}
    if logprobs is not None:
        told["logprobs"] = [_finite(token.logprob) for token in tokens]
        told["top_logprobs"] = [[[i, _finite(p)] for i, p in token.top[:logprobs]] for token in tokens]
    return told


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.name:
        function = {"name": delta.name, "arguments": delta.text}
        call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _message(deltas: Iterable[Delta]) -> dict[str, Any]:
    reasoning, content = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.kind == "reasoning":
            reasoning += delta.text
        elif delta.kind == "content":
            content += delta.text
        else:
            call = calls.setdefault(
                delta.index, {"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["function"]["name"] += delta.name
            call["function"]["arguments"] += delta.text
    silent = None if calls or reasoning else ""
    message: dict[str, Any] = {"role": "assistant", "content": content or silent}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
