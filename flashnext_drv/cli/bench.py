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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..bench import cases, interrupt, load, matrix, workload
from ..bench.client import Target
from ..bench.evidence import verdict
from ..bench.gauges import Sampler
from ..bench.plots import DRAWN, plot
from ..bench.receipt import client_digest, schema_problems, write_receipt
from ..bench.recheck import recheck
from ..bench.site import Site, find_site
from ..errors import CheckpointError, UsageError
from ..model.layout import Limits
from .hosting import Host, HostProcess, Plan, ledger_of
from .limits import add_limits, memory_limits
from .prompt import add_prefill, deep_limits
from .report import FAILED, GOOD, print_json

if TYPE_CHECKING:
    from ..drv.context import DeviceFacts

__all__ = ["add_parser", "run"]

_KINDS: Final = ("decode", "cache", "concurrent", "cold", "matrix", "workload", "load", "interrupt")
_CHAT: Final = 64  # tokens of context beside prompt and reply
_TEMPLATED: Final = 512  # of a short chat, whatever its template puts around it
Measure = Callable[[Site], dict[str, Any]]
T = TypeVar("T", workload.Sizes, load.Load, interrupt.Interrupts, matrix.Cells)


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser("bench", help="measure a server by its clients",
                            description=__doc__.splitlines()[0])
    parser.add_argument("what", type=_kinds, metavar="WHAT",
                        help="one or, on one server, several with commas: "
                        "decode (two short prompts), cache (exact lengths, again), concurrent (widths), cold "
                        "(cold, then warm), matrix (lengths and widths over expert lines, eager and graph), "
                        "workload (16,384 in, 1,024 out, one and eight streams), load (many short requests "
                        "with cancels), interrupt (streams given up in every phase)")
    parser.add_argument("url", nargs="?", metavar="URL", help="of a running server: http://host:port")
    parser.add_argument("--pack", dest="own_pack", metavar="PACK",
                        help="start a server on this pack instead: a folder, or synth:MODEL[?...]")
    parser.add_argument("--here", action="store_true",
                        help="with --pack: the server in this process instead of one of its own")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="write the result as JSON; of several kinds a folder, a file for each")
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
    size.add_argument("--cancels", type=_share, metavar="X", help="share of load's requests (default 0.1)")
    size.add_argument("--rate", type=_rate, metavar="X",
                      help="load: so many requests a second at random times, "
                      "whether others have ended or not")
    parser.add_argument("--require-cold", action="store_true", help="cache: no token may come from a cache")
    parser.add_argument("--chat", action="store_true",
                        help="decode: the prompts as text through the chat endpoint")
    parser.add_argument("--alone", action="store_true", help="concurrent: each request alone, before")
    parser.add_argument("--serial", dest="in_a_row", action="store_true",
                        help="concurrent: all requests in a row, behind")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE",
                        help="matrix, workload: one result out of parts with other lines or modes")
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
    kinds: list[str] = args.what
    if args.join:
        _check_files(args, kinds)
        return _join(args, kinds)
    if (args.url is None) == (args.own_pack is None):
        raise UsageError("bench needs the URL of a running server, or --pack PACK, and not both")
    if "matrix" in kinds and (args.own_pack is None or len(kinds) > 1):
        raise UsageError("matrix starts servers with other limits by itself", do="give --pack, and it alone")
    if "cold" in kinds and len(args.lengths or ()) > len(cases.COLD):
        raise UsageError("cold has so many prompts at most", prompts=len(cases.COLD))
    _check_files(args, kinds)
    if args.own_pack is not None:
        return _matrix(args) if "matrix" in kinds else _own(args, kinds)
    site = find_site(Target(args.url, key=_key(args.key_file)), vocab=args.vocab, say=_say)
    site.mode = args.mode
    codes = [_give(args, kind, _measured(args, kind, site, None, None), None) for kind in kinds]
    return max(codes)


