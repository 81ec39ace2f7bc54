"""Executable graphs of a rank, by identity, and how often each was captured, instantiated and replayed.

Owned by engine/rank.py.  An identity is (path, rows bucket): everything else a launch depends on sits in
device tables, whose addresses never change for a rank.  What must stay true: capturing has no side effect on
state, and an executable is closed before anything it captured.

Graphs make rounds faster and are never needed: when a driver call of capture, instantiation, upload or launch
fails and the context is sound, the identity is switched off, counted, and its rounds run eagerly with the
same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..drv.context import Context
from ..drv.graph import Graph, GraphExec, capture
from ..drv.module import Launch
from ..drv.stream import Stream
from ..errors import ContextLost, DriverError
from ..lifetime import Owner, Undo

__all__ = ["GraphCounters", "GraphSet", "Identity"]

Identity = tuple[str, int]


@dataclass
class GraphCounters:
    """Since the rank was opened.  failures: identities switched off because a driver call failed."""

    captures: int = 0
    instantiations: int = 0
    replays: int = 0
    eager_rounds: int = 0
    failures: int = 0


class GraphSet(Owner):
    """Owns graphs and executables.  captured: what their launches use and must outlive them.

    off: identities that run eagerly from now on, with the error that led to it.
    """

    def __init__(self, ctx: Context, captured: tuple[Owner, ...]) -> None:
        super().__init__("graphs", holds=(ctx, *captured))
        self._ctx = ctx
        self._captured = captured
        self._undo = Undo()
        self._graphs: dict[Identity, tuple[Graph, GraphExec]] = {}
        self.counters = GraphCounters()
        self.device_bytes: dict[Identity, int] = {}
        self.off: dict[Identity, str] = {}

    def identities(self) -> tuple[Identity, ...]:
        return tuple(self._graphs)

    def graph(self, identity: Identity) -> Graph:
        """The captured graph of an identity, for listings and drawings."""
        return self._graphs[identity][0]

    def drop(self) -> None:
        """Close every graph; none may be running.  Identities that are off stay off."""
        self._graphs.clear()
        self.device_bytes.clear()
        undo, self._undo = self._undo, Undo()
        undo.close()

    def replay(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> bool:
        """Replay the executable of `identity`; the first time capture `launches` on `stream` and make it.

        False, and nothing was run, when the identity is off or has just been switched off by a driver error:
        run the launches instead.  Raises ContextLost, or any DriverError that left the context broken.
        """
        if identity in self.off:
            return False
        try:
            if identity not in self._graphs:
                self._make(identity, launches, stream)
            # assumes: an executable whose launch is refused has run nothing
            self._graphs[identity][1].launch(stream)
        except ContextLost:
            raise
        except DriverError as error:
            if self._ctx.broken:
                raise
            self.off[identity] = str(error)
            self.counters.failures += 1
            return False
        self.counters.replays += 1
        return True

    def _make(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> None:
        name = f"{identity[0]}.rows{identity[1]}"
        free = self._ctx.free_bytes()
        with Undo() as undo:
            with capture(stream) as captured:
                for launch in launches:
                    launch.run(stream)
            self.counters.captures += 1
            graph = captured.graph(name, holds=self._captured)
            undo.callback(graph.close)
            executable = graph.instantiate()
            undo.callback(executable.close)
            self.counters.instantiations += 1
            executable.upload(stream)
            self._graphs[identity] = (graph, executable)
            self._undo.enter_context(undo.pop_all())
        self.device_bytes[identity] = free - self._ctx.free_bytes()

    def _release(self) -> None:
        self._graphs.clear()
        self._undo.close()
