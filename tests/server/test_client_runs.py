"""The measurements against the fake server: what they report, what they refuse to call qualified."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from flashnext_drv.bench import cases, load, matrix, workload
from flashnext_drv.bench.client import Target, arriving
from flashnext_drv.bench.evidence import joined_replies
from flashnext_drv.bench.inputs import asks
from flashnext_drv.bench.recheck import figures, recheck
from flashnext_drv.bench.site import Site, find_site
from flashnext_drv.errors import UsageError

from . import fake as fakes

SIZES = workload.Sizes(24, 12, 3)
CELLS = matrix.Cells(lengths=(20, 33), new_tokens=9, together=2, widths=(1, 2), width_length=8,
                     width_tokens=10, repeats=2, repeat_length=7, repeat_tokens=11, lines=(4, None))
LEDGER = {"load": {}, "peak": {}, "idle": {}, "closed": {"entries": 0, "engines": 1}}


class Control:
    def __init__(self, fake: fakes.Fake) -> None:
        self.fake = fake

    def graphs(self, on: bool) -> None:
        self.fake.graphs = on

    def drain(self) -> None:
        self.fake.draining = True

    def again(self) -> Target:
        self.fake.draining = False
        return Target(self.fake.url, timeout_s=10)


@pytest.fixture
def fake() -> Iterator[fakes.Fake]:
    with fakes.running() as made:
        yield made


def site_of(fake: fakes.Fake, control: bool = True) -> Site:
    return find_site(Target(fake.url, timeout_s=10), control=Control(fake) if control else None,
                     say=lambda _: None)


def reasons(result: dict[str, Any]) -> str:
    assert result["verdict"]["qualified"] is (not result["verdict"]["reasons"])
    return "\n".join(result["verdict"]["reasons"])


def test_a_scaled_workload_qualifies_under_its_own_name(fake: fakes.Fake) -> None:
    found = workload.run_workload(site_of(fake), SIZES)
    assert not reasons(found) and found["kind"] == "scaled" and fake.graphs, "it leaves the mode as it was"
    assert {(leg["mode"], leg["streams"]) for leg in found["legs"]} == {
        ("graph", 1), ("graph", 3), ("eager", 1), ("eager", 3)}
    assert found["checks"]["equal"] == found["checks"]["compared"] == 1 + 3 + 1 + 3
    for leg in found["legs"]:
        for side in ("client", "server"):
            assert all(leg[side][name] is not None for name in
                       ("ttft_s", "prefill_tokens_per_s", "itl_mean_ms", "itl_p50_ms", "itl_p95_ms"))
    assert recheck(found | {"ledger": LEDGER}) == []
    assert set(figures(found)) == {"graph c=1", "graph c=3", "eager c=1", "eager c=3"}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "streams in a row": ({"one_by_one": True, "token_s": 0.001}, "no time at which all streams"),
    "tokens change among others": ({"wrong_when": 2, "token_s": 0.005}, "its tokens are not those of"),
    "cached": ({"usage_edit": {"prompt_tokens_details": {"cached_tokens": 4}},
                "runtime_edit": {"cached_tokens": 4, "prefilled_tokens": 20}}, "came from a cache"),
    "replays in the eager leg": ({"runtime_edit": {"counters": {"graph_replays": 9, "eager_rounds": 1}}},
                                 "all had to be eager"),
    "no replays": ({"runtime_edit": {"counters": {"graph_replays": 0, "eager_rounds": 9}}},
                   "no graph was replayed"),
    "short replies": ({"drop_after": 6}, "6 tokens came"),
    "no usage": ({"usage": "absent"}, "usage unverified"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_workload_with_a_fault_is_not_qualified(fake: fakes.Fake, name: str) -> None:
    fake.knobs, wanted = FAULTS[name]
    assert wanted in reasons(workload.run_workload(site_of(fake), SIZES))


def test_a_leg_left_out_and_too_few_streams_speak_against_a_workload(fake: fakes.Fake) -> None:
    parts = [workload.run_workload(site_of(fake), SIZES, modes=(mode,)) for mode in workload.MODES]
    assert [part["kind"] for part in parts] == ["scaled-part"] * 2 and not any(map(reasons, parts))
    assert recheck(parts[1] | {"ledger": LEDGER}) == []
    assert "1 modes are called 'scaled'" in recheck(parts[1] | {"ledger": LEDGER, "kind": "scaled"})
    whole = workload.join_workload(parts)
    assert not reasons(whole) and whole["kind"] == "scaled" and whole["checks"]["equal"] == 1 + 3 + 1 + 3
    assert recheck(whole | {"ledger": LEDGER}) == []
    assert "2 legs graph c=1\n2 legs graph c=3\n0 legs eager c=1" in reasons(workload.join_workload(
        [parts[0], parts[0]]))
    parts[1]["replies"][0]["new_sha256"] = None
    assert "not the hash that another leg has" in reasons(workload.join_workload(parts))
    fake.max_streams = 2
    assert "3 are needed" in reasons(workload.run_workload(site_of(fake), SIZES))


def test_only_the_exact_sizes_bear_the_name() -> None:
    assert workload.is_workload(workload.Sizes(16_384, 1_024, 8))
    for sizes in (workload.Sizes(16_383, 1_024, 8), workload.Sizes(16_384, 1_025, 8),
                  workload.Sizes(16_384, 1_024, 7)):
        assert not workload.is_workload(sizes)


def test_a_server_elsewhere_cannot_be_switched(fake: fakes.Fake) -> None:
    with pytest.raises(UsageError, match="cannot be switched"):
        workload.run_workload(site_of(fake, control=False), SIZES)


def test_tampered_results_are_seen(fake: fakes.Fake) -> None:
    good = workload.run_workload(site_of(fake), SIZES) | {"ledger": LEDGER}

    def told(change: Any) -> str:
        made = copy.deepcopy(good)
        change(made)
        return "\n".join(recheck(made))

    def one_hash(made: dict[str, Any]) -> None:
        last = made["replies"][-1]
        last["new_sha256"] = last["client_new_sha256"] = "0" * 64

    def in_a_row(made: dict[str, Any]) -> None:
        made["legs"][1]["stamps_us"]["server_begun"] = [0, 10**9, 2 * 10**9]

    def twice(made: dict[str, Any]) -> None:
        made["legs"].append(copy.deepcopy(made["legs"][1]))

    def no_part(made: dict[str, Any]) -> None:
        made.update(kind="scaled-part", legs=[], replies=[], checks=dict.fromkeys(made["checks"], 0))

    assert told(lambda m: m.update(kind="workload")) == f"sizes {vars(SIZES)} are called 'workload'"
    assert "are called 'scaled'" in told(lambda m: m["sizes"].update(prompt_tokens=16384, new_tokens=1024,
                                                                     streams=8))
    assert "not the hash of the same request" in told(one_hash)
    assert "never decoded all at once" in told(in_a_row)
    assert "hashes are missing" in told(lambda m: m["replies"][0].update(new_sha256="0123456789ab"))
    assert "its stamps give" in told(lambda m: m["legs"][0]["client"].update(ttft_s=0.5))
    assert "not one server stamp a token" in told(lambda m: m["legs"][0]["stamps_us"]["server"][0].pop())
    assert "no leg eager c=3" in told(lambda m: m["legs"].pop())
    assert "5 cached tokens" in told(lambda m: m["replies"][0].update(cached_tokens=5))
    assert "replays" in told(lambda m: m["replies"][-1]["counters"].update(graph_replays=3))
    assert "disagree" in told(lambda m: m["verdict"]["reasons"].append("x"))
    assert "not empty when closed" in told(lambda m: m["ledger"].update(closed={"entries": 1}))
    assert "no ledger" in told(lambda m: m.pop("ledger"))
    assert "10 of 12 tokens" in told(lambda m: m["replies"][0].update(new_tokens=10))
    assert "no verdict" in told(lambda m: m.pop("verdict"))
    assert "kind 'measured' is unknown" in told(lambda m: m.update(kind="measured"))
    assert "not formed as its kind is" in told(lambda m: m.pop("sizes"))
    assert "no replies" in told(lambda m: m.update(replies=[]))
    assert "are wanted" in told(twice) and "are wanted" in told(no_part)
    assert "not those of its legs" in told(lambda m: m["replies"].pop())
    assert "not those of its legs" in told(lambda m: m["replies"][-1].update(name="x"))
    assert "give 8" in told(lambda m: m["checks"].update(equal=7))
    assert "3 wanted" in told(lambda m: m["replies"][-1].update(live=[1, 2]))
    assert "not 3 distinct requests" in told(lambda m: m["legs"][1]["wave"]["rows"].pop())
    assert "overlap is no proof" in told(lambda m: m["legs"][1]["wave"]["overlap"].update(fewest_tokens=0))
    assert "too few for 12 tokens" in told(lambda m: m["replies"][0]["counters"].update(graph_replays=2))
    assert "its stamps give" in told(lambda m: m["legs"][1]["each_client"][2].update(itl_p95_ms=9.0))
    assert "no rising microseconds" in told(
        lambda m: m["legs"][0]["stamps_us"]["server"][0].__setitem__(3, -5))
    assert "no engine's ledger" in told(lambda m: m["ledger"].update(closed={"entries": 0, "engines": 0}))
    assert "no ledger at load" in told(lambda m: m["ledger"].update(load=[None]))


def test_tampered_figures_of_the_small_measurements_are_seen(fake: fakes.Fake) -> None:
    site = site_of(fake)
    made = {
        "decode": cases.decode(site, new_tokens=10, repeats=2),
        "cold": cases.cold(site, lengths={"short": 6}, new_tokens=9),
        "cache": cases.cache(site, lengths=(5,), new_tokens=9),
        "concurrent": cases.concurrent(site, widths=(1, 2), length=6, new_tokens=10),
        "load": load.run_load(site, load.Load(requests=6, streams=2, kinds=2, prompt_tokens=9, new_tokens=8)),
    }

    def told(kind: str, change: Any) -> str:
        found = json.loads(json.dumps(made[kind] | {"ledger": LEDGER}))
        assert recheck(found) == []
        change(found)
        return "\n".join(recheck(found))

    assert "its replies give" in told("decode", lambda m: m["medians"]["code"].update(itl_mean_ms=1.0))
    assert "its reply give" in told("cold", lambda m: m["points"]["short warm"].update(ttft_s=None))
    assert "says otherwise" in told("cache", lambda m: m["points"][1].update(cached_tokens=4))
    assert "2 wanted" in told("concurrent", lambda m: m["replies"][-1].update(live=[1, 1]))
    for kind in ("decode", "cold", "cache", "concurrent"):
        assert "no replies" in told(kind, lambda m: m.update(replies=[], checks={}))
    for change in ({"latency": {"replies": 0}}, {"ledger_drift": ["x"]},
                   {"checks": made["load"]["checks"] | {"equal": 0}},
                   {"given_up": made["load"]["given_up"] | {"wrong": 1}}):
        assert told("load", lambda m, change=change: m.update(change)) != ""


def test_the_small_measurements(fake: fakes.Fake) -> None:
    site = site_of(fake)
    decode = cases.decode(site, new_tokens=10, repeats=3)
    assert not reasons(decode) and decode["checks"] | {"unmeasured": 0} == {  # the fake may be that fast
        "replies": 6, "failed": 0, "unmeasured": 0, "compared": 4, "equal": 4, "overlaps": 0}
    assert decode["medians"]["prose"]["ttft_s"] > 0
    cold = cases.cold(site, lengths={"short": 6, "long": 40}, new_tokens=9)
    assert not reasons(cold) and set(cold["points"]) == {"short cold", "short warm", "long cold", "long warm"}
    assert not reasons(cases.cache(site, lengths=(5, 30), new_tokens=9, cold=True))
    many = cases.concurrent(site, widths=(1, 2, 3), length=6, new_tokens=10, alone=True, serial=True)
    assert not reasons(many) and many["checks"]["equal"] == (1 + 2 + 3) + 3
    for widths in ((2,), (2, 3), (1,)):
        found = cases.concurrent(site, widths=widths, length=6, new_tokens=9)
        assert "held to a run of its own" in reasons(found), widths


def test_replies_that_come_in_one_piece_are_counted_as_unmeasured(fake: fakes.Fake) -> None:
    fake.knobs = {"token_s": 0.002}
    paced = cases.decode(site_of(fake), new_tokens=9, repeats=1)
    assert paced["checks"]["unmeasured"] == 0 and paced["medians"]["prose"]["decode_tokens_per_s"] > 0
    fake.knobs = {"a_chunk": 100}
    at_once = cases.decode(site_of(fake), new_tokens=9, repeats=1)
    assert not reasons(at_once) and at_once["medians"]["prose"]["decode_tokens_per_s"] is None
    assert at_once["checks"]["unmeasured"] == at_once["checks"]["replies"] == 2
    counts, _ = joined_replies([paced, at_once])
    assert (counts["replies"], counts["failed"], counts["unmeasured"]) == (4, 0, 2)
    fake.knobs = {"drop_after": 3, "a_chunk": 3}
    broken = cases.decode(site_of(fake), new_tokens=9, repeats=1)["checks"]
    assert (broken["failed"], broken["unmeasured"]) == (2, 0)


def test_a_cache_is_told_apart_when_it_is_allowed(fake: fakes.Fake) -> None:
    fake.knobs = {"usage_edit": {"prompt_tokens_details": {"cached_tokens": 4}},
                  "runtime_edit": {"cached_tokens": 4, "prefilled_tokens": 1}}
    allowed = cases.cache(site_of(fake), lengths=(5,), new_tokens=9)
    assert not reasons(allowed) and allowed["points"][0]["cached_tokens"] == 4
    assert "came from a cache" in reasons(cases.cache(site_of(fake), lengths=(5,), new_tokens=9, cold=True))


def test_the_matrix_holds_every_leg_to_every_other(fake: fakes.Fake) -> None:
    started: list[matrix.Lines] = []

    @contextmanager
    def serve(lines: matrix.Lines) -> Iterator[Site]:
        started.append(lines)
        fake.graphs = True
        yield site_of(fake)

    found = matrix.run_matrix(serve, CELLS)
    assert not reasons(found) and found["kind"] == "matrix-part" and started == [4, None]
    told = json.loads(json.dumps(found | {"ledger": LEDGER}))
    assert recheck(told) == [] and "are called 'matrix'" in "".join(recheck(told | {"kind": "matrix"}))
    assert "a leg or all of them are missing" in recheck(told | {"legs": []})
    told["legs"][0]["cells"][0]["ttft_s"] = 0.001
    assert "ttft_s is 0.001, its reply give" in "".join(recheck(told))
    assert len(found["legs"]) == 4
    checks = found["checks"]
    requests = 2 * 2 + 2 + 1
    assert checks["compared"] == checks["equal"] == checks["replies"] - requests
    parts = [matrix.run_matrix(serve, CELLS.__class__(**{**vars(CELLS), "lines": (n,)})) for n in CELLS.lines]
    joined = matrix.join_parts(parts)
    checks = joined["checks"]
    assert checks["compared"] == checks["equal"] == checks["replies"] - requests
    said = reasons(joined)
    assert "no leg with lines 16, graph" in said and "has lengths" in said and "another leg" not in said
    assert "2 legs with lines 4, graph" in reasons(matrix.join_parts([parts[0], parts[0], parts[1]]))
    parts[1]["replies"][3]["new_sha256"] = "0" * 64
    assert "not the hash that another leg has" in reasons(matrix.join_parts(parts))


def test_a_load_is_held_to_solo_runs_and_leaves_nothing(
    fake: fakes.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = load.Load(requests=60, streams=4, kinds=6, prompt_tokens=9, new_tokens=8, cancels=0.3)
    fake.knobs = {"token_s": 0.0005}
    found = load.run_load(site_of(fake), few)
    assert not reasons(found)
    assert found["given_up"]["asked"] >= 8 and found["given_up"]["wrong"] == 0
    assert found["latency"]["replies"] + found["given_up"]["asked"] == 60
    assert found["latency"]["ttft_s"]["p50"] <= found["latency"]["ttft_s"]["p99"]
    said = reasons(load.run_load(site_of(fake), replace(few, cancels=1.0)))
    assert said == "every request was to be given up: none was held to its whole solo run"
    fake.knobs = {"token_s": 0.0005, "short_from": fake.n_requests + few.kinds + few.streams + 1}
    assert "1 tokens came" in reasons(load.run_load(site_of(fake), replace(few, cancels=1.0)))
    monkeypatch.setattr(load, "_SETTLE_S", 0.05)
    fake.knobs = {"token_s": 0.0005, "hold": True}
    assert "left in the server: {'free_slots': " in reasons(load.run_load(site_of(fake), few))
    fake.knobs = {"leak": True}
    assert "ledger: weights device" in reasons(load.run_load(site_of(fake), few))
    fake.knobs = {"wrong_when": 2, "token_s": 0.003}
    assert "its tokens are not those of" in reasons(load.run_load(site_of(fake), few))


def test_requests_arrive_at_their_times_whether_others_have_ended_or_not(fake: fakes.Fake) -> None:
    """Replies of about 0.1 s at 60 a second: more are under way than `streams`."""
    few = load.Load(requests=30, streams=2, kinds=4, prompt_tokens=9, new_tokens=8, cancels=0.0, rate=60.0)
    fake.knobs = {"token_s": 0.02}
    found = load.run_load(site_of(fake), few)
    assert not reasons(found) and found["load"]["rate"] == 60.0 and found["latency"]["replies"] == 30
    assert fake.most_live > few.streams and found["late_s"] >= 0
    assert found["seconds"] > 0.2, "the 30th comes after half a second or so"
    fake.knobs = {}
    assert load.run_load(site_of(fake), replace(few, rate=0.0))["late_s"] is None
    fake.knobs = {"http": 429}
    assert "HTTP status 429" in reasons(load.run_load(site_of(fake), few))


def test_arrivals_are_in_order_and_none_comes_early(fake: fakes.Fake) -> None:
    asked, after_s = asks([3, 3, 3], fakes.VOCAB, 2), [0.0, 0.05, 0.1]
    replies, late = arriving(Target(fake.url, timeout_s=10), asked, after_s)
    assert [reply.ask for reply in replies] == asked and all(r.finished for r in replies) and 0 <= late < 5
    gaps = [reply.sent_at - replies[0].sent_at for reply in replies]
    assert all(gap >= due - late for gap, due in zip(gaps, after_s, strict=True))
