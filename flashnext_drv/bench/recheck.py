"""Results of `flashnext-drv bench` judged again from what they hold.

Called by tools/receipt.py and the tests over committed receipts.  What must stay true: nothing here trusts a
verdict: lengths, equality, counts, overlap and all figures that rows and stamps give are made again, a name
that its sizes do not allow is a fault, and so is a result that lacks what would be judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from .evidence import full_hash, rounds_problems, same_hash
from .interrupt import FEWEST
from .matrix import MATRIX, leg_names, plain
from .timing import Times, middle, stamps_of, times
from .workload import MODES, NAME, PART, WORKLOAD, row_names

__all__ = ["figures", "recheck"]

_KINDS: Final = frozenset({"decode", "cache", "concurrent", "cold", "load", "interrupt", "matrix",
                           "matrix-part", NAME, NAME + PART, "scaled", "scaled" + PART})
_MARKS: Final = ("kind", "verdict", "replies")  # one of them makes it a result of bench
Rows = Sequence[Mapping[str, Any]]


def recheck(results: Mapping[str, Any]) -> list[str]:
    """What does not hold, in words.  Results of other programs than bench have nothing to be made again."""
    if not any(name in results for name in _MARKS):
        return []
    try:
        return _judged(results)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return [f"it is not formed as its kind is: {type(error).__name__}: {error}"]


def figures(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of a workload, by leg ("graph c=8"), by the client's clock, made from its stamps."""
    return {f"{leg['mode']} c={leg['streams']}":
            middle([times(0.0, stamps_of(at), results["sizes"]["prompt_tokens"])
                    for at in leg["stamps_us"]["client"]]) for leg in results["legs"]}


def _judged(results: Mapping[str, Any]) -> list[str]:
    kind, verdict, rows = (results.get(name) for name in _MARKS)
    if kind not in _KINDS:
        return [f"kind {kind!r} is unknown"]
    if not isinstance(verdict, Mapping) or not isinstance(rows, list):
        return ["no verdict" if not isinstance(verdict, Mapping) else "no replies"]
    found = []
    if verdict.get("qualified") is not (verdict.get("reasons") == []):
        found.append("the verdict and its reasons disagree")
    if verdict.get("qualified"):
        found += _memory(results) + (_load(results) if kind == "load" else _replies(results, rows))
    if kind.removesuffix(PART) in (NAME, "scaled"):
        found += _workload(results, rows)
    if kind.removesuffix(PART) == "matrix":
        found += _matrix(results)
    return found


def _replies(results: Mapping[str, Any], rows: Rows) -> list[str]:
    """Of all kinds that keep their replies."""
    if not rows:
        return ["no replies"]
    found = [f"{row['name']}: {each}" for row in rows for each in _row(row)]
    by_name = {row["name"]: row for row in rows}
    found += _equality(rows)
    found += _counts(results["checks"], rows)
    found += _figures(results, by_name)
    if results["kind"] == "interrupt":
        stops, exact = results["interrupted"], results["recoveries_exact"]
        whole = [one for one in stops if one["cut"] and one["seen"] and one["exact_so_far"]]
        if min(len(whole), exact) < FEWEST or len(whole) < len(stops) or exact != results["checks"]["equal"]:
            found.append(f"{len(whole)} of {len(stops)} interruptions and {exact} recoveries are in order")
    waves = [*results.get("waves", ()), *(leg["wave"] for leg in results.get("legs", ()) if "wave" in leg)]
    cells = [cell for leg in results.get("legs", ()) for cell in leg.get("cells", ()) if "rows" in cell]
    for wave in (*waves, *cells):
        found += [f"{wave['name']}: {each}" for each in _wave(wave, by_name, "state" not in wave)]
    return found


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


def _equality(rows: Rows) -> list[str]:
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


def _counts(checks: Mapping[str, Any], rows: Rows) -> list[str]:
    """What was counted of the rows."""
    again = len(rows) - len({(row["prompt_sha256"], row["asked_tokens"]) for row in rows})
    wanted = {"replies": len(rows), "failed": 0, "compared": again, "equal": again}
    return [f"checks say {checks.get(name)} {name}, the replies give {n}" for name, n in wanted.items()
            if checks.get(name) != n]


