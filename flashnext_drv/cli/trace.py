"""`trace PACK`: what runs when tokens are made: a Chrome trace, drawings of the captured graphs, and time by
kernel and part; `trace --diff A B`: what two captured graphs differ in.

The prompt and its new tokens are run twice on one engine: as `generate` runs them, with graphs, and then
without.  What must stay true: both runs draw the same tokens, and the command fails when they do not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import ContractError, UsageError
from .ids import parse_ids, read_ids
from .limits import add_limits, memory_limits
from .prompt import add_prefill, deep_limits, prefill_of
from .report import FAILED, GOOD, Progress, print_json

if TYPE_CHECKING:
    from ..bench.trace import Phase
    from ..engine.engine import Engine, Generation

__all__ = ["add_parser", "run"]

WITH_GRAPHS: Final = "with graphs"
EAGER: Final = "eager"


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser("trace", help="what runs: timeline, graphs, time by kernel; compare two graphs",
                            description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("pack", nargs="?", metavar="PACK",
                        help="folder of a pack, or synth:MODEL[?seed=N&...] made in memory "
                        "(FLASHNEXT_DRV_PACK)")
    parser.add_argument("--prompt-ids", metavar="LIST", help='token ids, such as "1,2,3"')
    parser.add_argument("--ids-file", metavar="F",
                        help="file with a JSON list or whitespace-separated token ids")
    parser.add_argument("--max-new", type=int, default=4, metavar="N", help="tokens to draw (default 4)")
    parser.add_argument("--out", metavar="FOLDER", help="folder for trace.json and graph-*.dot, .svg, .json")
    parser.add_argument("--diff", nargs=2, metavar=("A.json", "B.json"),
                        help="compare two graph listings; exit 1 when they differ")
    add_prefill(parser)
    add_limits(parser)
    parser.add_argument("--device", choices=("auto", "cuda", "sim"),
                        help="default: FLASHNEXT_DRV_DEVICE, else auto")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Trace, or compare.  Raises what the engine raises; UsageError on arguments that do not fit together or
    an output that cannot be written."""
    return _diff(args) if args.diff else _trace(args)


def _diff(args: argparse.Namespace) -> int:
    from ..bench.graph_view import diff_listings, read_listing

    given = [name for name in ("prompt_ids", "ids_file", "out") if getattr(args, name) is not None]
    if given:
        raise UsageError("--diff takes two listings and nothing else", given=", ".join(given))
    a, b = (read_listing(path) for path in args.diff)
    lines = diff_listings(a, b)
    if args.json:
        print_json({"a": args.diff[0], "b": args.diff[1], "differences": lines})
    else:
        for sign, path, listing in zip("-+", args.diff, (a, b), strict=True):
            print(f"{sign}{sign}{sign} {path}  {listing['name']}: {len(listing['nodes'])} nodes, "
                  f"{len(listing['edges'])} edges")
        print("\n".join(lines) if lines else "equal")
    return FAILED if lines else GOOD


def _trace(args: argparse.Namespace) -> int:
    from ..bench.trace import Recorder, chrome_trace, write_trace
    from ..drv import api
    from ..engine.engine import Engine, Limits

    ids = _ids(args)
    if args.max_new < 1:
        raise UsageError("--max-new is 1 or more", value=args.max_new)
    progress = Progress()
    prefill = prefill_of(args, progress)
    limits = Limits(context_tokens=len(ids) + args.max_new, **deep_limits(args), **memory_limits(args))
    out = _folder(args.out)
    api.ensure(args.device)
    made: list[Generation] = []
    with (
        progress,
        Recorder() as recorder,
        Engine.open(args.pack, limits, device=args.device, progress=progress.bytes_done) as engine,
    ):
        device = str(engine.facts)
        for label in (WITH_GRAPHS, EAGER):
            engine.rank.use_graphs = label == WITH_GRAPHS
            with recorder.phase(label, engine.rank):
                made.append(engine.generate(ids, max_new_tokens=args.max_new, stop_ids=(), prefill=prefill))
        graphs = _write_graphs(engine, out)
    facts = {"device": device, "pack": args.pack, "prompt_tokens": len(ids), "tokens": made[0].tokens,
             "counters": {label: dict(each.counters)
                          for label, each in zip((WITH_GRAPHS, EAGER), made, strict=True)}}
    write_trace(out / "trace.json", chrome_trace(recorder.phases, facts))
    if made[0].tokens != made[1].tokens:
        raise ContractError("the eager run drew other tokens than the one with graphs",
                            graph=made[0].tokens, eager=made[1].tokens, do="run flashnext-drv check")
    found = {**facts, "out": str(out), "graphs": graphs, **_tables(recorder.phases)}
    if args.json:
        print_json(found)
    else:
        _print(found)
    return GOOD


