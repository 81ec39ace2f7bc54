"""`bench WHAT URL` or `bench WHAT --pack PACK`: measure a server by its clients, and say what that proves.

With --pack it starts a server of its own (cli/hosting.py) with the memory, prompt and graph settings of
`serve`; then --out writes a result that tools/receipt.py can seal.  Of a running server it writes the figures
alone: what ran there is not known here.  Exit 0 when the verdict is "qualified", else 1.  What must stay
true: a result is written whatever the verdict, with its reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from ..bench import cases, interrupt, load, matrix, workload
from ..bench.client import Target
from ..bench.gauges import UNMEASURED, Sampler
from ..bench.plots import plot
from ..bench.receipt import client_digest, write_receipt
from ..bench.site import Site, find_site
from ..errors import CheckpointError, UsageError
from ..model.layout import Limits
from .hosting import Host, HostProcess, Plan, ledger_of
from .limits import add_limits, memory_limits
from .prompt import add_prefill, deep_limits
from .report import FAILED, GOOD, print_json

__all__ = ["add_parser", "run"]

_KINDS: Final = ("decode", "cache", "concurrent", "cold", "matrix", "workload", "load", "interrupt")
_CHAT: Final = 64  # tokens of context beside prompt and reply
Measure = Callable[[Site], dict[str, Any]]
T = TypeVar("T", workload.Sizes, load.Load, interrupt.Interrupts, matrix.Cells)


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser("bench", help="measure a server by its clients",
                            description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=_KINDS, help="decode: two short prompts; cache: exact lengths, "
                        "again; concurrent: widths; cold: cold, then warm; matrix: all of these over expert "
                        "lines, eager and graph; workload: 16,384 in, 1,024 out, one and eight streams; "
                        "load: many short requests with cancels; interrupt: streams given up in every phase")
    parser.add_argument("url", nargs="?", metavar="URL", help="of a running server: http://host:port")
    parser.add_argument("--pack", dest="own_pack", metavar="PACK",
                        help="start a server on this pack instead: a folder, or synth:MODEL[?...]")
    parser.add_argument("--here", action="store_true",
                        help="with --pack: the server in this process instead of one of its own")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")
    parser.add_argument("--json", action="store_true", help="the result on stdout instead of its verdict")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the API key of the server")
    parser.add_argument("--mode", choices=workload.MODES, default="graph", help="what a running server does")
    parser.add_argument("--vocab", type=int, default=0, help="of a server that does not tell it")
    size = parser.add_argument_group("sizes", "what is left out is as published; other sizes get other names")
    for name, text in (("prompt-tokens", "of each prompt"), ("new-tokens", "of each reply"),
                       ("streams", "at once"), ("repeats", "of each request"),
                       ("requests", "of load (default 2000)"), ("kinds", "distinct requests of load"),
                       ("each", "interrupts of each phase and way (default 3)")):
        size.add_argument(f"--{name}", type=_positive, metavar="N", help=text)
    for name, text in (("lengths", "prompts of cache, cold and matrix"), ("widths", "streams at once")):
        size.add_argument(f"--{name}", type=_numbers, metavar="N,N,...", help=text)
    size.add_argument("--lines", type=_lines, metavar="N,...,all", help="expert lines of matrix's legs")
    size.add_argument("--modes", type=_modes, metavar="graph,eager", help="legs of workload and matrix")
    size.add_argument("--cancels", type=float, metavar="X", help="share of load's requests (default 0.1)")
    parser.add_argument("--require-cold", action="store_true", help="cache: no token may come from a cache")
    parser.add_argument("--alone", action="store_true", help="concurrent: each request alone, before")
    parser.add_argument("--serial", dest="in_a_row", action="store_true",
                        help="concurrent: all requests in a row, behind")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE",
                        help="matrix: one result out of several parts; measures nothing")
    host = parser.add_argument_group("server of its own")
    host.add_argument("--context", type=_positive, metavar="N", help="tokens (default: what is asked for)")
    host.add_argument("--max-streams", type=_positive, metavar="N", help="(default: what is asked for)")
    host.add_argument("--round-rows", type=_positive, metavar="N",
                      help="prompt rows between two rounds while others decode (default: the scheduler's)")
    prefill = _Without(parser, "--serial")  # of `generate`: prompts by decode's path
    add_prefill(prefill)  # type: ignore[arg-type]
    parser.set_defaults(serial=False)
    add_limits(parser)
    parser.add_argument("--device", choices=("auto", "cuda", "sim"),
                        help="default: FLASHNEXT_DRV_DEVICE, else auto")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write.  Raises UsageError, RemoteError, and what opening an engine raises."""
    if args.join:
        result = matrix.join_parts([_part(path) for path in args.join])
        return _give(args, result, None)
    if (args.url is None) == (args.own_pack is None):
        raise UsageError("bench needs the URL of a running server, or --pack PACK, and not both")
    if args.what == "matrix" and args.own_pack is None:
        raise UsageError("the legs of matrix need servers with other limits", do="give --pack")
    if args.own_pack is None:
        target = Target(args.url, key=_key(args.key_file))
        site = find_site(target, vocab=args.vocab, say=_say)
        site.mode = args.mode
        before = ledger_of(site.memory())
        with Sampler(None, pid=1 << 30) as sampler:
            result = _measure(args)(site)
        result |= {"ledger": {"load": before, "idle": ledger_of(site.memory()), "peak": UNMEASURED,
                              "closed": UNMEASURED}, "gauges": sampler.found(), "server": dict(site.told)}
        return _give(args, result, None)
    return _own(args)


