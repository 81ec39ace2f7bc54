#!/usr/bin/env python3
"""Prompts by every path against serial decode: logits bytes, all state bytes and the greedy tokens after it.

    python tools/prompt_equality.py --pack synth:quarter --tokens 4099,8192 \\
        --chunks 256,1024,2048,4096,8192,16384 --cuts 2 --rows 600 --out receipt.json
    python tools/prompt_equality.py --pack 'synth:full?ngram_rows=4000000' --tokens 16384 \\
        --chunks 4096,16384 --rows 1 --serial-rows 16 --serial-check 256

Of each prompt length one serial run is made, one row a launch through graphs; each case then runs the prompt
by the deep pass on a new sequence.  --rows: logits compared, spread over the prompt, its last row always with
them; --rows-chunks: only for these chunk sizes (the others compare the last row).  --serial-rows N: the
serial run takes N rows a launch and is itself compared with one row a launch on the first --serial-check
tokens.  --new-tokens: greedy ones after each.  Prints a line a case; exit 1 when one differs or did not go by
the deep pass.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_decode import prompt_ids

from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.prefill import Prompt, run_prompts
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence


@dataclass
class Left:
    """What a prompt left.  rows: SHA-256 of a row's logits by its position.  state: SHA-256 by array.
    tokens: drawn greedily after it."""

    rows: dict[int, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def differs(self, other: Left) -> list[str]:
        """What is not the same, in words; rows that only one side kept are not compared."""
        rows = [i for i in self.rows.keys() & other.rows.keys() if self.rows[i] != other.rows[i]]
        found = [f"{len(rows)} rows of logits, first {min(rows)}"] if rows else []
        names = self.state.keys() | other.state.keys()
        arrays = [name for name in sorted(names) if self.state.get(name) != other.state.get(name)]
        found += [f"{len(arrays)} state arrays, first {arrays[0]}"] if arrays else []
        return found + (["tokens"] if self.tokens != other.tokens else [])

    def state_sha256(self) -> str:
        return _of_lines(self.state)

    def summary(self) -> dict[str, Any]:
        return {"n_rows": len(self.rows), "rows_sha256": _of_lines(self.rows),
                "state_sha256": self.state_sha256(), "tokens": self.tokens, "seconds": self.seconds}


def _of_lines(hashes: dict[Any, str]) -> str:
    return hashlib.sha256("".join(f"{i} {h}\n" for i, h in sorted(hashes.items())).encode()).hexdigest()


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def spread_rows(n_tokens: int, count: int) -> set[int]:
    """About `count` positions spread over the prompt: neighbours of tile and page borders, and the last."""
    if count <= 1:
        return {n_tokens - 1}
    rows = {round(i * (n_tokens - 1) / (count - 1)) for i in range(count)}
    edges = {edge + d for edge in (64, 128, 256, 512, 1024, 2048, 4096, 8192) for d in (-2, -1, 0, 1)}
    return rows | {row for row in edges if row < n_tokens} | {0, n_tokens - 1}


def finish(engine: Engine, sequence: Sequence, token: int, left: Left, n_new: int) -> Left:
    """State as it is, then the greedy tokens."""
    left.state = {name: digest(array) for name, array in engine.export_state(sequence).items()}
    left.tokens = [token]
    while len(left.tokens) < n_new:
        sequence.extend(left.tokens[-1:])
        left.tokens.append(run_round(engine.rank, [Window(sequence, draw=True)]).tokens[0])
    return left


def serial(engine: Engine, ids: list[int], chosen: set[int], rows: int, n_new: int) -> Left:
    """By decode, `rows` rows a launch; the head runs for launches that hold a chosen row."""
    left = Left()
    started, token = time.perf_counter(), -1
    with engine.sequence() as sequence:
        sequence.extend(ids)
        while sequence.n_pending:
            first = sequence.n_done
            n = min(rows, sequence.n_pending)
            kept = [i for i in range(first, first + n) if i in chosen]
            window = Window(sequence, n, draw=n == sequence.n_pending, logits=bool(kept))
            result = run_round(engine.rank, [window])
            token = result.tokens[0]
            if result.logits is not None:
                left.rows |= {i: digest(result.logits[i - first]) for i in kept}
        engine.rank.stream.synchronize()
        left.seconds = time.perf_counter() - started
        return finish(engine, sequence, token, left, n_new)


def prompted(
    engine: Engine, ids: list[int], chosen: set[int], prefill: Prefill, cuts: Iterable[int], n_new: int
) -> Left:
    """By run_prompts, the prompt given in pieces that end at `cuts`."""
    left = Left()
    started, token = time.perf_counter(), -1

    def keep(i_id: int, block: np.ndarray) -> None:
        left.rows.update({i: digest(block[i - i_id]) for i in range(i_id, i_id + len(block)) if i in chosen})

    with engine.sequence() as sequence:
        for end in sorted({*cuts, len(ids)}):
            sequence.extend(ids[len(sequence.ids) : end])
            asked = Prompt(sequence, draw=True, keep_from=min(chosen), keep=keep)
            run_prompts(engine.rank, [asked], prefill, engine.prompts)
            token = asked.token
        left.seconds = time.perf_counter() - started
        return finish(engine, sequence, token, left, n_new)


def random_cuts(rng: random.Random, n_tokens: int) -> list[int]:
    """Up to 11 places in 1 .. n_tokens - 1, half of them near borders of pages, tiles and chunks."""
    near = [b + d for b in (1, 64, 128, 512, 1024, 2048, 4096, 8192) for d in (-1, 0, 1)]
    places = [b for b in near if 0 < b < n_tokens]
    count = rng.randint(2, 11)
    drawn = [rng.choice(places) if places and i % 2 else rng.randrange(1, n_tokens) for i in range(count)]
    return sorted(set(drawn))


@dataclass
class Verdict:
    """One line of the result."""

    tokens: int
    how: str
    differs: list[str]
    deep_rows: int
    rows_compared: int
    prompt_s: float

    @property
    def ok(self) -> bool:
        return not self.differs

    def line(self, name: str) -> str:
        what = "; ".join(self.differs) or "equal"
        return (f"{'PASS' if self.ok else 'FAIL'} {name} {self.tokens} tokens, {self.how}: {what}; logits of "
                f"{self.rows_compared} rows, deep pass {self.deep_rows} rows, {self.prompt_s:.2f} s")


def one_case(engine: Engine, oracle: Left, ids: list[int], chosen: set[int], how: str, prefill: Prefill,
             cuts: Iterable[int]) -> Verdict:
    before = vars(engine.prompts).copy()
    found = prompted(engine, ids, chosen, prefill, cuts, len(oracle.tokens))
    made = {name: value - before[name] for name, value in vars(engine.prompts).items()}
    differs = oracle.differs(found)
    if missing := chosen - found.rows.keys():
        differs.append(f"{len(missing)} rows not handed over")
    if not made["deep_rows"] or made["deep_refusals"]:
        differs.append(f"not by the deep pass: {engine.rank.deep_refused or made}")
    return Verdict(len(ids), how, differs, made["deep_rows"], len(chosen & oracle.rows.keys()), found.seconds)


def compare(engine: Engine, args: argparse.Namespace, n_tokens: int, chunks: list[int]) -> dict[str, Any]:
    """One serial run of n_tokens, then every case; prints as it goes."""
    ids = prompt_ids(n_tokens, engine.config.vocab)
    ids = [engine.config.eos_id if i % 509 == 5 else token for i, token in enumerate(ids)]
    chosen, last = spread_rows(n_tokens, args.rows), {n_tokens - 1}
    name = args.pack.rsplit("/", 1)[-1]
    verdicts: list[Verdict] = []
    if args.serial_rows > 1:
        n_check = min(args.serial_check, n_tokens)
        ones, many = (serial(engine, ids[:n_check], spread_rows(n_check, args.rows), rows, args.new_tokens)
                      for rows in (1, args.serial_rows))
        how = f"{args.serial_rows} rows a launch against one"
        verdicts.append(Verdict(n_check, how, ones.differs(many), 0, len(ones.rows), many.seconds))
        print(verdicts[-1].line(name), flush=True)
    oracle = serial(engine, ids, chosen, args.serial_rows, args.new_tokens)
    print(f"serial {name} {n_tokens} tokens, {args.serial_rows} rows a launch: {oracle.seconds:.1f} s, state "
          f"{oracle.state_sha256()[:16]}, tokens {oracle.tokens[:4]}...", flush=True)
    cases: list[tuple[str, set[int], Prefill, list[int]]] = []
    for chunk in chunks:
        rows = chosen if not args.rows_chunks or str(chunk) in args.rows_chunks.split(",") else last
        cases.append((f"chunk {chunk}", rows, Prefill(chunk=chunk, deep_rows=args.deep_rows), []))
    for i in range(args.cuts):
        rng = random.Random(args.seed + i)
        cuts = random_cuts(rng, n_tokens)
        chunk, deep_rows = rng.choice(chunks), rng.choice((1, args.deep_rows))
        how = f"seed {args.seed + i} chunk {chunk} deep_rows {deep_rows} cuts {','.join(map(str, cuts))}"
        rows = last if args.rows_chunks else chosen
        cases.append((how, rows, Prefill(chunk=chunk, deep_rows=deep_rows), cuts))
    for how, rows, prefill, cuts in cases:
        verdicts.append(one_case(engine, oracle, ids, rows, how, prefill, cuts))
        print(verdicts[-1].line(name), flush=True)
    return {"tokens": n_tokens, "serial_rows": args.serial_rows, "serial": oracle.summary(),
            "cases": [asdict(v) | {"ok": v.ok} for v in verdicts]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", default="", help="folder or synth:<model>; by default of the device's size")
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--tokens", default="4099,8192", help="prompt lengths, comma list")
    parser.add_argument("--chunks", default="256,1024,2048,4096,8192,16384", help="chunk sizes, comma list")
    parser.add_argument("--cuts", type=int, default=2, help="cases with random cuts")
    parser.add_argument("--seed", type=int, default=1, help="of the random cuts")
    parser.add_argument("--rows", type=int, default=600, help="rows whose logits are compared; 1: the last")
    parser.add_argument("--rows-chunks", default="", help="chunk sizes that compare --rows; '': all")
    parser.add_argument("--serial-rows", type=int, default=1, help="rows a launch of the serial run, 1..16")
    parser.add_argument("--serial-check", type=int, default=256, help="tokens of its check")
    parser.add_argument("--deep-rows", type=int, default=64, help="rows from which a segment goes deep")
    parser.add_argument("--new-tokens", type=int, default=24, help="drawn after each prompt")
    parser.add_argument("--out", help="write a receipt here")
    args = parser.parse_args()
    args.pack = args.pack or ("synth:tiny" if args.device == "sim" else "synth:quarter")
    counts, chunks = ([int(n) for n in text.split(",")] for text in (args.tokens, args.chunks))
    limits = Limits(context_tokens=max(counts) + args.new_tokens, rows=16, prompt_rows=16, chunk=max(chunks),
                    deep_rows=args.deep_rows)
    with Engine.open(args.pack, limits, device=args.device) as engine:
        print(f"device {engine.facts}; opened {args.pack} in {engine.open_seconds:.1f} s", file=sys.stderr)
        runs: list[dict[str, Any]] = []
        for n_tokens in counts:
            runs.append(compare(engine, args, n_tokens, chunks))
            if args.out:
                write_receipt(args.out, engine.facts, {"pack": args.pack.rsplit("/", 1)[-1], "runs": runs})
        if engine.rank.deep is not None:
            print(f"deep buffers hold {engine.rank.deep.layout.rows} rows", file=sys.stderr)
    wrong = sum(not case["ok"] for run in runs for case in run["cases"])
    n_cases = sum(len(run["cases"]) for run in runs)
    print(f"{'FAIL' if wrong else 'PASS'} {n_cases} cases, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
