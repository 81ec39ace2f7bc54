#!/usr/bin/env python3
"""Times forms of decode's weight products beside each other, and compares their bytes.

    python tools/bench_gemv.py --build DIR [--before REV]   # anywhere NVRTC is; needs no GPU
    python tools/bench_gemv.py --images DIR --out gemv.json [--rows 1,8] [--only gdn] [--forms old,tile]
    python tools/bench_gemv.py --device sim                 # shows that it works; times mean nothing

A form is the kernels' text under other macros (FORMS): how many tiles a warp takes, how large a block is,
how far ahead words are asked for, which pipe does what.  `old` is the text of the revision --before,
unchanged.  Forms carry only the decoders of mul1 at 3 and 5 bits, f16 and bf16.  Each shape of one decoded
token is a graph of launches over enough copies of its weights that L2 holds none; the time of a launch
includes the gap to the next.  The bytes of a launch of each form are compared with those of the first.

Exit 1 when bytes differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_linear import N_SLOTS, Bench, Built, measure, weight_bytes

from flashnext_drv.check.cases_exl3 import Dot, parse_linear
from flashnext_drv.check.contract import bits
from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import Span, copy_to_host, fill_bytes
from flashnext_drv.drv.module import Launch, Module, pack
from flashnext_drv.drv.stream import Stream
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.bind import Value, simulator_image
from flashnext_drv.kernels.exl3 import dot_segments
from flashnext_drv.kernels.planted_exl3 import _WIDTHS
from flashnext_drv.kernels.spec import PTR, KernelSpec
from flashnext_drv.kernels.tables import LINE, LINEAR, ROUND, ROUTE
from flashnext_drv.ledger import Ledger
from flashnext_drv.sim import load
from flashnext_drv.sim.build import Variant
from flashnext_drv.sim.build import build as build_simulator

ROOT: Final = Path(__file__).resolve().parents[1]
KERNELS: Final = ("linear_gemv_n8", "moe_gemv_gu", "moe_gemv_down")
NARROW: Final = "        FN_TRELLIS(6, 2)\n        FN_TRELLIS(10, 2)\n"


# exl3.cuh's choices where a form says nothing.
_NONE: Final = {"FN_AHEAD": 4, "FN_AHEAD_PLAIN": 4} | dict.fromkeys(
    ("FN_ROLLED", "FN_PREFETCH", "FN_SHARE", "FN_TOP_WINDOW", "FN_WINDOW_MAD", "FN_JOIN_MAD"), 0
)


@dataclass(frozen=True)
class Form:
    """tiles: of 16 outputs a warp; pairs: of tiles a block; blocks: of an SM that registers must leave room
    for; defines: other macros; old: the text of another revision, which knows none of this."""

    tiles: int = 2
    pairs: int = 4
    blocks: int = 7
    defines: Mapping[str, int] = field(default_factory=dict)
    old: bool = False

    def spec(self, kernel: str, name: str) -> KernelSpec:
        """The declaration of `kernel` in this form, under a name of its own."""
        spec = next(spec for spec in catalog.specs() if spec.name == kernel)
        if self.old:
            return replace(spec, name=f"{kernel}__{name}", block=128, blocks_per_sm=7)
        macros = {**_NONE, "FN_WARP_TILES": self.tiles, "FN_BLOCK_PAIRS": self.pairs, **self.defines}
        return replace(
            spec,
            name=f"{kernel}__{name}",
            block=64 * self.pairs // self.tiles,
            blocks_per_sm=self.blocks,
            defines=spec.defines + tuple((k, str(v)) for k, v in macros.items()),
        )


_TOP: Final = {"FN_PREFETCH": 2, "FN_TOP_WINDOW": 1}
_SHARE: Final = _TOP | {"FN_SHARE": 1}
_MIX: Final = _SHARE | {"FN_WINDOW_MAD": 2, "FN_JOIN_MAD": 2}
_ROLL: Final = _MIX | {"FN_ROLLED": 1}
FORMS: Final[Mapping[str, Form]] = {
    "old": Form(old=True),
    "start": Form(),  # descriptors at once, sizes by shift
    "pairmix": Form(2, 4, 7, _MIX),  # + fewer instructions, pipes balanced, plain words into L2
    "pair1mix": Form(2, 1, 28, _MIX),  # blocks of one warp with two tiles
    "tile4": Form(1, 4, 5),  # a tile a warp, the old grid, 40 warps
    "tile": Form(1, 1, 20),  # blocks of one pair, 40 warps
    "tiletop": Form(1, 1, 20, _TOP),
    "tileshare": Form(1, 1, 20, _SHARE),
    "tilemix": Form(1, 1, 20, _MIX),
    "tile4mix": Form(1, 4, 5, _MIX),
    "tilemad": Form(1, 1, 20, _SHARE | {"FN_WINDOW_MAD": 3, "FN_JOIN_MAD": 4}),
    "tileroll": Form(1, 1, 20, _ROLL),
    "tileroll4": Form(1, 4, 5, _ROLL),
    "tilefetch": Form(1, 1, 20, _ROLL | {"FN_PREFETCH": 3}),
    "tilenofetch": Form(1, 1, 20, _ROLL | {"FN_PREFETCH": 0}),
    "tiledeep": Form(1, 1, 16, _MIX | {"FN_AHEAD": 8, "FN_AHEAD_PLAIN": 10, "FN_PREFETCH": 0}),
    "tile24": Form(1, 1, 24, _ROLL),  # 48 warps
    "tilelow": Form(1, 1, 24, _ROLL | {"FN_AHEAD": 2}),
    # what a kernel for launches of plain weights alone would do: registers do not matter there
    "plain10": Form(1, 1, 8, _ROLL | {"FN_AHEAD_PLAIN": 10, "FN_PREFETCH": 0}),
    "plain20": Form(1, 1, 6, {"FN_AHEAD_PLAIN": 20}),
}

# One decoded token of the real widths: bits as the 3.05 bpw pack has them.
REAL: Final[Mapping[str, tuple[str, str]]] = {
    "gdn_in": ("linear_gemv_n8", "mul1_5 2560x10240; mul1_5 2560x6144; f16 2560x48; f16 2560x48"),
    "gdn_out": ("linear_gemv_n8", "mul1_5 6144x2560/8"),
    "qsa_in": ("linear_gemv_n8", "mul1_5 2560x12288; mul1_5 2560x512; mul1_5 2560x512; mul1_3 2560x640"),
    "head": ("linear_gemv_n8", "mul1_5 2560x248320"),
    "head_3": ("linear_gemv_n8", "mul1_3 2560x248320"),
    "site_down": ("linear_gemv_n8", "f16 10240x320; f16 10240x4"),
    "router": ("linear_gemv_n8", "f16 2560x512; f16 2560x1"),
    "moe_gu": ("moe_gemv_gu", "mul1_3 2560x640; mul1_5 2560x640"),
    "moe_down": ("moe_gemv_down", "mul1_3 640x2560; mul1_5 640x2560"),
}
TINY: Final[Mapping[str, tuple[str, str]]] = {
    "linears": ("linear_gemv_n8", "mul1_5 512x128; mul1_3 384x128/1; f16 512x20; bf16 64x5; f16 80x1"),
    "moe_gu": ("moe_gemv_gu", "mul1_3 256x128; mul1_5 256x128"),
    "moe_down": ("moe_gemv_down", "mul1_3 384x256; mul1_5 384x256"),
}


# ---- images


def sources(form: Form, revision: str, folder: Path) -> None:
    """A copy of the form's kernel text with two trellis decoders alone."""
    if form.old:
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", revision, "cuda_src"], capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as tar:
            tar.extractall(folder.parent / f"{folder.name}.git", filter="data")
        (folder.parent / f"{folder.name}.git" / "cuda_src").rename(folder)
    else:
        shutil.copytree(catalog.source_root(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "exl3.cuh"
    text = path.read_text(encoding="utf-8")
    if text.count(_WIDTHS) != 1:
        raise SystemExit("the list of widths in exl3.cuh is not the one known here")
    path.write_text(text.replace(_WIDTHS, NARROW), encoding="utf-8")


def unit_text(spec: KernelSpec, arch: str) -> str:
    lines = [f"#define {name} {value}".rstrip() for name, value in spec.macros(arch)]
    return "\n".join([*lines, f'#include "{spec.source}"']) + "\n"


def digest_of(spec: KernelSpec, folder: Path) -> str:
    text = hashlib.sha256(json.dumps(spec.all_macros()).encode())
    for path in sorted(folder.rglob("*.cu*")):
        text.update(path.read_bytes())
    return text.hexdigest()


def chosen(names: str, revision: str) -> dict[str, Form]:
    """The forms of a comma list ('' = all); `old` only where its revision is known."""
    wanted = names.split(",") if names else list(FORMS)
    return {name: FORMS[name] for name in wanted if revision or not FORMS[name].old}


def build_images(folder: Path, arch: str, forms: Mapping[str, Form], revision: str) -> None:
    import build_kernels as builder

    builder._require_nvrtc()
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {}
    for name, form in forms.items():
        with tempfile.TemporaryDirectory(prefix="flashnext-gemv-") as scratch:
            text = Path(scratch) / "sources"
            sources(form, revision, text)
            for kernel in KERNELS:
                spec = form.spec(kernel, name)
                digest = digest_of(spec, text)
                unit = builder.Unit(spec.name, arch, unit_text(spec, arch), digest, str(text))
                data, log = builder._compile(unit)
                (record,) = builder._entry(data, log)["kernels"].values()
                (folder / f"{spec.name}.cubin").write_bytes(data)
                made[spec.name] = {"digest": digest, "arch": arch, **record}
                print(
                    f"{spec.name}: {record['regs']} registers, {record['spill_store_bytes']} bytes spilled, "
                    f"{len(data)} bytes",
                    flush=True,
                )
    (folder / "manifest.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


def load_simulator(forms: Mapping[str, Form], revision: str) -> dict[str, str]:
    """The simulator with the forms beside the real kernels; digest by kernel name."""
    digests = {}
    with tempfile.TemporaryDirectory(prefix="flashnext-gemv-") as scratch:
        variants = []
        for name, form in forms.items():
            text = Path(scratch) / name
            sources(form, revision, text)
            for kernel in KERNELS:
                spec = form.spec(kernel, name)
                digests[spec.name] = digest_of(spec, text)
                variants.append(Variant(spec.name, spec, text, digests[spec.name]))
        load.load(built=build_simulator(variants=variants))
    return digests


# ---- one shape


@dataclass
class Shape:
    """What a launch of each copy takes.  pairs, rest: the grid is (ceil(pairs / a block's), *rest)."""

    kernel: str
    args: list[dict[str, Value]]
    pairs: int
    rest: tuple[int, ...]
    part: Span
    bytes_moved: int
    trellis_weights: int
    weights: int

    def launches(self, form: Form, name: str, module: Module) -> list[Launch]:
        grid = (-(-self.pairs // form.pairs), *self.rest)
        return [launch_of(module, form.spec(self.kernel, name), grid, args) for args in self.args]


class Bare(Bench):
    """A bench without the package's images: forms bring their own."""

    def __init__(self, stack: ExitStack, device: str, cold_bytes: int) -> None:
        api.ensure(device)
        self.arenas, self.cold_bytes = stack, cold_bytes
        self.ctx = stack.enter_context(Context(0, ledger=Ledger()))
        self.stream = stack.enter_context(Stream(self.ctx, "bench"))
        words = bits(1, "bench", (min(cold_bytes, 8 << 20) // 4,))
        self.block = words.tobytes()
        self.finite = (words & np.uint32(0xBBFFBBFF)).tobytes()


def launch_of(module: Module, spec: KernelSpec, grid: tuple[int, ...], args: Mapping[str, Value]) -> Launch:
    values: list[np.generic] = []
    for arg in spec.args:
        value = args[arg.name]
        number = value.address if isinstance(value, Span) else int(value)
        values.append(np.uint64(number) if arg.kind == PTR else np.uint32(number))
    arenas = {id(v.arena): v.arena for v in args.values() if isinstance(v, Span)}
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(
        module.function(spec.name),
        (x, y, z),
        spec.block,
        0,
        pack(spec.offsets(), values),
        holds=tuple(arenas.values()),
        names=tuple(arg.name for arg in spec.args),
    )


def linears(bench: Bench, dots: list[Dot], rows: int) -> Shape:
    size = sum(weight_bytes(dot) for dot in dots)
    part_size = sum(dot.units * 8 * dot.n * 4 for dot in dots)
    n_copies = bench.copies(size)
    shared = sum(8 * dot.k * 2 + 1024 for dot in dots) + part_size
    arena = bench.arena("linear", (size + 4096 * len(dots)) * n_copies + shared + (1 << 16))
    round_at = bench.put(arena, "round", np.array([(rows, rows, 8, 0)], ROUND))
    x = [bench.filled(arena, "x", 8 * dot.k * 2, True) for dot in dots]
    part = arena.span("part", part_size)
    args: list[dict[str, Value]] = []
    for _ in range(n_copies):
        table, first, at = np.zeros(len(dots), LINEAR), 0, part.address
        for j, dot in enumerate(dots):
            data = bench.filled(arena, "w", weight_bytes(dot), dot.dtype != "exl3")
            one = table[j]
            one["w"]["data"], one["w"]["format"] = data.address, dot.format
            one["x"], one["part"], one["x_stride"] = x[j].address, at, dot.k
            one["k"], one["n"], one["leaves"], one["segments"] = dot.k, dot.n, dot.leaves, dot.segments
            one["first_warp"], one["n_warps"] = first, -(-dot.n // 32) * dot.units
            first += int(one["n_warps"])
            at += dot.units * 8 * dot.n * 4
        args.append(
            {"round": round_at, "linears": bench.put(arena, "linears", table), "n_linears": len(dots)}
        )
    moved = size + sum(rows * (dot.k * 2 + dot.units * dot.n * 4) for dot in dots)
    return Shape(
        "linear_gemv_n8",
        args,
        first,
        (),
        part,
        moved,
        sum(dot.k * dot.n for dot in dots if dot.dtype == "exl3"),
        sum(dot.k * dot.n for dot in dots),
    )


def experts(bench: Bench, kernel: str, expert: Dot, shared: Dot, rows: int) -> Shape:
    """Every row of every copy goes to experts and a shared expert of its own."""
    up = kernel == "moe_gemv_gu"
    hidden, width = (expert.k, expert.n) if up else (expert.n, expert.k)
    names = ("gate", "up") if up else ("down",)
    size = len(names) * (weight_bytes(expert) * (N_SLOTS - 1) + weight_bytes(shared)) * rows
    n_copies, units = bench.copies(size), dot_segments(expert.k, expert.n)
    part_size = units * rows * N_SLOTS * len(names) * expert.n * 4
    x_size = rows * N_SLOTS * len(names) * expert.k * 2
    n_lines = n_copies * rows * N_SLOTS
    arena = bench.arena(
        "moe",
        (size + 256 * len(names) * N_SLOTS * rows) * n_copies
        + part_size
        + x_size
        + n_lines * LINE.itemsize
        + n_copies * (rows * N_SLOTS * ROUTE.itemsize + 256)
        + (1 << 16),
    )
    round_at = bench.put(arena, "round", np.array([(rows, rows, rows, 0)], ROUND))
    x, part = bench.filled(arena, "x", x_size, True), arena.span("part", part_size)
    lines = np.zeros(n_lines, LINE)
    lines["width"] = width
    for i in range(n_lines):
        dot = shared if i % N_SLOTS == N_SLOTS - 1 else expert
        for name in names:
            lines[i][name]["data"] = bench.filled(arena, "w", weight_bytes(dot), False).address
            lines[i][name]["format"] = dot.format
    lines_at = bench.put(arena, "lines", lines)
    args: list[dict[str, Value]] = []
    for c in range(n_copies):
        routes = np.zeros((rows, N_SLOTS), ROUTE)
        routes["expert"] = c * rows * N_SLOTS + np.arange(rows * N_SLOTS).reshape(rows, N_SLOTS)
        args.append(
            {
                "round": round_at,
                "routes": bench.put(arena, "routes", routes),
                "lines": lines_at,
                "x": x,
                "part": part,
                "hidden": hidden,
                "n_slots": N_SLOTS,
                "width_cap": width,
            }
        )
    weights = rows * N_SLOTS * len(names) * expert.k * expert.n
    return Shape(
        kernel,
        args,
        expert.n // 32 * units,
        (len(names) * N_SLOTS, rows),
        part,
        size + x_size + part_size,
        weights,
        weights,
    )


def outputs(bench: Bench, shape: Shape, launch: Launch) -> str:
    """SHA-256 of what a launch writes over a filled buffer."""
    found = np.zeros(shape.part.size_bytes, np.uint8)
    fill_bytes(bench.stream, shape.part, 0x5A)
    launch.run(bench.stream)
    copy_to_host(bench.stream, found, shape.part)
    bench.stream.synchronize()
    return hashlib.sha256(found.tobytes()).hexdigest()


def modules(
    bench: Bench, stack: ExitStack, forms: Mapping[str, Form], images: Path | None, digests: Mapping[str, str]
) -> Iterator[tuple[str, Module]]:
    manifest = json.loads((images / "manifest.json").read_text()) if images else {}
    for name, form in forms.items():
        for kernel in KERNELS:
            key = form.spec(kernel, name).name
            image = (images / f"{key}.cubin").read_bytes() if images else simulator_image(key, digests[key])
            digest = manifest[key]["digest"] if images else digests[key]
            yield key, stack.enter_context(Module(bench.ctx, key, image, digest))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="make the images in this folder, and nothing else")
    parser.add_argument("--before", default="", help="git revision of the form `old`")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--images", type=Path, help="folder that --build made")
    parser.add_argument("--device", choices=("sim", "cuda"), default="cuda")
    parser.add_argument("--forms", default="", help="comma list; '': all that were built")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rows", default="1", help="comma list of 1 .. 8")
    parser.add_argument("--launches", type=int, default=120, help="launches a graph")
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=4.4e12, help="bytes/s of the floor")
    parser.add_argument("--decode-rate", type=float, default=3.4e12, help="trellis weights/s of the floor")
    parser.add_argument("--out", help="write the results as JSON here")
    options = parser.parse_args()
    forms = chosen(options.forms, options.before)
    if options.build:
        build_images(options.build, options.arch, forms, options.before)
        return 0
    simulated, digests = options.device == "sim", {}
    if simulated:
        digests = load_simulator(forms, options.before)
    else:
        made = json.loads((options.images / "manifest.json").read_text())
        wanted = chosen(options.forms, "known")
        forms = {name: form for name, form in wanted.items() if form.spec(KERNELS[0], name).name in made}
    results: dict[str, Any] = {}
    differ = 0
    with ExitStack() as stack:
        api.ensure(options.device)
        bench = Bare(stack, options.device, 1 << 16 if simulated else 192 << 20)
        loaded = dict(modules(bench, stack, forms, None if simulated else options.images, digests))
        for shape_name, (kernel, texts) in (TINY if simulated else REAL).items():
            for rows in (int(r) for r in options.rows.split(",") if options.only in shape_name):
                dots = [parse_linear(text) for text in texts.split(";")]
                with ExitStack() as bench.arenas:
                    shape = (
                        linears(bench, dots, rows)
                        if kernel == "linear_gemv_n8"
                        else experts(bench, kernel, dots[0], dots[1], rows)
                    )
                    floor = (
                        max(
                            shape.bytes_moved / options.bandwidth, shape.trellis_weights / options.decode_rate
                        )
                        * 1e6
                    )
                    print(
                        f"{shape_name} rows {rows}: {shape.weights / 1e6:.1f} M weights, "
                        f"{shape.bytes_moved / 1e6:.1f} MB, floor {floor:.2f} us",
                        flush=True,
                    )
                    launches = {
                        name: shape.launches(form, name, loaded[form.spec(kernel, name).name])
                        for name, form in forms.items()
                    }
                    hashes = {name: outputs(bench, shape, some[0]) for name, some in launches.items()}
                    first = next(iter(hashes.values()))
                    holds = [span.arena for span in (shape.part,)]
                    for name, some in launches.items():
                        built = Built(some, shape.bytes_moved, shape.trellis_weights, holds)
                        times = measure(bench, built, 3 if simulated else options.launches, options.replays)
                        same = hashes[name] == first
                        differ += not same
                        us = median(times) or 1e-9
                        results[f"{shape_name}/{rows}/{name}"] = {
                            "us": us,
                            "us_best": min(times),
                            "same_bytes": same,
                            "floor_us": floor,
                            "weights": shape.weights,
                            "bytes": shape.bytes_moved,
                        }
                        print(
                            f"  {name:10} {us:8.2f} us (best {min(times):8.2f})  "
                            f"{shape.weights / us * 1e-6:6.2f} Tw/s  "
                            f"{shape.bytes_moved / us * 1e-3:7.0f} GB/s  {floor / us:6.1%} of floor"
                            f"{'' if same else '  BYTES DIFFER'}",
                            flush=True,
                        )
        if options.out:
            Path(options.out).write_text(
                json.dumps({"device": str(bench.ctx.facts), "results": results}, indent=1) + "\n"
            )
    print("FAIL: bytes differ" if differ else "PASS: all forms give the same bytes")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
