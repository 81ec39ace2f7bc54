"""Capture, graphs and their executables.

Used by `engine/graphs.py` and tests.  What must stay true: a capture is ended whatever happens inside it; a
graph and its executable keep open every module and arena that a captured launch or copy points into; nothing
is allocated or waited for while capturing (drv/faults.py refuses it); a capture that cannot be ended breaks
the context, because work given to its stream would be recorded instead of run.

    with capture(stream) as cap:        launches and copies on `stream`, or on streams that joined it by
    events
        launch.run(stream)
    graph = cap.graph("decode")         exec = graph.instantiate();  exec.upload(stream);  exec.launch(stream)
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from ..errors import DriverError, UsageError
from ..ledger import Entry
from ..lifetime import Owner, Undo
from . import api, faults
from .context import Context, DriverOwner, here
from .stream import Stream

__all__ = ["Capture", "Graph", "GraphExec", "Node", "capture", "read_arguments"]


@dataclass(frozen=True)
class Node:
    """One node.  kind: "kernel", "memcpy", "memset", "event_record" ...; name, grid and block of kernels
    alone."""

    i_node: int
    kind: str
    name: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)


def capture(stream: Stream) -> Capture:
    """Context manager: what this thread gives to `stream` inside is recorded and not run."""
    return Capture(stream)


def read_arguments(address: int, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """What a launch's void** at `address` points at; () where it is null.  sizes: bytes of each argument, as
    the kernel declares them."""
    if not sizes or not address:
        return ()
    pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
    return tuple(ctypes.string_at(at or 0, size) for at, size in zip(pointers, sizes, strict=True))


class Capture:
    """One capture; `graph` hands over what was recorded, once, after the block."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ctx = stream.ctx
        self._holds: list[Owner] = []
        self._undo = Undo()
        self._handle: api.Handle = None
        self._entry: Entry | None = None
        self._done = False

    def note(self, owners: tuple[Owner, ...]) -> None:
        """What was just recorded points into `owners`; they must be open."""
        for owner in owners:
            if all(owner is not held for held in self._holds):
                owner.require_open()
                self._holds.append(owner)

    def graph(self, name: str, holds: tuple[Owner, ...] = ()) -> Graph:
        """The recorded graph.  holds: further owners that tables point into.  Raises UsageError a second
        time."""
        if self._entry is None:
            raise UsageError(f"there is nothing captured for graph {name}",
                             because="the capture failed, has not ended or was taken already")
        for owner in holds:
            if all(owner is not held for held in self._holds):
                self._holds.append(owner)
        made = Graph(self._ctx, name, self._handle, tuple(self._holds))
        self._entry.remove()
        self._entry = None
        return made

    def discard(self) -> None:
        """Drop what was recorded; nothing happens when it was handed over."""
        if self._entry is not None:
            entry, self._entry = self._entry, None
            self._ctx.free(api.cuGraphDestroy, self._handle, entry, outlives=True)

    def __enter__(self) -> Capture:
        if here.capture is not None:
            raise UsageError("this thread is capturing already", do="end that capture first")
        if self._done:
            raise UsageError("a capture is used once", do="make another with capture(stream)")
        self._done = True
        self._stream.require_open()
        with Undo() as undo:
            undo.enter_context(self._ctx.active())
            api.cuStreamBeginCapture(self._stream.handle)
            self._undo = undo.pop_all()
        faults.set_capturing(+1)
        here.capture = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        here.capture = None
        faults.set_capturing(-1)
        try:
            with self._undo:
                self._end(error)
        except DriverError as second:
            try:
                self.discard()
            except DriverError as third:
                second.add_note(f"dropping the graph failed too: {third}")
            if error is None:
                raise
            error.add_note(f"ending the capture failed too: {second}")

    def _end(self, error: BaseException | None) -> None:
        first: DriverError | None = None
        for _ in range(2):          # like a free: left open, the capture would spoil the stream for good
            try:
                handle = api.cuStreamEndCapture(self._stream.handle)
                break
            except DriverError as failure:
                first = first or failure
        else:
            handle = None
            if self._still_capturing():
                self._ctx.mark_broken(f"the capture on stream {self._stream.name} cannot be ended: {first}")
        if handle is not None and int(handle):
            self._handle = handle
            self._entry = self._ctx.ledger.add(f"{self._stream.name}.capture", "graph")
        if first is not None or error is not None:
            self.discard()
        if first is not None:
            raise first

    def _still_capturing(self) -> bool:
        try:
            return api.cuStreamIsCapturing(self._stream.handle)
        except DriverError:
            return True