def _ids(args: argparse.Namespace) -> list[int]:
    if (args.prompt_ids is None) == (args.ids_file is None):
        raise UsageError("a trace needs a prompt", do="give --prompt-ids or --ids-file, one of them")
    return read_ids(args) if args.prompt_ids is None else parse_ids(args.prompt_ids, "--prompt-ids")


def _folder(text: str | None) -> Path:
    if not text:
        raise UsageError("a trace needs a folder to write into", do="give --out FOLDER")
    folder = Path(text)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError("--out is a folder in an existing one", value=text,
                         because=str(error.strerror)) from error
    return folder


def _write_graphs(engine: Engine, out: Path) -> list[dict[str, Any]]:
    """Listing, Graphviz text and drawing of every captured graph; names, sizes and the files' stem."""
    from ..bench.graph_view import dot_of, graph_listing, svg_of

    found: list[dict[str, Any]] = []
    deep = engine.rank.deep
    sets = (engine.rank.graphs, *(() if deep is None or deep.graphs is None else (deep.graphs,)))
    for graphs, identity in ((each, identity) for each in sets for identity in each.identities()):
        listing = graph_listing(graphs.graph(identity), identity, engine.rank.spans)
        stem = f"graph-{listing['name']}"
        texts = {"json": json.dumps(listing, indent=1) + "\n", "dot": dot_of(listing), "svg": svg_of(listing)}
        for suffix, text in texts.items():
            try:
                (out / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
            except OSError as error:
                raise UsageError("a graph cannot be written", file=str(out / f"{stem}.{suffix}"),
                                 because=str(error.strerror)) from error
        found.append({"name": listing["name"], "nodes": len(listing["nodes"]),
                      "edges": len(listing["edges"]), "files": stem})
    return found


def _tables(phases: list[Phase]) -> dict[str, Any]:
    from ..bench.trace import sums

    graph, eager = phases
    kernels = [work for work in eager.work if work.kind == "kernel"]
    return {
        "kernels": sums(kernels, lambda work: work.name),
        "parts": sums(kernels, lambda work: work.facts["part"] or "other"),
        "copies": sums([w for w in eager.work if w.kind in ("copy", "fill")], lambda work: work.name),
        "replays": sums([w for w in graph.work if w.kind == "replay"], lambda work: work.name),
        "host": {phase.label: _host(phase) for phase in phases},
    }


def _host(phase: Phase) -> dict[str, dict[str, float]]:
    """Count and host time of driver calls by kind."""
    found: dict[str, dict[str, float]] = {}
    for call in phase.calls:
        kind = found.setdefault(f"{call.kind} (captured)" if call.captured else call.kind,
                                {"n": 0, "ms": 0.0})
        kind["n"] += 1
        kind["ms"] += (call.end_us - call.start_us) / 1000
    return found


def _print(found: dict[str, Any]) -> None:
    print(f"device   {found['device']}")
    print(f"pack     {found['pack']}")
    print(f"tokens   {' '.join(map(str, found['tokens']))}  (the same with graphs and eager)")
    print(f"out      {found['out']}  trace.json")
    for graph in found["graphs"]:
        print(f"graph    {graph['files']}.dot, .svg, .json  {graph['nodes']} nodes, {graph['edges']} edges")
    if not found["graphs"]:
        print("graph    none was captured")
    titles = {"replays": "replays, device time", "parts": "parts of the model, eager, device time",
              "kernels": "kernels, eager, device time", "copies": "copies and fills, eager, device time"}
    for name, title in titles.items():
        if found[name]:
            print(f"\n{title:<40} {'n':>7} {'ms':>10} {'us each':>10} {'share':>7}")
            for row in found[name]:
                print(f"{row['name']:<40} {row['n']:>7} {row['ms']:>10.3f} {row['us_each']:>10.2f} "
                      f"{row['share']:>7.1%}")
    print(f"\n{'driver calls, host time':<40} {'n':>7} {'ms':>10}")
    for label, kinds in found["host"].items():
        for kind, row in sorted(kinds.items(), key=lambda item: -item[1]["ms"]):
            print(f"{label + ': ' + kind:<40} {row['n']:>7} {row['ms']:>10.3f}")
