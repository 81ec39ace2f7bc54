"""`flashnext-drv serve PACK`: an OpenAI-compatible HTTP server until a signal ends it.

Two threads do the work (server/worker.py has the engine, server/live.py the sockets); this one waits for
signals.  The first SIGTERM or SIGINT drains: what is here is finished, nothing new is taken.  The second
cancels what is left, and what does not end then is not waited for.  SIGHUP reads the API keys again.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import UsageError
from .limits import add_limits, memory_limits, parse_size
from .prompt import add_prefill, deep_limits
from .report import GOOD, INTERRUPTED, MISSING, Progress

if TYPE_CHECKING:
    from ..model.layout import Limits
    from ..model.pack import PackBase
    from ..server.schema import Model
    from ..server.wire import Settings
    from ..server.worker import Worker

__all__ = ["add_parser", "run"]

_MOST_STREAMS: Final = 16
_CONTEXT: Final = 8192  # tokens of a sequence unless said otherwise
_POLL_S: Final = 0.25
_HEARTBEAT_S: Final = 15.0
_HARD_S: Final = 5.0  # after the second signal
_LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "::1"))


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "serve",
        help="OpenAI-compatible HTTP server",
        description=__doc__.splitlines()[0],
        epilog="needs the extra: pip install 'flashnext_drv[server]'",
    )
    parser.add_argument(
        "pack",
        nargs="?",
        metavar="PACK",
        help="folder of a pack, or synth:MODEL[?seed=N&...] made in memory (FLASHNEXT_DRV_PACK)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one, printed (default 8000)")
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients call it (default: the pack's name)"
    )
    parser.add_argument(
        "--max-streams", type=int, default=8, metavar="N", help="sequences at one time (default 8)"
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that wait beside them; more get 429 (default 64)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="most tokens of a sequence, prompt and reply (default 8192, or what the model has)",
    )
    group = parser.add_argument_group("who may ask")
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="lines of a SHA-256 digest and a name; requests then need a key",
    )
    group.add_argument(
        "--add-key", metavar="NAME", help="make a key, print it, add its digest to --api-keys FILE, and end"
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without keys: everybody who reaches the port may ask",
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-connections",
        type=int,
        default=256,
        metavar="N",
        help="connections open at one time; requests on more get 503 (default 256)",
    )
    group.add_argument(
        "--body-limit",
        type=parse_size,
        default=16 << 20,
        metavar="SIZE",
        help="most of a request's body (default 16MiB)",
    )
    group.add_argument(
        "--prompt-limit",
        type=int,
        default=0,
        metavar="N",
        help="longest prompt in tokens (default: what the context holds)",
    )
    group.add_argument(
        "--request-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="a request may take so long (default 0: any time)",
    )
    group.add_argument(
        "--stall-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="a client may leave what is sent to it unread so long (default 60)",
    )
    group.add_argument(
        "--keepalive-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="silence of a stream before a comment is sent (default 10)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="after a signal, cancel what is not done by then (default 0: wait for all)",
    )
    group.add_argument(
        "--round-rows",
        type=int,
        metavar="N",
        help="prompt rows between two rounds while others decode (default: the scheduler's)",
    )
    add_prefill(parser)
    add_limits(parser, switch=True)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "sim"), help="default: FLASHNEXT_DRV_DEVICE, else auto"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop.  Raises UsageError, and what opening the engine raises."""
    if args.add_key is not None:
        return _add_key(args)
    try:
        from ..model.source import open_pack
        from ..server.app import create_app
        from ..server.live import Server
        from ..server.worker import Worker
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flashnext_drv"):
            raise
        print(
            f"flashnext-drv serve: {error.name} is not installed; pip install 'flashnext_drv[server]'",
            file=sys.stderr,
        )
        return MISSING
    settings = _settings(args)
    pack = open_pack(args.pack)
    limits = _limits(args, pack)
    model = _model(args, pack, limits)

    def open_engine(progress: Callable[[str, int, int], None]) -> Any:
        from ..engine.engine import Engine

        return Engine.open(pack, limits, device=args.device, progress=progress)

    logging.basicConfig(handlers=[_LogLines(settings.log)], level=logging.WARNING, force=True)
    worker = Worker(
        open_engine, max_streams=args.max_streams, max_queue=args.max_queue, chunk=args.round_rows
    )
    with (
        _signals() as told,
        Server(
            create_app(worker, model, settings),
            host=args.host,
            port=args.port,
            max_connections=args.max_connections,
        ) as server,
    ):
        print(f"listening on {server.url}, model {model.name}; /ready tells when it is loaded", flush=True)
        worker.start()
        code = _wait(args, worker, told, settings)
        server.stop(hard=code != GOOD)
    if worker.error is not None:
        raise worker.error
    return code