def _own(args: argparse.Namespace, kinds: Sequence[str]) -> int:
    """All kinds on one server of our own.  What was measured is written before it ends too: a run that is
    stopped leaves results without `closed`, which cannot be sealed."""
    plan, found = _plan(args, kinds), {}
    closed: list[dict[str, Any]] = []
    with _hosted(args, plan, closed) as (site, host):
        facts = host.facts
        for kind in kinds:
            ordinal = None if facts.is_simulator else 0
            found[kind] = _measured(args, kind, site, host.pid, ordinal) | _served(args, plan)
            _write(args, kind, found[kind], facts)
    return max(_give(args, kind, _ended(result, closed), facts) for kind, result in found.items())


def _matrix(args: argparse.Namespace) -> int:
    """One server after the other."""
    plan = _plan(args, ["matrix"])
    closed: list[dict[str, Any]] = []
    facts: list[DeviceFacts] = []
    ledger: dict[str, list[Any]] = {"load": [], "idle": [], "peak": []}
    gauges = []

    @contextmanager
    def serve(lines: matrix.Lines) -> Iterator[Site]:
        wanted = replace(plan, limits=replace(plan.limits, expert_lines=lines))
        with _hosted(args, wanted, closed) as (site, host):
            facts.append(host.facts)
            load_ = ledger_of(site.memory())
            with Sampler(None if host.facts.is_simulator else 0, pid=host.pid) as sampler:
                yield site
            gauges.append(sampler.found())
            for name, value in _ledger(load_, site).items():
                ledger[name].append(value)

    result = matrix.run_matrix(serve, _cells(args)) | _served(args, plan)
    result |= {"ledger": ledger, "gauges": gauges}
    return _give(args, "matrix", _ended(result, closed, len(facts)), facts[0])


def _measured(
    args: argparse.Namespace, kind: str, site: Site, pid: int | None, ordinal: int | None
) -> dict[str, Any]:
    """One measurement, with memory before, after and at most.  pid: of the engine's process, None where it is
    not known."""
    before = ledger_of(site.memory())
    with Sampler(ordinal, pid=pid if pid is not None else 0) as sampler:
        result = _measure(args, kind)(site)
    return result | {"ledger": _ledger(before, site), "gauges": sampler.found(),
                     "server": {name: site.told.get(name) for name in ("version", "device", "max_streams")}}


def _ledger(before: dict[str, Any], site: Site) -> dict[str, Any]:
    told = site.memory()
    peak = [{name: row[name] for name in ("owner", "tier", "peak_bytes")} for row in told["rows"]
            if row["peak_bytes"]]
    return {"load": before, "idle": ledger_of(told), "peak": peak}


def _served(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    return {"pack": Path(args.own_pack).name, "limits": vars(plan.limits), "max_streams": plan.max_streams}


def _ended(result: dict[str, Any], closed: Sequence[dict[str, Any]], servers: int = 1) -> dict[str, Any]:
    """The result with what the ledgers of all engines held when they were closed.  servers: that were
    started; each closes an engine or more."""
    entries = sum(one["entries"] for one in closed)
    result["ledger"] |= {"closed": {"entries": entries, "engines": len(closed)}}
    against = [f"{entries} entries were left in the ledger after the end"] if entries else []
    if len(closed) < servers:
        against.append(f"{len(closed)} engines were seen closing, of {servers} servers")
    return _judged_again(result, against)


def _judged_again(result: dict[str, Any], against: Sequence[str]) -> dict[str, Any]:
    return result | {"verdict": verdict([*result["verdict"]["reasons"], *against]).as_dict()}


@contextmanager
def _hosted(
    args: argparse.Namespace, plan: Plan, closed: list[dict[str, Any]]
) -> Iterator[tuple[Site, Host | HostProcess]]:
    """A server of our own; `closed` gets what its ledgers held at the end."""
    host: Host | HostProcess = Host(plan) if args.here else HostProcess(plan)
    with host:
        site = find_site(host.target, control=host, say=_say)
        site.mode = "graph" if plan.limits.graph else "eager"
        _say(f"serving {plan.pack} on {host.facts}")
        yield site, host
    closed += host.closed


def _measure(args: argparse.Namespace, kind: str) -> Measure:
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
        "decode": lambda site: cases.decode(site, chat=args.chat, **only("new_tokens", "repeats")),
        "cache": lambda site: cases.cache(site, cold=args.require_cold, **(
            {"lengths": matrix.MATRIX.lengths} | only("lengths", "new_tokens", "repeats"))),
        "concurrent": concurrent,
        "cold": cold,
        "workload": workload_,
        "load": lambda site: load.run_load(site, _load(args)),
        "interrupt": lambda site: interrupt.run_interrupts(site, _interrupts(args)),
    }
    return measures[kind]