def _own(args: argparse.Namespace) -> int:
    """Measure on a server of our own."""
    plan = _plan(args)
    notes: dict[str, Any] = {"load": [], "peak": [], "idle": [], "closed": [], "gauges": [], "facts": None}
    if args.what == "matrix":
        cells = _cells(args)

        @contextmanager
        def serve(lines: matrix.Lines) -> Iterator[Site]:
            with _hosted(args, replace(plan, limits=replace(plan.limits, expert_lines=lines)), notes) as site:
                yield site

        result = matrix.run_matrix(serve, cells)
    else:
        with _hosted(args, plan, notes) as site:
            result = _measure(args)(site)
    facts = notes.pop("facts")
    gauges = notes.pop("gauges")
    entries = sum(closed["entries"] for closed in notes["closed"])
    ledger = {name: notes[name][0] if len(notes[name]) == 1 else notes[name]
              for name in ("load", "peak", "idle")}
    result |= {"pack": Path(args.own_pack).name, "limits": vars(plan.limits), "max_streams": plan.max_streams,
               "ledger": ledger | {"closed": {"entries": entries, "engines": len(notes["closed"])}},
               "gauges": gauges}
    if entries:
        result["verdict"] = {"qualified": False, "reasons": [
            *result["verdict"]["reasons"], f"{entries} entries were left in the ledger after the end"]}
    return _give(args, result, facts)


@contextmanager
def _hosted(args: argparse.Namespace, plan: Plan, notes: dict[str, Any]) -> Iterator[Site]:
    """A server of our own, and what its memory was, in `notes`."""
    with ExitStack() as stack:
        host: Host | HostProcess = Host(plan) if args.here else HostProcess(plan)
        stack.enter_context(host)
        notes["facts"] = host.facts
        ordinal = None if host.facts.is_simulator else 0
        site = find_site(host.target, control=host, say=_say)
        site.mode = "graph" if plan.limits.graph else "eager"
        _say(f"serving {plan.pack} on {host.facts}")
        notes["load"].append(ledger_of(site.memory()))
        with Sampler(ordinal, pid=host.pid) as sampler:
            yield site
        notes["gauges"].append(sampler.found())
        told = site.memory()
        notes["idle"].append(ledger_of(told))
        notes["peak"].append([{name: row[name] for name in ("owner", "tier", "peak_bytes")}
                              for row in told["rows"] if row["peak_bytes"]])
    notes["closed"] += host.closed


