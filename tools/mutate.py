#!/usr/bin/env python3
"""Mutation testing: makes one small edit at a time in a copy of the tree and runs the tests that concern the
file; a mutant that no test notices is a missing test.

    python tools/mutate.py --list [--kind barrier] [--path cuda_src/moe]    every mutant, one a line
    python tools/mutate.py --sample 120 --seed 0 [--jobs 1] [--out FILE]     a seeded sample, each kind in it
    python tools/mutate.py --one ID                                          one mutant, with the test's words
    python tools/mutate.py --again FILE                                      the missed ones of an earlier run

The sites are found by tools/mutate_sites.py.  Nothing is edited in the tree itself: the files that git knows
are copied, changed and tested in a temporary folder, with a simulator cache of its own that starts with the
user's objects, so a kernel mutant compiles its own object only.  Outcomes:

    caught   a test failed, and passes without the edit     hang      no end within the time limit
    missed   every test passed                              crash     the process of the tests died
    invalid  the edit does not compile; another one of its kind is drawn instead

tools/mutate_equivalent.json lists by id the mutants that change nothing a test could see, each with its
reason; they are not run, and the list is printed.  Exit status 0: all caught (hangs count as caught).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutate_sites import KINDS, Mutant, find_all

__all__ = ["Result", "Stage", "equivalents", "main", "sample", "stages", "table"]

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("mutate_equivalent.json")
LOADER = Path(__file__).with_name("mutate_load.py")
BUILD_LIMIT_S = 900.0
_BUILD = "from flashnext_drv.sim import build; build.build"
FLOOR = 6               # of each kind in a sample, where there are as many

# For files whose name starts so, in order, the first that fits: what to run first, what to run then.
_ENGINE = ("tests/engine/test_golden.py", "tests/engine/test_bad_use.py", "tests/engine/test_open.py")
_BYTES = ("tests/engine/test_invariance.py::test_page_order_does_not_change_bytes",
          "tests/engine/test_invariance.py::test_slot_used_before_gives_the_same_bytes",
          "tests/engine/test_invariance.py::test_row_among_other_sequences_equals_row_alone")
_WHOLE = ("tests/faults/test_graph_fallback.py", "tests/engine/test_memory.py", *_BYTES,
          "tests/faults/test_sweep.py")
_DEEP = ("tests/host/test_deep_layout.py", "tests/engine/test_prefill.py",
         "tests/engine/test_prefill_refused.py")
_PROMPT = ("tests/engine/test_prefill.py", *_ENGINE)
TESTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("cuda_src/tables.cuh", ("tests/host/test_tables.py", "tests/host/test_catalog.py"),
     ("tests/contracts/test_exl3.py", *_ENGINE)),
    ("cuda_src/exl3.cuh", ("tests/contracts/test_exl3.py", "tests/contracts/test_deep.py"),
     ("tests/contracts/test_moe.py", "tests/contracts/test_moe_gemv.py", "tests/contracts/test_glue.py",
      *_ENGINE)),
    *((f"cuda_src/{start}", (f"tests/contracts/test_{family}.py",), then) for start, family, then in (
        ("deep.cuh", "deep", ("tests/contracts/test_moe_deep.py", *_PROMPT)),
        ("deep/", "deep", _PROMPT),
        ("moe/moe_deep", "moe_deep", _PROMPT),
        ("moe/moe_plan", "moe_deep", _PROMPT),
        ("half_rows", "deep", ("tests/contracts/test_moe_deep.py", *_PROMPT)),
        ("async.cuh", "gdn", ("tests/contracts/test_attn.py", *_PROMPT)),
        ("gdn/gdn_scan", "gdn", _PROMPT),
        ("gdn/gdn_deep_input", "gdn", _PROMPT),
        ("attn/qsa_deep", "attn", _PROMPT),
        ("attn/index_score_deep", "attn", _PROMPT),
        ("token/ple_gate", "token", _PROMPT),
        ("token/ple_conv", "token", _PROMPT),
        ("token/ple_tail", "token", _PROMPT))),
    *((f"cuda_src/{name}", (f"tests/contracts/test_{family}.py",), ("tests/engine/test_steps_ahead.py",))
      for name, family in (("token/advance_rows", "token"), ("move/count_replay", "move"))),
    ("cuda_src/token/edit_logits", ("tests/contracts/test_token.py",), ("tests/engine/test_edits.py",)),
    ("cuda_src/token/edits.cuh", ("tests/host/test_tables.py", "tests/host/test_catalog.py"),
     ("tests/contracts/test_token.py",)),
    ("cuda_src/token/ahead.cuh", ("tests/host/test_tables.py", "tests/host/test_catalog.py"),
     ("tests/contracts/test_token.py",)),
    ("cuda_src/move/line_", ("tests/contracts/test_move.py",), ("tests/engine/test_experts.py", *_ENGINE)),
    ("cuda_src/moe/moe_gemv", ("tests/contracts/test_moe_gemv.py",), _ENGINE),
    ("cuda_src/gemv.cuh", ("tests/contracts/test_exl3.py", "tests/contracts/test_moe_gemv.py"), _ENGINE),
    ("cuda_src/exl3/finish.cuh", ("tests/contracts/test_exl3.py",), _ENGINE),
    ("cuda_src/moe/gemv_slot", ("tests/contracts/test_moe_gemv.py",), _ENGINE),
    ("cuda_src/math.cuh", ("tests/contracts/test_math.py",),
     ("tests/contracts/test_glue.py", "tests/contracts/test_token.py", *_ENGINE)),
    ("cuda_src/prelude.cuh", ("tests/contracts/test_math.py",),
     ("tests/contracts/test_exl3.py", "tests/contracts/test_glue.py", *_ENGINE)),
    ("cuda_src/warp.cuh", ("tests/contracts/test_math.py",),
     ("tests/contracts/test_exl3.py", "tests/contracts/test_token.py", *_ENGINE)),
    ("cuda_src/mma.cuh", ("tests/contracts/test_mma.py",), ("tests/contracts/test_exl3.py", *_ENGINE)),
    ("flashnext_drv/lifetime.py", ("tests/host/test_lifetime.py",),
     ("tests/drv/test_memory.py", "tests/drv/test_graph.py", "tests/drv/test_faults.py", *_ENGINE)),
    ("flashnext_drv/ledger.py", ("tests/host/test_ledger.py",),
     ("tests/drv/test_memory.py", "tests/drv/test_context.py", "tests/engine/test_memory.py")),
    ("flashnext_drv/drv/api.py", ("tests/drv/test_faults.py", "tests/drv/test_context.py",
                                  "tests/host/test_errors.py"),
     ("tests/drv", *_ENGINE, "tests/faults/test_sweep.py")),
    ("flashnext_drv/drv/graph.py", ("tests/drv/test_graph.py", "tests/drv/test_ownership.py",
                                    "tests/drv/test_faults.py"),
     ("tests/drv/test_context.py", "tests/faults/test_graph_fallback.py", "tests/faults/test_sweep.py")),
    *((name, ("tests/engine/test_graph_cache.py",),
       ("tests/faults/test_graph_fallback.py", "tests/faults/test_graph_sweep.py",
        "tests/engine/test_graphs.py"))
      for name in ("flashnext_drv/drv/builder.py", "flashnext_drv/engine/graphs.py")),
    ("flashnext_drv/drv/module.py", ("tests/drv/test_launch.py", "tests/drv/test_faults.py",
                                     "tests/drv/test_graph.py", "tests/drv/test_ownership.py"),
     ("tests/drv/test_images.py", "tests/drv/test_context.py", "tests/engine/test_memory.py")),
    ("flashnext_drv/drv/", ("tests/drv/test_context.py", "tests/drv/test_memory.py",
                            "tests/drv/test_ownership.py", "tests/drv/test_faults.py",
                            "tests/drv/test_graph.py"),
     ("tests/drv/test_broken_device.py", *_ENGINE, "tests/engine/test_memory.py",
      "tests/faults/test_sweep.py")),
    ("flashnext_drv/state/kv.py", ("tests/host/test_tables.py", *_ENGINE), _WHOLE),
    ("flashnext_drv/state/weights.py", ("tests/host/test_weight_items.py", *_ENGINE), _WHOLE),
    *((f"flashnext_drv/state/{name}.py", ("tests/host/test_store.py", "tests/host/test_weight_items.py",
                                          "tests/engine/test_experts.py"), _WHOLE)
      for name in ("experts", "store", "lines")),
    *((f"flashnext_drv/state/{name}.py", ("tests/host/test_residency.py", "tests/engine/test_ring.py"),
       _WHOLE) for name in ("residency", "ring")),
    ("flashnext_drv/state/ngram.py", ("tests/host/test_rows.py", "tests/engine/test_ngram_order.py",
                                      "tests/engine/test_ngram_mapped.py"), ("tests/faults/test_sweep.py",)),
    ("flashnext_drv/model/rows.py", ("tests/host/test_rows.py",), ("tests/engine/test_ngram_mapped.py",)),
    ("flashnext_drv/state/deep.py", _DEEP, ("tests/faults/test_sweep.py",)),
    ("flashnext_drv/state/export.py", _DEEP[1:], ("tests/engine/test_far_positions.py",)),
    ("flashnext_drv/state/", _ENGINE, _WHOLE),
    ("flashnext_drv/engine/sequence.py", ("tests/host/test_sequence.py", *_ENGINE), _WHOLE),
    *((f"flashnext_drv/engine/{name}.py", _DEEP, ("tests/engine/test_ngram_order.py",
                                                  "tests/engine/test_cli.py", "tests/faults/test_sweep.py"))
      for name in ("chunk", "prefill")),
    ("flashnext_drv/engine/deep.py", ("tests/engine/test_deep_graphs.py", *_DEEP),
     ("tests/engine/test_ngram_order.py", "tests/engine/test_ring.py", "tests/faults/test_sweep.py")),
    ("flashnext_drv/engine/decode.py", ("tests/engine/test_steps_ahead.py",), _ENGINE),
    ("flashnext_drv/engine/edits.py", ("tests/host/test_sequence.py", "tests/engine/test_edits.py"), _ENGINE),
    ("flashnext_drv/engine/round.py", _ENGINE, ("tests/engine/test_ngram_mapped.py", *_WHOLE)),
    ("flashnext_drv/engine/requests.py",
     ("tests/host/test_layout.py", "tests/engine/test_scheduler.py"), _ENGINE),
    ("flashnext_drv/engine/", _ENGINE, ("tests/host/test_device_warning.py", *_WHOLE)),
    ("flashnext_drv/kernels/bind.py", ("tests/host/test_bind_values.py", "tests/drv/test_launch.py",
                                       "tests/drv/test_images.py", "tests/drv/test_ownership.py"),
     ("tests/drv/test_faults.py", "tests/host/test_device_warning.py", "tests/drv/test_context.py",
      "tests/engine/test_golden.py")),
    ("flashnext_drv/kernels/tables.py", ("tests/host/test_tables.py", "tests/host/test_catalog.py"), _ENGINE),
    ("flashnext_drv/kernels/", ("tests/host/test_catalog.py", "tests/host/test_build.py"),
     ("tests/drv/test_images.py", "tests/drv/test_launch.py", *_ENGINE)),
    ("flashnext_drv/model/layout.py", ("tests/host/test_layout.py", *_ENGINE), (
        "tests/host/test_cli_usage.py", *_WHOLE)),
    ("flashnext_drv/model/linears.py",
     ("tests/engine/test_golden.py", "tests/contracts/test_exl3.py", "tests/host/test_spread.py"),
     _ENGINE),
    *((f"flashnext_drv/model/deep_{name}.py", _DEEP, ("tests/engine/test_other_shapes.py",))
      for name in ("layout", "steps")),
    ("flashnext_drv/model/steps.py", _ENGINE, _BYTES),
    ("flashnext_drv/model/", ("tests/host/test_config.py", "tests/host/test_pack.py",
                              "tests/host/test_manifest.py", "tests/host/test_synth.py",
                              "tests/host/test_pack_bad.py", "tests/host/test_weight_items.py"),
     ("tests/host/test_fuzz_found.py", "tests/host/test_fuzz_inputs.py",
      "tests/host/test_cli_packs.py", "tests/host/test_ref_packs.py", "tests/contracts/test_move.py",
      "tests/engine/test_golden.py", "tests/host/test_cli_usage.py")),
)


@dataclass(frozen=True)
class Result:
    """What came of a mutant.  by: the test that failed, or what the build said."""

    id: str
    kind: str
    where: str
    outcome: str
    by: str
    seconds: float


@dataclass(frozen=True)
class Stage:
    """Something to run.  check: kernels whose `flashnext-drv check` stages run, else pytest with `arguments`.
    families: of the simulator it needs, () for all."""

    arguments: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    families: tuple[str, ...] = ()


def stages(mutant: Mutant) -> list[Stage]:
    """What is run until something fails, narrow first."""
    fits = next(((a, b) for start, a, b in TESTS if mutant.path.startswith(start)), None)
    if not mutant.path.startswith("cuda_src/"):
        if fits is None:
            raise ValueError(f"no tests are named for {mutant.path}: add them to TESTS in tools/mutate.py")
        return [Stage(fits[0]), Stage(fits[1])]
    first, then = fits or ((f"tests/contracts/test_{mutant.path.split('/')[1]}.py",), _ENGINE)
    sys.path.insert(0, str(ROOT))
    from flashnext_drv.kernels import catalog
    stems = [Path(name).stem.removeprefix("test_") for name in first]
    families = [stem if stem in catalog.families() else "probe" for stem in stems]
    own = [s.name for s in catalog.specs() if f"cuda_src/{s.source}" == mutant.path]
    kernels = own or [s.name for family in families for s in catalog.specs(family) if family != "probe"]
    if {"moe", "moe_gemv"} & set(families):
        families.append("exl3")         # they are compared with kernels of dense linears
    needs = tuple(dict.fromkeys(families)) if mutant.path != "cuda_src/tables.cuh" else ()
    narrow = [Stage((*first, "-k", " or ".join(own)), families=needs)] if own else []
    check = [Stage(check=tuple(kernels), families=needs)] if kernels and needs else []
    return [*narrow, *check, Stage(first, families=needs), Stage((*then, *_BYTES))]


def equivalents() -> dict[str, str]:
    """id -> reason of the mutants that are not run."""
    read: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return read


def sample(found: Sequence[Mutant], n: int, seed: int) -> tuple[list[Mutant], list[Mutant]]:
    """n mutants, every kind in it, and the order in which spare ones replace invalid ones.

    Each kind gets FLOOR (or all it has), the rest goes by how many a kind has.
    """
    choose = random.Random(seed)
    mixed = sorted(found, key=lambda m: m.id)
    choose.shuffle(mixed)
    taken: list[Mutant] = []
    for kind in KINDS:
        taken += [m for m in mixed if m.kind == kind][: min(FLOOR, max(1, n // len(KINDS)))]
    have = {m.id for m in taken}
    rest = [m for m in mixed if m.id not in have]
    more = max(0, n - len(taken))
    return taken + rest[:more], rest[more:]


class Bench:
    """One copy of the tree, in which one mutant at a time is tried."""

    def __init__(self, folder: Path, cache: Path, limit_s: float, commit: str = "",
                 quick: bool = False) -> None:
        self.root = folder
        self.limit_s = limit_s
        self.quick = quick
        self.green: dict[str, bool] = {}
        self._stamp = int(time.time()) - 1_000_000
        self._env = {**os.environ, "PYTHONPATH": f"{folder}:{LOADER.parent}", "XDG_CACHE_HOME": str(cache),
                     "FLASHNEXT_DRV_DEVICE": "sim"}
        _copy_tree(folder, commit)

    def try_one(self, mutant: Mutant) -> Result:
        started = time.monotonic()
        path = self.root / mutant.path
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.apply(text))
        try:
            outcome, by = self._judge(mutant)
        finally:
            self._write(path, text)
        if outcome == "caught" and not self._is_green(by):
            outcome, by = "red", f"{by} fails without the mutant too"
        return Result(mutant.id, mutant.kind, f"{mutant.path}:{mutant.line}", outcome, by,
                      round(time.monotonic() - started, 1))

    def _judge(self, mutant: Mutant) -> tuple[str, str]:
        built: set[tuple[str, ...]] = set()
        chosen = stages(mutant)
        for i_stage, stage in enumerate(chosen[:-1] if self.quick else chosen):
            if mutant.path.startswith("cuda_src/") and stage.families not in built:
                code, said = self._run(["-c", f"{_BUILD}({list(stage.families) or None})"], BUILD_LIMIT_S)
                if code != 0:
                    return "invalid", said.strip().splitlines()[-1][:200] if said.strip() else f"exit {code}"
                built.add(stage.families)
            limit_s = self.limit_s if i_stage else self.limit_s / 4     # the first takes seconds
            code, said = self._run(_command(stage), limit_s, stage.families)
            what = " ".join(stage.arguments or ("check", *stage.check))
            if code is None:
                return "hang", what
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
            if code < 0 or code in (134, 139):
                return "crash", f"exit {code} in {what}"
            if code not in (0, 5):      # 5: the filter chose no test
                return "caught", failed.group(1) if failed else f"exit {code} of {what}"
        return "missed", ""

    def _is_green(self, test: str) -> bool:
        """Whether a test passes on the unchanged copy; asked once each."""
        if not test.startswith(("tests/", "check::")):
            return True
        if test not in self.green:
            stage = Stage(check=(test.split("::")[1],)) if test.startswith("check::") else Stage((test,))
            code, _ = self._run(_command(stage), 2 * self.limit_s, stage.families)
            self.green[test] = code == 0
        return self.green[test]

    def _write(self, path: Path, text: str) -> None:
        """A new whole second each time: compiled modules are told apart by it."""
        path.write_text(text, encoding="utf-8")
        self._stamp += 1
        os.utime(path, (self._stamp, self._stamp))

    def _run(self, arguments: list[str], limit_s: float,
             families: tuple[str, ...] = ()) -> tuple[int | None, str]:
        """Exit status (None: time limit) and everything said."""
        env = {**self._env, "MUTATE_FAMILIES": ",".join(families or _all_families())}
        child = subprocess.Popen([sys.executable, *arguments], cwd=self.root, env=env, text=True,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 start_new_session=True, errors="replace")
        try:
            said, _ = child.communicate(timeout=limit_s)
            return child.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)    # its own session: what it started goes too
            child.communicate()
            return None, ""


def _command(stage: Stage) -> list[str]:
    if stage.check:
        return [str(LOADER), *stage.check]
    few = ["-p", "mutate_load"] if stage.families else []
    return ["-m", "pytest", *few, "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-rfE",
            *stage.arguments]


def _all_families() -> tuple[str, ...]:
    sys.path.insert(0, str(ROOT))
    from flashnext_drv.kernels import catalog
    return catalog.families()


def _copy_tree(folder: Path, commit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if commit:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", str(folder)], input=packed.stdout, check=True)
        return
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _start_cache(cache: Path) -> None:
    """The user's simulator objects, as links: they are replaced by rename and never written in place."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashnext_drv"
    objects = cache / "flashnext_drv" / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    for path in (base / "objects").glob("*.o"):
        try:
            os.link(path, objects / path.name)
        except OSError:
            shutil.copy2(path, objects / path.name)


