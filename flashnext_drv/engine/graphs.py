"""Executable graphs of a rank by identity: which are kept, which are made, and what that did.

Owned by engine/rank.py, and for chunks by engine/deep.py.  An identity names everything that a captured
launch depends on and that is not in device tables: path, rows, window pattern, reach of the attention grids,
geometries, and the arguments themselves by a fingerprint.  What must stay true: capturing has no side effect
on state; an executable is closed before anything it captured, and one still being made on the thread is
joined first; a replay happens only under the identity it was captured for.

    sighting  kept?  -> replay
              off, or not seen often enough, or being made on the thread  -> the round runs eagerly
              else  capture; make room (the oldest go, or one of them is updated); instantiate; upload; replay

Graphs make rounds faster and are never needed.  When a driver call of capture, instantiation, upload or
launch fails, also late on the thread, and the context is sound, the identity is switched off, counted, and
its rounds run eagerly with the same bytes.  After MOST_FAILURES identities all graphs are off: a driver that
refuses so much is not asked again.  An update that fails ends in an instantiation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any

from ..drv.builder import Build, Builder
from ..drv.context import Context
from ..drv.graph import Graph, GraphExec, capture
from ..drv.module import Launch
from ..drv.stream import Stream
from ..errors import ContextLost, DriverError
from ..lifetime import Owner, Undo
from ..model.layout import Limits

__all__ = ["MOST_FAILURES", "GraphCounters", "GraphSet", "Identity", "fingerprint_of"]

MOST_FAILURES = 8
FEWEST = 2  # executables that a lack of memory leaves room for: a round's body and its head
_SEEN = 4096  # identities whose first sighting is remembered


@dataclass(frozen=True)
class Identity:
    """What an executable was captured for.

    rows: bucket of the padded grid.  pattern: rows of each window, in order; (1,) where each has one row.
    context: tokens that the attention grids reach.  pages, lines: geometry of pages, and device lines a layer
    (-1: none).  ranks: (this one, of how many).  fingerprint: 64 bits over functions, grids and argument
    bytes of the launches.
    """

    path: str
    rows: int
    pattern: tuple[int, ...]
    context: int
    pages: str
    lines: int
    ranks: tuple[int, int]
    fingerprint: int

    def __str__(self) -> str:
        """E.g. "body.rows8.5x1+3.context2048"; without geometry and fingerprint."""
        runs = [(n, len(list(same))) for n, same in groupby(self.pattern)]
        pattern = "+".join(f"{times}x{n}" if times > 1 else str(n) for n, times in runs)
        parts = (self.path, f"rows{self.rows}", pattern, f"context{self.context}" if self.context else "")
        return ".".join(part for part in parts if part)

    @property
    def place(self) -> tuple[Any, ...]:
        """Everything that the fingerprint is a function of as long as no address changes."""
        return self.path, self.rows, self.context, self.pages, self.lines, self.ranks


def fingerprint_of(launches: Sequence[Launch]) -> int:
    """64 bits over what a graph that captures `launches` keeps of them."""
    found = blake2b(digest_size=8)
    for launch in launches:
        found.update(launch.content())
    return int.from_bytes(found.digest(), "little")


@dataclass
class GraphCounters:
    """Since the rank was opened, of one path or of all.

    captures, instantiations, updates, uploads: as often as they worked.  updates_refused: tried in vain, and
    instantiated instead.  replays, head_replays: executables launched, those of the head apart.
    eager_rounds, eager_heads: the same run launch by launch.  failures: identities switched off because a
    driver call failed.  dropped: executables closed because an address changed; evicted: to make room.
    Of the path of heads alone, its replays and eager runs stand under replays and eager_rounds.
    """

    captures: int = 0
    instantiations: int = 0
    updates: int = 0
    updates_refused: int = 0
    uploads: int = 0
    replays: int = 0
    head_replays: int = 0
    eager_rounds: int = 0
    eager_heads: int = 0
    failures: int = 0
    dropped: int = 0
    evicted: int = 0

    def since(self, earlier: GraphCounters) -> dict[str, int]:
        """By name, what was added after `earlier` was copied."""
        return {name: value - getattr(earlier, name) for name, value in vars(self).items()}


@dataclass
class _Kept:
    """names: of the captured kernels, in order."""

    graph: Graph
    executable: GraphExec
    names: tuple[str, ...]


@dataclass
class _Pending:
    identity: Identity
    build: Build
    names: tuple[str, ...]
    wanted: bool = True


class GraphSet(Owner):
    """Owns graphs and executables.  captured: what their launches use and must outlive them.

    heads: the paths whose replays are counted apart.  off: identities that run eagerly from now on, with the
    error that led to it.  all_off: why all do ("": they do not).  cap: executables kept at most; sinks when
    device memory ran below Limits.graph_floor_bytes.
    """

    def __init__(
        self, ctx: Context, captured: tuple[Owner, ...], limits: Limits, heads: tuple[str, ...] = ("head",),
        name: str = "graphs",
    ) -> None:
        super().__init__(name, holds=(ctx, *captured))
        self._ctx = ctx
        self._captured = captured
        self._heads = heads
        self._after = limits.graph_after
        self._floor_bytes = limits.graph_floor_bytes or limits.reserve_bytes // 2
        self.cap = limits.graphs
        self._kept: OrderedDict[Identity, _Kept] = OrderedDict()  # used longest ago first
        self._pending: dict[Identity, _Pending] = {}
        self._seen: OrderedDict[Identity, int] = OrderedDict()
        self._prints: dict[tuple[Any, ...], int] = {}
        self.counters = GraphCounters()
        self._paths: dict[str, GraphCounters] = {}
        self.off: dict[Identity, str] = {}
        self.all_off = ""
        self._builder = Builder(ctx) if limits.graph_async else None

    def identities(self) -> tuple[Identity, ...]:
        """Of the executables kept, used longest ago first."""
        return tuple(self._kept)

    def graph(self, identity: Identity) -> Graph:
        """The captured graph of an identity, for listings and drawings."""
        return self._kept[identity].graph

    @property
    def n_pending(self) -> int:
        """Executables being made on the thread."""
        return len(self._pending)

    @property
    def device_bytes(self) -> dict[Identity, int]:
        """Device memory that the driver was seen to take for each executable kept."""
        return {identity: kept.executable.size_bytes for identity, kept in self._kept.items()}

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that were ever run."""
        return tuple(self._paths)

    def counters_of(self, path: str) -> GraphCounters:
        """Of one path, since the rank was opened."""
        return self._paths.setdefault(path, GraphCounters())

    def ran_eagerly(self, path: str) -> None:
        """Count a round of `path`, or its head, that was run launch by launch."""
        self._count(path, "eager_rounds")

    def replay(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> bool:
        """Replay the executable of `identity`; where it is time, first capture `launches` and make it.

        False, and nothing was run, when there is none to replay: run the launches instead.
        Raises ContextLost, or any DriverError that left the context broken.
        """
        try:
            if self._pending:
                self._take_up()
            if self.off and (self.all_off or identity in self.off):
                return False
            kept = self._kept.get(identity)
            if kept is None:
                kept = self._make(identity, launches, stream)
            if kept is None:
                return False
            # assumes: an executable whose launch is refused has run nothing
            kept.executable.launch(stream)
        except DriverError as error:
            self._switch_off(identity, error)
            return False
        self._kept.move_to_end(identity)
        self._count(identity.path, "replays")
        return True

    def drop(self, path: str, stream: Stream) -> None:
        """Close every executable of `path`; those being made are closed when they are ready."""
        for pending in self._pending.values():
            pending.wanted = pending.wanted and pending.identity.path != path
        going = [identity for identity in self._kept if identity.path == path]
        if going:
            stream.synchronize()
        with Undo() as undo:
            for identity in going:
                undo.callback(self._close, identity)
                self._count(path, "dropped")

    def drop_all(self, stream: Stream) -> None:
        """Close every executable; of those being made, what is ready: call again while `n_pending`.

        Raises ContextLost, or the DriverError of whatever could not be closed."""
        for pending in self._pending.values():
            pending.wanted = False
        if self._pending:
            self._take_up()
        for path in {identity.path: None for identity in self._kept}:
            self.drop(path, stream)

    def report(self) -> dict[str, Any]:
        """For `memory()`: bytes by identity, counters by path, what is off."""
        sizes = {str(identity): size for identity, size in self.device_bytes.items()}
        return {
            "cap": self.cap,
            "kept": len(self._kept),
            "pending": self.n_pending,
            "bytes": sum(self.device_bytes.values()),
            "sizes": sizes,
            "counters": dict(vars(self.counters)),
            "paths": {path: dict(vars(counters)) for path, counters in self._paths.items()},
            "off": {str(identity): why for identity, why in self.off.items()},
            "all_off": self.all_off,
        }

    def _make(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> _Kept | None:
        """The executable of an identity that has none, or None: not now, or never."""
        if identity in self._pending:
            return None
        self._check_addresses(identity, stream)
        # what is being made cannot be closed to make room
        if len(self._pending) >= self.cap or not self._often_enough(identity):
            return None
        names = tuple(launch.name for launch in launches)
        with Undo() as undo:
            graph = self._capture(identity, launches, stream)
            undo.callback(graph.close)
            build = Build(graph, self._make_room(identity, names, stream))
            undo.pop_all()
            undo.callback(build.drop)
            if self._builder is not None:
                self._builder.submit(build)
                self._pending[identity] = _Pending(identity, build, names)
                undo.pop_all()
                return None
            build.run(stream)
            undo.pop_all()
        return self._keep(_Pending(identity, build, names))

    def _check_addresses(self, identity: Identity, stream: Stream) -> None:
        """Drop a path's executables when its launches have other arguments than those captured."""
        before = self._prints.get(identity.place)
        if before is not None and before != identity.fingerprint:
            self.drop(identity.path, stream)
            self._prints = {place: was for place, was in self._prints.items() if place[0] != identity.path}
        self._prints[identity.place] = identity.fingerprint

    def _often_enough(self, identity: Identity) -> bool:
        seen = self._seen.pop(identity, 0) + 1
        if seen >= self._after:
            return True
        self._seen[identity] = seen
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return False

    def _capture(self, identity: Identity, launches: Sequence[Launch], stream: Stream) -> Graph:
        with capture(stream) as captured:
            for launch in launches:
                launch.run(stream)
        graph = captured.graph(str(identity), holds=self._captured)
        self._count(identity.path, "captures")
        return graph

    def _make_room(self, identity: Identity, names: tuple[str, ...], stream: Stream) -> GraphExec | None:
        """Close what must go before one more is made.  An executable that must go anyway and was captured
        from the same kernels for the same path and rows is returned instead, to be updated."""
        n_made = len(self._kept) + len(self._pending)
        quarter = -(-len(self._kept) // 4)
        if self._kept and self._ctx.free_bytes() < self._floor_bytes:
            self.cap = min(self.cap, max(n_made + 1 - quarter, FEWEST))
        n_going = min(max(n_made + 1 - self.cap, 0), len(self._kept))
        if not n_going:
            return None
        stream.synchronize()  # a replay of what goes may be in flight
        oldest = list(self._kept)
        alike = (identity.path, identity.rows, names)
        going = [each for each in oldest[: max(n_going, quarter)]
                 if (each.path, each.rows, self._kept[each].names) == alike][:1]
        going += [each for each in oldest if each not in going][: n_going - len(going)]
        with Undo() as undo:
            spare: GraphExec | None = None
            for each in going:
                self._count(each.path, "evicted")
                if spare is None and (each.path, each.rows, self._kept[each].names) == alike:
                    kept = self._kept.pop(each)
                    undo.callback(kept.executable.close)
                    spare = kept.executable
                    kept.graph.close()
                else:
                    self._close(each)
            undo.pop_all()
        return spare

    def _take_up(self) -> None:
        """Keep what the thread has made, and switch off what it could not make.

        Raises ContextLost, or the DriverError that left the context broken."""
        assert self._builder is not None
        ended = self._builder.finished()
        of = {id(pending.build): pending for pending in self._pending.values()}
        with Undo() as undo:
            for build in reversed(ended):
                undo.callback(self._took, of[id(build)])

    def _took(self, pending: _Pending) -> None:
        del self._pending[pending.identity]
        if not pending.wanted:
            self._count(pending.identity.path, "dropped")
            pending.build.drop()
            return
        try:
            self._keep(pending)
        except DriverError as error:
            self._switch_off(pending.identity, error)

    def _keep(self, pending: _Pending) -> _Kept:
        """Enter a build that has ended.  Raises its error, with everything of it closed."""
        build, path = pending.build, pending.identity.path
        for name, n in (("updates", build.updated), ("updates_refused", build.refused),
                        ("instantiations", build.instantiated), ("uploads", build.uploaded)):
            self._count(path, name, int(n))
        if build.error is not None:
            with Undo() as undo:
                undo.callback(build.drop)
                raise build.error
        assert build.executable is not None
        kept = self._kept[pending.identity] = _Kept(build.graph, build.executable, pending.names)
        return kept

    def _switch_off(self, identity: Identity, error: DriverError) -> None:
        """Raises the error when nothing more can run on the context."""
        if isinstance(error, ContextLost) or self._ctx.broken:
            raise error
        self.off[identity] = str(error)
        self._count(identity.path, "failures")
        if identity in self._kept:  # nobody asks for it again: the next to go
            self._kept.move_to_end(identity, last=False)
        if len(self.off) >= MOST_FAILURES and not self.all_off:
            self.all_off = f"{len(self.off)} graphs failed, the last with: {error}"

    def _close(self, identity: Identity) -> None:
        kept = self._kept.pop(identity)
        with Undo() as undo:
            undo.callback(kept.graph.close)
            undo.callback(kept.executable.close)

    def _count(self, path: str, name: str, n: int = 1) -> None:
        of_path = self.counters_of(path)
        setattr(of_path, name, getattr(of_path, name) + n)
        if path in self._heads:
            name = {"replays": "head_replays", "eager_rounds": "eager_heads"}.get(name, name)
        setattr(self.counters, name, getattr(self.counters, name) + n)

    def _release(self) -> None:
        with Undo() as undo:
            for identity in list(self._kept):
                undo.callback(self._close, identity)
            if self._builder is not None:
                undo.callback(self._builder.close)
