"""Owners: closed once, never under a borrower, always giving back what they hold."""

from __future__ import annotations

import gc
import weakref

import pytest

from flashnext_drv.errors import UsageError
from flashnext_drv.lifetime import Owner, State, Undo


class Thing(Owner):
    def __init__(self, name: str, holds: tuple[Owner, ...] = (), fail: bool = False,
                 fail_open: bool = False) -> None:
        super().__init__(name, holds)
        self.n_released = 0
        self.fail = fail
        if fail_open:
            raise ValueError("opening failed")

    def _release(self) -> None:
        self.n_released += 1
        if self.fail:
            raise ValueError(f"release of {self.name} failed")


def test_close_is_done_once() -> None:
    thing = Thing("a")
    thing.close()
    thing.close()
    assert thing.n_released == 1 and thing.closed and thing.state is State.CLOSED


def test_closing_under_a_borrower_is_refused_by_name() -> None:
    base = Thing("base")
    user, other = Thing("user", (base,)), Thing("other", (base,))
    with pytest.raises(UsageError, match="used by user, other"):
        base.close()
    assert base.n_released == 0 and not base.closed
    user.close()
    other.close()
    base.close()
    assert base.n_released == 1


def test_a_closed_owner_keeps_nothing_alive() -> None:
    base = Thing("base")
    user = Thing("user", (base,))
    user.close()
    base.close()
    gone = weakref.ref(base)
    del base
    gc.collect()
    assert gone() is None and user.closed


def test_a_failing_constructor_does_not_block_what_it_held() -> None:
    base = Thing("base")
    with pytest.raises(ValueError, match="opening failed"):
        Thing("half", (base,), fail_open=True)
    assert base.borrowers() == ()
    base.close()


def test_a_failing_release_still_gives_back_and_is_not_repeated() -> None:
    base = Thing("base")
    bad = Thing("bad", (base,), fail=True)
    with pytest.raises(ValueError, match="release of bad failed"):
        bad.close()
    bad.close()
    assert bad.n_released == 1
    base.close()


def test_holding_something_closed_is_refused() -> None:
    base = Thing("base")
    base.close()
    with pytest.raises(UsageError, match="Thing base is closed"):
        Thing("late", (base,))


def test_with_keeps_the_error_that_led_to_a_failing_close() -> None:
    with pytest.raises(KeyError) as caught, Thing("bad", fail=True):
        raise KeyError("first")
    assert "release of bad failed" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="release of bad failed"), Thing("bad", fail=True):
        pass


def test_entering_a_closed_owner_is_refused() -> None:
    thing = Thing("a")
    thing.close()
    with pytest.raises(UsageError), thing:
        pass


def test_undoing_that_fails_leaves_the_error_that_led_to_it() -> None:
    done: list[str] = []

    def refuse() -> None:
        raise ValueError("free refused")

    with pytest.raises(KeyError) as found, Undo() as undo:
        undo.callback(done.append, "first made")
        undo.callback(refuse)
        raise KeyError("the cause")
    assert done == ["first made"] and "free refused" in "".join(found.value.__notes__)
    with pytest.raises(ValueError, match="free refused"), Undo() as undo:
        undo.callback(refuse)
    with Undo() as undo:
        undo.callback(done.append, "late")
        kept = undo.pop_all()
    assert done == ["first made"]
    kept.close()
    assert done == ["first made", "late"]
