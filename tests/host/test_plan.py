"""Plans without a device: lines that are seated, what is allowed, nearest settings, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.cli import report
from flashnext_drv.cli.limits import parse_size
from flashnext_drv.engine.plan import Sizer
from flashnext_drv.errors import CapacityError, UsageError
from flashnext_drv.model.layout import Layout, Limits, seat_lines
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.plan import Plan, device_allowed, host_allowed
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.state import upload

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def sizer() -> Sizer:
    return Sizer(Pack.open(MICRO))


def planned(sizer: Sizer, limits: Limits) -> Plan:
    return sizer.plan(Layout(Pack.open(MICRO).config, limits))


def test_requested_lines_are_a_floor_and_memory_is_filled_to_most() -> None:
    assert seat_lines(4, 0, [0, 99], 10, 16) == [4, 4]
    assert seat_lines(4, 9, [0, 9, 10, 29, 50, 999], 10, 16) == [4, 4, 5, 6, 9, 9]
    assert seat_lines(4, 99, [9999], 10, 16) == [16] == seat_lines(99, 0, [0], 10, 16)
    assert seat_lines(4, 9, [-1], 10, 16) == [4]
    assert seat_lines(0, 3, [20], 10, 16) == [2]
    assert seat_lines(5, 9, [40, 10, 20], 10, 16, uniform=True) == [6, 6, 6]
    assert seat_lines(5, 9, [], 10, 16, uniform=True) == []


def test_reserves_come_out_of_what_is_free() -> None:
    plain = Limits(reserve_bytes=50)
    assert (device_allowed(150, plain), device_allowed(20, plain)) == (100, 0)
    assert device_allowed(0, Limits(device_bytes=99)) == 99, "the caller's word counts where no reserve does"
    server = Limits(reserve_bytes=50, server_reserve_bytes=30)
    assert (device_allowed(150, server), device_allowed(60, server)) == (70, -20)
    assert device_allowed(150, replace(server, expert_reserve_bytes=20)) == 70, "nothing is offloaded"
    both = replace(server, expert_reserve_bytes=20, expert_lines=0)
    assert device_allowed(150, both) == 50
    assert device_allowed(1000, replace(both, device_bytes=80)) == 30
    assert device_allowed(120, replace(both, device_bytes=80)) == 20, "no more than is free"


def test_host_memory_is_the_least_of_what_is_given_and_what_is_there() -> None:
    limits = Limits(host_reserve_bytes=100)
    assert (host_allowed(None, limits), host_allowed(150, limits), host_allowed(50, limits)) == (
        None,
        50,
        -50,
    )
    given = replace(limits, host_bytes=40)
    assert (host_allowed(None, given), host_allowed(150, given), host_allowed(120, given)) == (40, 40, 20)


def test_plans_are_judged_at_the_byte() -> None:
    plan = Plan({"weights": 60, "kv": 40}, {"store": 10, "ngram": 30}, {"tables": 5}, {"upload": 7})
    limits = Limits(reserve_bytes=50, server_reserve_bytes=10, host_reserve_bytes=100)
    assert plan.host_bytes == 52 and plan.room(160, limits) == 0 and plan.fits(160, limits, 152)
    plan.require_fits(160, limits, 152)
    for free, available, match in (
        (
            159,
            152,
            "device memory .*needed_bytes=100, allowed_bytes=99.*159 B are free, of which 50 B stay "
            "in reserve, and 10 B are reserved for experts and server; largest owner weights 60 B",
        ),
        (59, 152, "reserves exceed device memory"),
        (
            160,
            151,
            "host memory .*needed_bytes=52, allowed_bytes=51.*151 B are available, of which 100 B "
            "stay in reserve; largest owner ngram 30 B",
        ),
        (160, 7, "host memory .*allowed_bytes=0"),
    ):
        assert not plan.fits(free, limits, available)
        with pytest.raises(CapacityError, match=match):
            plan.require_fits(free, limits, available)
    plan.require_fits(160, limits, None)
    with pytest.raises(CapacityError, match="Limits.host_bytes allows 51 B; .*; try this; or this"):
        plan.require_fits(160, replace(limits, host_bytes=51), None, lambda: ["try this", "or this"])


def test_bytes_of_offloaded_experts(sizer: Sizer) -> None:
    """16 experts a layer in host memory, however many of them have lines; one line's worth apart."""
    resident = planned(sizer, Limits())
    assert (resident.lines, resident.lines_requested) == (16, 16) and "experts.store" not in resident.pinned
    assert resident.device["experts"] == 16 * resident.line_bytes
    for lines, seen in ((0, 0), (3, 3), (16, 16), (1024, 16)):
        plan = planned(sizer, Limits(expert_lines=lines))
        assert plan.pinned["experts.store"] == 16 * plan.line_bytes and plan.lines == seen
        assert plan.device["experts"] == max(seen * plan.line_bytes, 256)
    assert resident.opening == {"upload.staging": 2 * upload.HALF_BYTES}
    assert resident.host_bytes == (sum(resident.pinned.values()) + resident.host["tables"] + 64 * MIB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_lines", -1),
        ("expert_lines", 1025),
        ("expert_lines", 2.0),
        ("expert_lines_most", -1),
        ("expert_reserve_bytes", -1),
        ("server_reserve_bytes", -1),
        ("host_bytes", -1),
        ("host_reserve_bytes", -1),
        ("ring_depth", 0),
        ("ring_lines", 0),
        ("ngram", "disk"),
    ],
)
def test_limits_outside_their_range(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        Limits(**{"expert_lines": 1, name: value})


def test_lines_to_fill_up_to_need_lines() -> None:
    with pytest.raises(UsageError, match="expert_lines_most needs expert_lines"):
        Limits(expert_lines_most=4)
    assert Limits(expert_lines=0, expert_lines_most=4).expert_lines_most == 4


def nearest(sizer: Sizer, limits: Limits, free: int | None, host: int | None) -> dict[str, int]:
    """Settings of one number that were named, each shown to be the nearest that fits."""
    said = sizer.nearest(limits, free, host)
    steps = {
        "context_tokens": 64,
        "sequences": 1,
        "expert_lines": 1,
        "server_reserve_bytes": MIB,
        "expert_reserve_bytes": MIB,
    }
    found = {}
    for text in said:
        setting = re.fullmatch(r"(\w+)=(\d+) fits", text)
        if setting and setting[1] in steps:
            name, value = setting[1], int(setting[2])
            assert sizer.fits(replace(limits, **{name: value}), free, host), text
            more = value + steps[name]
            asked = getattr(limits, name)
            if more < (16 if asked is None else asked):
                assert not sizer.fits(replace(limits, **{name: more}), free, host), f"{text}, and {more} too"
            found[name] = value
    return found


def test_named_settings_fit_and_are_the_nearest(sizer: Sizer) -> None:
    limits = Limits(
        context_tokens=4000,
        sequences=3,
        rows=4,
        reserve_bytes=0,
        expert_lines=12,
        expert_reserve_bytes=2 * MIB,
        server_reserve_bytes=3 * MIB,
        deep="off",
    )
    need = planned(sizer, limits).device_bytes + 5 * MIB
    assert sizer.fits(limits, need, None) and not sizer.fits(limits, need - 1, None)
    line = planned(sizer, limits).line_bytes
    found = nearest(sizer, limits, need - 1, None)
    assert found["expert_lines"] == 11 and found["sequences"] == 2 and found["context_tokens"] < 4000
    assert (found["expert_reserve_bytes"], found["server_reserve_bytes"]) == (MIB, 2 * MIB)
    assert nearest(sizer, limits, need - 4 * line, None)["expert_lines"] == 8
    assert "rows=2 fits" in sizer.nearest(limits, need - 1, None)


def test_resident_experts_that_do_not_fit_get_lines(sizer: Sizer) -> None:
    limits = Limits(reserve_bytes=0, expert_reserve_bytes=0, context_tokens=64, deep="off")
    plan = planned(sizer, limits)
    free = plan.device_bytes - 5 * plan.line_bytes
    assert 8 <= nearest(sizer, limits, free, 10 * GIB)["expert_lines"] <= 11


def test_settings_together_when_none_is_enough_alone(sizer: Sizer) -> None:
    """Host memory is too small for the table and for the experts: only both changes help."""
    limits = Limits(expert_lines=4, context_tokens=64, deep="off", host_reserve_bytes=0)
    least = planned(sizer, replace(limits, ngram="mapped")).host_bytes
    assert sizer.nearest(limits, 10 * GIB, least)[0] in ("ngram='mapped' fits", "expert_lines=None fits")
    said = sizer.nearest(replace(limits, server_reserve_bytes=1 << 45), 10 * GIB, least)
    assert any(text.startswith("server_reserve_bytes=") and "with ngram='mapped'" in text for text in said)
    assert any("ngram='mapped' needs" in text and "less of host memory" in text for text in said)
    said = sizer.nearest(limits, 1 << 10, 1 << 10)
    assert said[0].startswith("no setting alone is enough: the smallest plan takes ")


def test_the_deep_pass_goes_before_more_lines(sizer: Sizer) -> None:
    limits = Limits(
        context_tokens=2048,
        expert_lines=2,
        expert_lines_most=16,
        ring_lines=2,
        reserve_bytes=0,
        expert_reserve_bytes=0,
    )
    layout = Layout(Pack.open(MICRO).config, limits)
    roomy = sizer.seat(layout, 10 * GIB, None)
    assert (roomy.plan.deep_rows, roomy.plan.lines, roomy.plan.ring) == (2048, 16, (4, 2))
    tight = sizer.seat(layout, roomy.plan.device_bytes - 1, None)
    assert (tight.plan.deep_rows, tight.plan.lines) == (2048, 15)
    bare = sizer.seat(layout, sizer.plan(layout).device_bytes, None)
    assert (bare.plan.deep_rows, bare.plan.lines, bare.deep) == (0, 2, None)
    assert "the smallest deep buffers take" in bare.refused and "leaves 0 B" in bare.refused
    unknown = sizer.seat(layout, None, None)
    assert (unknown.plan.deep_rows, unknown.plan.lines) == (2048, 2)
    little = sizer.seat(layout, 10 * GIB, sizer.plan(layout).host_bytes + limits.host_reserve_bytes)
    assert little.deep is None and "of host memory, the plan leaves 0 B" in little.refused


def test_a_model_of_many_gigabytes_is_planned_by_its_headers() -> None:
    """A 16 GB card holds 72 lines a layer of the large model with a context of 32768 tokens."""
    pack = SynthPack("full")
    sizer = Sizer(pack)
    limits = Limits(context_tokens=32768, expert_lines=72, rows=16, prompt_rows=16)
    layout = Layout(pack.config, limits)
    free = 16 * 10**9 - 600 * MIB  # a context and its modules take some
    found = sizer.seat(layout, free, 96 * GIB).plan
    assert found.lines == 72 and found.deep_rows >= 512 and found.ring == (4, 64)
    assert found.device_bytes + limits.reserve_bytes + limits.expert_reserve_bytes <= free
    assert found.pinned["experts.store"] == 512 * found.line_bytes > 42 * GIB
    with pytest.raises(CapacityError, match="largest owner experts.store 42.6 GiB; ngram='mapped' fits"):
        sizer.seat(layout, free, 64 * GIB)
    with pytest.raises(CapacityError, match="largest owner experts 42.6 GiB.*expert_lines=94 fits"):
        sizer.seat(Layout(pack.config, replace(limits, expert_lines=None)), free, 96 * GIB)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 * MIB),
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("2 kB", 2000),
        ("3k", 3000),
        ("1TiB", 1 << 40),
        ("7B", 7),
        ("0.1KiB", 102),
        ("16gib", 16 * GIB),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "-5GB", "1e9", "1,5GB", "16 G B", "16GiBs", "1..5GB", "0x10", "\u0661GB"]
)
def test_texts_that_are_no_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(MICRO), f"--device-memory={text}"])
    assert stopped.value.code == report.USAGE and "no size" in capsys.readouterr().err


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *argv, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return code, found


