"""The checker of orders on schedules written by hand."""

from __future__ import annotations

import pytest

from flashnext_drv.check.happens import HOST, Access, Call, findings

pytestmark = pytest.mark.host
STORE, BANK = 1000, 5000


def fill(source: int = STORE, to: int = BANK, size: int = 64) -> Call:
    return Call("work", "copy", "fill", accesses=(Access(source, size), Access(to, size, True, source)))


def read(wants: int | None = STORE, at: int = BANK, size: int = 64, where: str = "compute") -> Call:
    return Call("work", where, "kernel", accesses=(Access(at, size, holds=wants),))


def record(where: str, event: str) -> Call:
    return Call("record", where, "record", event)


def wait(where: str, event: str) -> Call:
    return Call("wait", where, "wait", event)


GOOD = [fill(), record("copy", "full"), wait("compute", "full"), read(), record("compute", "free"),
        wait("copy", "free"), fill(STORE + 64), record("copy", "full"), wait("compute", "full"),
        read(STORE + 64)]


def test_a_run_in_order_has_no_findings() -> None:
    assert findings(GOOD) == []


@pytest.mark.parametrize(("dropped", "text"), [
    (2, "reads what call 0 (copy: fill) writes"), (5, "writes what call 3 (compute: kernel) reads"),
    (8, "reads what call 5 (copy: fill) writes"), (0, "there is no copy"), (6, "there is what call 0 wrote"),
    (1, "reads what call 0 (copy: fill) writes"), (4, "writes what call 3 (compute: kernel) reads")])
def test_a_dropped_call_is_found(dropped: int, text: str) -> None:
    found = findings(GOOD[:dropped] + GOOD[dropped + 1:])
    if dropped == 8:
        text = text.replace("call 5", "call 6")
    assert any(text in line for line in found), found


def test_a_wait_for_an_older_record_orders_nothing_later() -> None:
    found = findings([record("copy", "full"), fill(), wait("compute", "full"), read()])
    assert any("no order" in line for line in found)


def test_only_bytes_that_meet_count() -> None:
    assert findings([fill(), read(None, BANK + 64)]) == []
    assert len(findings([fill(), read(None, BANK + 63)])) == 1
    assert len(findings([fill(), read(None, BANK - 4, 8)])) == 1


def test_a_stream_is_in_order_and_reads_do_not_disturb_reads() -> None:
    assert findings([fill(), read(where="copy"), fill(STORE + 64)]) == []
    assert findings([read(None), read(None, where="other")]) == []


def test_the_host_orders_what_it_gives_out_but_sees_only_what_it_waits_for() -> None:
    write = Call("work", HOST, "write", accesses=(Access(BANK, 8, True),))
    look = Call("work", HOST, "read", accesses=(Access(BANK, 8),))
    launch = read(None, size=8)
    assert findings([write, launch]) == []
    assert any("no order" in line for line in findings([write, launch, write]))
    event = [record("compute", "e"), Call("sync", HOST, "sync", "e")]
    for sync in (event, [Call("sync", "compute", "sync")]):
        assert findings([write, launch, *sync, write]) == []
    assert findings([fill(), record("copy", "e"), Call("sync", HOST, "sync", "e"), look, read()]) == []
    assert findings([fill(), Call("sync", "compute", "sync"), look]) != []


def test_bytes_are_compared_by_place_in_the_copy() -> None:
    assert findings([fill(size=128), read(STORE + 32, BANK + 32, 32, "copy")]) == []
    assert findings([fill(size=128), read(STORE, BANK + 32, 32, "copy")]) != []
    assert findings([fill(size=32), read(STORE, BANK, 64, "copy")]) != []  # filled by half
