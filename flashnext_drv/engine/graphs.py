"""Executable graphs of a rank, by identity, and how often each was captured, instantiated and replayed.

Owned by engine/rank.py.  An identity is (path, rows bucket): everything else a launch depends on sits in
device
tables, whose addresses never change for a rank.  What must stay true: capturing has no side effect on
state, and an
executable is closed before anything it captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..drv.context import Context
from ..drv.graph import Graph, GraphExec, capture
from ..drv.module import Launch
from ..drv.stream import Stream
from ..lifetime import Owner

__all__ = ["GraphCounters", "GraphSet", "Identity"]

Identity = tuple[str, int]


@dataclass
class GraphCounters:
    """Since the rank was opened."""

    captures: int = 0
    instantiations: int = 0
    replays: int = 0
    eager_rounds: int = 0


class GraphSet(Owner):
    """Owns graphs and executables.  captured: what their launches use and must outlive them."""

    def __init__(self, ctx: Context, captured: tuple[Owner, ...]) -> None:
        super().__init__("graphs", holds=(ctx, *captured))
        self._ctx = ctx
        self._captured = captured
        self._undo = ExitStack()
        self._graphs: dict[Identity, tuple[Graph, GraphExec]] = {}
        self.counters = GraphCounters()
        self.device_bytes: dict[Identity, int] = {}

    def identities(self) -> tuple[Identity, ...]:
        return tuple(self._graphs)

    def graph(self, identity: Identity) -> Graph:
        """The captured graph of an identity, for listings and drawings."""
        return self._graphs[identity][0]

    def replay(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> None:
        """Replay the executable of `identity`; the first time capture `launches` on `stream` and make it."""
        if identity not in self._graphs:
            self._make(identity, launches, stream)
        self._graphs[identity][1].launch(stream)
        self.counters.replays += 1

    def _make(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> None:
        name = f"{identity[0]}.rows{identity[1]}"
        free = self._ctx.free_bytes()
        with ExitStack() as undo:
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