def run(found: Sequence[Mutant], spare: Sequence[Mutant], jobs: int, limit_s: float, commit: str,
        quick: bool, out: Path | None) -> list[Result]:
    """Try every mutant; an invalid one is replaced by a spare one of its kind."""
    results: list[Result] = []
    left = {kind: [m for m in spare if m.kind == kind] for kind in KINDS}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        cache = Path(scratch) / "cache"
        _start_cache(cache)
        free = [Bench(Path(scratch) / f"tree{i}", cache, limit_s, commit, quick) for i in range(jobs)]

        def one(mutant: Mutant) -> None:
            with lock:
                bench = free.pop()
            try:
                while True:
                    result = bench.try_one(mutant)
                    with lock:
                        results.append(result)
                        print(f"{len(results):4} {result.outcome:<8} {result.seconds:6.1f} s  {mutant}  "
                              f"{result.by}", flush=True)
                        if out is not None:
                            with out.open("a", encoding="utf-8") as file:
                                file.write(json.dumps(asdict(result)) + "\n")
                        if result.outcome != "invalid" or not left[mutant.kind]:
                            return
                        mutant = left[mutant.kind].pop(0)
            finally:
                with lock:
                    free.append(bench)

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            list(pool.map(one, found))
    return results


def _read(path: Path | None) -> list[Result]:
    """Results of an earlier run; the last one of each mutant."""
    if path is None or not path.is_file():
        return []
    rows = [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row.id: row for row in rows}.values())


