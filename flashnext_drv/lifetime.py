"""Owner: the base of everything that must be closed.

Called by every class that holds a driver object or a file mapping.  What must stay true: an owner is closed
exactly once, never while something still uses it, and always gives back what it holds, whether its release
worked or not. There are no finalisers: an owner dropped while open stays in the ledger and is reported at the
end.
"""

from __future__ import annotations

import enum
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .errors import UsageError

__all__ = ["Owner", "State", "Undo"]


_holding = threading.Lock()  # executables are also made on another thread, and hold what rounds hold


class State(enum.Enum):
    """OPEN may be used; CLOSING is inside its release; CLOSED is over, for good."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Undo(ExitStack):
    """An ExitStack for constructors: when unwinding fails too, the error that led to it stays the one
    raised."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None, /) -> bool:
        try:
            return bool(super().__exit__(kind, error, trace))
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"undoing failed too: {type(second).__name__}: {second}")
            return False


if TYPE_CHECKING:
    _OwnerMeta = type
else:
    class _OwnerMeta(type):
        """A constructor that fails gives back what its owner held: a half-made owner never blocks a close."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = cls.__new__(cls, *args, **kwargs)
            try:
                made.__init__(*args, **kwargs)
            except BaseException:
                if isinstance(made, Owner) and "_held" in made.__dict__:
                    made._let_go()
                raise
            return made


class Owner(metaclass=_OwnerMeta):
    """Something with one `close`.  Subclasses implement `_release`, which runs once and frees what they own.

    name: dotted, for people and the ledger.  holds: owners that must outlive this one.
    """

    def __init__(self, name: str, holds: tuple[Owner, ...] = ()) -> None:
        for owner in holds:
            owner.require_open()
        self.name = name
        self._state = State.OPEN
        self._held: list[Owner] = []
        self._borrowers: list[Owner] = []
        for owner in holds:
            self._hold(owner)

    @property
    def state(self) -> State:
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is State.CLOSED

    @property
    def holds(self) -> tuple[Owner, ...]:
        """The owners this one keeps open."""
        return tuple(self._held)

    def borrowers(self) -> tuple[str, ...]:
        """Names of the open owners that still use this one."""
        return tuple(b.name for b in self._borrowers)

    def require_open(self) -> None:
        """Raises UsageError when this owner is closed."""
        if self._state is not State.OPEN:
            raise UsageError(f"{type(self).__name__} {self.name} is {self._state.value}",
                             do="open a new one")

    def close(self) -> None:
        """Free what this owns.  Does nothing when closed already.

        Raises UsageError, with nothing done, while another owner uses this one; else whatever the release
        raises, after every step of it was tried.
        """
        if self._state is not State.OPEN:
            return
        self._check_close()
        self._state = State.CLOSING
        try:
            self._release()
        finally:
            self._state = State.CLOSED
            self._let_go()

    def _check_close(self) -> None:
        """Raises UsageError, with nothing done, when closing is not possible now; subclasses add their
        reasons."""
        if self._borrowers:
            raise UsageError(f"{type(self).__name__} {self.name} cannot be closed",
                             because=f"used by {', '.join(self.borrowers())}", do="close those first")

    def _release(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no _release")

    def _hold(self, owner: Owner) -> None:
        """Keep `owner` open until this one is closed; once is enough."""
        with _holding:
            if all(owner is not held for held in self._held):
                self._held.append(owner)
                owner._borrowers.append(self)

    def _let_go(self) -> None:
        with _holding:
            for owner in reversed(self._held):
                owner._borrowers = [b for b in owner._borrowers if b is not self]
            self._held.clear()

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        # The error that led here must stay visible: a failing close becomes its note, not its replacement.
        try:
            self.close()
        except Exception as second:
            error.add_note(f"closing {self.name} failed too: {type(second).__name__}: {second}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self._state.value}>"
