#!/usr/bin/env python3
"""What exactness costs a prompt: the deep pass beside the same pass with inexact kernels, on one engine.

    python tools/yardstick.py --build DIR --arch sm_90a      # anywhere NVRTC is; needs no GPU
    python tools/yardstick.py --images DIR --out yardstick.json
    python tools/yardstick.py --device sim                   # shows that it works; times mean nothing

The inexact forms are those of yardstick_forms.py.  They give up the order of sums (all of K in one chain of
products, experts added by float atomics) and the exact functions; tiles of 256 rows, the ring that feeds them
and blocks that stride over tiles they have from the exact kernels, whose text they are.  All other kernels of
the pass are the exact ones.

First every option runs alone, and for each kernel (products by the part of a layer they serve) the fastest is
taken, the exact kernel among them: the yardstick is tuned by itself.  Then the exact and the chosen pass run
in turns, with events between all launches.  The ratio is the exact pass's speed over the yardstick's, the
DeltaNet scan left out of both.  An option whose logits of the last row are further from the exact ones than
--most of their standard deviation (root mean square) is not used: a yardstick that computes something else
proves nothing.

Exit 1 when an option or the chosen pass fails that or, on a GPU, nothing inexact is faster than the exact
kernels or the ratio is below --least.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import yardstick_forms
from bench_decode import prompt_ids
from bench_prefill import key_of, marked_chunk
from yardstick_forms import EXPERTS, Form, Option

from flashnext_drv.bench.prefill_floor import Rates, WorkOf
from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.drv.module import Launch, Module
from flashnext_drv.drv.stream import Event, elapsed_ms
from flashnext_drv.engine.deep import address_of
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.errors import BuildError
from flashnext_drv.kernels.bind import make_launch, simulator_image
from flashnext_drv.kernels.planting import control_digest, control_image, plant, planted, planted_unit
from flashnext_drv.model.steps import Step
from flashnext_drv.sim import load
from flashnext_drv.sim.build import Variant
from flashnext_drv.sim.build import build as build_simulator

SCAN = "gdn_scan"
EXACT = "exact"
Times = dict[str, float]  # ms by key


# ---- images

def build_images(folder: Path, arch: str, only: str = "") -> None:
    """A cubin of every form whose name fits the expression `only`, and manifest.json with what it was made
    of."""
    import build_kernels as builder

    builder._require_nvrtc()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "manifest.json"
    made: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for form in yardstick_forms.forms():
        name, digest = control_image(form.spec, form.control), control_digest(form.spec, form.control)
        known = made.get(name, {}).get("digest") == digest and (folder / f"{name}.cubin").is_file()
        if known or not re.search(only, name):
            continue
        with tempfile.TemporaryDirectory(prefix="flashnext-yardstick-") as scratch:
            sources = Path(scratch) / "sources"
            plant(form.spec, form.control, sources)
            unit = builder.Unit(name, arch, planted_unit(form.spec, form.control, arch), digest, str(sources))
            data, log = builder._compile(unit)
        (record,) = builder._entry(data, log)["kernels"].values()
        if "serialized" in log:  # ptxas says so where it cannot leave a wgmma running
            record["serialized"] = True
        (folder / f"{name}.cubin").write_bytes(data)
        made[name] = {"digest": digest, "arch": arch, **record}
        path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {record['regs']} registers, {record['spill_store_bytes']} bytes spilled"
              f"{', wgmma one by one' if 'serialized' in record else ''}", flush=True)


def load_simulator() -> None:
    """The simulator with the forms beside the real kernels, for this process."""
    with tempfile.TemporaryDirectory(prefix="flashnext-yardstick-") as scratch:
        variants = []
        for form in yardstick_forms.forms():
            name, folder = control_image(form.spec, form.control), Path(scratch) / str(len(variants))
            plant(form.spec, form.control, folder)
            digest = control_digest(form.spec, form.control)
            variants.append(Variant(name, planted(form.spec, form.control), folder, digest))
        load.load(built=build_simulator(variants=variants))


def image_of(form: Form, images: Path | None) -> tuple[bytes, str]:
    """(image, digest).  images: the folder of `build_images`, None in the simulator."""
    name, digest = control_image(form.spec, form.control), control_digest(form.spec, form.control)
    if images is None:
        return simulator_image(name, digest), digest
    entry = json.loads((images / "manifest.json").read_text()).get(name)
    if entry is None or entry["digest"] != digest:
        raise BuildError(f"the image of {name} is missing or stale", do="run tools/yardstick.py --build")
    return (images / f"{name}.cubin").read_bytes(), digest


# ---- passes

def group_of(key: str) -> str:
    """What an option is chosen for."""
    return "experts" if key in EXPERTS else key


class Passes:
    """Launches of the deep pass, exact or with forms in the place of kernels."""

    def __init__(self, engine: Engine, images: Path | None, stack: ExitStack, only: str = "") -> None:
        """only: comma list of options; the others are as if they were not there."""
        assert engine.rank.deep is not None
        self.engine, self.deep = engine, engine.rank.deep
        self.options = {
            group: tuple(o for o in given if not only or o.name in only.split(","))
            for group, given in yardstick_forms.options().items()
        }
        self.modules: dict[str, Module] = {}
        for form in yardstick_forms.forms():
            name = control_image(form.spec, form.control)
            module = Module(engine.rank.ctx, name, *image_of(form, images))
            self.modules[name] = stack.enter_context(module)

    def names(self) -> list[str]:
        """Of all options."""
        return list(dict.fromkeys(o.name for given in self.options.values() for o in given))

    def options_of(self, group: str) -> dict[str, Option]:
        return {option.name: option for option in self.options.get(group.split(" ")[0], ())}

    def launches(self, bucket: int, choice: Mapping[str, str]) -> list[tuple[Step, Launch]]:
        """choice: an option's name by group; groups without one stay exact."""
        steps, exact = self.deep.steps(bucket), self.deep.launches(bucket)
        known: dict[tuple[str, str], Any] = {}
        for step in steps:
            for name, value in step.args.items():
                known.setdefault((step.scope, name), value)
        made: list[tuple[Step, Launch]] = []
        for step, launch in zip(steps, exact, strict=True):
            group = group_of(key_of(step))
            option = self.options_of(group).get(choice.get(group, EXACT))
            form = option.forms.get(step.kernel) if option is not None else None
            if option is None or form is None:
                made.append((step, launch))
                continue
            at = len(made) - 1 if option.zero_first and step.kernel == "moe_deep_sum" else len(made)
            made.insert(at, (step, self._launch(step, form, known)))
        return made

    def _launch(self, step: Step, form: Form, known: Mapping[tuple[str, str], Any]) -> Launch:
        spans = self.deep.spans
        args = {}
        for arg in form.spec.args:
            if arg.name == "round":
                args["round"] = spans["round"]
                continue
            value = step.args[arg.name] if arg.name in step.args else known[step.scope, arg.name]
            args[arg.name] = address_of(spans, value) if isinstance(value, str) else value
        module = self.modules[control_image(form.spec, form.control)]
        grid = tuple(int(n) for n in step.grid)
        return make_launch(module, planted(form.spec, form.control), grid, args)

    @contextmanager
    def taking(self, choice: Mapping[str, str]) -> Iterator[None]:
        """The engine's own prompts take these launches inside, one by one: a graph holds the real ones."""
        kept, graphs = dict(self.deep._launches), self.engine.rank.use_graphs
        self.engine.rank.use_graphs = False
        try:
            for bucket in kept:
                self.deep._launches[bucket] = [launch for _, launch in self.launches(bucket, choice)]
            yield
        finally:
            self.deep._launches.update(kept)
            self.engine.rank.use_graphs = graphs

    def logits(self, n_tokens: int, chunk: int, choice: Mapping[str, str]) -> np.ndarray:
        """Of the last row."""
        ids = prompt_ids(n_tokens, self.engine.config.vocab)
        with self.taking(choice):
            return self.engine.logits(ids, (n_tokens - 1, n_tokens), prefill=Prefill(chunk=chunk))[0]

    def timed(self, n_tokens: int, chunk: int, choice: Mapping[str, str], rates: Rates | None = None
              ) -> tuple[Times, Times]:
        """(ms, floor in ms if rates are given) by key, of a prompt's chunks that the deep pass takes."""
        engine, rank = self.engine, self.engine.rank
        ms: Times = defaultdict(float)
        floors: Times = defaultdict(float)
        with engine.sequence() as sequence, ExitStack() as stack:
            sequence.extend(prompt_ids(n_tokens, engine.config.vocab))
            events: list[Event] = []
            while (n := min(chunk, sequence.n_pending)) and (not ms or n >= engine.limits.deep_rows):
                bucket = self.deep.layout.bucket(n)
                launches = self.launches(bucket, choice)
                while len(events) <= len(launches):
                    events.append(stack.enter_context(Event(rank.ctx, "yardstick.mark", timing=True)))
                if rates is not None:
                    work_of = WorkOf(self.deep.layout, engine.pack, sequence.position, n)
                    for step in self.deep.steps(bucket):
                        floors[key_of(step)] += work_of(step).seconds(rates) * 1e3
                marked_chunk(engine, sequence, n, bucket, [launch for _, launch in launches], events)
                for i, (step, _) in enumerate(launches):
                    ms[key_of(step)] += elapsed_ms(events[i], events[i + 1])
        return ms, floors


