#!/usr/bin/env python3
"""Experts in host memory: link, equal tokens, decode and prompts against their bounds, a small card, opening.

    python tools/bench_experts.py --out receipts --parts link,tokens,decode,resident,prefill
    python tools/bench_experts.py --out receipts --parts card,open --folder quarter

Opening takes longer than most of what is measured, so all parts that can share one engine do: it is given a
line for every expert, and `seat` then limits how many are in use.  An engine that never offloads is opened
before it and gives the resident times (`baseline`).  A receipt a part is written as soon as it is done; exit
1 when a part fails.  With --device sim a small pack is used and times mean nothing: bytes, tokens, plan and
ledger are judged all the same.

    link      pinned memory to the device by the copy engine, and by kernel line_fill
    tokens    the same tokens and state with few lines to all of them, eager and by graphs
    decode    forced ids of four hit rates: at most 1.25 of resident time + missed bytes / link
    resident  all experts in lines: within 5% of the engine that never offloads
    prefill   at least 0.8 of the slower of the resident prompt and its bytes over the link
    card      a plan for a small card: plan = ledger, and free memory never below the reserves
    open      from disk and from memory, beside what reading and pinning alone take
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_decode import decode, prompt_ids
from bench_prefill import median_prompt, timed_prompt
from expert_memory import Told, open_disk, open_times, opened, say, small_card, touch_host

from flashnext_drv.bench import experts as bench
from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context, DeviceFacts
from flashnext_drv.engine.engine import Engine, Limits, Prefill, token_sha256
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.pack import PackBase
from flashnext_drv.model.source import open_pack
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.state.lines import layer_line_bytes

PARTS = ("link", "tokens", "decode", "resident", "prefill", "card", "open")
SHARED = {"tokens", "decode", "resident", "prefill"}  # what the engine with all lines serves
BASED = {"tokens", "resident", "prefill"}  # what needs the engine that never offloads
MOST_RATIO, AIM_RATIO = 1.25, 1.10  # of a token, to its bound
MOST_SLOWER = 1.05  # all in lines, to never offloaded
LEAST_PROMPT, AIM_PROMPT = 0.8, 0.9  # of a prompt's bound
BANDS = (bench.Band(0.55, 0.75, fixed=True), bench.Band(0.2, 0.42), bench.Band(0.78, 0.9),
         bench.Band(0.92, 0.99))
SEED = 5
Found = tuple[dict[str, Any], bool]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.  lines: in use, for `tokens`, after a prompt of `prompt` tokens for `new` ones;
    work: of decode and prompts; others: choices where a hit rate is not met at `work`."""

    lines: tuple[int, ...]
    prompt: int
    new: int
    work: int
    others: tuple[int, ...]
    warm: int
    rounds: int
    prompts: tuple[int, ...]
    deep_rows: int
    card_context: int
    card_bytes: int
    link_bytes: int

    @classmethod
    def of(cls, pack: PackBase, small: bool, card_bytes: int) -> Sizes:
        most = pack.config.n_experts

        def held(*lines: int) -> tuple[int, ...]:
            return tuple(dict.fromkeys(min(n, most) for n in lines))

        if small:
            k = pack.config.n_active
            return cls(held(1, k, most // 2, most), 24, 4, most // 2, held(1, most - 1), 2, 4, (24,), 8,
                       72, card_bytes or 1 << 30, 1 << 16)
        return cls(held(16, 40, 72, 144, most), 64, 32, min(72, most), held(40, 16, 144, 288, 432), 24, 40,
                   (16384, 2048), 512, 32768, card_bytes or 16_000_000_000, 2 << 30)


class Suite:
    """The parts.  Each gives its results and whether it passed."""

    def __init__(self, pack: PackBase, args: argparse.Namespace) -> None:
        self.pack, self.args = pack, args
        self.digest = pack.digest() if isinstance(pack, SynthPack) else ""  # of files it takes minutes
        self.small = args.device == "sim"
        self.sizes = Sizes.of(pack, self.small, args.card_bytes)
        count = max(self.sizes.prompts) + 16
        self.limits = Limits(
            context_tokens=max(count, self.sizes.warm + self.sizes.rounds + 2, 112),
            rows=16, prompt_rows=16, deep_rows=self.sizes.deep_rows, **args.set)
        self.baseline: dict[str, Any] = {}
        self.in_use = 0
        with Context(0, ledger=Ledger()) as ctx:
            self.facts = ctx.facts
            widest = max(layer_line_bytes(pack, i) for i in range(pack.config.n_layers))
            self.rates = bench.link_rates(ctx, widest, self.sizes.link_bytes)
        say(f"link {self.rates.copy / 1e9:.2f} GB/s by copies, {self.rates.fill / 1e9:.2f} by line_fill; "
            f"pinning {self.rates.pin / 1e9:.2f} GB/s")

    def open(self, limits: Limits) -> tuple[Engine, Told]:
        return opened(self.pack, limits, self.args.device)

    def card_limits(self) -> Limits:
        """Of a card of `card_bytes`, all of them free at first."""
        reserve = (1 << 20) if self.small else self.limits.reserve_bytes
        expert_reserve = (1 << 20) if self.small else self.limits.expert_reserve_bytes
        return replace(self.limits, context_tokens=self.sizes.card_context, expert_lines=self.sizes.work,
                       reserve_bytes=reserve, expert_reserve_bytes=expert_reserve,
                       device_bytes=self.sizes.card_bytes - reserve)

    # Measurements on one engine.

    def seat(self, engine: Engine, lines: int) -> None:
        """`lines` lines a layer in use from now on, holding the first experts."""
        engine.rank.experts.seat(engine.rank.stream, n_lines=lines)
        engine.rank.stream.synchronize()
        self.in_use = lines

    def tally(self, engine: Engine) -> bench.Tally:
        return bench.Tally.of(engine.rank.experts.counters(engine.rank.stream))

    def forced(self, engine: Engine, setting: bench.Setting, counted: bool) -> tuple[list[int], list[Any]]:
        """Drawn tokens and rounds (or seconds, not counted) of the setting's ids, after the first `warm`."""
        warm, rounds = self.sizes.warm, self.sizes.rounds
        ids = bench.forced_ids(self.pack.config.vocab, setting.n_working, setting.fresh, warm + rounds + 1,
                               SEED)
        tallies: list[bench.Tally] = []
        with engine.sequence() as sequence:
            sequence.extend(ids[:1])
            decode(engine, sequence, warm, ids[1 : warm + 1])
            if counted:
                tallies.append(self.tally(engine))
            tokens, seconds = decode(engine, sequence, rounds, ids[warm + 1 :],
                                     (lambda: tallies.append(self.tally(engine))) if counted else None)
        if not counted:
            return tokens, seconds
        made = [bench.Round(s, b.since(a)) for s, a, b in zip(seconds, tallies, tallies[1:], strict=False)]
        return tokens, made

    def greedy(self, engine: Engine) -> dict[str, Any]:
        """A prompt in batches and the tokens drawn behind it, with the state they leave."""
        with engine.sequence() as sequence:
            ids = prompt_ids(self.sizes.prompt, self.pack.config.vocab)
            sequence.extend(ids)
            first = engine.prompt([sequence], draw=True, prefill=Prefill(deep=False))[0]
            sequence.extend([first])
            rest, _ = decode(engine, sequence, self.sizes.new - 1)
            state = sha256()
            for name, value in sorted(engine.export_state(sequence).items()):
                state.update(name.encode() + value.tobytes())
        tokens = [first, *rest]
        return {"sha256": token_sha256([*ids, *tokens]), "state_sha256": state.hexdigest(), "tokens": tokens}

    def prompts(self, engine: Engine) -> dict[str, Any]:
        return {str(n): median_prompt(engine, n, self.args.repeats) for n in self.sizes.prompts}

    def measure_baseline(self, parts: set[str]) -> None:
        """The engine that never offloads: resident times and tokens."""
        engine, told = self.open(self.limits)
        with engine:
            setting = bench.Setting(64 if not self.small else 4, 0.0, 0)
            tokens, seconds = self.forced(engine, setting, counted=False)
            self.baseline = {
                "open_s": engine.open_seconds, "progress": told.as_dict(), "setting": vars(setting),
                "token_ms": median(seconds) * 1e3, "tokens": tokens, "greedy": self.greedy(engine),
                "prompts": self.prompts(engine) if "prefill" in parts else {},
                "graphs_off": {str(k): v for k, v in engine.rank.graphs.off.items()},
            }

    # Parts.

    def shared(self, part: Callable[[Engine], Found], engine: Engine) -> Found:
        """A part on the engine with all lines, with that engine's limits and memory beside what it found."""
        found, good = part(engine)
        return found | {"engine_limits": vars(engine.limits), "memory": engine.memory().as_dict()}, good

    def link(self) -> Found:
        good = self.small or (self.rates.copy > 20e9 and self.rates.fill > 0.8 * self.rates.copy)
        return {"rates": self.rates.as_dict()}, good

    def tokens(self, engine: Engine) -> Found:
        runs, wanted = [], self.baseline["greedy"]
        for lines in self.sizes.lines:
            for mode in ("eager", "graph"):
                engine.rank.use_graphs = mode == "graph"
                self.seat(engine, lines)
                before, replays = self.tally(engine), engine.rank.graphs.counters.replays
                made = self.greedy(engine)
                counters = self.tally(engine).since(before)
                replays = engine.rank.graphs.counters.replays - replays
                equal = made == wanted
                runs.append({"lines": lines, "mode": mode, "equal": equal, "sha256": made["sha256"],
                             "state_sha256": made["state_sha256"], "hit_rate": counters.hit_rate,
                             "counters": counters.counts, "replays": replays})
                say(f"{lines:>4} lines {mode:<5} {made['sha256'][:16]} hit rate {counters.hit_rate:.3f} "
                    f"{'equal' if equal else 'DIFFERS'}")
        engine.rank.use_graphs = engine.limits.graph
        return {"never_offloaded": wanted, "prompt_tokens": self.sizes.prompt,
                "new_tokens": self.sizes.new, "runs": runs}, all(
            run["equal"] and (run["replays"] > 0) == (run["mode"] == "graph") for run in runs)

    def decode(self, engine: Engine) -> Found:
        tried: dict[bench.Setting, float] = {}

        def rate(setting: bench.Setting) -> float:
            if setting not in tried:
                if setting.lines != self.in_use:
                    self.seat(engine, setting.lines)
                _, rounds = self.forced(engine, setting, counted=True)
                asked = [sum(r.tally.counts[name] for r in rounds) for name in ("hits", "misses")]
                tried[setting] = asked[0] / max(sum(asked), 1)
            return tried[setting]

        points, good = [], True
        choices = [self.sizes.work, *self.sizes.others]
        for band in BANDS:
            found = bench.find_setting(rate, band, choices, self.pack.config.vocab)
            if found is None:
                say(f"no ids with a hit rate in {band.low}..{band.high}")
                good &= self.small
                points.append({"wanted": vars(band), "found": False})
                continue
            points.append({"wanted": vars(band), "found": True, **self.point(engine, found[0])})
            good &= points[-1]["equal"] and (
                self.small or (points[-1]["ratio"] <= MOST_RATIO and band.holds(points[-1]["hit_rate"])))
        return {
            "points": points, "link_bytes_s": self.rates.best, "most_ratio": MOST_RATIO, "aim": AIM_RATIO,
            "graphs_off": {str(k): v for k, v in engine.rank.graphs.off.items()},
            "tried": [vars(s) | {"hit_rate": r} for s, r in tried.items()],
        }, good

    def point(self, engine: Engine, setting: bench.Setting) -> dict[str, Any]:
        """A setting's rounds at its lines, then with all experts in lines."""
        self.seat(engine, setting.lines)
        tokens, rounds = self.forced(engine, setting, counted=True)
        self.seat(engine, self.pack.config.n_experts)
        same, resident = self.forced(engine, setting, counted=True)
        misses = sum(r.tally.counts["misses"] for r in resident)
        made = {"setting": vars(setting), "equal": tokens == same and misses == 0,
                **bench.token_bound(rounds, [r.seconds for r in resident], self.rates.best)}
        say(f"hit rate {made['hit_rate']:.3f} ({setting.n_working} tokens, {setting.fresh:.3f} fresh, "
            f"{setting.lines} lines): {made['token_ms']:.3f} ms a token, "
            f"{made['missed_bytes_a_token'] / 1e6:.1f} MB, resident {made['resident_ms']:.3f} ms, bound "
            f"{made['bound_ms']:.3f} ms, ratio {made['ratio']:.3f}, tokens "
            f"{'equal' if made['equal'] else 'DIFFER'}")
        return made

    def resident(self, engine: Engine) -> Found:
        self.seat(engine, self.pack.config.n_experts)
        before = self.tally(engine)
        tokens, seconds = self.forced(engine, bench.Setting(**self.baseline["setting"]), counted=False)
        counters = self.tally(engine).since(before)
        token_ms, never = median(seconds) * 1e3, self.baseline["token_ms"]
        equal = tokens == self.baseline["tokens"] and counters.counts["misses"] == 0
        say(f"all in lines {token_ms:.3f} ms a token, never offloaded {never:.3f} ms: "
            f"{token_ms / never:.3f}")
        return {
            "token_ms": token_ms, "never_offloaded_ms": never, "ratio": token_ms / never,
            "most": MOST_SLOWER, "equal": equal, "counters": counters.counts, "baseline": self.baseline,
        }, equal and (self.small or token_ms / never <= MOST_SLOWER)

    def prefill(self, engine: Engine) -> Found:
        if engine.rank.deep is None:
            say(f"no deep pass: {engine.rank.deep_refused}")
            return {"refused": engine.rank.deep_refused}, False
        prompts, good = {}, True
        for count in self.sizes.prompts:
            self.seat(engine, self.sizes.work)
            made = ring_prompt(engine, count, self.args.repeats)
            never = self.baseline["prompts"][str(count)]
            made |= bench.prompt_bound(made["seconds"], never["seconds"], made["copied_bytes"],
                                       self.rates.best)
            made["equal"] = made["same_token"] and made["token"] == never["token"]
            self.seat(engine, self.pack.config.n_experts)
            made["all_in_lines_s"] = median_prompt(engine, count, self.args.repeats)["seconds"]
            prompts[str(count)] = made
            good &= made["equal"] and (self.small or made["ratio"] >= LEAST_PROMPT)
            say(f"{count} tokens, {self.sizes.work} lines: {made['seconds'] * 1e3:.1f} ms, "
                f"{made['copied_bytes'] / 1e9:.2f} GB = {made['link_s'] * 1e3:.1f} ms of link, resident "
                f"{made['resident_s'] * 1e3:.1f} ms, {made['ratio']:.3f} of the bound ({made['bound_by']}), "
                f"overlap {made['overlap']:.3f}, by events {made['events']['hidden']:.3f}")
        return {"prompts": prompts, "lines": self.sizes.work, "link_bytes_s": self.rates.best,
                "least": LEAST_PROMPT, "aim": AIM_PROMPT, "chunk": engine.rank.chunk}, good


def ring_prompt(engine: Engine, count: int, repeats: int) -> dict[str, Any]:
    """Prompts of `count` tokens through the ring, with what one of them copied; and one with the ring's
    events, which is not timed as a whole.

    hidden: the share of the copying during which no launch waited for a bank.
    """
    deep = engine.rank.deep
    assert deep is not None and deep.ring is not None
    ring = deep.ring
    before = ring.banks.counters.copy()
    made = median_prompt(engine, count, repeats)
    counted = {
        name: int((ring.banks.counters[name] - before[name]).sum(dtype=np.uint64)) // (repeats + 1)
        for name in before.dtype.names
    }
    ring.timing = True
    try:
        timed_prompt(engine, count, None)
        clocks = ring.timings()
    finally:
        ring.timing = False
    clocks["hidden"] = 1 - clocks["wait_ms"] / clocks["copy_ms"] if clocks["copy_ms"] else 1.0
    return made | {"ring": counted, "copied_bytes": counted["copied_bytes"], "events": clocks}


class Receipts:
    """Runs parts, writes what they found at once, and remembers whether all passed.  A part that raises has
    failed; the others go on."""

    def __init__(self, suite: Suite) -> None:
        self.suite, self.good = suite, True

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """What is raised inside counts as a failure and is shown; the parts that follow are tried."""
        try:
            yield
        except Exception:
            traceback.print_exc()
            self.good = False

    def run(self, name: str, part: Callable[[], Found]) -> None:
        started = time.perf_counter()
        try:
            found, good = part()
        except Exception:
            traceback.print_exc()
            found, good = {"raised": traceback.format_exc(limit=-1)}, False
        self.good &= good
        suite = self.suite
        found |= {"ok": good, "pack": suite.args.pack, "pack_digest": suite.digest,
                  "limits": vars(suite.limits), "rates": suite.rates.as_dict(),
                  "seconds": time.perf_counter() - started}
        write_receipt(suite.args.out / f"{stem(suite.facts)}-experts-{name}.json", suite.facts, found)
        say(f"{'PASS' if good else 'FAIL'} {name} in {found['seconds']:.1f} s")


def stem(facts: DeviceFacts) -> str:
    """The start of a receipt's name: "h200-9.0", "sim"."""
    if facts.is_simulator:
        return "sim"
    return f"{facts.name.split()[-1].lower()}-{facts.cc[0]}.{facts.cc[1]}"


def run(suite: Suite, parts: list[str]) -> bool:
    receipts, chosen = Receipts(suite), set(parts)
    if "link" in chosen:
        receipts.run("link", suite.link)
    if BASED & chosen:
        with receipts.going_on():
            suite.measure_baseline(chosen)
    full: dict[str, Any] = {}
    good = False
    if (SHARED | {"open"}) & chosen:
        with receipts.going_on():
            limits = replace(suite.limits, expert_lines=suite.pack.config.n_experts)
            engine, told = suite.open(limits)
            with engine:
                full["memory"], good = open_times(engine, told, suite.rates, None)
                for name in ("tokens", "decode", "resident", "prefill"):
                    if name in chosen:
                        receipts.run(name, partial(suite.shared, getattr(suite, name), engine))
    if "card" in chosen:
        receipts.run("card", partial(small_card, suite.pack, suite.card_limits(), suite.sizes.card_bytes,
                                     suite.args.device))
    if "open" in chosen:
        def opening() -> Found:
            args = suite.args
            few = replace(suite.limits, context_tokens=1024, deep="off", expert_lines=suite.sizes.work)
            found, disk_good = open_disk(args.folder, args.disk_model, few, args.device, suite.rates)
            return full | {"from_disk": found, "disk_model": suite.args.disk_model}, good and disk_good

        receipts.run("open", opening)
    return receipts.good


def limits_of(text: str) -> dict[str, int]:
    """ "name=number,.." as fields of Limits."""
    pairs = [part.split("=") for part in text.split(",") if part]
    return {name: bool(int(value)) if name == "ring_prefetch" else int(value) for name, value in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pack", default="", help="folder or synth:<model>[?...]; by default of the device's size"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--parts", default=",".join(PARTS), help="which; they run in the order given above")
    parser.add_argument("--out", type=Path, required=True, help="folder for the receipts")
    parser.add_argument("--folder", type=Path, help="pack that `open` reads from disk; made when absent")
    parser.add_argument("--disk-model", default="", help="synthetic model written into --folder")
    parser.add_argument("--card-bytes", type=int, default=0, help="device memory of the card; 0: 16 GB")
    parser.add_argument("--set", type=limits_of, default={}, metavar="NAME=N,..",
                        help="numbers of Limits for all engines, such as ring_depth=8,ring_prefetch=0")
    parser.add_argument("--touch-bytes", type=int, default=0, metavar="N",
                        help="fill N bytes of host memory and free them first, where a virtual machine has "
                        "its memory only once that was used")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    small = args.device == "sim"
    args.pack = args.pack or ("synth:micro" if small else "synth:full?ngram_rows=4000000")
    args.disk_model = args.disk_model or ("micro" if small else "quarter")
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts are of {','.join(PARTS)}, not {','.join(sorted(unknown))}")
    if "open" in parts and args.folder is None:
        parser.error("open needs --folder, a pack on disk or where to write one")
    args.out.mkdir(parents=True, exist_ok=True)
    api.ensure(args.device)
    touch_host(args.touch_bytes)
    suite = Suite(open_pack(args.pack), args)
    say(f"device {suite.facts}, pack {args.pack}")
    good = run(suite, parts)
    say("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
