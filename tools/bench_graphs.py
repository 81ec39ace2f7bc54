#!/usr/bin/env python3
"""Graphs on the full-size pack, on one opened engine: eager bytes against replayed ones on every path, with
the exact number of replays, and what graphs make of decode.

    python tools/bench_graphs.py --model full --out receipts

    rows     decode rounds of 1, 2, 4, 8 and 16 sequences, eager and by graph: logits of --rows rounds, tokens
    abab     two prompts, --tokens tokens each, eager, graph, eager, graph; replays counted by host and device
    prompt   --prompt tokens in chunks through two eager and three graph runs: last logits, 24 decode rows,
             and the replays of layer graphs in each pass
    single   decode of one stream behind --context tokens: several tokens a visit; the host's own time a token
    eight    eight streams together against each alone; the floor at the distinct experts of this very run
    cycles   --cycles engines with graphs opened and closed; the driver's free memory before and after

The floor of single and eight is the larger of bytes / --bytes-per-s and trellis weights / the rate at which
linear_gemv decodes large matrices here, measured first (the best of three shapes; or --weights-per-s).

Writes a receipt a part as soon as it is done; exit 1 when a part fails.  Runs on a GPU; with --device sim and
a small model it shows that the program works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_decode import prompt_ids
from bench_linear import REAL, TINY, Bench, build_linear, measure

from flashnext_drv.bench.floor import decode_floor
from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.drv.memory import copy_to_host
from flashnext_drv.drv.module import Launch
from flashnext_drv.engine.decode import Ahead, run_ahead
from flashnext_drv.engine.deep import DEEP
from flashnext_drv.engine.engine import Engine, Limits, Prefill, token_sha256
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.kernels.tables import ROUTE
from flashnext_drv.model.synth import SynthPack

BUCKETS = (1, 2, 4, 8, 16)
PARTS = ("prompt", "rows", "abab", "single", "eight", "cycles")  # prompt first: no chunk has been seen then
Found = tuple[dict[str, Any], bool]


class Suite:
    """The parts on one engine.  Each gives its results and whether it passed."""

    def __init__(self, engine: Engine, pack: SynthPack, args: argparse.Namespace) -> None:
        self.engine, self.pack, self.args = engine, pack, args
        self.vocab = engine.config.vocab

    @contextmanager
    def graphs(self, used: bool) -> Iterator[None]:
        self.engine.rank.use_graphs = used
        try:
            yield
        finally:
            self.engine.rank.use_graphs = True

    def begun(self, stack: ExitStack, n: int, context: int, sampled: bool = False) -> list[Sequence]:
        """n sequences of different prompts, each with one pending token."""
        live = [stack.enter_context(self.engine.sequence()) for _ in range(n)]
        for i, sequence in enumerate(live):
            sequence.extend(ids_of(i, context, self.vocab))
        for sequence, token in zip(live, self.engine.prompt(live, draw=True), strict=True):
            sequence.extend([token])
        return live

    def rows(self) -> Found:
        found: dict[str, Any] = {}
        for bucket in (each for each in BUCKETS if each <= self.engine.limits.sequences):
            runs = []
            for used in (False, True):
                with self.graphs(used), ExitStack() as stack:
                    live = self.begun(stack, bucket, self.args.short + 3 * bucket)
                    logits, tokens = [], []
                    for _ in range(self.args.rows):
                        made = run_round(self.engine.rank, [Window(s, draw=True, logits=True) for s in live])
                        assert made.logits is not None
                        logits.append(made.logits.tobytes())
                        tokens.append(made.tokens)
                        for sequence, token in zip(live, made.tokens, strict=True):
                            sequence.extend([token])
                    runs.append((logits, tokens))
            same = [a == b for a, b in zip(runs[0][0], runs[1][0], strict=True)]
            found[str(bucket)] = {"rounds": len(same), "equal_rounds": sum(same),
                                  "tokens_equal": runs[0][1] == runs[1][1]}
            print(f"{bucket} rows: {sum(same)} of {len(same)} rounds have eager's bytes", flush=True)
        return found, all(each["equal_rounds"] == self.args.rows and each["tokens_equal"]
                          for each in found.values())

    def abab(self) -> Found:
        found, good = [], True
        hashes: dict[int, set[str]] = {0: set(), 1: set()}
        for used in (False, True, False, True):
            with self.graphs(used):
                for i in range(2):
                    prompt = ids_of(i, self.args.context, self.vocab)
                    made = self.engine.generate(prompt, max_new_tokens=self.args.tokens, stop_ids=())
                    hashes[i].add(made.sha256)
                    counted = {name: n for name, n in made.counters.items()
                               if name in ("graph_replays", "head_replays", "eager_rounds", "graph_captures",
                                           "graph_instantiations", "graph_failures")}
                    by_path = {name: (made.counters[f"rank0.{name}.replays"],
                                      made.counters[f"rank0.{name}.device_replays"])
                               for name in self.engine.rank.graphs.paths}
                    good &= all(host == device for host, device in by_path.values())
                    good &= (counted["graph_replays"] > 0) == used
                    found.append({"graphs": used, "prompt": i, "sha256": made.sha256, **counted,
                                  "replays_host_device": by_path,
                                  "tokens_per_s": (len(made.tokens) - 1) / made.times["decode"]})
                    print(f"graphs {used}, prompt {i}: {counted} {by_path}", flush=True)
        return {"runs": found}, good and all(len(each) == 1 for each in hashes.values())

    def prompt(self) -> Found:
        engine, n_parts = self.engine, self.engine.config.n_layers + 1
        prompt = ids_of(0, self.args.prompt, self.vocab)
        how = Prefill(chunk=self.args.chunk)
        chunks = -(-len(prompt) // self.args.chunk)
        runs, good = [], True
        first: bytes | None = None
        for i, used in enumerate((False, False, True, True, True)):
            deep = engine.rank.deep
            if deep is None or deep.graphs is None:
                return {"refused": engine.rank.deep_refused}, False
            before = vars(deep.graphs.counters).copy()
            with self.graphs(used), engine.sequence() as sequence:
                sequence.extend(prompt)
                started = time.perf_counter()
                token = engine.prompt([sequence], draw=True, prefill=how)[0]
                engine.rank.stream.synchronize()
                seconds = time.perf_counter() - started
                counted = {name: n - before[name] for name, n in vars(deep.graphs.counters).items()}
                last = engine.rank.read_logits(0, 1).tobytes()
                decoded = []
                for _ in range(24):
                    sequence.extend([token])
                    made = run_round(engine.rank, [Window(sequence, draw=True, logits=True)])
                    assert made.logits is not None
                    token = made.tokens[0]
                    decoded.append(made.logits.tobytes())
            whole = last + b"".join(decoded)
            first = first or whole
            # a bucket's first chunk of an engine is eager: only a repeated shape pays for a capture
            eager = n_parts * (chunks if not used else 1 if i == 2 else 0)
            wanted = {"replays": n_parts * chunks - eager, "eager_rounds": eager}
            good &= whole == first and all(counted[name] == n for name, n in wanted.items())
            runs.append({"graphs": used, "seconds": seconds, "equal": whole == first, "wanted": wanted,
                         **{name: counted[name] for name in ("captures", "instantiations", "replays",
                                                             "eager_rounds", "failures")}})
            print(f"{self.args.prompt} tokens, graphs {used}: {runs[-1]}", flush=True)
        return {"tokens": self.args.prompt, "chunk": self.args.chunk, "parts_a_chunk": n_parts,
                "path": DEEP, "runs": runs}, good

    def decode(self, live: list[Sequence], count: int) -> tuple[list[list[int]], list[float], list[float]]:
        """count tokens for each; the seconds of each visit by token, and those in which the host worked."""
        rank, steps = self.engine.rank, self.engine.limits.steps_ahead
        tokens: list[list[int]] = [[] for _ in live]
        walls, hosts = [], []
        waited = 0.0
        synchronize = rank._done.synchronize

        def wait() -> None:
            nonlocal waited
            started = time.perf_counter()
            synchronize()
            waited += time.perf_counter() - started

        rank._done.synchronize = wait  # type: ignore[method-assign]
        try:
            while len(tokens[0]) < count:
                n, waited = min(steps, count - len(tokens[0])), 0.0
                started = time.perf_counter()
                drawn = run_ahead(rank, [Ahead(sequence, n) for sequence in live], n)
                for mine, sequence, one in zip(tokens, live, drawn, strict=True):
                    mine.extend(one.tokens)
                    sequence.extend(one.tokens[-1:])
                seconds = time.perf_counter() - started
                walls += [seconds / n] * n
                hosts += [(seconds - waited) / n] * n
        finally:
            del rank._done.synchronize  # type: ignore[method-assign]
        return tokens, walls, hosts

    def single(self) -> Found:
        rank, args = self.engine.rank, self.args
        found: dict[str, Any] = {"nodes": {path: len(rank.launches(path, 1)) for path in ("body", "next")}}
        hashes = set()
        for used in (False, True):
            with self.graphs(used), ExitStack() as stack:
                live = self.begun(stack, 1, args.context)
                self.decode(live, 2 * self.engine.limits.steps_ahead)
                tokens, walls, hosts = self.decode(live, args.tokens)
            hashes.add(token_sha256(tokens[0]))
            mode = "graph" if used else "eager"
            found[mode] = {"median_ms": median(walls) * 1e3, "tokens_per_s": len(walls) / sum(walls),
                           "host_us_a_token": median(hosts) * 1e6}
            print(f"one stream, {mode}: {found[mode]}", flush=True)
        floor = decode_floor(rank.layout, self.pack, args.context)
        rates = floor.seconds(args.bytes_per_s, args.weights_per_s)
        found |= {"weights_per_s": args.weights_per_s, "bytes_per_s": args.bytes_per_s}
        found |= {"floor_bytes": floor.bytes_read, "floor_trellis_weights": floor.trellis_weights,
                  "floor_ms": {name: value * 1e3 for name, value in rates.items()},
                  "share_of_floor": rates["floor"] * 1e3 / found["graph"]["median_ms"],
                  "equal": len(hashes) == 1}
        print(f"floor {found['floor_ms']}, share {found['share_of_floor']:.3f}", flush=True)
        return found, len(hashes) == 1

    def eight(self) -> Found:
        n, args = min(8, self.engine.limits.sequences), self.args
        alone = []
        for i in range(n):
            made = self.engine.generate(ids_of(i, args.context, self.vocab), stop_ids=(),
                                        max_new_tokens=1 + 2 * self.engine.limits.steps_ahead + args.tokens)
            alone.append(made.tokens)
        with ExitStack() as stack:
            live = self.begun(stack, n, args.context)
            begun = [sequence.ids[-1:] for sequence in live]
            first, _, _ = self.decode(live, 2 * self.engine.limits.steps_ahead)
            tokens, walls, hosts = self.decode(live, args.tokens)
            distinct = self.distinct(live)
        made_ids = [a + b + c for a, b, c in zip(begun, first, tokens, strict=True)]
        equal = [a == b for a, b in zip(made_ids, alone, strict=True)]
        bytes_read, weights = self.floor_of(n, distinct)
        floor = max(bytes_read / args.bytes_per_s, weights / args.weights_per_s)
        seconds = median(walls)
        found = {"streams": n, "equal_to_solo": sum(equal), "round_ms": seconds * 1e3,
                 "aggregate_tokens_per_s": n * len(walls) / sum(walls),
                 "host_us_a_round": median(hosts) * 1e6,
                 "distinct_experts_a_layer": distinct, "chosen_a_layer": n * self.engine.config.n_active,
                 "weights_per_s": args.weights_per_s, "bytes_per_s": args.bytes_per_s,
                 "floor_bytes": bytes_read, "floor_trellis_weights": weights, "floor_ms": floor * 1e3,
                 "share_of_floor": floor / seconds}
        print(f"{n} streams: {found}", flush=True)
        return found, all(equal)

    def distinct(self, live: list[Sequence]) -> float:
        """Mean over layers and 4 eager rounds of the experts that are chosen by at least one row."""
        rank, counts = self.engine.rank, []
        n_slots = self.engine.config.n_active + 1

        def observe(launch: Launch) -> None:
            if launch.name == "router_pick":
                routes = np.empty((len(live), n_slots), ROUTE)
                copy_to_host(rank.stream, routes, rank.work["routes"].sub(0, routes.nbytes))
                counts.append(len(np.unique(routes["expert"][:, :-1])))

        rank.observer = observe
        try:
            for _ in range(4):
                drawn = run_round(rank, [Window(sequence, draw=True) for sequence in live]).tokens
                for sequence, token in zip(live, drawn, strict=True):
                    sequence.extend([token])
        finally:
            rank.observer = None
        return float(np.mean(counts))

    def floor_of(self, n: int, distinct: float) -> tuple[int, int]:
        """Bytes and trellis weights of a round of n rows: weights once, each distinct expert once, state and
        KV by row."""
        layout, c = self.engine.rank.layout, self.engine.config
        one = decode_floor(layout, self.pack, self.args.context)
        none = decode_floor(layout, self.pack, 0)
        expert_weights = 3 * c.hidden * c.moe_width * c.n_layers
        experts = [self.pack.experts(i) for i in range(c.n_layers)]
        expert_bytes = sum(self.pack.tensor(name).size for layer in experts for linear in layer
                           for info in linear for part, name in info.parts.items()
                           if part not in ("mcg", "mul1")) // c.n_experts
        state = 2 * 128 * 128 * 4 * c.gdn_value_heads * sum(kind == "gdn" for kind in c.layer_kinds)
        by_row = one.bytes_read - none.bytes_read + state
        more = distinct - c.n_active
        return (int(one.bytes_read + (n - 1) * by_row + more * expert_bytes),
                int(one.trellis_weights + more * expert_weights))

    def cycles(self) -> Found:
        free, tokens = [], set()
        for _ in range(self.args.cycles):
            limits = Limits(context_tokens=256, rows=16, prompt_rows=16)
            with Engine.open("synth:micro?seed=1", limits, device=self.args.device) as engine:
                made = engine.generate([1, 2, 3, 4, 5], max_new_tokens=12, stop_ids=())
                if not made.counters["graph_replays"]:
                    return {"no replay": dict(made.counters)}, False
            tokens.add(made.sha256)
            engine.ledger.require_empty()
            free.append(self.engine.rank.ctx.free_bytes())
        found = {"cycles": len(free), "free_bytes_after_first": free[0], "free_bytes_after_last": free[-1],
                 "least": min(free), "most": max(free), "tokens_equal": len(tokens) == 1}
        print(f"cycles: {found}", flush=True)
        return found, len(tokens) == 1 and free[0] == free[-1]


def ids_of(i: int, count: int, vocab: int) -> list[int]:
    """The i-th prompt: ids of one integer hash, another stretch for each."""
    return prompt_ids(100_003 * i + count, vocab)[100_003 * i :]


def decode_rate(device: str) -> float:
    """Trellis weights a second of linear_gemv, one row, over copies of matrices that L2 cannot hold: the best
    of 3 and 5 bits and the head's shape."""
    sim, rates = device == "sim", []
    with ExitStack() as stack:
        bench = Bench(stack, device, 1 << 16 if sim else 192 << 20, ("exl3",))
        for name in ("rate_mul1_3", "rate_mul1_5", "lm_head"):
            built = build_linear(bench, TINY["linears"][1] if sim else REAL[name][1], 1)
            bench.stream.synchronize()
            best = min(measure(bench, built, 3 if sim else 100, 5))
            rates.append(built.trellis_weights / best * 1e6)
            print(f"{name}: {rates[-1] / 1e12:.2f} T weights/s", flush=True)
    return max(rates)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="full", help="micro, tiny, quarter or full")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ngram-rows", type=int, default=4_000_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--short", type=int, default=200, help="prompt tokens of part rows")
    parser.add_argument("--rows", type=int, default=64, help="rounds of part rows")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps-ahead", type=int, default=4)
    parser.add_argument("--deep-rows", type=int, default=512)
    parser.add_argument("--expert-lines", type=int, help="experts in pinned memory, so many lines a layer")
    parser.add_argument("--bytes-per-s", type=float, default=4.4e12, help="measured streaming read rate")
    parser.add_argument("--weights-per-s", type=float, help="trellis decode rate (default: measured here)")
    parser.add_argument("--out", help="folder for receipts")
    parser.add_argument("--name", default="graphs", help="stem of the receipts' names")
    args = parser.parse_args()
    pack = SynthPack(args.model, args.seed, ngram_rows=args.ngram_rows)
    limits = Limits(context_tokens=max(args.prompt, args.context + args.tokens) + 128,
                    rows=16, prompt_rows=16, sequences=args.sequences,
                    steps_ahead=args.steps_ahead, deep_rows=args.deep_rows,
                    chunk=args.chunk, expert_lines=args.expert_lines)
    good = True
    if not args.weights_per_s:
        args.weights_per_s = decode_rate(args.device)
    with Engine.open(pack, limits, device=args.device) as engine:
        print(f"device {engine.facts}; opened {args.model} in {engine.open_seconds:.1f} s", flush=True)
        suite = Suite(engine, pack, args)
        for name in args.parts.split(","):
            started = time.perf_counter()
            results, passed = getattr(suite, name)()
            seconds, word = time.perf_counter() - started, "passed" if passed else "FAILED"
            print(f"{name}: {word}, {seconds:.1f} s", flush=True)
            good &= passed
            if args.out:
                Path(args.out).mkdir(parents=True, exist_ok=True)
                write_receipt(Path(args.out) / f"{args.name}-{name}.json", engine.facts,
                              {"passed": passed, "open_s": engine.open_seconds, **results})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
