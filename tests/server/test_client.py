"""The measuring client against a server that misbehaves in every way we could think of."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext_drv.bench import evidence
from flashnext_drv.bench.client import Ask, Cut, Reply, Target, ask, get_json, together
from flashnext_drv.bench.evidence import overlap, problems
from flashnext_drv.bench.inputs import prompt_ids
from flashnext_drv.bench.sse import EventParser
from flashnext_drv.bench.timing import gaps_us, middle, percentile, times
from flashnext_drv.errors import RemoteError, UsageError

from . import fake as fakes

REQUEST = Ask((5, 9, 300, 4), 12, seed=3)


@pytest.fixture(scope="module")
def fake() -> Iterator[fakes.Fake]:
    with fakes.running() as made:
        yield made


def answer(fake: fakes.Fake, request: Ask = REQUEST, cut: Cut | None = None, **knobs: Any) -> Reply:
    fake.knobs.clear()
    fake.knobs.update(knobs)
    return ask(Target(fake.url, timeout_s=10), request, cut)


def test_a_whole_reply_is_in_order(fake: fakes.Fake) -> None:
    reply = answer(fake)
    assert problems(reply, cold=True, replays=True) == []
    assert list(reply.tokens) == fakes.model(REQUEST.ids, 12, 3)
    assert len(reply.token_at) == 12 and list(reply.token_at) == sorted(reply.token_at)
    assert reply.sent_at < reply.token_at[0] and reply.token_at[-1] <= reply.done_at
    body = fake.bodies[-1]
    assert body["ids"] == list(REQUEST.ids) and body["max_new_tokens"] == 12 and body["ignore_eos"] is True


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "no usage": ({"usage": "absent"}, "usage unverified: missing"),
    "usage is text": ({"usage": "12 tokens"}, "usage unverified: missing"),
    "usage without prompt": ({"usage_edit": {"prompt_tokens": None}}, "usage.prompt_tokens unverified"),
    "usage as text": ({"usage_edit": {"prompt_tokens": "4"}}, "usage.prompt_tokens unverified"),
    "usage as bool": ({"usage_edit": {"completion_tokens": True}}, "usage.completion_tokens unverified"),
    "usage negative": ({"usage_edit": {"total_tokens": -16}}, "usage.total_tokens unverified"),
    "usage float": ({"usage_edit": {"prompt_tokens": 4.0}}, "usage.prompt_tokens unverified"),
    "usage wrong": ({"usage_edit": {"prompt_tokens": 3}}, "usage.prompt_tokens is 3"),
    "cached missing": ({"usage_edit": {"prompt_tokens_details": None}}, "cached tokens unverified"),
    "cached null": ({"usage_edit": {"prompt_tokens_details": {"cached_tokens": None}}},
                    "cached tokens unverified"),
    "cached differs": ({"runtime_edit": {"cached_tokens": 2, "prefilled_tokens": 2}},
                       "cached tokens unverified"),
    "cached": ({"usage_edit": {"prompt_tokens_details": {"cached_tokens": 2}},
                "runtime_edit": {"cached_tokens": 2, "prefilled_tokens": 2}},
               "2 prompt tokens came from a cache"),
    "no runtime": ({"runtime": "absent"}, "runtime block unverified"),
    "no hash": ({"runtime_edit": {"new_sha256": None}}, "new_sha256 unverified"),
    "short hash": ({"runtime_edit": {"token_sha256": "0123456789ab"}}, "token_sha256 unverified"),
    "upper hash": ({"runtime_edit": {"token_sha256": "A" * 64}}, "token_sha256 unverified"),
    "other hash": ({"runtime_edit": {"new_sha256": "0" * 64}}, "new_sha256 is not that of the ids"),
    "prefilled short": ({"runtime_edit": {"prefilled_tokens": 3}}, "prompt unverified: 0 cached and 3"),
    "prefilled missing": ({"runtime_edit": {"prefilled_tokens": None}}, "prompt unverified"),
    "decoded wrong": ({"runtime_edit": {"decoded_tokens": 13}}, "13 tokens decoded"),
    "no stamps": ({"runtime_edit": {"token_at": None}}, "server stamps unverified"),
    "a stamp short": ({"runtime_edit": {"token_at": [1e9] * 11}}, "server stamps unverified"),
    "stamps fall": ({"runtime_edit": {"token_at": [1e9 - i for i in range(12)]}}, "server stamps unverified"),
    "stamps before": ({"runtime_edit": {"token_at": [-1.0] * 12}}, "server stamps unverified"),
    "stamps null": ({"runtime_edit": {"token_at": [None] * 12}}, "server stamps unverified"),
    "stamps as list": ({"runtime_edit": {"stamps": [1]}}, "server stamps unverified"),
    "stamps too large": ({"runtime_edit": {"token_at": [10**400] * 12}}, "server stamps unverified"),
    "too few rounds": ({"runtime_edit": {"counters": {"graph_replays": 1, "eager_rounds": 0}}},
                       "too few for 12 tokens"),
    "no counters": ({"runtime_edit": {"counters": None}}, "graph replays unverified"),
    "counters text": ({"runtime_edit": {"counters": {"graph_replays": "9", "eager_rounds": 1}}},
                      "unverified: not told"),
    "no replay": ({"runtime_edit": {"counters": {"graph_replays": 0, "eager_rounds": 11}}},
                  "no graph was replayed"),
    "mostly eager": ({"runtime_edit": {"counters": {"graph_replays": 2, "eager_rounds": 9}}},
                     "9 rounds ran eagerly"),
    "stopped": ({"finish": "stop"}, "finish is 'stop'"),
    "no end": ({"done": False}, "end was not announced"),
    "dropped": ({"drop_after": 5}, "5 tokens came"),
    "error": ({"error_after": 5}, "the round failed"),
    "status": ({"http": 503}, "HTTP status 503"),
    "not JSON": ({"raw": b"data: {oops\n\n"}, "no JSON"),
    "a list": ({"raw": b"data: [1]\n\n"}, "no JSON object"),
    "ids text": ({"raw": b'data: {"tokens": ["7"]}\n\n'}, "integer token ids"),
    "ids bool": ({"raw": b'data: {"tokens": [true]}\n\n'}, "integer token ids"),
    "ids null": ({"raw": b'data: {"tokens": null}\n\n'}, "integer token ids"),
    "cut event": ({"raw": b'data: {"tokens": []}\n\ndata: {"tok'}, "ended inside an event"),
    "behind the end": ({"raw": b"data: [DONE]\n\ndata: {}\n\n"}, "behind the announced end"),
    "no UTF-8": ({"raw": b"data: \xff\n\n"}, "not UTF-8"),
    "plain JSON": ({"type": "application/json"}, "no event stream"),
    "nothing": ({"raw": b""}, "end was not announced"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_named_and_never_qualifies(fake: fakes.Fake, name: str) -> None:
    knobs, wanted = LIES[name]
    found = problems(answer(fake, **knobs), cold=True, replays=True)
    assert any(wanted in each for each in found), found
    assert not evidence.verdict(found).qualified


def test_eager_runs_must_show_no_replay(fake: fakes.Fake) -> None:
    reply = answer(fake)
    assert any("all had to be eager" in each for each in problems(reply, replays=False))
    fake.graphs = False
    try:
        assert problems(answer(fake), replays=False) == []
    finally:
        fake.graphs = True


def test_retry_after_is_read(fake: fakes.Fake) -> None:
    reply = answer(fake, http=429)
    assert (reply.status, reply.retry_after_s) == (429, 2.5)


def test_pieces_and_comments_change_nothing(fake: fakes.Fake) -> None:
    whole = answer(fake)
    for knobs in ({"piece": 1}, {"piece": 7, "comments": 2}, {"a_chunk": 5}):
        assert answer(fake, **knobs).tokens == whole.tokens
        assert problems(answer(fake, **knobs), cold=True) == []


def test_gaps_of_tokens_in_one_piece_count_as_zero(fake: fakes.Fake) -> None:
    reply = answer(fake, a_chunk=12)
    found = times(reply.sent_at, reply.token_at, 4)
    assert found.itl_mean_ms == found.itl_p50_ms == found.itl_p95_ms == 0.0
    assert found.decode_tokens_per_s is None, "no span, no rate"


def test_disconnect_and_cancel_stop_a_reply(fake: fakes.Fake) -> None:
    long = replace(REQUEST, new_tokens=400)
    for how in ("disconnect", "cancel"):
        reply = answer(fake, long, Cut(after_tokens=5, how=how), token_s=0.002)
        assert reply.cut.startswith(how) and 5 <= len(reply.tokens) < 400
        assert list(reply.tokens) == fakes.model(long.ids, 400, 3)[:len(reply.tokens)]
        assert not reply.error and any("given up" in each for each in problems(reply))
    assert reply.finish == "cancelled" and reply.finished


@pytest.mark.parametrize("cut", [Cut(after_tokens=3, how="cancel"), Cut(after_s=0.01, how="cancel")])
def test_a_cancel_that_nobody_answers_is_an_error_of_the_reply(fake: fakes.Fake, cut: Cut) -> None:
    reply = answer(fake, cut=cut, deaf=True, token_s=0.005)
    assert reply.cut.startswith("cancel") and "had no answer" in reply.error


def test_a_condition_that_fails_is_an_error_of_the_reply(fake: fakes.Fake) -> None:
    def fails() -> bool:
        raise UsageError("nobody can tell")

    reply = answer(fake, cut=Cut(when=fails), token_s=0.005)
    assert not reply.cut and "nobody can tell" in reply.error


def test_a_reply_can_be_given_up_before_anything_came(fake: fakes.Fake) -> None:
    reply = answer(fake, REQUEST, Cut(after_s=0.05), token_s=0.3)
    assert reply.cut == "disconnect after 0 tokens" and not reply.error and not reply.tokens
    due = threading.Event()
    due.set()
    assert answer(fake, REQUEST, Cut(when=due.is_set), token_s=0.3).cut


def test_nobody_there() -> None:
    target = Target("http://127.0.0.1:9", timeout_s=2)
    reply = ask(target, REQUEST)
    assert reply.status == 0 and "ConnectionRefusedError" in reply.error
    with pytest.raises(RemoteError):
        get_json(target, "/status")
    for url in ("ftp://x", "http://", "http://x:y", "127.0.0.1:80", "http://x?y"):
        with pytest.raises(UsageError):
            ask(Target(url), REQUEST)


def test_keys_are_sent_and_not_shown(fake: fakes.Fake) -> None:
    fake.key = "secret"
    try:
        assert answer(fake).status == 401
        target = Target(fake.url, key="secret", timeout_s=10)
        assert ask(target, REQUEST).status == 200 and "secret" not in repr(target)
    finally:
        fake.key = ""


def wave(fake: fakes.Fake, n: int, **knobs: Any) -> list[Reply]:
    fake.knobs.clear()
    fake.knobs.update(knobs)
    return together(Target(fake.url, timeout_s=10),
                    [Ask(prompt_ids(9, fakes.VOCAB, i), 10) for i in range(n)])


def test_eight_at_once_are_shown_by_the_servers_stamps(fake: fakes.Fake) -> None:
    proof = overlap(wave(fake, 8))
    assert proof.problems == () and proof.tokens >= 2 and proof.seconds > 0


def test_streams_one_after_the_other_are_no_wave(fake: fakes.Fake) -> None:
    found = overlap(wave(fake, 3, one_by_one=True)).problems
    assert any("no time at which all" in each for each in found), found
    assert any("3 wanted" in each for each in found), found


def test_a_wave_needs_stamps_counts_and_distinct_inputs(fake: fakes.Fake) -> None:
    assert "no server stamps" in overlap(wave(fake, 2, runtime_edit={"token_at": None})).problems[-1]
    assert "2 wanted" in overlap(wave(fake, 2, runtime_edit={"live_max": 1})).problems[-1]
    assert "2 wanted" in overlap(wave(fake, 2, runtime_edit={"live_max": None})).problems[-1]
    assert evidence.present(wave(fake, 3)) == []
    none = wave(fake, 2, runtime_edit={"token_at": None})
    assert evidence.present(none) == ["a stream has no server stamps"]
    far = {"stamps": {"submitted": 1e9}, "token_at": [2e9] * 10}
    first, later = wave(fake, 1)[0], wave(fake, 1, runtime_edit=far)
    assert evidence.present([first, later[0]]) == ["a stream had ended before another came"]
    same = wave(fake, 2)
    assert "not distinct" in overlap([same[0], same[0]]).problems[-1]
    assert overlap(same[:1]).problems == ("one stream cannot overlap",)
    assert overlap([]).problems and evidence.present([])


def test_hashes_that_are_missing_or_short_are_never_equal() -> None:
    whole = "ab" * 32
    assert evidence.same_hash(whole, whole)
    for bad in (None, "", whole[:12], whole + "00", whole.upper(), "g" * 64, 7, [whole]):
        assert not evidence.same_hash(bad, bad) and not evidence.same_hash(whole, bad)


# Parts by themselves.


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\n"), max_size=9),
                min_size=1, max_size=6),
       st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 80), max_size=8), st.booleans())
def test_events_do_not_depend_on_how_bytes_are_cut(lines: list[str], end: str, cuts: list[int],
                                                   mark: bool) -> None:
    text = "".join(f": note{end}data: {line}{end}{end}" for line in lines)
    raw = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    parser = EventParser()
    got = [event.data for a, b in zip(places, places[1:], strict=False) for event in parser.feed(raw[a:b])]
    parser.finish()
    assert got == lines and parser.n_comments == len(lines)


def test_events_of_several_lines_and_names() -> None:
    parser = EventParser()
    events = parser.feed(b"event: x\ndata: a\ndata:b\ndata\nid: 4\n\ndata\n\n\n\nevent: y\n\n")
    assert [(e.name, e.data) for e in events] == [("x", "a\nb\n"), ("message", "")]


def test_times_are_those_of_the_stamps() -> None:
    found = times(10.0, [12.0, 12.1, 12.1, 12.4], 100)
    assert found.ttft_s == 2.0 and found.prefill_tokens_per_s == 50.0
    assert math.isclose(found.decode_tokens_per_s or 0, 7.5) and math.isclose(found.itl_mean_ms or 0, 400 / 3)
    assert math.isclose(found.itl_p50_ms or 0, 100.0) and math.isclose(found.itl_p95_ms or 0, 280.0)
    assert times(None, [1.0], 3).ttft_s is None and times(1.0, [], 3).ttft_s is None
    assert times(1.0, [2.0], 3).itl_mean_ms is None
    assert middle([found, times(None, [], 1)])["ttft_s"] is None, "one that does not tell spoils the median"
    assert percentile([], 50) is None and percentile([4.0], 95) == 4.0
    assert gaps_us([1.5, 1.5, 2.0], 1.0) == [500000, 0, 500000]


def test_the_time_to_the_first_token_has_parts() -> None:
    def parts(**stamps: Any) -> dict[str, float | None]:
        return evidence.phases(Reply(REQUEST, runtime={"stamps": stamps}))

    at = {"submitted": 1.0, "admitted": 1.5, "first_chunk": 1.75, "first_token": 4.0, "done": 9.0}
    assert parts(**at) == {"queue": 0.5, "wait": 0.25, "prompt": 2.25}
    assert parts(**at | {"admitted": None}) == {"queue": None, "wait": None, "prompt": 2.25}
    assert parts(**at | {"first_token": 1.0})["prompt"] is None, "stamps that fall tell nothing"
    for runtime in (None, {}, {"stamps": "soon"}, {"stamps": {"admitted": "1"}}):
        assert set(evidence.phases(Reply(REQUEST, runtime=runtime)).values()) == {None}


def test_prompts_differ_at_once() -> None:
    made = {prompt_ids(6, 300, salt)[:4] for salt in range(2000)}
    assert len(made) == 2000
    assert all(0 <= i < 300 for i in prompt_ids(500, 300, 7)) and len(prompt_ids(2, 300, 7)) == 2
    with pytest.raises(UsageError):
        prompt_ids(0, 300)
