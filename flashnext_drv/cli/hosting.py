"""A server of its own for `bench --pack`: on a thread here, or in a process of its own.

    bench (clients, figures)  --HTTP-->  Host: worker, app, sockets     Host: same process, for tests
                              --pipe-->  HostProcess's child: a Host    HostProcess: the clients' Python takes
                                                                        no time from the engine's

Made by cli/bench.py.  What must stay true: every engine that was opened is closed, and what its ledger said
while it was open and after is kept; a child that dies is an error of the next call, never a silence.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from ..bench.client import Target
from ..errors import FlashNextError, RemoteError
from ..model.layout import Limits

if TYPE_CHECKING:
    from ..drv.context import DeviceFacts
    from ..engine.engine import Engine

__all__ = ["Host", "HostProcess", "Plan", "ledger_of"]

_OPEN_S: Final = 900.0
_STOP_S: Final = 600.0


@dataclass(frozen=True)
class Plan:
    """What is served, and how.  text: with the pack's tokenizer and template."""

    pack: str
    limits: Limits
    device: str = "auto"
    max_streams: int = 8
    max_queue: int = 64
    chunk: int | None = None
    text: bool = False


class Host:
    """A context manager: inside, the pack is served at `target`.  See bench.site.Control for its switches.

    closed: of every engine that was closed, entries left in its ledger and their bytes by tier.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.closed: list[dict[str, Any]] = []
        self.target = Target("http://127.0.0.1:1")
        self._engine: Engine | None = None

    def __enter__(self) -> Host:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def facts(self) -> DeviceFacts:
        assert self._engine is not None
        return self._engine.facts

    @property
    def pid(self) -> int:
        """Of the process that holds the engine."""
        return os.getpid()

    def graphs(self, on: bool) -> None:
        def switch(engine: Engine) -> None:
            engine.rank.use_graphs = on

        self._worker.ask(switch).result(_STOP_S)

    def drain(self) -> None:
        self._worker.drain()

    def again(self) -> Target:
        self._stop()
        self._start()
        return self.target

    def _start(self) -> None:
        from ..engine.engine import Engine
        from ..model.source import open_pack
        from ..server.app import create_app
        from ..server.live import Server
        from ..server.schema import Model
        from ..server.text import TextModel
        from ..server.wire import Settings
        from ..server.worker import Worker

        plan = self.plan
        pack = open_pack(plan.pack)

        def opener(progress: Callable[[str, int, int], None]) -> Engine:
            self._engine = Engine.open(pack, plan.limits, device=plan.device, progress=progress)
            return self._engine

        self._worker = Worker(opener, max_streams=plan.max_streams, max_queue=plan.max_queue,
                              chunk=plan.chunk).start()
        if not self._worker.wait_ready(_OPEN_S):
            self._worker.abort()
            self._worker.join(_STOP_S)
            raise self._worker.error or RemoteError("the engine did not open", state=self._worker.state)
        try:
            text = TextModel.load(plan.pack) if plan.text else None
            model = Model.of("bench", pack.config.vocab, plan.limits.context_tokens, pack.config.eos_id, text)
            self._server = Server(create_app(self._worker, model, Settings(log=_no_log))).__enter__()
        except BaseException:
            self._worker.abort()
            self._worker.join(_STOP_S)
            raise
        self.target = Target(self._server.url)

    def _stop(self) -> None:
        self._worker.drain()
        ended = self._worker.join(_STOP_S)
        self._server.stop(hard=not ended)
        if not ended:
            raise RemoteError("the engine did not stop", waited_s=_STOP_S)
        if self._engine is not None:
            ledger, self._engine = self._engine.ledger, None
            self.closed.append({"entries": len(ledger), "live_bytes": ledger.live()})
        if self._worker.error is not None:
            raise self._worker.error


class HostProcess:
    """As Host, in a child process that is started anew (no fork: a driver may be loaded here)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.closed: list[dict[str, Any]] = []
        self.target = Target("http://127.0.0.1:1")

    def __enter__(self) -> HostProcess:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, self.plan), name="bench-host")
        self._child.start()
        theirs.close()
        try:
            self.target, self.facts, self.pid = self._told(_OPEN_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._child.is_alive():
                self.closed = self._ask("close")
        finally:
            self._end()

    def graphs(self, on: bool) -> None:
        self._ask("graphs", on)

    def drain(self) -> None:
        self._ask("drain")

    def again(self) -> Target:
        self.target = self._ask("again")
        return self.target

    def _ask(self, what: str, *values: Any) -> Any:
        try:
            self._pipe.send((what, values))
        except OSError as error:
            self._child.join(5)  # for its exit code
            raise RemoteError("the server's process has ended", exit_code=self._child.exitcode) from error
        return self._told(_STOP_S + _OPEN_S)

    def _told(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise RemoteError("the server's process gives no answer", waited_s=seconds)
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._child.join(5)
            raise RemoteError("the server's process has ended", exit_code=self._child.exitcode) from error
        if not good:
            raise value
        return value

    def _end(self) -> None:
        self._pipe.close()  # the child ends by itself when it sees that
        self._child.join(_STOP_S)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()


def ledger_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """What /v1/memory told, as results hold it: live bytes by owner and tier, and the driver's."""
    rows = [{name: row[name] for name in ("owner", "tier", "n_live", "live_bytes", "granted_bytes")}
            for row in told["rows"] if row["n_live"]]
    return {"rows": rows, "free_bytes": told.get("free_bytes"),
            "unexplained_bytes": told.get("unexplained_bytes")}


def _serve(pipe: Connection, plan: Plan) -> None:
    """The child: a Host that does what the pipe says until it says close, or is closed."""
    with pipe:
        try:
            with Host(plan) as host:
                pipe.send((True, (host.target, host.facts, host.pid)))
                while True:
                    try:
                        what, values = pipe.recv()
                    except EOFError:  # nobody is there any more
                        return
                    if what == "close":
                        break
                    try:
                        pipe.send((True, getattr(host, what)(*values)))
                    except FlashNextError as error:
                        pipe.send((False, _portable(error)))
            pipe.send((True, host.closed))
        except FlashNextError as error:
            with suppress(OSError):
                pipe.send((False, _portable(error)))
        except KeyboardInterrupt:
            return


def _portable(error: FlashNextError) -> FlashNextError:
    """The error as something that crosses a pipe: itself, or its text where it holds what cannot."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a fact's own pickling raises
        return RemoteError(str(error))
    return error


def _no_log(_: Mapping[str, Any]) -> None:
    """The clients say what happened."""
