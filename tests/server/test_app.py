"""The server as the official client sees it: chat, completions, streams, logprobs, stops, tools, errors."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flashnext_drv.engine.engine import token_sha256

from .served import Served
from .texts import CLOCK, WEATHER

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 11}


def rendered(served: Served) -> list[int]:
    text = served.model.text
    assert text is not None
    return text.encode(text.render(MESSAGES))


def chat(served: Served, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "micro", "messages": MESSAGES, "max_tokens": 7, "seed": 11, **more}
    extra = {"ignore_eos": True, **given.pop("extra_body", {})}
    return served.client().chat.completions.create(**given, extra_body=extra)


def test_a_chat_has_the_tokens_of_the_engine_alone(served: Served) -> None:
    prompt = rendered(served)
    reply = chat(served, extra_body={"return_token_ids": True})
    alone = served.solo(prompt, 7, **SAMPLING)
    choice, runtime = reply.choices[0], reply.model_extra["runtime"]
    assert choice.model_extra["token_ids"] == alone.tokens
    assert runtime["token_sha256"] == alone.sha256 and runtime["new_sha256"] == token_sha256(alone.tokens)
    said = (choice.message.model_extra.get("reasoning_content") or "") + (choice.message.content or "")
    assert said.strip() == served.model.text.decode(alone.tokens).replace("</think>", "").strip()
    assert reply.usage.prompt_tokens == len(prompt) and reply.usage.completion_tokens == 7
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert choice.finish_reason == "length" and len(runtime["token_at"]) == 7
    assert sorted(runtime["token_at"]) == runtime["token_at"]


def test_a_stream_says_what_the_whole_reply_says(served: Served) -> None:
    whole = chat(served)
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert content == (whole.choices[0].message.content or "")
    assert reasoning == whole.choices[0].message.model_extra.get("reasoning_content", "")
    assert len(chunks) >= 4 and deltas[0].role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].model_extra["runtime"]["token_sha256"] == whole.model_extra["runtime"]["token_sha256"]


def test_logprobs_are_those_of_the_logits(served: Served) -> None:
    prompt = rendered(served)
    reply = chat(served, max_tokens=3, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    ids = reply.choices[0].model_extra["token_ids"]
    logits = (
        served.worker.ask(lambda engine: engine.logits(prompt + ids[:-1], (len(prompt) - 1, len(prompt) + 2)))
        .result(60)
        .astype(np.float64)
    )
    entries = reply.choices[0].logprobs.content
    for row, token, entry in zip(logits, ids, entries, strict=True):
        peak = row.max()
        logprobs = row - peak - math.log(np.exp(row - peak).sum())
        assert entry.logprob == pytest.approx(logprobs[token], abs=1e-9)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(sorted(logprobs)[:-4:-1], abs=1e-9)
        assert bytes(entry.bytes) == served.model.text.token_bytes(token)
    streamed = chat(served, max_tokens=3, logprobs=True, top_logprobs=3, stream=True)
    found = [
        entry
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert found == entries


def crossing(served: Served, ids: list[int]) -> tuple[int, str]:
    """(tokens, text) of a piece of the reply that two tokens share and that comes no earlier."""
    decode = served.model.text.decode
    for n in range(4, 10):
        before, behind = decode(ids[:n]), decode(ids[: n + 1])
        stop = behind[len(before) - 1 : len(before) + 1]
        if len(stop) == 2 and "\ufffd" not in stop and behind.find(stop) == len(before) - 1:
            return n + 1, stop
    raise AssertionError(f"{decode(ids)!r} has no such place: change the prompt")


def test_a_stop_string_cuts_the_reply_and_stops_the_sequence(served: Served) -> None:
    prompt = [5, 6, 7]
    given: dict[str, Any] = {"model": "micro", "prompt": prompt, "max_tokens": 16, "temperature": 0.0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    plain = served.client().completions.create(**given, extra_body=extra).choices[0]
    text, ids = plain.text, plain.model_extra["token_ids"]
    cut, stop = crossing(served, ids)
    wanted = text[: text.find(stop)]
    reply = served.client().completions.create(**given, stop=[stop, "never said"], extra_body=extra)
    choice, runtime = reply.choices[0], reply.model_extra["runtime"]
    assert choice.text == wanted and choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == stop
    assert choice.model_extra["token_ids"] == ids[:cut] and reply.usage.completion_tokens == cut
    assert runtime["new_sha256"] == token_sha256(ids[:cut]) and len(runtime["token_at"]) == cut
    assert runtime["token_sha256"] == token_sha256([*prompt, *ids[:cut]])
    # It ended with that visit: nothing but the rest of one was drawn behind the stop.
    assert (
        runtime["counters"]["drawn_behind_stop"] < served.worker.ask(lambda e: e.limits.steps_ahead).result()
    )
    streamed = list(served.client().completions.create(**given, stop=stop, stream=True, extra_body=extra))
    assert "".join(chunk.choices[0].text for chunk in streamed) == wanted
    assert streamed[-1].choices[0].finish_reason == "stop"
    assert (
        "".join(
            chunk.choices[0].text
            for chunk in served.client().completions.create(
                **given, stop=stop, stream=True, extra_body={**extra, "include_stop_str_in_output": True}
            )
        )
        == wanted + stop
    )


@pytest.mark.parametrize("behind", (0, 1, 8), ids=("at-the-last-token", "one-more", "long-before"))
def test_a_stop_string_counts_as_a_stop_everywhere(served: Served, behind: int) -> None:
    given: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    plain = served.ask("POST", "/v1/completions", {**given, "return_token_ids": True}).json()["choices"][0]
    cut, stop = crossing(served, plain["token_ids"])
    before, told = served.settled().finished, successes(served)
    body = {**given, "max_tokens": cut + behind, "stop": stop}
    answered = served.ask("POST", "/v1/completions", body, {"X-Request-Id": f"stop-{behind}"}).json()
    assert answered["choices"][0]["finish_reason"] == "stop" == answered["runtime"]["finish"]
    assert answered["choices"][0]["stop_reason"] == stop
    assert answered["usage"]["completion_tokens"] == cut
    assert served.line(f"stop-{behind}")["finish"] == "stop"
    assert served.settled().finished == {**before, "stop": before.get("stop", 0) + 1}
    assert successes(served) == {**told, "stop": told["stop"] + 1}


def successes(served: Served) -> dict[str, float]:
    """vllm:request_success_total by reason."""
    families = text_string_to_metric_families(served.ask("GET", "/metrics").raw.decode())
    return {
        sample.labels["finished_reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }


def test_a_stop_id_ends_and_is_told_when_it_is_the_requests_own(served: Served) -> None:
    prompt = [5, 6, 7]
    alone = served.solo(prompt, 8)
    stop = alone.tokens[5]
    n = alone.tokens.index(stop) + 1
    found = served.ask("POST", "/v1/generate", {"ids": prompt, "max_new_tokens": 8, "stop_token_ids": [stop]})
    assert found.json()["tokens"] == alone.tokens[:n] and found.json()["finish_reason"] == "stop"


def test_tools_reach_the_template_and_what_is_no_call_stays_content(served: Served) -> None:
    text = served.model.text
    auto, named = "auto", {"type": "function", "function": {"name": "clock"}}
    given = {"tools": [CLOCK], "max_tokens": 2, "extra_body": {"enable_thinking": False}}
    ids = text.encode(text.render(MESSAGES, [CLOCK], variables={"enable_thinking": False}))
    opening = text.encode(text.decode(ids, special=True) + "<tool_call>\n<function=clock>\n")
    for choice, n_prompt in ((auto, len(ids)), (named, len(opening))):
        reply = chat(served, tool_choice=choice, **given)
        message = reply.choices[0].message
        assert reply.usage.prompt_tokens == n_prompt
        assert message.tool_calls is None and reply.choices[0].finish_reason == "length"
        assert message.content.startswith("<tool_call>" if choice is named else "")
    without = chat(served, tools=[WEATHER], tool_choice="none", max_tokens=1)
    assert without.usage.prompt_tokens == len(rendered(served))


def test_errors_are_the_clients_own_classes(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as two:
        chat(served, n=2)
    assert two.value.param == "n"
    with pytest.raises(openai.BadRequestError) as unknown:
        chat(served, extra_body={"tempersture": 1})
    assert unknown.value.param == "tempersture"
    with pytest.raises(openai.BadRequestError) as long:
        chat(served, max_tokens=2040)
    assert long.value.param == "max_tokens" or long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="micro", input="x")
    assert [card.id for card in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").model_extra["max_model_len"] == served.model.context_tokens
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_eight_at_once_have_the_tokens_they_have_alone(served: Served) -> None:
    prompts = [[(7 * i + 3 * k) % served.model.vocab for k in range(2 + 2 * i)] for i in range(8)]
    wanted = [served.solo(ids, 4 + i % 4, temperature=0.9, seed=i).tokens for i, ids in enumerate(prompts)]
    found: dict[int, Any] = {}
    barrier = threading.Barrier(8)

    def run(i: int) -> None:
        barrier.wait()
        found[i] = served.generate(prompts[i], 4 + i % 4, temperature=0.9, seed=i, stream=bool(i % 2))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live = []
    for i, reply in found.items():
        events = reply[:-1] if i % 2 else [reply]
        assert [token for event in events for token in event["tokens"]] == wanted[i], i
        live.append(events[-1]["runtime"]["live_max"])
    assert max(live) >= 4


def test_token_ids_go_in_and_out(served: Served) -> None:
    alone = served.solo([5, 6, 7], 5)
    whole = served.generate([5, 6, 7], 5)
    assert whole["tokens"] == alone.tokens and whole["runtime"]["token_sha256"] == alone.sha256
    *chunks, done = served.generate([5, 6, 7], 5, stream=True, logprobs=1)
    assert done == "[DONE]" and sum((chunk["tokens"] for chunk in chunks), []) == alone.tokens
    assert all(len(c["logprobs"]) == len(c["top_logprobs"]) == 1 for c in chunks if c["tokens"])
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_tokenize_and_back(served: Served) -> None:
    told = served.ask("POST", "/tokenize", {"prompt": "a river, à la mer"}).json()
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == served.model.context_tokens
    back = served.ask("POST", "/detokenize", {"tokens": told["tokens"]}).json()
    assert back == {"prompt": "a river, à la mer"}
    assert served.ask("POST", "/tokenize", {"messages": MESSAGES}).json()["tokens"] == rendered(served)
    with_echo = served.client().completions.create(
        model="micro", prompt="a river", max_tokens=2, temperature=0.0, extra_body={"echo": True}
    )
    assert with_echo.choices[0].text.startswith("a river")