def _wait(args: argparse.Namespace, worker: Worker, told: queue.SimpleQueue[int], settings: Settings) -> int:
    """Until the engine's thread has ended; the exit code."""
    from ..server.worker import LOADING, READY

    n_stops, limit, beat = 0, float("inf"), time.monotonic() + _HEARTBEAT_S
    seen = LOADING
    with Progress() as progress:
        while worker.alive:
            if worker.state != seen:
                seen = worker.state
                settings.log({"event": seen, **worker.facts})
                if seen == READY:
                    print(
                        f"ready: {worker.facts['device']}, {worker.facts['open_seconds']:.1f} s", flush=True
                    )
            elif seen == LOADING and worker.loading[0]:
                progress.bytes_done(*worker.loading)
                if time.monotonic() >= beat and not progress.shown:
                    beat += _HEARTBEAT_S
                    what, done, total = worker.loading
                    settings.log({"event": "loading", "what": what, "done_bytes": done, "total_bytes": total})
            try:
                signum = told.get(timeout=_POLL_S)
            except queue.Empty:
                signum = 0
            if signum == signal.SIGHUP:
                _reload(settings)
            elif signum:
                n_stops += 1
                settings.log(
                    {
                        "event": "signal",
                        "signal": signal.Signals(signum).name,
                        "then": "drain" if n_stops == 1 else "stop",
                    }
                )
                if n_stops == 1:
                    worker.drain()
                    limit = time.monotonic() + args.drain_seconds if args.drain_seconds else limit
            if n_stops > 1 and signum not in (0, signal.SIGHUP) or time.monotonic() >= limit:
                worker.abort()
                n_stops, limit = max(n_stops, 2), float("inf")
                if not worker.join(_HARD_S):
                    settings.log({"event": "stopped", "because": "a launch did not end in time"})
                    os._exit(INTERRUPTED)
    settings.log({"event": worker.state, **({"error": str(worker.error)} if worker.error else {})})
    return GOOD if n_stops < 2 else INTERRUPTED


class _LogLines(logging.Handler):
    """What libraries log, such as uvicorn, in the form of all other lines."""

    def __init__(self, log: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        line = {"event": "log", "logger": record.name, "level": record.levelname, "said": record.getMessage()}
        if record.exc_info:
            line["trace"] = logging.Formatter().formatException(record.exc_info)
        self._log(line)


@contextmanager
def _signals() -> Iterator[queue.SimpleQueue[int]]:
    """Signals as a queue, the handlers of before on the way out."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {
        number: signal.signal(number, lambda got, _: told.put(got))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settings(args: argparse.Namespace) -> Settings:
    """Raises UsageError: a limit outside its range, no keys beyond loopback, a file of keys that is none."""
    from ..server.keys import Keys
    from ..server.wire import Settings

    for name in (
        "max_streams",
        "max_queue",
        "max_connections",
        "prompt_limit",
        "body_limit",
        "request_seconds",
        "stall_seconds",
        "keepalive_seconds",
        "drain_seconds",
    ):
        least = 0 if name in ("max_queue", "prompt_limit", "request_seconds", "drain_seconds") else 1e-3
        if not getattr(args, name) >= least:
            raise UsageError(f"--{name.replace('_', '-')} is too small", value=getattr(args, name))
    if args.max_streams > _MOST_STREAMS:
        raise UsageError(
            "--max-streams is 1 to 16, the rows of a round", value=args.max_streams, do="let the rest wait"
        )
    if args.round_rows is not None and args.round_rows < 1:
        raise UsageError("--round-rows is too small", value=args.round_rows)
    if args.serial:
        raise UsageError("--serial is not served", do="use --prompt-rows 1 --no-deep for one row a launch")
    if not 0 <= args.port <= 65535:
        raise UsageError("--port is 0 to 65535", value=args.port)
    keys = None if args.api_keys is None else Keys(args.api_keys)
    loopback = _is_loopback(args.host)
    if keys is None and not loopback and not args.insecure:
        raise UsageError(
            "without API keys only this machine is served",
            host=args.host,
            do="give --api-keys FILE, or --insecure if the network keeps others out",
        )
    hosts = _LOOPBACK | {args.host} if keys is None and loopback else None
    return Settings(
        keys=keys,
        hosts=hosts,
        body_bytes=args.body_limit,
        prompt_tokens=args.prompt_limit,
        request_seconds=args.request_seconds,
        keepalive_seconds=args.keepalive_seconds,
        stall_seconds=args.stall_seconds,
    )


def _limits(args: argparse.Namespace, pack: PackBase) -> Limits:
    """Raises UsageError, also on a context that the model does not have."""
    from ..model.layout import Limits

    most = pack.config.max_positions
    context = min(_CONTEXT, most) if args.context is None else args.context
    if context > most:
        raise UsageError("--context is longer than the model's positions", context=context, positions=most)
    fields = {**deep_limits(args), **memory_limits(args)}
    fields["rows"] = max(fields["rows"], min(args.max_streams, 16))
    return Limits(context_tokens=context, sequences=args.max_streams, **fields)


def _model(args: argparse.Namespace, pack: PackBase, limits: Limits) -> Model:
    """What is served, from the pack's headers and the files of its text side.  Raises CheckpointError."""
    from ..server.schema import Model
    from ..server.text import TextModel

    folder = Path(args.pack)
    text = TextModel.load(folder) if folder.is_dir() else None
    own = folder.resolve().name if folder.is_dir() else args.pack.partition("?")[0]
    name = args.model_name or own
    return Model.of(name, pack.config.vocab, limits.context_tokens, pack.config.eos_id, text)


def _reload(settings: Settings) -> None:
    """SIGHUP: the keys again; a file that cannot be used leaves them as they were."""
    if settings.keys is None:
        return
    try:
        settings.keys.reload()
        settings.log({"event": "keys", "count": len(settings.keys.entries)})
    except UsageError as error:
        settings.log({"event": "keys", "error": str(error)})


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _add_key(args: argparse.Namespace) -> int:
    from ..server.keys import add_key

    if args.api_keys is None:
        raise UsageError("--add-key needs --api-keys FILE")
    print(add_key(args.api_keys, args.add_key))
    print(f"its digest is in {args.api_keys}; the key itself is stored nowhere", file=sys.stderr)
    return GOOD