def _plan(args: argparse.Namespace, kinds: Sequence[str]) -> Plan:
    """The server that all kinds' sizes need.  Raises UsageError."""
    needs = [_needs(args, kind) for kind in kinds]
    tokens, streams = (max(column) for column in zip(*needs, strict=True))
    streams = args.max_streams or streams
    fields = {**deep_limits(args), **memory_limits(args)}
    fields["rows"] = max(fields["rows"], min(streams, 16))
    limits = Limits(context_tokens=args.context or tokens, sequences=streams, **fields)
    return Plan(args.own_pack, limits, args.device or "auto", streams, max_queue=4 * streams + 64,
                chunk=args.round_rows, text=args.chat)


def _needs(args: argparse.Namespace, kind: str) -> tuple[int, int]:
    """(tokens of the longest sequence, streams at once) of a kind."""
    new, lengths = args.new_tokens, args.lengths
    if kind == "matrix":
        cells = _cells(args)
        return cells.context_tokens + _CHAT, cells.streams
    if kind == "workload":
        sizes = _sizes(args)
        return sizes.prompt_tokens + sizes.new_tokens + _CHAT, sizes.streams
    if kind == "load":
        asked = _load(args)
        return asked.prompt_tokens + asked.new_tokens + _CHAT, asked.streams
    if kind == "interrupt":
        stops = _interrupts(args)
        new_ = max(stops.new_tokens, stops.least_tokens)
        return max(stops.prompt_tokens, stops.short_tokens) + new_ + _CHAT, max(8, stops.each * 2)
    if kind == "concurrent":
        return (args.prompt_tokens or 64) + (new or 128) + _CHAT, max(args.widths or (8,))
    longest = {"decode": (_TEMPLATED if args.chat else 64,), "cache": lengths or matrix.MATRIX.lengths,
               "cold": lengths or tuple(cases.COLD.values())}[kind]
    return max(longest) + (new or 256) + _CHAT, 1


def _sizes(args: argparse.Namespace) -> workload.Sizes:
    return _changed(workload.WORKLOAD, args, prompt_tokens="prompt_tokens", new_tokens="new_tokens",
                    streams="streams")


def _load(args: argparse.Namespace) -> load.Load:
    return _changed(load.Load(), args, requests="requests", streams="streams", kinds="kinds",
                    prompt_tokens="prompt_tokens", new_tokens="new_tokens", cancels="cancels",
                    rate="rate")


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


def _give(args: argparse.Namespace, kind: str, result: dict[str, Any], facts: DeviceFacts | None) -> int:
    """Write and print a result; the exit code of its verdict."""
    _write(args, kind, result, facts)
    if args.plot is not None:
        with _writing(args.plot):
            args.plot.write_text(plot(result) or "", encoding="utf-8")
    judged = result["verdict"]
    if args.json:
        print_json(result)
    else:
        print(f"{result['kind']}: {'qualified' if judged['qualified'] else 'NOT qualified'}; "
              + ", ".join(f"{n} {name}" for name, n in result.get("checks", {}).items()))
        for reason in judged["reasons"]:
            print(f"  {reason}")
    return GOOD if judged["qualified"] else FAILED