@pytest.mark.parametrize("pack", [str(MICRO), "synth:micro?seed=3"])
def test_the_command_plans_folders_and_synthetic_packs(pack: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "--context 1024 --expert-lines 3 --expert-lines-most 9 --ring-lines 2 --ring-depth 2"
    argv = (pack, *f"{text} --expert-reserve 1MiB --host-memory 8GiB".split())
    code, found = run(capsys, *argv, "--device-memory", "1GiB")
    assert code == report.GOOD and found["fits"] and found["nearest"] == []
    assert found["lines"]["requested"] == 3 and found["lines"]["observed"] == 9
    assert (found["pages"], found["deep_rows"], found["ring"]) == (16, 1024, {"banks": 2, "lines": 2})
    assert {"experts", "deep", "ring"} <= set(found["bytes"]["device"])
    assert sum(found["bytes"]["device"].values()) == found["device"]["needed_bytes"]
    assert {"experts.store", "ngram", "ring.staging"} <= set(found["bytes"]["pinned"])
    assert found["host"]["allowed_bytes"] == 7 * GIB
    least = found["device"]["least_free_bytes"]
    exact = run(capsys, *argv, "--device-memory", str(least))[1]
    assert (exact["bytes"], exact["lines"]) == (found["bytes"], found["lines"])
    assert run(capsys, *argv, "--device-memory", str(least - 1))[1]["lines"]["observed"] == 8
    code, found = run(capsys, *argv, "--device-memory", "262MiB")
    assert code == report.CAPACITY and not found["fits"]
    assert "does not fit device memory" in found["problem"]
    assert any(text.startswith("context_tokens=") for text in found["nearest"]) and not found["deep_rows"]
    code, found = run(capsys, *argv)
    assert (
        code == report.GOOD and found["device"]["allowed_bytes"] is None and found["lines"]["observed"] == 3
    )


def test_the_command_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "plan",
        str(MICRO),
        "--context",
        "256",
        "--expert-lines",
        "3",
        "--no-deep",
        "--host-memory",
        "4GiB",
    ]
    assert main([*argv, "--device-bytes", "1GiB"]) == report.GOOD
    out = capsys.readouterr().out
    for text in (
        "experts.store",
        "upload.staging",
        "3 of 16 experts a layer requested, 3 observed",
        "4 of 64 tokens",
        "no deep  Limits.deep is off",
        "512.0 MiB reserved",
        "fits     yes",
    ):
        assert text in out
    assert main(argv) == report.GOOD
    out = capsys.readouterr().out
    assert "not judged; enough with" in out and "fits     host memory" in out
    assert main([*argv, "--host-bytes", "1MiB"]) == report.CAPACITY
    out = capsys.readouterr().out
    assert "fits     no: the plan does not fit host memory" in out and "nearest  host_bytes=0 fits" in out
    assert (
        main(["plan", str(MICRO), "--server-reserve", "2GiB", "--device-memory", "1GiB"]) == report.CAPACITY
    )
    assert "the reserves exceed device memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["no/such/pack"], report.MISSING, "no/such/pack"),
        ([str(MICRO), "--expert-lines", "-1"], report.USAGE, "expert_lines is outside its range"),
        ([str(MICRO), "--expert-lines-most", "4"], report.USAGE, "expert_lines_most needs expert_lines"),
        ([str(MICRO), "--context", "0"], report.USAGE, "context_tokens is outside"),
        ([str(MICRO), "--context", "4097"], report.CAPACITY, "longer than the model's positions"),
    ],
)
def test_errors_of_the_command_are_one_line(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