def table(results: Iterable[Result]) -> str:
    """Outcomes by kind, invalid ones aside."""
    counts = Counter((r.kind, r.outcome) for r in results)
    columns = ("caught", "hang", "missed", "crash", "red")
    lines = [f"{'kind':<11}{'run':>6}" + "".join(f"{c:>8}" for c in columns) + f"{'invalid':>9}"]
    for kind in (*KINDS, "all"):
        row = [sum(n for (k, o), n in counts.items() if o == c and kind in (k, "all")) for c in columns]
        invalid = sum(n for (k, o), n in counts.items() if o == "invalid" and kind in (k, "all"))
        lines.append(f"{kind:<11}{sum(row):>6}" + "".join(f"{n:>8}" for n in row) + f"{invalid:>9}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print every mutant and stop")
    what.add_argument("--sample", type=int, metavar="N", help="try N mutants")
    what.add_argument("--one", metavar="ID", action="append", help="try this mutant (may be repeated)")
    what.add_argument("--again", type=Path, metavar="FILE", help="try what was not caught in FILE (--out)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240.0,
                        help="seconds for one run of tests; the first, narrow one gets a quarter")
    parser.add_argument("--quick", action="store_true", help="leave out the last, wide run of tests")
    parser.add_argument("--kind", choices=KINDS, help="only mutants of this kind")
    parser.add_argument("--path", default="", help="only files whose path starts so")
    parser.add_argument("--commit", default="", help="copy this commit instead of the working files")
    parser.add_argument("--out", type=Path, help="add results to this file, one JSON object a line; what "
                        "it holds already is not tried again")
    given = parser.parse_args(argv)
    excused = equivalents()
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        root = ROOT
        if given.commit:
            root = Path(scratch)
            _copy_tree(root, given.commit)
        everything = find_all(root)
    found = [m for m in everything if given.kind in (None, m.kind) and m.path.startswith(given.path)]
    if given.list:
        for mutant in found:
            print(f"{mutant}{'  equivalent: ' + excused[mutant.id] if mutant.id in excused else ''}")
        print(f"{len(found)} mutants", file=sys.stderr)
        return 0
    live = [m for m in found if m.id not in excused]
    spare: list[Mutant] = []
    if given.sample:
        chosen, spare = sample(live, given.sample, given.seed)
    else:
        wanted = set(given.one or ()) or {
            r.id for r in _read(given.again) if r.outcome not in ("caught", "hang", "invalid")}
        chosen = [m for m in everything if m.id in wanted]
        for gone in sorted(wanted - {m.id for m in chosen}):
            print(f"{gone} is not in the tree any more: its line has changed")
    done = _read(given.out)
    have = {result.id for result in done}
    chosen, spare = ([m for m in some if m.id not in have] for some in (chosen, spare))
    results = done + run(chosen, spare, given.jobs, given.limit, given.commit, given.quick,
                         given.out)
    print(table(results))
    for mutant in found:
        if mutant.id in excused:
            print(f"not run, equivalent: {mutant}: {excused[mutant.id]}")
    bad = [r for r in results if r.outcome in ("missed", "crash", "red")]
    for result in bad:
        print(f"{result.outcome}: {result.id} {result.where} {result.by}")
    print(f"MUTANTS {len(results) - len(bad) - sum(r.outcome == 'invalid' for r in results)} caught, "
          f"{len(bad)} not, of {len(everything)} in the tree, {len(excused)} excused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