def _measure(args: argparse.Namespace) -> Measure:
    """What a kind does on a site, with the sizes that were given."""
    given = {name: getattr(args, name) for name in ("lengths", "new_tokens", "repeats", "widths")
             if getattr(args, name) is not None}

    def only(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    def cold(site: Site) -> dict[str, Any]:
        named = dict(zip(cases.COLD, args.lengths, strict=False)) if args.lengths else dict(cases.COLD)
        return cases.cold(site, lengths=named, **only("new_tokens"))

    def workload_(site: Site) -> dict[str, Any]:
        return workload.run_workload(site, _sizes(args), modes=args.modes or workload.MODES)

    def concurrent(site: Site) -> dict[str, Any]:
        length = {"length": args.prompt_tokens} if args.prompt_tokens else {}
        return cases.concurrent(site, alone=args.alone, serial=args.in_a_row, **length,
                                **only("widths", "new_tokens"))

    measures: dict[str, Measure] = {
        "decode": lambda site: cases.decode(site, **only("new_tokens", "repeats")),
        "cache": lambda site: cases.cache(site, cold=args.require_cold, **(
            {"lengths": matrix.MATRIX.lengths} | only("lengths", "new_tokens", "repeats"))),
        "concurrent": concurrent,
        "cold": cold,
        "workload": workload_,
        "load": lambda site: load.run_load(site, _load(args)),
        "interrupt": lambda site: interrupt.run_interrupts(site, _interrupts(args)),
    }
    return measures[args.what]


def _plan(args: argparse.Namespace) -> Plan:
    """The server that the sizes need.  Raises UsageError."""
    tokens, streams = _needs(args)
    streams = args.max_streams or streams
    fields = {**deep_limits(args), **memory_limits(args)}
    fields["rows"] = max(fields["rows"], min(streams, 16))
    limits = Limits(context_tokens=args.context or tokens, sequences=streams, **fields)
    return Plan(args.own_pack, limits, args.device or "auto", streams, max_queue=4 * streams + 64,
                chunk=args.round_rows)


def _needs(args: argparse.Namespace) -> tuple[int, int]:
    """(tokens of the longest sequence, streams at once) of a kind."""
    new, lengths = args.new_tokens, args.lengths
    if args.what == "matrix":
        cells = _cells(args)
        return cells.context_tokens + _CHAT, cells.streams
    if args.what == "workload":
        sizes = _sizes(args)
        return sizes.prompt_tokens + sizes.new_tokens + _CHAT, sizes.streams
    if args.what == "load":
        asked = _load(args)
        return asked.prompt_tokens + asked.new_tokens + _CHAT, asked.streams
    if args.what == "interrupt":
        stops = _interrupts(args)
        return max(stops.prompt_tokens, stops.short_tokens) + stops.new_tokens + _CHAT, 4
    if args.what == "concurrent":
        return (args.prompt_tokens or 64) + (new or 128) + _CHAT, max(args.widths or (8,))
    longest = {"decode": (64,), "cache": lengths or matrix.MATRIX.lengths,
               "cold": lengths or tuple(cases.COLD.values())}[args.what]
    return max(longest) + (new or 256) + _CHAT, 1


def _sizes(args: argparse.Namespace) -> workload.Sizes:
    return _changed(workload.WORKLOAD, args, prompt_tokens="prompt_tokens", new_tokens="new_tokens",
                    streams="streams")


def _load(args: argparse.Namespace) -> load.Load:
    return _changed(load.Load(), args, requests="requests", streams="streams", kinds="kinds",
                    prompt_tokens="prompt_tokens", new_tokens="new_tokens", cancels="cancels")


def _interrupts(args: argparse.Namespace) -> interrupt.Interrupts:
    return _changed(interrupt.Interrupts(), args, each="each", prompt_tokens="prompt_tokens",
                    new_tokens="new_tokens")


def _cells(args: argparse.Namespace) -> matrix.Cells:
    return _changed(matrix.MATRIX, args, lengths="lengths", new_tokens="new_tokens", widths="widths",
                    repeats="repeats", lines="lines", modes="modes")


def _changed(sizes: T, args: argparse.Namespace, **names: str) -> T:
    """`sizes` with the fields whose arguments were given."""
    return replace(sizes, **{field: getattr(args, name) for field, name in names.items()
                             if getattr(args, name) is not None})


def _give(args: argparse.Namespace, result: dict[str, Any], facts: Any) -> int:
    """Print and write a result; the exit code of its verdict."""
    if args.plot is not None:
        drawn = plot(result)
        if drawn is None:
            raise UsageError(f"{args.what} has nothing to draw", do="leave --plot out")
        args.plot.write_text(drawn, encoding="utf-8")
    if args.out is not None and facts is not None:
        write_receipt(args.out, facts, result)
    elif args.out is not None:
        text = json.dumps({"client_digest": client_digest(), "results": result}, indent=1, sort_keys=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    verdict = result["verdict"]
    if args.json:
        print_json(result)
    else:
        print(f"{result['kind']}: {'qualified' if verdict['qualified'] else 'NOT qualified'}; "
              + ", ".join(f"{n} {name}" for name, n in result.get("checks", {}).items()))
        for reason in verdict["reasons"]:
            print(f"  {reason}")
    return GOOD if verdict["qualified"] else FAILED


def _part(path: Path) -> dict[str, Any]:
    """A matrix result out of a file.  Raises CheckpointError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        part: dict[str, Any] = found["results"]
        if part["kind"] not in ("matrix", "matrix-part"):
            raise ValueError(f"its kind is {part['kind']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("no result of matrix", file=path, because=str(error)) from error
    return part


def _key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError("the key file cannot be read", file=path, because=str(error)) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part.strip()) for part in text.split(","))


def _lines(text: str) -> tuple[matrix.Lines, ...]:
    return tuple(None if part.strip() == "all" else _positive(part.strip()) for part in text.split(","))


def _modes(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    if not set(found) <= set(workload.MODES):
        raise argparse.ArgumentTypeError(f"{text!r}: modes are {', '.join(workload.MODES)}")
    return found


class _Without:
    """A parser that passes one argument over when it is declared."""

    def __init__(self, parser: argparse.ArgumentParser, name: str) -> None:
        self._parser, self._name = parser, name

    def add_argument(self, *names: str, **more: Any) -> None:
        if self._name not in names:
            self._parser.add_argument(*names, **more)
