"""A server in the form of the real one with a model of a few lines, that can be told to misbehave.

Used by the tests of the clients.  `knobs` is a dictionary that tests change between requests; each name below
is one lie or fault.  Its tokens depend on a request's ids and seed alone, as the real server's do.

    usage           replaces the usage block ("absent": none)       runtime       the same of the runtime one
    usage_edit      dict merged into usage, None removes a key      runtime_edit  the same of the runtime one
    finish          finish reason                                   done          False: no [DONE]
    drop_after      closes the connection after so many tokens      http          status of the answer
    raw             bytes sent in place of the events               piece         bytes of one chunk
    a_chunk         tokens an event                                 comments      keep-alive comments between
    error_after     an error event after so many tokens             token_s       seconds a token takes
    wrong_when      streams at once from which on tokens are wrong  leak          the ledger grows
    one_by_one      streams run one after the other                 type          content type
    deaf            a cancel is not answered
    hold            a cancelled request keeps its slot and pages
    short_from      requests from this one on end after a token, as if that were all

Its stamps are made up: a token a second from when the request came, so that streams sent together overlap by
them however busy the machine is; with one_by_one each begins where the one before ended.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 509
TOKEN_S = 1.0


def hash_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()


def model(ids: Sequence[int], new_tokens: int, seed: int) -> list[int]:
    state = int(hash_of(ids)[:12], 16) ^ seed
    out = []
    for _ in range(new_tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out.append(state >> 33 & 0xFFFF)
    return [token % VOCAB for token in out]


@dataclass
class Fake:
    """url and key of the running server, its knobs, and what it has seen."""

    url: str = ""
    key: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)
    graphs: bool = True
    max_streams: int = 8
    live: int = 0
    most_live: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    disconnected: int = 0
    n_requests: int = 0
    draining: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    one: threading.Lock = field(default_factory=threading.Lock)
    end: float = 0.0

    def status(self) -> dict[str, Any]:
        held = len(self.cancelled) if self.knobs.get("hold") else 0
        return {"model": {"name": "fake", "vocab": VOCAB}, "max_streams": self.max_streams,
                "graphs": self.graphs, "queued": 0, "prompting": 0, "decoding": self.live,
                "free_slots": self.max_streams - self.live - held, "free_pages": 9 - held,
                "draining": self.draining}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        answers = {"/status": self.fake.status(), "/v1/memory": memory(self.fake)}
        self.plain(200 if self.path in answers else 404, answers.get(self.path, {"error": "no route"}))

    def do_POST(self) -> None:
        fake, knobs = self.fake, self.fake.knobs
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if fake.key and self.headers.get("authorization") != f"Bearer {fake.key}":
            return self.plain(401, {"error": {"message": "no such key"}})
        if self.path == "/v1/cancel" and knobs.get("deaf"):
            self.close_connection = True
            return None
        if self.path == "/v1/cancel":
            fake.cancelled.add(body["id"])
            return self.plain(200, {"cancelled": True})
        with fake.lock:
            fake.bodies.append(body)
            fake.n_requests += 1
            name = self.headers.get("x-request-id") or f"req-{fake.n_requests}"
        if knobs.get("http"):
            return self.plain(knobs["http"], {"error": {"message": "as told"}}, {"Retry-After": "2.5"})
        with fake.one if knobs.get("one_by_one") else nullcontext():
            self.stream(body, name)
        return None

    def plain(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(raw)),
                            **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def stream(self, body: dict[str, Any], name: str) -> None:
        fake, knobs = self.fake, self.fake.knobs
        submitted = time.perf_counter()
        base = max(submitted, fake.end) if knobs.get("one_by_one") else submitted
        self.send_response(200)
        self.send_header("Content-Type", knobs.get("type", "text/event-stream; charset=utf-8"))
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("X-Request-Id", name)
        self.end_headers()
        with fake.lock:
            fake.live += 1
            fake.most_live = max(fake.most_live, fake.live)
        try:
            self.events(body, name, submitted, base)
        except (ConnectionError, TimeoutError):
            fake.disconnected += 1
            self.close_connection = True
        finally:
            with fake.lock:
                fake.live -= 1

    def events(self, body: dict[str, Any], name: str, submitted: float, base: float) -> None:
        fake, knobs = self.fake, self.fake.knobs
        if "raw" in knobs:
            self.send(knobs["raw"])
            self.end()
            return
        tokens = model(body["ids"], body["max_new_tokens"], body.get("seed", 0))
        if fake.live >= knobs.get("wrong_when", 1 << 30):
            tokens[-1] = (tokens[-1] + 1) % VOCAB
        if fake.n_requests >= knobs.get("short_from", 1 << 30):
            tokens = tokens[:1]
        sent: list[int] = []
        finish = knobs.get("finish", "length")
        step = knobs.get("a_chunk", 1)
        for first in range(0, len(tokens), step):
            if name in fake.cancelled:
                finish = "cancelled"
                break
            time.sleep(knobs.get("token_s", 0.0))
            piece = tokens[first : first + step]
            sent += piece
            for _ in range(knobs.get("comments", 0)):
                self.send(b": alive\n\n")
            self.event({"id": name, "tokens": piece})
            if len(sent) >= knobs.get("drop_after", 1 << 30):
                raise ConnectionError
            if len(sent) >= knobs.get("error_after", 1 << 30):
                self.event({"error": {"message": "the round failed"}})
                self.end()
                return
        n = len(sent)
        usage = {"prompt_tokens": len(body["ids"]), "completion_tokens": n,
                 "total_tokens": len(body["ids"]) + n, "prompt_tokens_details": {"cached_tokens": 0}}
        live = 1 if knobs.get("one_by_one") else fake.max_streams
        at = [base + TOKEN_S * (i + 1) for i in range(n)]
        fake.end = at[-1] if at else base
        runtime = {
            "token_sha256": hash_of([*body["ids"], *sent]), "new_sha256": hash_of(sent),
            "cached_tokens": 0, "prefilled_tokens": len(body["ids"]), "decoded_tokens": n,
            "counters": {"graph_replays": max(n - 2, 0) if fake.graphs else 0,
                         "eager_rounds": 1 if fake.graphs else n, "expert_hits": 3, "expert_misses": 1},
            "stamps": {"submitted": submitted, "first_token": at[0] if at else None, "done": base + 1},
            "token_at": at, "live_min": live, "live_max": live,
        }
        last: dict[str, Any] = {"id": name, "tokens": [], "finish_reason": finish}
        for kind, block in (("usage", usage), ("runtime", runtime)):
            block = merged(block, knobs.get(f"{kind}_edit", {}))
            block = knobs.get(kind, block)
            if block != "absent":
                last[kind] = block
        self.event(last)
        if knobs.get("done", True):
            self.send(b"data: [DONE]\n\n")
        self.end()

    def event(self, told: dict[str, Any]) -> None:
        self.send(b"data: " + json.dumps(told).encode() + b"\n\n")

    def send(self, raw: bytes) -> None:
        step = self.fake.knobs.get("piece", len(raw)) or 1
        for first in range(0, len(raw), step):
            piece = raw[first : first + step]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")


def merged(block: dict[str, Any], edit: dict[str, Any]) -> dict[str, Any]:
    both = {**block, **edit}
    return {name: value for name, value in both.items() if value is not None}


def memory(fake: Fake) -> dict[str, Any]:
    rows = [{"owner": "weights", "tier": "device", "n_live": 1, "n_total": 1, "live_bytes": 1000,
             "granted_bytes": 1024, "peak_bytes": 1000, "peak_granted_bytes": 1024}]
    return {"rows": rows, "total_bytes": 1 << 30, "free_bytes": 1 << 29,
            **({} if not fake.knobs.get("leak") else {"rows": [{**rows[0], "live_bytes": fake.n_requests}]})}


@contextmanager
def running(**knobs: Any) -> Iterator[Fake]:
    fake = Fake(knobs=knobs)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": fake}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
