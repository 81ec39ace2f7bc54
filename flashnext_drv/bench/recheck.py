"""Results of `flashnext-drv bench` judged again from what they hold.

Called by tools/receipt.py and the tests over committed receipts.  What must stay true: nothing here trusts a
verdict: lengths, equality, overlap and the four figures are made again from rows and stamps, and a name that
its sizes do not allow is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from .evidence import full_hash, same_hash
from .timing import middle, stamps_of, times
from .workload import MODES, NAME, PART, WORKLOAD

__all__ = ["figures", "recheck"]


def recheck(results: Mapping[str, Any]) -> list[str]:
    """What does not hold, in words.  Results of other programs than bench have nothing to be made again."""
    if "kind" not in results or "verdict" not in results:
        return []
    verdict = results["verdict"]
    found = []
    if verdict.get("qualified") is not (not verdict.get("reasons")):
        found.append("the verdict and its reasons disagree")
    rows = results.get("replies", [])
    if verdict.get("qualified"):
        found += [f"{row['name']}: {each}" for row in rows for each in _row(row)]
        found += _equality(rows)
        found += _memory(results)
    if results["kind"].removesuffix(PART) in (NAME, "scaled"):
        found += _workload(results, rows)
    return found


def figures(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of a workload, by leg ("graph c=8"), by the client's clock, made from its stamps."""
    return {f"{leg['mode']} c={leg['streams']}":
            middle([times(0.0, stamps_of(at), results["sizes"]["prompt_tokens"])
                    for at in leg["stamps_us"]["client"]]) for leg in results["legs"]}


def _row(row: Mapping[str, Any]) -> list[str]:
    """A reply of a qualified result is whole, and its hashes are those of both sides."""
    found = []
    if row["new_tokens"] != row["asked_tokens"]:
        found.append(f"{row['new_tokens']} of {row['asked_tokens']} tokens")
    if row["problems"] or row["error"] or row["finish"] != "length":
        found.append("it had problems")
    if not same_hash(row["new_sha256"], row["client_new_sha256"]) or full_hash(row["token_sha256"]) is None:
        found.append("hashes are missing or differ")
    if row["cached_tokens"] is None:
        found.append("cached tokens are not told")
    return found


def _equality(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One hash a request, whatever leg it ran in."""
    known: dict[tuple[Any, Any], Any] = {}
    found = []
    for row in rows:
        if full_hash(row["prompt_sha256"]) is None:
            found.append(f"{row['name']}: no hash of its prompt")
        first = known.setdefault((row["prompt_sha256"], row["asked_tokens"]), row["new_sha256"])
        if not same_hash(first, row["new_sha256"]):
            found.append(f"{row['name']}: not the hash of the same request before")
    return found


def _memory(results: Mapping[str, Any]) -> list[str]:
    """The ledger was told four times, and nothing of it was left at the end."""
    ledger = results.get("ledger")
    if ledger is None:
        return ["no ledger"]
    found = [f"no ledger at {name}" for name in ("load", "peak", "idle", "closed") if name not in ledger]
    if not found and ledger["closed"].get("entries") != 0:
        found.append(f"the ledger was not empty when closed: {ledger['closed']}")
    return found


def _workload(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    sizes = results["sizes"]
    named = sizes == vars(WORKLOAD)
    kind, n_modes = results["kind"], len({leg["mode"] for leg in results["legs"]})
    found = [] if named is (kind.removesuffix(PART) == NAME) else [f"sizes {sizes} are called {kind!r}"]
    if not kind.endswith(PART) and n_modes < len(MODES):
        found.append(f"{n_modes} modes are called {kind!r}")
    if not results["verdict"]["qualified"]:
        return found
    legs = {(leg["mode"], leg["streams"]): leg for leg in results["legs"]}
    modes = [mode for mode in MODES if not kind.endswith(PART) or (mode, 1) in legs]
    wanted = [(mode, n) for mode in modes for n in (1, sizes["streams"])]
    found += [f"no leg {mode} c={n}" for mode, n in wanted if (mode, n) not in legs]
    lengths = (sizes["prompt_tokens"], sizes["new_tokens"])
    found += [f"{row['name']}: {row['prompt_tokens']} in, {row['new_tokens']} out" for row in rows
              if (row["prompt_tokens"], row["new_tokens"]) != lengths]
    found += [f"{row['name']}: {row['cached_tokens']} cached tokens" for row in rows
              if row["cached_tokens"] != 0]
    for (mode, n), leg in legs.items():
        name = f"{mode} c={n}"
        stamps = leg["stamps_us"]
        for side in ("client", "server"):
            if [len(at) for at in stamps[side]] != [sizes["new_tokens"]] * n:
                found.append(f"{name}: not one {side} stamp a token")
                break
            made = middle([times(0.0, stamps_of(at), sizes["prompt_tokens"]) for at in stamps[side]])
            found += [f"{name}: {side} {key} is {leg[side][key]}, its stamps give {value}"
                      for key, value in made.items() if not _close(value, leg[side][key])]
        else:
            found += _overlap(name, n, stamps)
        found += [f"{row['name']}: {_replays(row)} replays" for row in rows
                  if row["name"].startswith(f"{name}") and (_replays(row) > 0) is not (mode == "graph")]
    return found


def _overlap(name: str, n: int, stamps: Mapping[str, Any]) -> list[str]:
    if n < 2:
        return []
    at = [[begun + each for each in accumulate(gaps)]
          for begun, gaps in zip(stamps["server_begun"], stamps["server"], strict=True)]
    begin, end = max(one[0] for one in at), min(one[-1] for one in at)
    within = min(sum(begin < stamp < end for stamp in one) for one in at)
    return [] if begin < end and within > 0 else [f"{name}: its streams never decoded all at once"]


def _replays(row: Mapping[str, Any]) -> int:
    counters = row.get("counters")
    told = counters.get("graph_replays") if isinstance(counters, Mapping) else None
    return told if type(told) is int else -1


def _close(one: float | None, other: float | None) -> bool:
    """Equal but for stamps having been rounded to microseconds."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other)) + 2e-3
