"""A look at every driver call of the process while it is made.

Used by bench/trace.py.  What must stay true: nobody who does not watch pays for it: `watched` puts a stand-in
where drv/api.py finds the binding, and takes it away again; calls that a planned failure keeps from the
driver are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import api

__all__ = ["Watcher", "watched"]

# (name, the driver's function, arguments) -> what that function returned: (code, values...)
Watcher = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Every driver call of this process, on any thread, is made by `watcher` inside: it calls the function it
    is given and returns its result.  Raises UsageError before a driver was chosen."""
    before = api.route(partial(_StandIn, watcher))
    try:
        yield
    finally:
        api.route(lambda _: before)


class _StandIn:
    """The binding's names; functions of the driver go through the watcher, types and constants do not."""

    def __init__(self, watcher: Watcher, driver: Any) -> None:
        self._watcher = watcher
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if not name.startswith("cu"):
            return found
        seen = partial(_pass, self._watcher, name, found)
        setattr(self, name, seen)
        return seen


def _pass(watcher: Watcher, name: str, call: Callable[..., Any], *args: Any) -> Any:
    return watcher(name, call, args)
