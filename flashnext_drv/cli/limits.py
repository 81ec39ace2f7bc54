"""How much memory an engine may take, where experts lie, how graphs are kept: arguments and fields of Limits.

Called by the commands that open a pack, and by `plan`.  What must stay true: an argument that was not given
leaves the field at its default; none changes a byte of a result.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, Final

from ..model.layout import NGRAM_MODES, Limits

__all__ = ["add_limits", "memory_limits", "parse_size"]

_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]I?)?B?", re.IGNORECASE)
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def add_limits(parser: argparse.ArgumentParser, *, switch: bool = False) -> None:
    """Declare the arguments.  Sizes are bytes, or written as 16GB, 16GiB, 512MiB.

    switch: also --graph and --no-graph, of commands that run either way.
    """
    d = Limits()
    group = parser.add_argument_group("memory", "sizes: bytes, or as 16GB (10^9), 16GiB (2^30), 512MiB")
    group.add_argument("--expert-lines", type=_lines, metavar="N|all",
                       help="keep experts in host memory, N of each layer on the device too "
                       "(default all: every expert on the device, none in host memory)")
    group.add_argument("--expert-lines-most", type=int, default=0, metavar="N",
                       help="fill free device memory with up to N experts of each layer")
    group.add_argument("--expert-reserve", type=parse_size, metavar="SIZE",
                       help="device memory that stays free when experts are in host memory "
                       f"(default {d.expert_reserve_bytes >> 20}MiB)")
    group.add_argument("--server-reserve", type=parse_size, metavar="SIZE",
                       help="device memory that stays free for others (default 0)")
    group.add_argument("--uniform-lines", action="store_true",
                       help="every GPU takes the fewest lines that any has room for")
    group.add_argument("--ring-depth", type=int, metavar="N",
                       help=f"banks that the deep pass streams experts through (default {d.ring_depth})")
    group.add_argument("--ring-lines", type=int, metavar="N",
                       help=f"experts a bank holds (default {d.ring_lines})")
    group.add_argument("--no-ring-prefetch", action="store_true",
                       help="fill no bank before the routing that needs it is known")
    group.add_argument("--ngram", choices=NGRAM_MODES, default=d.ngram,
                       help="the n-gram table in pinned host memory, or read from the pack's mapped files")
    group.add_argument("--host-bytes", type=parse_size, metavar="SIZE", help="most host memory to take")
    group.add_argument("--host-reserve", type=parse_size, metavar="SIZE",
                       help="available host memory that stays free "
                       f"(default {d.host_reserve_bytes >> 30}GiB)")
    group.add_argument("--device-bytes", type=parse_size, metavar="SIZE",
                       help="count the device as this large (default: what is free)")
    graphs = parser.add_argument_group("graphs")
    if switch:
        graphs.add_argument("--graph", action=argparse.BooleanOptionalAction, default=d.graph,
                            help="run rounds and chunks by replaying captured graphs")
    graphs.add_argument("--graphs", type=int, metavar="N",
                        help=f"executables kept at most, least recently used go first (default {d.graphs})")
    graphs.add_argument("--graph-floor", type=parse_size, metavar="SIZE",
                        help="free device memory below which the oldest go "
                        "(default: half of what is reserved)")
    graphs.add_argument("--graph-after", type=int, metavar="N",
                        help=f"capture a round when it comes for the N-th time (default {d.graph_after})")
    graphs.add_argument("--graph-async", action="store_true",
                        help="instantiate on a thread while rounds run eagerly")
    graphs.add_argument("--steps-ahead", type=int, metavar="N",
                        help="most tokens drawn on the device before the host looks at them, 1..64 "
                        f"(default {d.steps_ahead})")


def memory_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of Limits that `add_limits`'s arguments give."""
    given = {
        "expert_lines": args.expert_lines,
        "expert_lines_most": args.expert_lines_most,
        "expert_reserve_bytes": args.expert_reserve,
        "server_reserve_bytes": args.server_reserve,
        "uniform_lines": args.uniform_lines,
        "ring_depth": args.ring_depth,
        "ring_lines": args.ring_lines,
        "ring_prefetch": not args.no_ring_prefetch,
        "ngram": args.ngram,
        "host_bytes": args.host_bytes,
        "host_reserve_bytes": args.host_reserve,
        "device_bytes": args.device_bytes,
        "graph": getattr(args, "graph", None),
        "graphs": args.graphs,
        "graph_floor_bytes": args.graph_floor,
        "graph_after": args.graph_after,
        "graph_async": args.graph_async,
        "steps_ahead": args.steps_ahead,
    }
    return {name: value for name, value in given.items() if value is not None}


def parse_size(text: str) -> int:
    """Bytes of "4096", "512MiB", "16GB", "1.5GiB": units of 1000, or of 1024 with an i.

    Raises argparse.ArgumentTypeError, which argparse turns into a usage error.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, or as 16GB, 16GiB, 512MiB")
    number, unit = found[1], (found[2] or "").lower()
    factor = int((1024 if unit.endswith("i") else 1000) ** _POWERS[unit[0]]) if unit else 1
    whole, _, part = number.partition(".")
    return int(whole) * factor + (int(part) * factor // 10 ** len(part) if part else 0)


def _lines(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of lines nor all") from None
