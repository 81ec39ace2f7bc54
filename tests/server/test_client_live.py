"""All measurements against the real server on the micro pack, as small as they can be."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.bench import cases, interrupt, load, workload
from flashnext_drv.bench.client import Ask, Target, ask
from flashnext_drv.bench.evidence import ids_hash, problems
from flashnext_drv.bench.inputs import prompt_ids
from flashnext_drv.bench.receipt import schema_problems
from flashnext_drv.bench.recheck import recheck
from flashnext_drv.bench.site import Site, find_site
from flashnext_drv.cli import bench as bench_module
from flashnext_drv.cli.hosting import Host, HostProcess, Plan
from flashnext_drv.engine.engine import Engine
from flashnext_drv.errors import RemoteError
from flashnext_drv.model.layout import Limits
from flashnext_drv.server.text import TextModel

PACK = Path(__file__).resolve().parents[1] / "data" / "exl3_micro" / "pack"
LIMITS = Limits(context_tokens=128, sequences=2, rows=8, prompt_rows=8, deep="off", steps_ahead=1)


@pytest.fixture(scope="module")
def host(device_name: str) -> Iterator[Host]:
    with Host(Plan(str(PACK), LIMITS, device_name, max_streams=2, max_queue=16)) as made:
        yield made
    assert [closed["entries"] for closed in made.closed] == [0] * len(made.closed)


@pytest.fixture
def site(host: Host) -> Site:
    host.graphs(True)
    return find_site(host.target, control=host, say=lambda _: None)


def test_the_server_tells_what_clients_need(site: Site) -> None:
    assert site.vocab == 512 and site.max_streams == 2
    assert site.counts()["free_slots"] == 2 and not site.counts()["draining"]
    assert any(row["tier"] == "device" and row["live_bytes"] for row in site.memory()["rows"])


def test_a_reply_is_that_of_the_engine(site: Site, device_name: str) -> None:
    request = Ask(prompt_ids(9, site.vocab, 3), 8)
    reply = ask(site.target, request)
    assert problems(reply, cold=True, replays=True) == []
    with Engine.open(PACK, LIMITS, device=device_name) as engine:
        made = engine.generate(list(request.ids), max_new_tokens=8, stop_ids=())
    assert list(reply.tokens) == made.tokens
    assert reply.runtime is not None and reply.runtime["token_sha256"] == made.sha256


def test_a_scaled_workload(site: Site) -> None:
    found = workload.run_workload(site, workload.Sizes(4, 6, 2))
    assert found["verdict"]["reasons"] == [] and found["kind"] == "scaled"
    assert found["checks"]["equal"] == 1 + 2 + 1 + 2


def test_the_small_measurements(site: Site) -> None:
    for found in (
        cases.decode(site, new_tokens=2, repeats=1),
        cases.cache(site, lengths=(5,), new_tokens=1, cold=True),
        cases.concurrent(site, widths=(1, 2), length=4, new_tokens=5, alone=True),
        cases.cold(site, lengths={"short": 3, "long": 20}, new_tokens=1),
    ):
        assert found["verdict"]["reasons"] == [], found["kind"]
        for made in found["replies"]:  # parts of the server's own time to the first token
            assert all(part is not None for part in made["phases_s"].values()), made["name"]
            assert sum(made["phases_s"].values()) == pytest.approx(made["server"]["ttft_s"], abs=5e-6)


def test_chats_are_measured_as_text(
    text_pack: Path, site: Site, device_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    code, said = run(["decode", "--chat", "--pack", str(text_pack), "--here", "--device", device_name,
                      "--prompt-rows", "16", "--no-deep", "--new-tokens", "3", "--repeats", "2",
                      "--out", str(out)], capsys)
    assert code == 0, said
    made = json.loads(out.read_text())["results"]
    assert made["chat"] is True and made["checks"]["equal"] == 2 and recheck(made) == []
    text = TextModel.load(text_pack)
    assert text is not None
    for first, content in zip(made["replies"][::2], cases._CHAT.values(), strict=True):
        prompt = text.encode(text.render([{"role": "user", "content": content}]))
        assert first["prompt_sha256"] == ids_hash(prompt) and first["prompt_tokens"] == len(prompt)
    assert made["medians"]["code"]["prefill_tokens_per_s"] > 0
    without = cases.decode(site, new_tokens=3, repeats=1, chat=True)["verdict"]["reasons"]
    assert any("no tokenizer" in reason for reason in without), "the golden pack has no text"


def test_a_load_with_cancels(site: Site) -> None:
    few = load.Load(requests=9, streams=3, kinds=2, prompt_tokens=6, new_tokens=5, cancels=0.5)
    found = load.run_load(site, few)
    assert found["verdict"]["reasons"] == [] and 1 <= found["given_up"]["asked"] <= 8


@pytest.mark.parametrize(("phases", "way"), [(("queue", "decode"), "cancel"),
                                             (("prompt", "drain"), "disconnect")])
def test_interrupted_in_every_phase_and_exact_again(site: Site, phases: tuple[str, ...], way: str) -> None:
    site.switch("eager" if "drain" in phases else "graph")
    sizes = interrupt.Interrupts(each=1, prompt_tokens=56, short_tokens=4, new_tokens=2, least_tokens=60,
                                 phases=phases, ways=(way,))
    found = interrupt.run_interrupts(site, sizes)
    assert found["verdict"]["reasons"] == ["2 interruptions and 2 exact recoveries, 24 of each are wanted"]
    assert [(one["phase"], one["way"]) for one in found["interrupted"]] == [(phase, way) for phase in phases]
    assert found["restarts"] == phases.count("drain") and found["ledger_drift"] == []
    assert problems(ask(site.target, Ask(prompt_ids(3, site.vocab), 8)), replays=site.mode == "graph") == []


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["bench", *words])
    return code, capsys.readouterr().out


def test_a_running_server_gives_figures_and_no_receipt(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "r.json", tmp_path / "r.svg"
    code, said = run(["concurrent", host.target.url, "--widths", "1,2", "--prompt-tokens", "3",
                      "--new-tokens", "5", "--out", str(out), "--plot", str(drawn)], capsys)
    assert code == 0 and said.startswith("concurrent: qualified")
    made = json.loads(out.read_text())
    assert set(made) == {"client_digest", "results"}
    assert made["results"]["gauges"]["process"]["rss_bytes"] == "unmeasured"
    assert drawn.read_text().startswith("<svg")


def test_a_server_of_its_own_gives_a_result_to_seal(
    device_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    code, said = run(["cold,cache", "--pack", str(PACK), "--device", device_name, "--no-deep", "--new-tokens",
                      "2", "--lengths", "4", "--repeats", "1", "--out", str(out)], capsys)
    assert code == 0, said
    for kind in ("cold", "cache"):
        made: dict[str, Any] = json.loads((out / f"{kind}.json").read_text())
        assert schema_problems(made) == [] and recheck(made["results"]) == []
        ledger = made["results"]["ledger"]
        assert ledger["closed"] == {"entries": 0, "engines": 1} and ledger["load"]["rows"]
        assert made["results"]["gauges"]["process"]["rss_bytes"] > 1 << 20
        assert made["results"]["kind"] == kind and made["results"]["limits"]["deep"] == "off"


def test_a_server_that_cannot_start_or_dies_is_an_error(
    device_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--device", device_name, "--no-deep", "--new-tokens", "2"]
    assert run(["decode", "--pack", str(tmp_path / "none"), *small], capsys)[0] == 3
    assert run(["decode", "--pack", str(PACK), *small, "--device-bytes", "1MiB"], capsys)[0] == 4
    with HostProcess(Plan(str(PACK), LIMITS, device_name, max_streams=2)) as host:
        os.kill(host.pid, signal.SIGKILL)
        host._child.join(10)  # else it may still count as alive when the host is closed
        with pytest.raises(RemoteError, match="has ended"):
            host.graphs(True)
    assert host.closed == []


def test_a_part_of_the_matrix_and_parts_joined(
    device_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["matrix", "--pack", str(PACK), "--device", device_name, "--here", "--no-deep", "--lengths", "5",
             "--steps-ahead", "1", "--new-tokens", "4", "--widths", "1", "--repeats", "1", "--modes", "graph",
             "--out"]
    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    small = {"together": 2, "width_length": 4, "width_tokens": 2, "repeat_length": 4, "repeat_tokens": 2}
    with pytest.MonkeyPatch.context() as patch:
        cells = bench_module.matrix.Cells(**small)  # type: ignore[arg-type]
        patch.setattr(bench_module.matrix, "MATRIX", cells)
        code, said = run([*words, str(parts[0]), "--lines", "5"], capsys)
        assert code == 0, said
    parts[1].write_text(parts[0].read_text().replace('"lines": "5"', '"lines": "all"'))
    whole = tmp_path / "whole.json"
    code, said = run(["matrix", "--out", str(whole), "--join", *map(str, parts)], capsys)
    assert code == 1 and "no leg with lines 16, graph" in said and "another leg has" not in said
    made = json.loads(whole.read_text())
    assert schema_problems(made) == [] and made["results"]["ledger"]["closed"]["engines"] == 2
    other = json.loads(parts[1].read_text())
    parts[1].write_text(json.dumps(other | {"source_digest": "0" * 64}))
    assert run(["matrix", "--join", *map(str, parts)], capsys)[0] == 2
    assert run(["workload", "--join", *map(str, parts)], capsys)[0] == 3


def test_what_cannot_be_measured_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decode"], capsys)[0] == 2
    assert run(["decode", "http://127.0.0.1:9", "--pack", "x"], capsys)[0] == 2
    assert run(["matrix", "http://127.0.0.1:9"], capsys)[0] == 2
    assert run(["matrix,decode", "--pack", "x"], capsys)[0] == 2
    for words in (["nothing"], ["decode,decode"], ["decode", "--repeats", "0"], ["workload", "--modes", "x"]):
        with pytest.raises(SystemExit):
            run(words, capsys)
    assert run(["decode", "http://127.0.0.1:9"], capsys)[0] == 1  # nobody answers
    assert ask(Target("http://127.0.0.1:9", timeout_s=1), Ask((1,), 1)).error