class Graph(DriverOwner):
    """Owns one graph.  Made by `Capture.graph`; may be closed while executables made from it live on."""

    def __init__(self, ctx: Context, name: str, handle: api.Handle, holds: tuple[Owner, ...]) -> None:
        super().__init__(name, holds=(ctx, *holds))
        self.ctx = ctx
        self.handle = handle
        self._entry = ctx.ledger.add(name, "graph")

    def nodes(self) -> list[Node]:
        """Every node, in the driver's order."""
        self.require_open()
        with self.ctx.active(), faults.silent():
            return [self._node(i, node) for i, node in enumerate(api.cuGraphGetNodes(self.handle))]

    def arguments(self, sizes: Mapping[str, Sequence[int]]) -> list[tuple[bytes, ...]]:
        """The argument bytes of every node, as captured; () for what is no kernel or no kernel of `sizes`.

        sizes: bytes of each argument in order, by kernel name, as the kernel declares them.
        """
        self.require_open()
        with self.ctx.active(), faults.silent():
            return [self._arguments(node, sizes) for node in api.cuGraphGetNodes(self.handle)]

    def edges(self) -> list[tuple[int, int]]:
        """(from, to) as indices into `nodes`."""
        return [(a, b) for a, b, _ in self._edges()]

    def programmatic_edges(self) -> list[tuple[int, int]]:
        """Those of `edges` over which a kernel may start ahead of the end of the one before it."""
        return [(a, b) for a, b, programmatic in self._edges() if programmatic]

    def _edges(self) -> list[tuple[int, int, bool]]:
        self.require_open()
        with self.ctx.active(), faults.silent():
            index = {int(node): i for i, node in enumerate(api.cuGraphGetNodes(self.handle))}
            return [(index[int(a)], index[int(b)], early)
                    for a, b, early in api.cuGraphGetEdges(self.handle)]

    def dot(self) -> str:
        """The graph as Graphviz text; programmatic edges are dashed."""
        lines = [f'digraph "{self.name}" {{']
        for n in self.nodes():
            label = f"{n.name}\\n{n.grid} x {n.block[0]}" if n.kind == "kernel" else n.kind
            lines.append(f'  n{n.i_node} [label="{label}"];')
        lines += [f"  n{a} -> n{b}{' [style=dashed]' if early else ''};" for a, b, early in self._edges()]
        return "\n".join([*lines, "}"]) + "\n"

    def instantiate(self, name: str = "") -> GraphExec:
        """An executable that holds what this graph holds."""
        self.require_open()
        return GraphExec(self, name or f"{self.name}.exec")

    def _node(self, i_node: int, node: api.Handle) -> Node:
        kind = api.cuGraphNodeGetType(node)
        if kind != "kernel":
            return Node(i_node, kind)
        function, grid, block, _ = api.cuGraphKernelNodeGetParams(node)
        return Node(i_node, kind, self.ctx.function_names.get(function, "?"), grid, block)

    def _arguments(self, node: api.Handle, sizes: Mapping[str, Sequence[int]]) -> tuple[bytes, ...]:
        if api.cuGraphNodeGetType(node) != "kernel":
            return ()
        function, _, _, address = api.cuGraphKernelNodeGetParams(node)
        wanted = sizes.get(self.ctx.function_names.get(function, "?"), ())
        return read_arguments(address, wanted)

    def _release(self) -> None:
        self.ctx.free(api.cuGraphDestroy, self.handle, self._entry, outlives=True)


class GraphExec(DriverOwner):
    """Owns one executable.  The device memory the driver takes for it is measured and stands in the
    ledger."""

    def __init__(self, graph: Graph, name: str) -> None:
        super().__init__(name, holds=graph.holds)
        self.ctx = graph.ctx
        with Undo() as undo:
            with self.ctx.active():
                free_before = api.cuMemGetInfo()[0]
                self.handle = api.cuGraphInstantiate(graph.handle)
                self._entry = self.ctx.ledger.add(name, "graph_exec")
                undo.callback(self.ctx.free, api.cuGraphExecDestroy, self.handle, self._entry)
                self._entry.measured(max(0, free_before - api.cuMemGetInfo()[0]))
            self.ctx.graph_names[int(self.handle)] = graph.name
            self._undo = undo.pop_all()

    @property
    def size_bytes(self) -> int:
        """Device memory that the driver was seen to take for it."""
        return self._entry.granted_bytes

    def upload(self, stream: Stream) -> None:
        """Put the executable on the device ahead of its first launch, in stream order."""
        self.require_open()
        with self.ctx.active():
            free_before = api.cuMemGetInfo()[0]
            api.cuGraphUpload(self.handle, stream.handle)
            taken = free_before - api.cuMemGetInfo()[0]
            self._entry.measured(self._entry.granted_bytes + max(0, taken))

    def launch(self, stream: Stream) -> None:
        """Replay in stream order; returns at once."""
        if here.top is self.ctx:
            api.cuGraphLaunch(self.handle, stream.handle)
            return
        with self.ctx.active():
            api.cuGraphLaunch(self.handle, stream.handle)

    def update(self, graph: Graph) -> bool:
        """Take over `graph`'s parameters.  False, nothing changed, when the graphs differ in more than
        those."""
        self.require_open()
        graph.require_open()
        with self.ctx.active():
            if not api.cuGraphExecUpdate(self.handle, graph.handle):
                return False
        # What only the old parameters used stays held: a replay may be in flight.
        for owner in graph.holds:
            self._hold(owner)
        return True

    def _release(self) -> None:
        self.ctx.graph_names.pop(int(self.handle), None)
        self._undo.close()