# ---- the measurement

def by_group(ms: Times) -> Times:
    out: Times = defaultdict(float)
    for key, value in ms.items():
        out[group_of(key)] += value
    return out


def middle(runs: list[Times]) -> Times:
    """The median of each key."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


def measure(
    passes: Passes, n_tokens: int, chunk: int, repeats: int, most: float, rates: Rates
) -> dict[str, Any]:
    first, floors = passes.timed(n_tokens, chunk, {}, rates)
    groups = list(by_group(first))
    exact_logits = passes.logits(n_tokens, chunk, {})
    spread = float(np.std(exact_logits.astype(np.float64)))

    def error(choice: Mapping[str, str]) -> float:
        """Root mean square of the difference of the last row's logits, in their standard deviations."""
        difference = passes.logits(n_tokens, chunk, choice).astype(np.float64) - exact_logits
        return float(np.sqrt(np.mean(difference**2))) / spread

    def all_of(name: str) -> dict[str, str]:
        return {group: name for group in groups if name in passes.options_of(group)}

    errors = {}
    for name in passes.names():
        print(f"option {name}: ", end="", flush=True)  # before it runs: a fault ends everything
        far = errors[name] = error(all_of(name))
        verdict = "" if far < most else "; NOT USED"
        print(f"last row's logits {far:.2e} of their deviation away{verdict}", flush=True)
    usable = [name for name, far in errors.items() if far < most]
    runs: dict[str, list[Times]] = defaultdict(list)
    for _ in range(repeats):
        for name in (EXACT, *usable):
            runs[name].append(by_group(passes.timed(n_tokens, chunk, all_of(name))[0]))
    alone = {name: middle(found) for name, found in runs.items()}
    choice = {}
    for group in groups:
        candidates = [EXACT, *(name for name in usable if name in passes.options_of(group))]
        best = min(candidates, key=lambda name, group=group: alone[name][group])
        if len(candidates) > 1:
            choice[group] = best
    exact_runs, inexact_runs = [], []
    for _ in range(repeats):
        exact_runs.append(passes.timed(n_tokens, chunk, {})[0])
        inexact_runs.append(passes.timed(n_tokens, chunk, choice)[0])
    exact, inexact = middle(exact_runs), middle(inexact_runs)
    chosen_error = error(choice)
    scan = exact[SCAN]
    exact_ms, inexact_ms = (sum(ms.values()) - ms[SCAN] for ms in (exact, inexact))
    floor_ms = sum(floors.values()) - floors[SCAN]
    return {
        "tokens": n_tokens,
        "chunk": chunk,
        "errors": errors | {"chosen": chosen_error},
        "most": most,
        "options_ms": {
            group: {name: found[group] for name, found in alone.items()
                    if name == EXACT or name in passes.options_of(group)}
            for group in choice
        },
        "choice": choice,
        "kernels": {
            key: {"exact_ms": exact[key], "inexact_ms": inexact.get(key, 0.0), "floor_ms": floors[key],
                  "option": choice.get(group_of(key), EXACT)}
            for key in sorted(exact, key=lambda key: -exact[key])
        },
        "exact_ms": exact_ms,
        "inexact_ms": inexact_ms,
        "floor_ms": floor_ms,
        "scan_ms": scan,
        "scan_share": scan / (exact_ms + scan),
        "ratio": inexact_ms / exact_ms,
        "share_of_floor": {"exact": floor_ms / exact_ms, "inexact": floor_ms / inexact_ms},
        "usable": usable,
    }


