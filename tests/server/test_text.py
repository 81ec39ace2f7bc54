"""Between ids and text: nothing depends on how a stream is cut, no character is split, calls are whole or no
calls at all.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashnext_drv.server.calls import forced_opening
from flashnext_drv.server.parse import ReplyParser, ReplyStream, StopStrings
from flashnext_drv.server.text import Detokenizer

from . import texts

CUTS = st.lists(st.integers(0, 400), max_size=12)
TOOLS = (texts.WEATHER, texts.CLOCK)
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
FRAGMENTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "word",
    "<",
    "</",
    "<tool",
    "é",
    "<function=weather>",
    "<function=clock>",
    "<function=none>",
    "<parameter=city>",
    "<parameter=days>",
    "</parameter>",
    "</function>",
    "7",
    CALL,
    '"',
    "{",
    "}",
    '{"name": "clock", "arguments": {}}',
    '{"name": "weather", "arguments": {"city": "</tool_call>"}}',
    "<|im_end|>",
)
STREAM_TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def parser(**kwargs: Any) -> ReplyParser:
    return ReplyParser(**{"form": "xml", "tools": TOOLS, "call_id": "call"} | kwargs)


def parsed(text: str, cuts: list[int] | None = None, **kwargs: Any) -> list[Any]:
    one = parser(**kwargs)
    deltas = texts.run_pieces(one.push, texts.pieces(text, cuts or []))
    return texts.joined([*deltas, *one.finish()])


def calls(text: str, **kwargs: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of the calls in a reply."""
    return [
        (name, json.loads(arguments))
        for kind, arguments, _, _, name in parsed(text, **kwargs)
        if kind == "tool_call"
    ]


# Bytes to characters.


@settings(deadline=None, max_examples=80)
@given(st.binary(max_size=40) | st.text(max_size=20).map(lambda t: t.encode()), CUTS)
def test_characters_are_never_split_whatever_the_bytes(raw: bytes, cuts: list[int]) -> None:
    stream = Detokenizer(texts.text_model())
    said = [stream.push(part) for part in texts.pieces(texts.ids_of(raw), cuts)]
    whole = raw.decode(errors="replace")
    assert "".join(said) + stream.finish() == whole == texts.text_model().decode(texts.ids_of(raw))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(-1, 700), max_size=40), CUTS)
def test_any_ids_at_any_cut_give_one_text(ids: list[int], cuts: list[int]) -> None:
    stream = Detokenizer(texts.text_model())
    said = [stream.push(part) for part in texts.pieces(ids, cuts)]
    assert "".join(said) + stream.finish() == texts.text_model().decode(ids)


def test_half_a_character_waits_and_ends_as_a_replacement() -> None:
    stream = Detokenizer(texts.text_model())
    assert [stream.push([i]) for i in texts.ids_of("🎉".encode())] == ["", "", "", "🎉"]
    assert stream.push(texts.ids_of("é".encode()[:1])) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_stay_out_of_replies_but_marks_do_not() -> None:
    text = texts.text_model()
    ids = text.encode("a<|im_end|><think>b<|im_start|>")
    assert text.decode(ids) == "a<think>b" and text.decode(ids, special=True).endswith("<|im_start|>")


# Stop strings.


def stopped_at(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Letter by letter: the first that is complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))], True
    return text, False


