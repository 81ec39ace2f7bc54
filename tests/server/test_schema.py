"""Bodies of requests: what is asked for reaches the engine and the template as it was meant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashnext_drv.engine import sequence
from flashnext_drv.engine.sequence import Sampling
from flashnext_drv.server.fields import ApiError
from flashnext_drv.server.parse import Delta
from flashnext_drv.server.schema import (
    Model,
    parse_detokenize,
    parse_generate,
    parse_tokenize,
)

from . import texts
from .texts import HELLO, chat, completion, prompt_of

NAMED = {"type": "function", "function": {"name": "weather"}}


# What a request becomes.


def test_a_plain_chat() -> None:
    ask = chat(of=Model.of("m", 512, 400, 7, texts.text_model()))
    assert prompt_of(ask).endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert ask.thinking and ask.reasoning and not ask.stream and ask.form == "" and ask.tool_choice == "none"
    request = ask.request
    assert request.stop_ids == {7, 9} and request.max_new_tokens == 400 - len(ask.prompt_ids) + 1
    assert request.logprobs is None and request.min_new_tokens == 0 and request.edits is None
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.95, 20)
    assert chat(seed=5).seed == 5 and chat().seed != chat().seed < 1 << 53


def test_all_that_a_request_may_set() -> None:
    does_nothing: dict[str, Any] = {
        "user": "me",
        "n": 1,
        "response_format": {"type": "text"},
        "draft": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "store": False,
        "parallel_tool_calls": False,
        "service_tier": "auto",
        "modalities": ["text"],
    }
    ask = chat(
        max_completion_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        seed=2**64 - 1,
        stop=["a", "bc"],
        include_stop_str_in_output=True,
        stop_token_ids=[300],
        logprobs=True,
        top_logprobs=4,
        stream=True,
        stream_options={"include_usage": True},
        return_progress=True,
        return_token_ids=True,
        **does_nothing,
    )
    request = ask.request
    assert request.sampling == Sampling(0.5, 0, 0.25, 0.125, 2**64 - 1)
    assert (request.max_new_tokens, request.min_new_tokens, request.logprobs) == (9, 3, 4)
    assert request.stop_ids == {7, 9, 300} and ask.stop_strings == ("a", "bc") and ask.include_stop
    assert ask.stream and ask.include_usage and ask.progress and ask.return_ids and not ask.single_call
    assert chat(ignore_eos=True).request.stop_ids == frozenset()
    assert chat(ignore_eos=True, stop_token_ids=[3]).request.stop_ids == {3}
    assert chat(logprobs=True).logprobs == 0 and chat(logprobs=False).logprobs is None
    assert chat(stop="x").stop_strings == ("x",)


def test_penalties_and_bias_become_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5}
    bias = {"logit_bias": {"5": -100, "6": 2.5}}
    monkeypatch.setattr(sequence, "Edits", SimpleNamespace, raising=False)
    made = chat(fields | bias).request.edits
    assert vars(made) == {
        "repetition": 1.5,
        "presence": -1.0,
        "frequency": 0.5,
        "bias": ((5, -100.0), (6, 2.5)),
    }
    assert vars(completion(bias).request.edits)["repetition"] == 1.0
    monkeypatch.delattr(sequence, "Edits")
    for name, value in (fields | bias).items():
        with pytest.raises(ApiError, match="own logits") as caught:
            chat({name: value})
        assert caught.value.param == name


def test_null_is_the_same_as_absent() -> None:
    names = (
        "temperature",
        "stop",
        "tools",
        "tool_choice",
        "logprobs",
        "max_tokens",
        "seed",
        "logit_bias",
        "stream_options",
        "n",
        "user",
        "response_format",
        "reasoning_effort",
        "functions",
        "unheard_of",
    )
    assert chat(seed=1) == chat(dict.fromkeys(names) | {"seed": 1})


def test_prompts_of_completions() -> None:
    text = texts.text_model()
    assert completion(prompt="Hello").prompt_ids == tuple(text.encode("Hello"))
    for prompt in ([5, 6], [[5, 6]]):
        assert completion(prompt=prompt).prompt_ids == (5, 6)
    assert completion(prompt=["Hello"]).prompt_ids == tuple(text.encode("Hello"))
    ask = completion(prompt="a<|im_end|>", echo=True, seed=1)
    assert ask.echo == "a<|im_end|>" and ask.request.max_new_tokens == 16 and ask.kind == "completion"
    assert completion(logprobs=3).logprobs == 3 and completion(logprobs=0).logprobs == 0


def test_token_ids_in_and_out_are_greedy_by_default() -> None:
    ask = parse_generate({"ids": [1, 2], "max_new_tokens": 4}, texts.model())
    assert ask.request.sampling.temperature == 0.0 and ask.request.sampling.top_k == 0 and ask.return_ids
    assert ask.kind == "ids" and ask.reply_stream(texts.model()).push([3, 4]) == []


def test_packs_without_a_tokenizer_say_so_and_take_ids() -> None:
    bare = texts.bare_model()
    with pytest.raises(ApiError, match="no tokenizer: send token ids to /v1/completions") as caught:
        chat(of=bare)
    assert caught.value.status == 400 and caught.value.code == "no_tokenizer"
    ask = completion(of=bare)
    assert ask.return_ids and ask.request.stop_ids == {7} and ask.reply_stream(bare).push([1]) == []
    for fields in ({"prompt": "text"}, {"stop": "x"}, {"echo": True}):
        with pytest.raises(ApiError, match="no tokenizer"):
            completion(fields, of=bare)
    for parse in (parse_tokenize, parse_detokenize):
        with pytest.raises(ApiError, match="no tokenizer"):
            parse({"prompt": "a"}, bare)


def test_the_context_holds_prompt_and_reply() -> None:
    model = Model.of("m", 512, 10, 7)
    assert completion(of=model, prompt=[1] * 10, max_tokens=1).request.max_new_tokens == 1
    assert completion(of=model, prompt=[1] * 5, max_tokens=6).request.max_new_tokens == 6
    for n, most in ((5, 7), (11, 1), (10, 2)):
        with pytest.raises(ApiError, match="do not fit the context") as caught:
            completion(of=model, prompt=[1] * n, max_tokens=most)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    short = Model.of("m", 512, 400, 7, texts.text_model(), max_new_tokens=20)
    assert chat(of=short).request.max_new_tokens == 20


# Messages.


def test_contents_and_roles() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "is it?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning_content": "Look.",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
        {"role": "user", "content": "Thanks"},
    ]
    text = prompt_of(chat(messages=messages, enable_thinking=False))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow is it?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nLook.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\n"
        "Bonn\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n"
        "</tool_response><|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_what_a_template_says_reaches_the_client() -> None:
    model = texts.model("{{ raise_exception('no system message, please') }}")
    with pytest.raises(ApiError, match="no system message, please") as caught:
        chat(of=model)
    assert caught.value.param == "messages"
    with pytest.raises(ApiError, match="no chat template"):
        chat(of=texts.model(None))


# Tools and thinking.


def test_tools_by_choice() -> None:
    tools = [texts.WEATHER, texts.CLOCK]
    auto = chat(tools=tools)
    assert auto.form == "xml" and auto.tool_choice == "auto" and not auto.opening and auto.reasoning
    assert '"name": "clock"' in prompt_of(auto)
    none = chat(tools=tools, tool_choice="none")
    assert none.form == "" and "clock" not in prompt_of(none)
    assert chat(tools=tools, parallel_tool_calls=False).single_call
    assert chat(tools=[], tool_choice="auto").tool_choice == "none"


@pytest.mark.parametrize(
    ("choice", "ending"),
    [("required", "</think>\n\n<tool_call>\n<function="), (NAMED, "<tool_call>\n<function=weather>\n")],
)
def test_a_forced_call_begins_in_the_prompt(choice: Any, ending: str) -> None:
    ask = chat(tools=[texts.WEATHER], tool_choice=choice)
    assert (
        prompt_of(ask).endswith(ending) and ask.opening in ending and not ask.reasoning and not ask.thinking
    )
    rest = ("weather>\n" if choice == "required" else "") + "</function>\n</tool_call><|im_end|>"
    stream = ask.reply_stream(texts.model())
    deltas = stream.push(texts.text_model().encode(rest))
    assert [(d.kind, d.name, d.text) for d in deltas] == [
        ("tool_call", "weather", ""),
        ("tool_call", "", "{}"),
    ]
    assert stream.finish("stop") == ([], "tool_calls")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_goes_off(fields: dict[str, Any]) -> None:
    ask = chat(fields)
    assert prompt_of(ask).endswith("<think>\n\n</think>\n\n") and not ask.thinking and not ask.reasoning
    stream = ask.reply_stream(texts.model())
    assert stream.push(texts.text_model().encode("Hi")) == [Delta("content", "Hi")]


def test_efforts_reach_a_template_that_has_them() -> None:
    assert "Think briefly." in prompt_of(chat(reasoning_effort="low"))
    assert "Think" not in prompt_of(chat(chat_template_kwargs={"reasoning_effort": "medium"}))
    other = texts.model(texts.JSON_TEMPLATE)
    with pytest.raises(ApiError, match="no efforts"):
        chat(of=other, reasoning_effort="low")
    with pytest.raises(ApiError, match="cannot turn thinking"):
        chat(of=other, enable_thinking=False)
    assert chat(of=other, tools=[texts.WEATHER], tool_choice=NAMED).opening.startswith(
        '<tool_call>\n{"name": "w'
    )
    with pytest.raises(ApiError, match="knows no tools"):
        chat(of=texts.model("{{ messages[0].content }}"), tools=[texts.WEATHER])
    named = texts.model("{{ tone }}{{ messages[0].content }}")
    assert prompt_of(chat(of=named, chat_template_kwargs={"tone": "dry"})) == "dryHello"


# Tokens and text by themselves.


def test_tokenize_and_detokenize() -> None:
    text, model = texts.text_model(), texts.model()
    told = parse_tokenize({"prompt": "Hello é", "return_token_strs": True, "add_special_tokens": True}, model)
    assert told["tokens"] == text.encode("Hello é") and told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 2048 and len(told["token_strs"]) == told["count"]
    turns = parse_tokenize(
        {"messages": HELLO, "add_generation_prompt": False, "enable_thinking": False}, model
    )
    assert text.decode(turns["tokens"], special=True) == "<|im_start|>user\nHello<|im_end|>\n"
    assert parse_detokenize({"tokens": turns["tokens"]}, model) == {
        "prompt": "<|im_start|>user\nHello<|im_end|>\n"
    }
    assert parse_detokenize({"tokens": []}, model) == {"prompt": ""}
    for parse, body, param in (
        (parse_tokenize, {}, "prompt"),
        (parse_tokenize, {"prompt": 3}, "prompt"),
        (parse_detokenize, {"tokens": "a"}, "tokens"),
        (parse_detokenize, {"tokens": [999]}, "tokens[0]"),
        (parse_detokenize, {"tokens": [1], "x": 1}, "x"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(body, model)
        assert caught.value.param == param