def show(found: dict[str, Any]) -> None:
    print("ms of each option alone:")
    for group, times in found["options_ms"].items():
        print(f"  {group:<28} " + "  ".join(f"{name} {ms:.3f}" for name, ms in times.items()))
    print(f"{'kernel':<28} {'exact ms':>9} {'inexact':>9} {'ratio':>6} {'floor ms':>9} {'of floor':>8} "
          f"{'inexact':>8}  form")
    for key, k in found["kernels"].items():
        ratio = k["inexact_ms"] / k["exact_ms"] if k["exact_ms"] else 0.0
        shares = [k["floor_ms"] / k[ms] if k[ms] else 0.0 for ms in ("exact_ms", "inexact_ms")]
        print(f"{key:<28} {k['exact_ms']:>9.3f} {k['inexact_ms']:>9.3f} {ratio:>6.3f} {k['floor_ms']:>9.3f} "
              f"{shares[0]:>8.1%} {shares[1]:>8.1%}  {k['option']}")
    share = found["share_of_floor"]
    print(f"{found['tokens']} tokens, chunk {found['chunk']}, without the scan ({found['scan_ms']:.2f} ms, "
          f"{found['scan_share']:.1%}): exact {found['exact_ms']:.2f} ms ({share['exact']:.1%} of floor), "
          f"inexact {found['inexact_ms']:.2f} ms ({share['inexact']:.1%}); "
          f"speed of exact / inexact {found['ratio']:.4f}; logits {found['errors']['chosen']:.2e} of their "
          f"deviation away", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="make the images in this folder, and nothing else")
    parser.add_argument("--only", default="", help="with --build: forms whose name has this expression")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--images", type=Path, help="folder that --build made (default: build now)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--pack", default="", help="default: full on a GPU, tiny in the simulator")
    parser.add_argument("--tokens", type=int, default=0, help="default 16384, in the simulator 40")
    parser.add_argument("--chunk", type=int, default=0, help="most rows of a segment; 0: the memory plan's")
    parser.add_argument("--options", default="", help="only these, comma list; '': all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=float, default=5e-2, help="an option's error in the logits' deviation")
    parser.add_argument("--least", type=float, default=0.95, help="ratio asked for on a GPU")
    parser.add_argument("--out", help="write a receipt here")
    args = parser.parse_args()
    if args.build:
        build_images(args.build, args.arch, args.only)
        return 0
    simulated = args.device == "sim"
    pack = args.pack or ("synth:tiny" if simulated else "synth:full?ngram_rows=4000000")
    n_tokens = args.tokens or (40 if simulated else 16384)
    limits = Limits(context_tokens=n_tokens + 16, rows=16, prompt_rows=16, chunk=args.chunk,
                    deep_rows=2 if simulated else 512)
    with ExitStack() as stack:
        images: Path | None = args.images
        if simulated:
            images = None
            load_simulator()
        elif images is None:
            images = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashnext-yardstick-")))
            build_images(images, args.arch)
        engine = stack.enter_context(Engine.open(pack, limits, device=args.device))
        if engine.rank.deep is None:
            print(f"no deep pass: {engine.rank.deep_refused}", file=sys.stderr)
            return 3
        passes = Passes(engine, images, stack, args.options)
        chunk = min(engine.rank.chunk, n_tokens)
        found = measure(passes, n_tokens, chunk, args.repeats, args.most, Rates())
        if images is not None:
            found["images"] = json.loads((images / "manifest.json").read_text())
        show(found)
        inexact = any(name != EXACT for name in found["choice"].values())
        good = max(found["errors"].values()) < args.most
        good &= simulated or (inexact and found["ratio"] >= args.least)
        if args.out:
            write_receipt(args.out, engine.facts, found | {"ok": good})
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