@settings(deadline=None, max_examples=120)
@example("abbb", ["abbb", "bb"], False, [])
@example("aabaab", ["abaab"], False, [4])
@example("babab", ["ab", "bab"], True, [2])
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    CUTS,
)
def test_stop_strings_at_any_cut(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    one, said, ended = StopStrings(stops, include), "", False
    for part in texts.pieces(text, cuts):
        piece, ended = one.push(part)
        said += piece
    assert (said + one.finish(), ended) == stopped_at(text, stops, include)


def test_text_is_held_back_no_longer_than_it_may_become_a_stop_string() -> None:
    one = StopStrings(["\n\nUser:"])
    assert [one.push(part)[0] for part in ("hello", "\n", "\nUs", "ual", "\n\nUser", ": x")] == [
        "hello",
        "",
        "",
        "\n\nUsual",
        "",
        "",
    ]
    assert one.stopped and one.found == "\n\nUser:" and one.push("more") == ("", True)


# Reasoning and calls.


@settings(deadline=None, max_examples=150)
@given(STREAM_TEXT, CUTS, st.booleans(), st.sampled_from(["", "xml", "json"]))
def test_replies_are_read_alike_at_any_cut(text: str, cuts: list[int], reasoning: bool, form: str) -> None:
    whole = parsed(text, reasoning=reasoning, form=form)
    assert whole == parsed(text, cuts, reasoning=reasoning, form=form)
    assert whole == parsed(text, list(range(len(text))), reasoning=reasoning, form=form)
    if not reasoning and not form and "<think>" not in text:
        assert [each[1] for each in whole] == [text] * bool(text)


def test_reasoning_ends_and_the_space_around_it_is_nobodys() -> None:
    assert parsed("\nWhy?\n</think>\n\nBecause.\n", reasoning=True) == [
        ("reasoning", "Why?", 0, "", ""),
        ("content", "Because.\n", 0, "", ""),
    ]
    assert parsed(" <think>a</think>b", reasoning=False) == [
        ("reasoning", "a", 0, "", ""),
        ("content", "b", 0, "", ""),
    ]
    assert parsed("never ends ", reasoning=True) == [("reasoning", "never ends", 0, "", "")]
    assert parsed("a <think> b") == [("content", "a <think> b", 0, "", "")]


def test_calls_come_out_whole_name_first() -> None:
    one = parser()
    assert [delta.text for delta in one.push("Let me look.\n\n" + CALL[:40])] == ["Let me look."]
    deltas = one.push(CALL[40:] + "\n" + CALL + "\n")
    assert [(d.index, d.id, d.name) for d in deltas] == [
        (0, "call_0", "weather"),
        (0, "", ""),
        (1, "call_1", "weather"),
        (1, "", ""),
    ]
    assert json.loads(deltas[1].text) == {"city": "Bonn", "days": 3} and one.finish() == []


@pytest.mark.parametrize(
    ("value", "key", "wanted"),
    [
        ("12", "city", "12"),
        ("12", "days", 12),
        ("null", "units", None),
        ("nil", "units", "nil"),
        ("True", "wind", True),
        ("false", "wind", False),
        ('{"a": "</parameter>"}', "more", {"a": "</parameter>"}),
        ("not json", "days", "not json"),
        ("[1, 2]", "unheard", [1, 2]),
        ("NaN", "days", "NaN"),
        ("-1e999", "days", "-1e999"),
        ("1e-999", "unheard", 0.0),
        ("", "city", ""),
        ("a</parameter>b", "city", "a</parameter>b"),
        ("\n", "city", ""),
        ("\n\n x ", "city", "\n x "),
        ("</function></tool_call>", "city", "</function></tool_call>"),
    ],
)
def test_values_become_what_the_schema_says(value: str, key: str, wanted: Any) -> None:
    text = f"<tool_call><function=weather><parameter={key}>{value}</parameter></function></tool_call>"
    assert calls(text) == [("weather", {key: wanted})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>hello</tool_call>",
        "<tool_call><function=none></function></tool_call>",
        "<tool_call>\n<function=clock>\n</function>",
        "<tool_call><function=clock>x</function></tool_call>",
        CALL[:-5],
        CALL.replace("</parameter>\n</function>", "</function>"),
        CALL.replace("days", "city"),
        "<tool_call><function=" + "x" * 300 + "></function></tool_call>",
        "<tool_call><function=></function>",
    ],
)
def test_malformed_calls_stay_content(text: str) -> None:
    assert parsed("a " + text + " b") == [("content", "a " + text + " b", 0, "", "")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "clock"</tool_call>',
        '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>["clock"]</tool_call>',
        '<tool_call>{"name": "clock"} x</tool_call>',
        '<tool_call>{"name": "</tool_call>',
    ],
)
def test_malformed_json_calls_stay_content(text: str) -> None:
    assert parsed(text, form="json") == [("content", text, 0, "", "")]


def test_a_call_behind_a_malformed_one_is_found() -> None:
    assert [each[0] for each in parsed("<tool_call>no " + CALL)] == ["content", "tool_call"]


def test_json_calls() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "</tool_call>é"}}\n</tool_call>'
    assert calls(text, form="json") == [("weather", {"city": "</tool_call>é"})]
    lone = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>'
    told = parsed(lone, form="json")[0][1]
    assert told.encode() and json.loads(told) == {"city": "\ud800"}


@pytest.mark.parametrize(
    ("form", "name", "rest"),
    [
        ("xml", None, "clock>\n</function>\n</tool_call>"),
        ("xml", "clock", "</function></tool_call>"),
        ("json", None, 'clock", "arguments": {}}</tool_call>'),
        ("json", "clock", "{}}\n</tool_call>"),
    ],
)
def test_a_forced_opening_is_part_of_the_call(form: str, name: str | None, rest: str) -> None:
    opening = forced_opening(form, name)
    assert calls(rest, form=form, opening=opening) == [("clock", {})]
    assert parsed("!", form=form, opening=opening)[0][:2] == ("content", opening + "!")


