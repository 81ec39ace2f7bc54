"""`plan PACK`: what an engine would take for given limits, before anything is loaded.

Reads headers only and needs no GPU.  Prints bytes by owner on each tier, device lines of experts, pages, rows
of the deep pass, whether it all fits, and if not, the nearest setting that does.  Exit 0 when it fits, else
4.  What must stay true: the numbers are those of `Engine.memory()` after open with the same limits and as
much free memory.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import CapacityError, bytes_text
from .limits import add_limits, memory_limits, parse_size
from .prompt import add_prefill, deep_limits
from .report import CAPACITY, GOOD, print_json

if TYPE_CHECKING:
    from ..host_memory import HostMemory
    from ..model.layout import Limits
    from ..model.plan import Plan

__all__ = ["add_parser", "run"]


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser("plan", help="memory by owner before loading, and what fits",
                            description=__doc__.splitlines()[0])
    parser.add_argument("pack", nargs="?", metavar="PACK",
                        help="folder of a pack, or synth:MODEL[?seed=N&...] (FLASHNEXT_DRV_PACK)")
    parser.add_argument("--context", type=int, default=4096, metavar="N",
                        help="tokens of the longest sequence (default 4096)")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="sequences live at one time")
    parser.add_argument("--rows", type=int, metavar="N",
                        help="rows of one launch, 1..16 (default: --prompt-rows)")
    add_prefill(parser)
    add_limits(parser)
    parser.add_argument("--device-memory", type=parse_size, metavar="SIZE",
                        help="free memory of the device (default: not judged unless --device-bytes is given)")
    parser.add_argument("--host-memory", type=parse_size, metavar="SIZE",
                        help="available host memory (default: what this machine reports)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan and print.  Raises UsageError, CheckpointError; a plan that does not fit is a result, not an
    error."""
    from ..engine.plan import Sizer
    from ..host_memory import host_memory
    from ..model.layout import Layout, Limits
    from ..model.source import open_pack

    given = deep_limits(args)
    if args.rows is not None:
        given |= {"rows": args.rows, "prompt_rows": min(args.prompt_rows, args.rows)}
    limits = Limits(context_tokens=args.context, sequences=args.sequences, **given, **memory_limits(args))
    pack = open_pack(args.pack)
    pack.check()
    layout, sizer = Layout(pack.config, limits), Sizer(pack)
    host = host_memory()
    available = host.available_bytes if args.host_memory is None else args.host_memory
    free = args.device_memory
    if free is None and limits.device_bytes:
        free = limits.device_bytes + limits.reserve_bytes
    found: dict[str, Any] = {"pack": args.pack, "experts": pack.config.n_experts, "fits": True, "problem": "",
                             "nearest": [], "deep_refused": ""}
    try:
        seating = sizer.seat(layout, free, available)
        planned, found["deep_refused"] = seating.plan, seating.refused
    except CapacityError as error:
        planned = sizer.plan(layout)
        found |= {"fits": False, "problem": str(error), "nearest": sizer.nearest(limits, free, available)}
    found |= _numbers(planned, limits, free, available)
    if args.json:
        print_json(found | {"limits": asdict(limits), "host_memory": asdict(host)})
    else:
        _print(found, planned, None if args.host_memory is not None else host)
    return GOOD if found["fits"] else CAPACITY


def _numbers(planned: Plan, limits: Limits, free: int | None, available: int | None) -> dict[str, Any]:
    from ..model.plan import device_allowed, device_reserves, host_allowed

    banks, bank_lines = planned.ring
    reserves = device_reserves(limits)
    return {
        "bytes": {
            "device": dict(planned.device),
            "pinned": dict(planned.pinned),
            "host": dict(planned.host),
            "opening": dict(planned.opening),
        },
        "device": {
            "needed_bytes": planned.device_bytes,
            "allowed_bytes": None if free is None else device_allowed(free, limits),
            "reserved_bytes": reserves,
            "least_free_bytes": planned.device_bytes + reserves + limits.reserve_bytes,
        },
        "host": {"needed_bytes": planned.host_bytes, "allowed_bytes": host_allowed(available, limits)},
        "lines": {
            "requested": planned.lines_requested,
            "observed": planned.lines,
            "line_bytes": planned.line_bytes,
            "offloaded": limits.expert_lines is not None,
        },
        "pages": planned.pages,
        "deep_rows": planned.deep_rows,
        "ring": {"banks": banks, "lines": bank_lines},
    }


def _print(found: dict[str, Any], planned: Plan, host: HostMemory | None) -> None:
    print(f"pack     {found['pack']}")
    print(f"{'owner':<18} {'tier':<8} {'bytes':>15}")
    for tier in ("device", "pinned", "host", "opening"):
        for owner, size in sorted(found["bytes"][tier].items(), key=lambda item: -item[1]):
            print(f"{owner:<18} {tier:<8} {size:>15}  {bytes_text(size)}")
    device, lines, ring = found["device"], found["lines"], found["ring"]
    reserved = f", {bytes_text(device['reserved_bytes'])} reserved" if device["reserved_bytes"] else ""
    if device["allowed_bytes"] is None:
        judged = f"not judged; enough with {bytes_text(device['least_free_bytes'])} free (--device-memory)"
    else:
        judged = _judged(device) + reserved
    print(f"device   {bytes_text(device['needed_bytes'])}: {judged}")
    print(f"host     {bytes_text(found['host']['needed_bytes'])}: {_judged(found['host'])}"
          + (f"; {host}" if host is not None else ""))
    if lines["offloaded"]:
        print(f"lines    {lines['requested']} of {found['experts']} experts a layer requested, "
              f"{lines['observed']} observed; one more in every layer takes {bytes_text(planned.line_bytes)}")
    else:
        print(f"lines    all {found['experts']} experts of every layer on the device")
    print(f"pages    {planned.pages} of 64 tokens")
    if planned.deep_rows:
        streamed = f", ring of {ring['banks']} banks of {ring['lines']} experts" if ring["banks"] else ""
        print(f"deep     chunks of {planned.deep_rows} rows{streamed}")
    elif found["fits"]:
        print(f"no deep  {found['deep_refused'] or 'made at the first prompt that wants it'}")
    if found["fits"]:
        print("fits     yes" if device["allowed_bytes"] is not None else "fits     host memory")
    else:
        print(f"fits     no: {found['problem']}")
        for setting in found["nearest"]:
            print(f"nearest  {setting}")


def _judged(tier: dict[str, Any]) -> str:
    allowed, needed = tier["allowed_bytes"], tier["needed_bytes"]
    if allowed is None:
        return "not judged"
    if needed > allowed:
        return f"{bytes_text(needed - allowed)} more than the {bytes_text(max(allowed, 0))} allowed"
    return f"{bytes_text(allowed - needed)} left of the {bytes_text(allowed)} allowed"