def _figures(results: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Figures beside the replies that they were taken from."""
    found = []
    for name, told in results.get("medians", {}).items():
        made = middle([Times(**by_name[f"{name} {k}"]["client"]) for k in range(results["repeats"])])
        found += _differ(f"{name}:", told, made, "its replies")
    points = results.get("points", ())
    if results["kind"] == "cold":
        for name, told in points.items():
            found += _differ(f"{name}:", told, by_name[name]["client"], "its reply")
    else:
        found += [f"{point['name']}: {point['cached_tokens']} cached tokens, its reply says otherwise"
                  for point in points if point["cached_tokens"] != by_name[point["name"]]["cached_tokens"]]
    for cell in (cell for leg in results.get("legs", ()) for cell in leg.get("cells", ())):
        if "rows" not in cell:
            found += _differ(f"{cell['name']}:", cell, by_name[cell["name"]]["client"], "its reply")
    return found


def _wave(wave: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]], decoding: bool) -> list[str]:
    """So many distinct requests were asked for at once, and, where that is claimed, decoded at once."""
    n, rows = wave["streams"], [by_name[name] for name in wave["rows"] if name in by_name]
    found = []
    if len({row["prompt_sha256"] for row in rows}) != n or len(rows) != n:
        found.append(f"not {n} distinct requests")
    if n < 2 or not decoding:
        return found
    live = [row["live"][1] for row in rows]
    if any(type(most) is not int or most < n for most in live):
        found.append(f"most sequences in one round: {live}, {n} wanted")
    if wave["overlap"]["problems"] or not wave["overlap"]["fewest_tokens"] > 0:
        found.append("its overlap is no proof")
    return found


def _load(results: Mapping[str, Any]) -> list[str]:
    """A load keeps counts alone."""
    load, checks, given_up = results["load"], results["checks"], results["given_up"]
    n_whole = results["latency"]["replies"]
    wanted = {"failed replies": (checks["failed"], 0), "equal replies": (checks["equal"], checks["compared"]),
              "given up ones that are wrong": (given_up["wrong"], 0),
              "requests": (given_up["asked"] + n_whole, load["requests"])}
    found = [f"{told} {name} where {n} are wanted" for name, (told, n) in wanted.items() if told != n]
    if not 0 < n_whole <= checks["compared"] or checks["compared"] + load["kinds"] != checks["replies"]:
        found.append(f"{checks['compared']} of {checks['replies']} replies were compared")
    if results["ledger_drift"]:
        found.append("the ledger had changed")
    return found


def _memory(results: Mapping[str, Any]) -> list[str]:
    """The ledger was told four times, nothing of it was left at the end, and there was one to look at."""
    ledger = results.get("ledger")
    if ledger is None:
        return ["no ledger"]
    found = [f"no ledger at {name}" for name in ("load", "peak", "idle", "closed")
             if ledger.get(name) is None or (isinstance(ledger[name], list) and None in ledger[name])]
    if not found:
        closed = ledger["closed"]
        if closed.get("entries") != 0:
            found.append(f"the ledger was not empty when closed: {closed}")
        if type(closed.get("engines")) is not int or closed["engines"] < 1:
            found.append("no engine's ledger was seen at its end")
    return found


def _matrix(results: Mapping[str, Any]) -> list[str]:
    """Only a run of all legs and sizes is called a matrix."""
    cells = results.get("cells")
    legs = [(leg["lines"], leg["mode"]) for leg in results["legs"]]
    found = []
    if results["kind"] == "matrix":
        if cells != plain(MATRIX):
            found.append(f"cells {cells} are called 'matrix'")
        if sorted(legs) != sorted(leg_names(MATRIX)):
            found.append(f"legs {legs} are called 'matrix'")
    if results["verdict"].get("qualified") and not (legs and all(leg["cells"] for leg in results["legs"])):
        found.append("a leg or all of them are missing")
    return found


def _workload(results: Mapping[str, Any], rows: Rows) -> list[str]:
    sizes = results["sizes"]
    named = sizes == vars(WORKLOAD)
    kind, there = results["kind"], {leg["mode"] for leg in results["legs"]}
    found = [] if named is (kind.removesuffix(PART) == NAME) else [f"sizes {sizes} are called {kind!r}"]
    if not kind.endswith(PART) and len(there) < len(MODES):
        found.append(f"{len(there)} modes are called {kind!r}")
    if not results["verdict"]["qualified"]:
        return found
    legs = [(leg["mode"], leg["streams"]) for leg in results["legs"]]
    modes = [mode for mode in MODES if not kind.endswith(PART) or mode in there]
    wanted = [(mode, n) for mode in modes for n in (1, sizes["streams"])]
    found += [f"no leg {mode} c={n}" for mode, n in wanted if (mode, n) not in legs]
    if not wanted or sorted(legs) != sorted(wanted):
        found.append(f"legs {legs} where {wanted} are wanted")
    names = [name for mode in modes for name in row_names(mode, sizes["streams"])]
    if sorted(row["name"] for row in rows) != sorted(names):
        found.append("its replies are not those of its legs")
    lengths = (sizes["prompt_tokens"], sizes["new_tokens"])
    for row in rows:
        if (row["prompt_tokens"], row["new_tokens"]) != lengths:
            found.append(f"{row['name']}: {row['prompt_tokens']} in, {row['new_tokens']} out")
        if row["cached_tokens"] != 0:
            found.append(f"{row['name']}: {row['cached_tokens']} cached tokens")
        rounds = rounds_problems(row["counters"], sizes["new_tokens"], row["name"].startswith("graph"))
        found += [f"{row['name']}: {each}" for each in rounds]
    for leg in results["legs"]:
        found += [f"{leg['mode']} c={leg['streams']}: {each}" for each in _leg(leg, sizes)]
    return found


def _leg(leg: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    """Figures and overlap from the stamps."""
    n, stamps, found = leg["streams"], leg["stamps_us"], []
    for side in ("client", "server"):
        if [len(at) for at in stamps[side]] != [sizes["new_tokens"]] * n:
            return [f"not one {side} stamp a token"]
        if not all(type(gap) is int and gap >= 0 for at in stamps[side] for gap in at):
            return [f"its {side} stamps are no rising microseconds"]
        made = [times(0.0, stamps_of(at), sizes["prompt_tokens"]) for at in stamps[side]]
        found += _differ(side, leg[side], middle(made), "its stamps")
        if side == "client":
            found += [each for told, one in zip(leg["each_client"], made, strict=True)
                      for each in _differ("a stream's", told, one.as_dict(), "its stamps")]
    if n < 2:
        return found
    at = [[begun + each for each in accumulate(gaps)]
          for begun, gaps in zip(stamps["server_begun"], stamps["server"], strict=True)]
    begin, end = max(one[0] for one in at), min(one[-1] for one in at)
    within = min(sum(begin < stamp < end for stamp in one) for one in at)
    if "wave" not in leg:
        found.append("its streams are not told together")
    return found if begin < end and within > 0 else [*found, "its streams never decoded all at once"]


def _differ(name: str, told: Mapping[str, Any], made: Mapping[str, Any], source: str) -> list[str]:
    return [f"{name} {key} is {told[key]}, {source} give {value}" for key, value in made.items()
            if not _close(key, value, told[key])]


def _close(key: str, one: float | None, other: float | None) -> bool:
    """Equal but for stamps having been rounded to microseconds."""
    if one is None or other is None:
        return one is other
    unit = {"itl_mean_ms": 1e-3, "itl_p50_ms": 1e-3, "itl_p95_ms": 1e-3, "ttft_s": 1e-6, "total_s": 1e-6}
    return abs(one - other) <= 2 * unit.get(key, 1e-5 * abs(one))
