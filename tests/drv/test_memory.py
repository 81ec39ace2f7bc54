"""Arenas, spans, guards and copies."""

from __future__ import annotations

import numpy as np
import pytest

from flashnext_drv.drv import api, faults, memory
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import (
    DeviceArena,
    PinnedArena,
    copy_async,
    copy_to_device,
    copy_to_host,
    fill_bytes,
)
from flashnext_drv.drv.stream import Stream
from flashnext_drv.errors import CapacityError, ContractError, DriverError, OutOfMemory, UsageError
from flashnext_drv.host_memory import HostMemory
from flashnext_drv.ledger import Ledger

OUT_OF_MEMORY = 2


def test_spans_are_aligned_and_disjoint(ctx: Context) -> None:
    with DeviceArena(ctx, "a", 8192) as arena:
        spans = [arena.span("x", 100), arena.span("y", 1, align=16), arena.span("z", 300, align=512)]
        assert [s.address % a for s, a in zip(spans, (256, 16, 512), strict=True)] == [0, 0, 0]
        for low, high in zip(spans, spans[1:], strict=False):
            assert low.address + low.size_bytes <= high.address
        assert arena.used_bytes == 1024 - 512 + 300


def test_a_full_arena_says_what_holds_it(ctx: Context) -> None:
    with DeviceArena(ctx, "kv", 4096) as arena:
        arena.span("pages", 3072)
        with pytest.raises(CapacityError, match=r"arena kv has no room for more .*size_bytes=2048, "
                                                r"free_bytes=1024.*pages 3.0 KiB"):
            arena.span("more", 2048)
        assert arena.span("rest", 1024).size_bytes == 1024


def test_a_piece_stays_inside_its_span(ctx: Context) -> None:
    with DeviceArena(ctx, "a", 4096) as arena:
        span = arena.span("x", 100)
        piece = span.sub(40, 60, "tail")
        assert (piece.address, piece.size_bytes, piece.name) == (span.address + 40, 60, "tail")
        for offset, size in ((41, 60), (-1, 5), (0, 101), (100, 1)):
            with pytest.raises(UsageError, match="would reach outside"):
                span.sub(offset, size)


def test_bytes_go_up_across_and_down(ctx: Context, stream: Stream) -> None:
    data = np.arange(1000, dtype=np.uint16)
    with DeviceArena(ctx, "a", 8192) as arena, PinnedArena(ctx, "p", 8192) as pinned:
        x, y = arena.span("x", data.nbytes), arena.span("y", data.nbytes)
        a, b = pinned.span("a", data.nbytes), pinned.span("b", data.nbytes)
        copy_to_device(stream, x, data)
        copy_async(stream, y, x, data.nbytes)
        copy_async(stream, a, y, data.nbytes)
        stream.synchronize()
        assert (pinned.host(a).view(np.uint16) == data).all()
        pinned.host(b)[:] = pinned.host(a)[::-1]
        copy_async(stream, x, b, data.nbytes)
        fill_bytes(stream, x.sub(0, 10), 7)
        found = np.empty(data.nbytes, np.uint8)
        copy_to_host(stream, found, x)
        assert (found[10:] == data.view(np.uint8)[::-1][10:]).all() and (found[:10] == 7).all()


def test_copies_longer_than_the_span_are_refused(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 4096) as arena:
        span = arena.span("x", 16)
        with pytest.raises(UsageError, match="outside span x"):
            copy_to_device(stream, span, np.zeros(17, np.uint8))
        with pytest.raises(UsageError, match="outside span x"):
            copy_to_host(stream, np.zeros(17, np.uint8), span)
        with pytest.raises(UsageError, match="contiguous"):
            copy_to_host(stream, np.zeros((4, 4), np.uint8).T[:, ::2], span)
        span_after = span
    with pytest.raises(UsageError, match="is closed"):
        copy_to_device(stream, span_after, np.zeros(4, np.uint8))


def test_a_write_behind_a_span_is_found_and_named(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 16384, guard=True) as arena:
        first, second = arena.span("first", 100), arena.span("second", 256)
        arena.check_guards()
        fill_bytes(stream, first, 1)
        fill_bytes(stream, second, 2)
        stream.synchronize()
        arena.check_guards()
        for span, behind in ((first, 0), (second, 255)):
            address = span.address + span.size_bytes + behind
            copy_to_device(stream, address, np.array([3], np.uint8))
            stream.synchronize()
            with pytest.raises(ContractError, match=f"behind span {span.name} .*first_byte_behind={behind}"):
                arena.check_guards()
            copy_to_device(stream, address, np.array([0xFF], np.uint8))
    with DeviceArena(ctx, "b", 4096) as arena, pytest.raises(UsageError, match="no guards"):
        arena.check_guards()


def test_ledger_knows_owner_site_and_bytes(ctx: Context, ledger: Ledger) -> None:
    before = ctx.free_bytes()
    with DeviceArena(ctx, "weights", 5_000_000), PinnedArena(ctx, "stage", 4097):
        entry = next(e for e in ledger if e.owner == "weights")
        assert entry.size_bytes == 5_000_000 and "test_memory.py:" in entry.site
        assert 0 <= entry.granted_bytes - entry.size_bytes <= 4 << 20 or entry.granted_bytes == 0
        assert ledger.live("pinned") == {"stage": 4097} and ledger.peak("pinned") == {"stage": 8192}
        taken = before - ctx.free_bytes()
        assert abs(taken - entry.granted_bytes) <= 2 << 20
    assert ledger.live("device") == {} and ledger.live("pinned") == {}


def test_out_of_memory_names_the_largest_holder(ctx: Context) -> None:
    too_much = ctx.facts.total_bytes + (1 << 30)
    with DeviceArena(ctx, "experts", 3 << 20), pytest.raises(OutOfMemory) as caught:
        DeviceArena(ctx, "kv", too_much)
    text = str(caught.value)
    assert f"size_bytes={too_much}" in text and "largest holder experts 3.0 MiB" in text.replace("4.0", "3.0")
    assert "OUT_OF_MEMORY" in text and "lower the limits" in text


def test_pinned_memory_that_is_refused_names_the_limits_of_the_host(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostMemory(8 << 30, 6 << 30, 2 << 30, "cgroup /app with a limit of 4.0 GiB", 65536)
    monkeypatch.setattr(memory, "host_memory", lambda: host)
    with PinnedArena(ctx, "experts.store", 8192), pytest.raises(OutOfMemory) as caught, \
            faults.fail_nth(1, OUT_OF_MEMORY, only="cuMemHostAlloc"):
        PinnedArena(ctx, "ngram", 4096)
    text = str(caught.value)
    assert "2.0 GiB available by cgroup /app with a limit of 4.0 GiB, mlock limit 64.0 KiB" in text
    assert "largest holder experts.store" in text and "--ulimit memlock=-1" in text and "\n" not in text


def test_an_empty_arena_is_refused(ctx: Context) -> None:
    with pytest.raises(UsageError, match="needs a size"):
        DeviceArena(ctx, "a", 0)
    assert ctx.borrowers() == ()


def test_freeing_twice_is_the_drivers_error(ctx: Context) -> None:
    with ctx.active():
        address = api.cuMemAlloc(512)
        api.cuMemFree(address)
        with pytest.raises(DriverError, match="cuMemFree"):
            api.cuMemFree(address)