def _write(args: argparse.Namespace, kind: str, result: dict[str, Any], facts: DeviceFacts | None) -> None:
    """To --out: a result to be sealed where the device is known, else figures."""
    if args.out is None:
        return
    path = args.out if len(args.what) == 1 else args.out / f"{kind}.json"
    with _writing(path):
        if facts is not None:
            write_receipt(path, facts, result)
            return
        text = json.dumps({"client_digest": client_digest(), "results": result}, indent=1, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")


def _check_files(args: argparse.Namespace, kinds: Sequence[str]) -> None:
    """Before hours of measuring: what is to be written can be.  Raises UsageError."""
    if args.plot is not None:
        if len(kinds) > 1:
            raise UsageError("--plot draws one measurement")
        if kinds[0] not in DRAWN:
            raise UsageError(f"{kinds[0]} has nothing to draw", do="leave --plot out")
    if args.out is not None and len(kinds) > 1:
        with _writing(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
    for path in (args.out if len(kinds) == 1 else None, args.plot):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError("a file in an existing folder is wanted", file=path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError("a result cannot be written", file=path, because=str(error.strerror)) from error


def _join(args: argparse.Namespace, kinds: Sequence[str]) -> int:
    """One result out of parts; to be sealed when the same sources made them all on the same device."""
    joins = {"matrix": matrix.join_parts, "workload": workload.join_workload}
    if len(kinds) != 1 or kinds[0] not in joins:
        raise UsageError("--join is for the parts of one matrix or workload")
    parts = [_part(path, kinds[0]) for path in args.join]
    own = ("form", "device", "kernels", "package_digest", "source_digest", "client_digest", "versions")
    served = ("pack", "max_streams", *(("limits",) if kinds[0] == "workload" else ()))
    told = [part["results"] for part in parts]
    for path, part in zip(args.join, parts, strict=True):
        for name, mine, first in ((name, part.get(name), parts[0].get(name)) for name in own):
            if mine != first:
                raise UsageError("parts of other runs cannot be joined", file=path, differs=name)
        for name in served:
            if part["results"].get(name) != told[0].get(name):
                raise UsageError("parts of other servers cannot be joined", file=path, differs=name)
        wrong = schema_problems(part)
        if args.out is not None and wrong:
            raise UsageError("a part is no result that can be sealed", file=path, because=wrong[0])
    try:
        result = joins[kinds[0]](told)
    except (AttributeError, LookupError, TypeError) as error:
        raise CheckpointError("a part lacks what is joined", because=f"{type(error).__name__}: {error}") \
            from error
    result = _judged_again(result, [f"part {i}: {each}" for i, one in enumerate(told)
                                    for each in (recheck(one) if "form" in parts[0] else ())])
    result |= {name: told[0][name] for name in ("pack", "max_streams") if name in told[0]}
    result |= {"limits": [each.get("limits") for each in told],
               "gauges": [each.get("gauges") for each in told],
               "ledger": _joined_ledger([each.get("ledger", {}) for each in told])}
    if args.out is not None:
        whole = {**parts[0], "results": result, "date": max(part["date"] for part in parts),
                 "command": " && ".join(part["command"] for part in parts)}
        whole.pop("tree", None)  # of a part that was sealed: the whole is not
        with _writing(args.out):
            args.out.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    args.out = None
    return _give(args, kinds[0], result, None)


def _joined_ledger(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each moment of all parts; closed: the sum, where every part says it."""
    out: dict[str, Any] = {name: [part.get(name) for part in parts] for name in ("load", "peak", "idle")}
    if all("closed" in part for part in parts):
        out["closed"] = {name: sum(part["closed"][name] for part in parts) for name in ("entries", "engines")}
    return out


def _part(path: Path, kind: str) -> dict[str, Any]:
    """A part out of a file.  Raises CheckpointError."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        own = found["results"]["kind"].removesuffix(workload.PART)
        if own not in {"matrix": ("matrix",), "workload": ("workload", "scaled")}[kind]:
            raise ValueError(f"its kind is {own}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"no result of {kind}", file=path, because=str(error)) from error
    return found


def _key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError("the key file cannot be read", file=path, because=str(error)) from error
    if not key.isascii() or not key.isprintable():
        raise UsageError("the key file holds no single line of plain characters", file=path)
    return key


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _kinds(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if len(set(found)) != len(found) or not set(found) <= set(_KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(_KINDS)}, each once")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:  # nan is neither
        raise argparse.ArgumentTypeError(f"{text!r} is no share of 0..1")
    return value


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e5:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of requests a second")
    return rate


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