# All of it together.


def stream(**kwargs: Any) -> ReplyStream:
    reader = kwargs.pop("parser", None)
    return ReplyStream(texts.text_model(), stop_ids=(7, 9), parser=reader, **kwargs)


@settings(deadline=None, max_examples=150)
@given(
    STREAM_TEXT,
    CUTS,
    st.booleans(),
    st.sampled_from([(), ("word",), ("</think>", "é")]),
    st.integers(0, 6),
    st.booleans(),
)
def test_streams_are_read_alike_at_any_cut(
    text: str, cuts: list[int], reasoning: bool, stops: tuple[str, ...], least: int, single: bool
) -> None:
    ids = texts.text_model().encode(text)
    ids = ids[: next((i + 1 for i, one in enumerate(ids) if one in (7, 9)), len(ids))]
    found = []
    for parts in ([ids], texts.pieces(ids, cuts), [[i] for i in ids]):
        one = stream(
            parser=parser(reasoning=reasoning), stop_strings=stops, min_tokens=least, single_call=single
        )
        deltas = texts.run_pieces(one.push, parts)
        rest, finish = one.finish("stop" if ids and ids[-1] in (7, 9) else "length")
        counts = (one.n_tokens, one.reasoning_tokens, one.stopped)
        found.append((texts.joined([*deltas, *rest]), finish, counts))
    assert found[0] == found[1] == found[2]


def test_tokens_behind_a_stop_string_do_not_belong_to_the_reply() -> None:
    ids = texts.ids_of(b"one two three")
    one = stream(stop_strings=("two",))
    assert "".join(d.text for d in one.push(ids)) == "one " and one.stopped and one.n_tokens == 7
    assert one.finish("cancelled") == ([], "stop") and one.stop_reason == "two" and one.push(ids) == []
    kept = stream(stop_strings=("two",), include_stop=True)
    assert "".join(d.text for d in kept.push(ids)) == "one two"
    late = stream(stop_strings=("o",), min_tokens=7)
    assert "".join(d.text for d in late.push(ids)) == "one two three" and not late.stopped


def test_a_stop_id_ends_the_text_and_is_no_part_of_it() -> None:
    ids = [*texts.ids_of(b"hi"), 300]
    shown = texts.text_model().token_text(300)[0]
    for include, wanted in ((False, "hi"), (True, "hi" + shown)):
        one = ReplyStream(texts.text_model(), stop_ids=(300,), include_stop=include)
        assert "".join(d.text for d in one.push(ids)) == wanted and one.n_tokens == 3
        assert one.finish("stop") == ([], "stop")


def test_reasoning_tokens_and_reasons_to_end() -> None:
    text = texts.text_model()
    thought, rest = text.encode("abc</think>"), text.encode("\n\nx" + CALL)
    one = stream(parser=parser(reasoning=True))
    deltas = one.push([*thought, *rest])
    assert [d.kind for d in deltas] == ["reasoning", "content", "tool_call", "tool_call"]
    assert one.reasoning_tokens == len(thought) and one.finish("stop") == ([], "tool_calls")
    cut = stream(parser=parser())
    cut.push(rest)
    assert cut.finish("length") == ([], "length")
    single = stream(parser=parser(), single_call=True)
    assert len(single.push([*rest, *rest])) == 3 and single.stopped and single.n_tokens == len(rest)
    assert single.finish("cancelled") == ([], "tool_calls")
    opened = stream(parser=parser())
    opened.push([*text.encode("<think>"), *thought, *rest])
    assert opened.reasoning_tokens == len(thought) + 1


def test_reasoning_tokens_are_counted_when_the_mark_is_spelled_out() -> None:
    one = stream(parser=parser(reasoning=True))
    deltas = texts.run_pieces(one.push, [[i] for i in texts.ids_of(b"abc</think>de")])
    assert texts.joined(deltas) == [("reasoning", "abc", 0, "", ""), ("content", "de", 0, "", "")]
    assert one.reasoning_tokens == len("abc</think>") and one.n_tokens == len("abc</think>de")


def test_without_a_text_side_tokens_are_counted() -> None:
    one = ReplyStream(None, stop_ids=(7,))
    assert one.push([1, 2, 7]) == [] and one.n_tokens == 3 and one.finish("stop") == ([], "stop")
