"""Traces of runs: everything that ran is there once, in order, with its time; nothing is left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.bench import trace
from flashnext_drv.bench.graph_view import graph_listing, read_listing
from flashnext_drv.cli import report
from flashnext_drv.drv import api, faults
from flashnext_drv.engine.engine import Engine
from flashnext_drv.errors import DriverError, UsageError

pytestmark = pytest.mark.sim

PACK = "synth:micro?seed=5"
OpenMicro = Callable[..., Engine]


@pytest.fixture(scope="module")
def traced(device_name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the command printed, and its folder."""
    out = tmp_path_factory.mktemp("trace") / "out"
    told = out.parent / "told.json"
    with told.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        code = main(["trace", PACK, "--prompt-ids", "1,2,3", "--max-new", "3", "--no-deep", "--out", str(out),
                     "--device", device_name, "--json"])
    assert code == report.GOOD
    return json.loads(told.read_text()), out


def events(out: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [e for e in json.loads((out / "trace.json").read_text())["traceEvents"] if e["ph"] == kind]


def test_the_traced_run_is_generates(traced: tuple[dict[str, Any], Path], device_name: str) -> None:
    found, out = traced
    with Engine.open(PACK, device=device_name) as engine:
        assert found["tokens"] == engine.generate([1, 2, 3], max_new_tokens=3, stop_ids=()).tokens
    counters = found["counters"]
    assert counters["with graphs"]["graph_replays"] > 0 == counters["eager"]["graph_replays"]
    assert json.loads((out / "trace.json").read_text())["otherData"]["device"] == found["device"]


def test_every_track_has_a_name_and_its_spans_do_not_overlap(traced: tuple[dict[str, Any], Path]) -> None:
    _, out = traced
    names = {(e["pid"], e["tid"]) for e in events(out, "M") if e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events(out):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(tracks) == names
    assert {pid for pid, _ in names} == {1, 2, 3, 4}
    for track in tracks.values():
        track.sort(key=lambda e: e["ts"])
        for before, after in zip(track, track[1:], strict=False):
            assert before["ts"] >= 0 and before["dur"] >= 0
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002, (before, after)


def test_captured_launches_and_replays_are_told_apart(traced: tuple[dict[str, Any], Path]) -> None:
    found, out = traced
    kinds = Counter((e["pid"], e["cat"]) for e in events(out))
    names = Counter((e["pid"], e["name"]) for e in events(out))
    counters = found["counters"]["with graphs"]
    replays = counters["graph_replays"] + counters["head_replays"]
    assert kinds[(1, "replay")] == kinds[(2, "replay")] == replays == sum(r["n"] for r in found["replays"])
    captured = ("cuLaunchKernel (captured)", "cuLaunchKernelEx (captured)")
    assert sum(names[(1, name)] for name in captured) == sum(
        node["kind"] == "kernel" for graph in found["graphs"]
        for node in read_listing(out / f"{graph['files']}.json")["nodes"])
    assert kinds[(3, "replay")] == kinds[(4, "replay")] == sum(names[(3, name)] for name in captured) == 0
    assert kinds[(3, "launch")] == kinds[(4, "kernel")] == sum(row["n"] for row in found["kernels"]) > 0
    assert sum(row["n"] for row in found["parts"]) == kinds[(4, "kernel")]
    assert {row["name"] for row in found["parts"]} >= {"gdn", "qsa", "moe", "site", "head", "draw"}
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)


def test_eager_launches_are_the_replayed_nodes(traced: tuple[dict[str, Any], Path]) -> None:
    """Each replay of a graph, node by node, against the launches of the eager run, by kernel and grid."""
    found, out = traced
    nodes: Counter[tuple[str, ...]] = Counter()
    for row in found["replays"]:
        listing = read_listing(out / f"graph-{row['name']}.json")
        for node in listing["nodes"]:
            nodes[(node["name"], str(node["grid"]), node["layer"], node["part"])] += row["n"]
    launched = Counter((e["name"], str(e["args"]["grid"]), e["args"]["layer"], e["args"]["part"])
                       for e in events(out) if (e["pid"], e["cat"]) == (4, "kernel"))
    assert {key: n for key, n in nodes.items() if key[0] != "count_replay"} == launched


def test_arrows_lead_from_each_call_to_its_work(traced: tuple[dict[str, Any], Path]) -> None:
    _, out = traced
    starts, ends = events(out, "s"), events(out, "f")
    work = [e for e in events(out) if e["pid"] % 2 == 0]
    assert len(starts) == len(ends) == len(work) == len({e["id"] for e in starts})
    at = Counter((e["pid"], e["tid"], e["ts"]) for e in ends)
    assert sum(at.values()) == len(work)
    pids = {e["id"]: e["pid"] for e in ends}
    assert all(pids[e["id"]] == e["pid"] + 1 for e in starts)


def test_copies_say_bytes_and_direction(traced: tuple[dict[str, Any], Path]) -> None:
    _, out = traced
    copies = [e["args"] for e in events(out) if (e["pid"], e["cat"]) == (4, "copy")]
    ways = {each["direction"] for each in copies}
    assert ways == {"pinned to device", "device to pinned", "device to host"}
    assert all(each["bytes"] > 0 for each in copies)


def test_graph_files_come_in_threes(traced: tuple[dict[str, Any], Path]) -> None:
    found, out = traced
    wanted = {f"{graph['files']}.{end}" for graph in found["graphs"] for end in ("json", "dot", "svg")}
    assert {path.name for path in out.iterdir()} == wanted | {"trace.json"} and len(found["graphs"]) > 1
    paths = {read_listing(out / f"{graph['files']}.json")["identity"]["path"] for graph in found["graphs"]}
    assert "body" in paths or "token" in paths


def test_text_says_the_same(device_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["trace", PACK, "--prompt-ids", "1 2 3", "--max-new", "1", "--no-deep", "--out",
            str(tmp_path / "new"), "--device", device_name]
    assert main(argv) == report.GOOD
    out, err = capsys.readouterr()
    assert err == "" and "kernels, eager, device time" in out and "linear_gemv_n8" in out
    assert "with graphs: replay" in out and "eager: launch" in out and "eager: replay" not in out


def test_arguments_of_captured_launches_have_the_names_of_their_spans(open_micro: OpenMicro) -> None:
    with open_micro(deep="off") as engine:
        engine.generate([1], max_new_tokens=2, stop_ids=())
        graphs, listings = engine.rank.graphs, []
        for identity in graphs.identities():
            listings.append(graph_listing(graphs.graph(identity), identity, engine.rank.spans))
    nodes = [node for listing in listings for node in listing["nodes"]]
    embed = next(node for node in nodes if node["name"] == "embed_rows")
    assert {name: embed["args"][name] for name in ("round", "rows", "table", "streams", "hidden")} == {
        "round": "round", "rows": "rows", "table": "embed", "streams": "streams",
        "hidden": engine.config.hidden}
    assert {"FnRound round", "FnRow rows"} <= set(embed["reads"])
    gemvs = [node["args"]["linears"] for node in nodes if node["name"] == "linear_gemv_n8"]
    assert {"L0.attn_site.down.linears", "head.linears"} < set(gemvs)
    assert all(value != "elsewhere" for node in nodes for value in node["args"].values())
    last = engine.config.n_layers - 1
    assert {node["layer"] for node in nodes} == {"", *(f"L{i}" for i in range(last + 1))}


# The recorder.


def test_nothing_stays_between_the_engine_and_the_driver(open_micro: OpenMicro) -> None:
    before = (api._driver, api._launch_kernel)
    with trace.Recorder() as recorder:
        assert api._driver is not before[0]
        with open_micro(deep="off") as engine, recorder.phase("one", engine.rank):
            engine.generate([1, 2], max_new_tokens=1, stop_ids=())
            with pytest.raises(UsageError, match="open already"), recorder.phase("two", engine.rank):
                raise AssertionError("a second phase was opened")
    assert (api._driver, api._launch_kernel) == before
    assert [phase.label for phase in recorder.phases] == ["one"]


def test_a_recorder_needs_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_driver", None)
    with pytest.raises(UsageError, match="no driver was chosen"), trace.Recorder():
        raise AssertionError("something is watched")


def test_events_are_used_again_without_losing_a_time(
    open_micro: OpenMicro, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_EVENTS", 6)
    with trace.Recorder() as recorder, open_micro(deep="off", graph=False) as engine:
        with faults.count_calls() as count, recorder.phase("few", engine.rank) as phase:
            engine.generate([1, 2], max_new_tokens=2, stop_ids=())
        n = Counter(count.names)
    launches = [work for work in phase.work if work.kind == "kernel"]
    assert len(launches) == n["cuLaunchKernel"] + n["cuLaunchKernelEx"] > 100 and n["cuEventCreate"] == 6 + 2
    ends = 0.0
    for work in phase.work:
        assert ends <= work.start_us <= work.end_us
        ends = work.end_us
    calls = [call for call in phase.calls if call.i_work >= 0]
    assert [call.i_work for call in calls] == list(range(len(phase.work)))
    assert all(call.start_us <= phase.work[call.i_work].end_us for call in calls)


def test_streams_that_wait_for_each_other_have_tracks(open_micro: OpenMicro) -> None:
    limits = {"expert_lines": 2, "ring_depth": 2, "ring_lines": 2, "deep_rows": 4}
    with trace.Recorder() as recorder, open_micro(**limits) as engine:
        with recorder.phase("ring", engine.rank) as phase:
            engine.logits(list(range(1, 9)), prefill=None, rows=(7, 8))
        deep = engine.prompts.deep_rows
    streams = Counter((work.stream, work.kind) for work in phase.work)
    assert deep == 0 or streams[("copy", "copy")] > 0 < streams[("compute", "wait")]
    parts = {work.facts["part"] for work in phase.work if work.name == "line_fill"}
    assert parts == {"moe"}


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventSynchronize",
                                  "cuEventElapsedTime", "cuStreamSynchronize"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_failing_event_ends_the_phase_and_nothing_else(open_micro: OpenMicro, call: str, nth: int) -> None:
    with trace.Recorder() as recorder, open_micro(deep="off", graph=False) as engine:
        fired = 0
        try:
            with faults.fail_nth(nth, only=call) as plan, recorder.phase("bad", engine.rank):
                engine.generate([1, 2], max_new_tokens=1, stop_ids=())
        except DriverError as error:
            assert error.call == call
            fired = 1
        assert fired == min(plan.fired, 1) and len(recorder.phases) == 1 - fired
        assert fired or plan.seen < nth
        with recorder.phase("good", engine.rank) as phase:
            tokens = engine.generate([1, 2], max_new_tokens=1, stop_ids=()).tokens
        assert phase.work and len(tokens) == 1


def test_a_failed_call_is_kept_with_its_code_and_gives_no_work(open_micro: OpenMicro) -> None:
    with trace.Recorder() as recorder, open_micro(deep="off") as engine:
        with recorder.phase("bad", engine.rank) as phase, engine.rank.ctx.active(), \
                pytest.raises(DriverError):
            api.cuMemsetD8Async(16, 0, 1 << 20, engine.rank.stream.handle)
        if api.loaded() == "sim":
            assert [(c.name, c.i_work) for c in phase.calls if "code" in c.facts] == [("cuMemsetD8Async", -1)]
            assert not phase.work


def test_pinned_memory_is_known_from_its_allocation_until_it_is_freed() -> None:
    where = trace.Where()
    where.note("cuMemHostAlloc", (100, 3), (0, 5000))
    where.note("cuMemHostGetDevicePointer", (5000, 0), (0, 9000))
    assert [where.tier(at) for at in (4999, 5000, 5099, 5100, 8999, 9000, 9099, 9100)] == [
        "device", "pinned", "pinned", "device", "device", "pinned", "pinned", "device"]
    where.note("cuMemFreeHost", (5000,), (0,))
    assert where.tier(5000) == where.tier(9000) == "device"


def test_calls_of_the_thread_that_makes_executables_have_their_own_track(open_micro: OpenMicro) -> None:
    with trace.Recorder() as recorder, open_micro(deep="off", graph_async=True) as engine:
        with recorder.phase("async", engine.rank) as phase:
            tokens = engine.generate([1, 2], max_new_tokens=6, stop_ids=()).tokens
        engine.rank.use_graphs = False
        assert engine.generate([1, 2], max_new_tokens=6, stop_ids=()).tokens == tokens
    made = {call.thread for call in phase.calls if call.name == "cuGraphInstantiate"}
    launched = {call.thread for call in phase.calls if call.name.startswith("cuLaunchKernel")}
    assert made and launched and not made & launched
    tracks = {e["args"]["name"] for e in trace.chrome_trace([phase], {})["traceEvents"]
              if e["name"] == "thread_name"}
    assert made | launched <= tracks
