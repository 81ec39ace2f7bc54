"""uvicorn on a thread of its own, on a socket that is bound before the thread starts.

Used by cli/serve.py, whose main thread waits for signals, and by tests and programs that embed the server.
What must stay true: a port that cannot be had is a typed error of the caller; no signal handler is touched;
what is no HTTP at all is answered with a body in the same form as every other error.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import UsageError
from .wire import CROWDED

__all__ = ["Server"]

_START_S: Final = 30.0
_HEAD_BYTES: Final = 65536  # most bytes of a request's line and headers
_HEAD_S: Final = 30.0  # and how long they may take
_CROWDED_S: Final = 2.0  # on a connection too many
_IDLE_S: Final = 75  # a connection may be kept; clients' pools give up earlier, so none loses a request


class Server:
    """A context manager: inside, `app` answers at `url`.

    port 0: any free one.  On the way out connections may end what they are at for `grace` seconds.
    max_connections: open at one time; one more may ask once, is told so by wire.py and closed.
    Raises UsageError when the address cannot be bound.
    """

    def __init__(
        self,
        app: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grace: int = 10,
        max_connections: int = 256,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=512)
        except (OSError, OverflowError) as error:
            raise UsageError(
                "the address cannot be bound",
                host=host,
                port=port,
                because=getattr(error, "strerror", None) or str(error),
                do="choose another --host or --port, or stop what holds it",
            ) from error
        # Accepted sockets inherit it; asyncio sets it only where the protocol's number is given.  Without it
        # each small event of a stream waits for the client's delayed acknowledgement.
        # measured: 44 ms a reply, 2 ms with it, Linux loopback, http.client
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=grace,
            timeout_keep_alive=_IDLE_S,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            limit_concurrency=max_connections,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._main, name="flashnext-http", daemon=True)
        self.error: BaseException | None = None

    @property
    def url(self) -> str:
        """Without a path: http://127.0.0.1:8000."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __enter__(self) -> Server:
        self._thread.start()
        limit = threading.Event()
        for _ in range(int(_START_S / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            limit.wait(0.01)
        if not self._server.started:
            self.stop(hard=True)
            raise UsageError("the HTTP server did not start", because=str(self.error or "no reason given"))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, *, hard: bool = False) -> None:
        """Take no more connections and wait for the open ones, `grace` seconds, or hard: one.  Idempotent."""
        if hard:  # their last events are on the way
            self._server.config.timeout_graceful_shutdown = 1
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def _main(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:
            self.error = error


class _Protocol(H11Protocol):
    """Its own answer to bytes that are no HTTP, an end to waiting for a request's head, and a word to the
    application on connections beyond the limit."""

    _limit: asyncio.TimerHandle | None = None
    _crowded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, "abort": transport.abort}  # closing waits for who reads nothing
        super().connection_made(transport)
        # uvicorn would refuse in plain text, and also requests of connections that were there before
        most, self.limit_concurrency = self.limit_concurrency, None
        if most is not None and len(self.connections) > most:
            self.app_state = {**self.app_state, CROWDED: most}
            self._crowded = True
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Give the head of the next request its time, from the connection or its first byte on."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        elif self._limit is None and not self.transport.is_closing():
            self._limit = self.loop.call_later(
                _CROWDED_S if self._crowded else _HEAD_S, self.transport.close
            )

    def _rest(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def send_400_response(self, msg: str) -> None:
        error = {
            "message": f"the request is no HTTP/1.1: {msg}",
            "type": "invalid_request_error",
            "param": None,
            "code": "bad_http",
        }
        body = json.dumps({"error": error}).encode()
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % len(body)
        )
        if self.cycle is None or self.cycle.response_complete:  # else it would land inside a response
            self.transport.write(head + body)
        self.transport.close()
