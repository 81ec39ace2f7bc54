"""What is fuzzed: one function a kind of input, each of which makes one input and gives it to the package.

Used by tools/fuzz.py and tests/host/test_fuzz_inputs.py.  What must stay true: a target raises nothing but
errors of our tree when the package behaves; whatever the package accepts is checked for what it promises.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashnext_drv.check import resources
from flashnext_drv.cli import ids as cli_ids
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import copy_to_host
from flashnext_drv.drv.stream import Stream
from flashnext_drv.engine import engine as engine_module
from flashnext_drv.engine.plan import plan
from flashnext_drv.engine.prefill import Prefill
from flashnext_drv.engine.sequence import Sampling, checked_ids
from flashnext_drv.kernels import bind, catalog
from flashnext_drv.kernels.cubin import read_cubin
from flashnext_drv.kernels.spec import F32
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.deep_layout import deep_layouts
from flashnext_drv.model.header import read_header
from flashnext_drv.model.layout import DEEP_MODES, Layout, Limits
from flashnext_drv.model.manifest import FileEntry, Manifest
from flashnext_drv.model.ngram import ngram_info
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.source import open_pack
from flashnext_drv.state.tables import DeviceTables
from tools import fuzz_pack
from tools.fuzz_values import mangle_bytes, mangle_json, odd_int, odd_text, odd_value

__all__ = ["DEVICE_TARGETS", "TARGETS", "Bench", "Target"]

_DIGEST = Manifest((FileEntry("a", 5, "0" * 64), FileEntry("b", 0, "1" * 64))).digest


class Bench:
    """What the targets share: a folder of their own, the base pack's pieces, and every ledger made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_json = fuzz_pack.base_config()
        self.config = ModelConfig.from_json(self.config_json)
        entries = fuzz_pack.base_entries(self.config)
        self.main = fuzz_pack.header_of(entries)
        self.table = fuzz_pack.header_of(fuzz_pack.ngram_entries(self.config))
        self.ngram_entries = fuzz_pack.ngram_entries(self.config)
        self.pack = folder / "pack"
        self.pack.mkdir()
        self.restore()
        self.ledgers: list[Ledger] = []

    def restore(self) -> None:
        """The pack unmangled."""
        fuzz_pack.fresh(self.pack / "config.json").write_text(json.dumps(self.config_json))
        for name, (header, data, size) in (("model", self.main), ("ngram_embedding", self.table)):
            fuzz_pack.write_file(self.pack / f"{name}.safetensors", json.dumps(header).encode(), data, size)

    def require_empty_ledgers(self) -> int:
        """How many ledgers were made since the last call; each must be empty.  Raises LeakError."""
        n_ledgers = len(self.ledgers)
        for one in self.ledgers:
            one.require_empty()
        self.ledgers.clear()
        return n_ledgers


@dataclass(frozen=True)
class Target:
    """run(generator, bench): one input.  share: how often it is drawn, against the others."""

    name: str
    share: int
    run: Callable[[random.Random, Bench], None]


def _mangled_header(rng: random.Random, base: tuple[dict[str, Any], dict[int, bytes], int]) -> bytes:
    """Header bytes, mangled as JSON, as bytes, or both."""
    if rng.random() < 0.7:
        raw = json.dumps(mangle_json(rng, base[0], rng.choice((1, 1, 2, 3)))).encode()
        return raw if rng.random() < 0.9 else mangle_bytes(rng, raw)
    return mangle_bytes(rng, json.dumps(base[0]).encode())


def _header(rng: random.Random, bench: Bench) -> None:
    base = bench.table if rng.random() < 0.8 else bench.main
    raw = _mangled_header(rng, base)
    length = None if rng.random() < 0.9 else rng.choice((odd_int(rng), len(raw) + rng.randrange(-9, 9)))
    size = base[2] if rng.random() < 0.8 else base[2] + rng.randrange(-300, 300)
    path = bench.folder / "one.safetensors"
    fuzz_pack.write_file(path, raw, {}, size, length)
    if rng.random() < 0.05:
        os.truncate(path, rng.randrange(20))
    found = read_header(path)
    data_at, at = 8 + found.header_bytes, 8 + found.header_bytes
    for tensor in sorted(found.tensors, key=lambda t: (t.offset, t.size)):
        assert tensor.offset == at >= data_at, tensor
        at += tensor.size
    assert at == found.size == path.stat().st_size


def _pack(rng: random.Random, bench: Bench) -> None:
    _mangle_pack(rng, bench)
    try:
        pack = Pack.open(bench.pack, strict=rng.random() < 0.9)
        pack.check()
        layout = Layout(pack.config, Limits(context_tokens=rng.choice((1, 64, 300)), rows=4))
        found = plan(layout, pack)
        assert all(size > 0 for size in found.device.values())
    finally:
        bench.restore()


def _mangle_pack(rng: random.Random, bench: Bench) -> None:
    """One file of the pack mangled on disk."""
    kind = rng.random()
    if kind < 0.3:
        raw = json.dumps(mangle_json(rng, bench.config_json, rng.choice((1, 2)))).encode()
        config = fuzz_pack.fresh(bench.pack / "config.json")
        config.write_bytes(raw if rng.random() < 0.8 else mangle_bytes(rng, raw))
        return
    name, base = ("model", bench.main) if kind < 0.65 else ("ngram_embedding", bench.table)
    header, data, size = base
    if rng.random() < 0.5:      # a header that holds together: entries laid out anew
        edited = {n: e for n, e in header.items() if n != "__metadata__"}
        for _ in range(rng.choice((1, 1, 2))):
            victim = rng.choice(list(edited))
            change = rng.randrange(4)
            if change == 0:
                del edited[victim]
            elif change == 1:
                edited[victim + rng.choice(("x", ".1", "0"))] = edited.pop(victim)
            elif change == 2:
                shape = [*edited[victim]["shape"]]
                shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 16, 33, 128, 144))
                edited[victim] = {**edited[victim], "shape": shape}
            else:
                shape = [1] * rng.choice((1, 33, 70)) + edited[victim]["shape"]
                edited[victim] = {**edited[victim], "shape": shape,
                                  "dtype": rng.choice(("F16", "BF16", "I16", "I64", "U8", "F32"))}
        header, data, size = fuzz_pack.header_of(
            {n: (e["dtype"], e["shape"], b"") for n, e in edited.items()})
        raw = json.dumps(header).encode()
    else:
        raw = _mangled_header(rng, base)
    if rng.random() < 0.2:
        data = {at: mangle_bytes(rng, piece)[:len(piece)] for at, piece in data.items()}
    fuzz_pack.write_file(bench.pack / f"{name}.safetensors", raw, data, size)


def _config(rng: random.Random, bench: Bench) -> None:
    raw: Any = mangle_json(rng, bench.config_json, rng.choice((1, 1, 2, 4)))
    if rng.random() < 0.2:
        path = bench.folder / "config.json"
        fuzz_pack.fresh(path).write_bytes(mangle_bytes(rng, json.dumps(raw).encode()))
        config = ModelConfig.load(bench.folder, strict=rng.random() < 0.5)
    else:
        if rng.random() < 0.7 and isinstance(raw, Mapping) and isinstance(raw.get("text_config"), dict):
            field = rng.choice(sorted(bench.config_json["text_config"]))
            raw["text_config"][field] = rng.choice((odd_value, odd_int, odd_int))(rng)
        config = ModelConfig.from_json(raw, strict=rng.random() < 0.5)
    assert 0 <= config.eos_id < config.vocab and len(config.layer_kinds) == config.n_layers
    for i_ple in range(min(len(config.ple_layers), 2)):
        made = config.ngram(i_ple)
        assert len(made.sizes) == config.n_ngram_heads and made.rows >= sum(made.sizes)


def _ngram(rng: random.Random, bench: Bench) -> None:
    entries = dict(bench.ngram_entries)
    if rng.random() < 0.5:      # another number of shards, and which of them there are
        entries = fuzz_pack.ngram_entries(bench.config, rng.choice((1, 2, 3, 11)))
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(entries))
        dtype, shape, first = entries.pop(name)
        kind = rng.randrange(6)
        if kind == 0:
            name = name.replace("shard_", rng.choice(("shard_9", "shard_0", "shard_٣", "shard_" + "9" * 12,
                                                      "shard_" + "9" * 5000)))
        elif kind == 1:
            name = name.replace("layers.1.", rng.choice(("layers.0.", "layers.", f"layers.{'1' * 5000}.")))
        elif kind == 2:
            shape = [rng.choice((0, 1, 2, 5, 31, n, n + 1, n - 1)) for n in shape] + [1] * rng.randrange(2)
        elif kind == 3:
            dtype = rng.choice(("I16", "I64", "BF16", "F16", "F8_E4M3", "F32"))
        elif kind == 4:
            name = (name.replace("trellis", "weight") if rng.random() < 0.5
                    else name + rng.choice(("x", ".trellis")))
        else:
            first = mangle_bytes(rng, first)[:len(first)] if first else first
            if rng.random() < 0.3:
                continue        # dropped
        entries[name] = (dtype, [max(n, 0) for n in shape], first)
    path = bench.folder / "table.safetensors"
    header, data, size = fuzz_pack.header_of(entries)
    fuzz_pack.write_file(path, json.dumps(header).encode(), data, size)
    found = read_header(path)
    info = ngram_info(Pack(bench.folder, bench.config, [found]))
    assert info.rows == sum(n for _, _, n in info.sources) >= int(info.head_offsets[-1] + info.head_sizes[-1])
    assert info.bits == 0 or 1 <= info.bits <= 8


def _ids(rng: random.Random, bench: Bench) -> None:
    kind = rng.randrange(4)
    text = mangle_bytes(rng, rng.choice((b"1,2,3", b"[1, 2, 3]", b"1 2\n3", b"[[1]]", b"0:3,5,7:9"))) \
        if rng.random() < 0.9 else rng.choice((b"," * 60_000 + b"x", b"1," * 30_000 + b"?", b"[" * 50_000))
    if kind == 0:
        given = cli_ids.parse_ids(text.decode("utf-8", "surrogateescape"), "--ids")
        assert given and all(type(i) is int for i in given)
    elif kind == 1:
        for first, end in cli_ids.parse_rows(text.decode("utf-8", "surrogateescape"), 10):
            assert 0 <= first < end <= 10
    elif kind == 2:
        path = bench.folder / "ids.txt"
        fuzz_pack.fresh(path).write_bytes(text)
        cli_ids.read_ids(SimpleNamespace(ids=None, ids_file=str(path)))  # type: ignore[arg-type]
    else:
        wanted: Any = [odd_value(rng) if rng.random() < 0.3 else rng.randrange(300)
                       for _ in range(rng.randrange(6))]
        if rng.random() < 0.3:
            wanted = rng.choice((odd_value(rng), np.array([[1]]), np.array([1.5]), np.array([2], "<u8"),
                                 np.zeros((0, 3), int), np.array(7), [[1], [1, 2]], [1, [2]]))
        assert all(0 <= i < 256 for i in checked_ids(wanted, 256))


def _limits(rng: random.Random, bench: Bench) -> None:
    fields = {"context_tokens": 300, "sequences": 2, "rows": 4, "prompt_rows": 2, "device_bytes": 0,
              "reserve_bytes": 1 << 20, "page_order": "forward", "graph": True, "chunk": 0,
              "deep": rng.choice(DEEP_MODES), "deep_rows": 128}
    for _ in range(rng.choice((1, 2, 3))):
        field = rng.choice(list(fields))
        fields[field] = rng.choice((odd_value(rng), rng.randrange(-1, 5000), odd_text(rng)))
    draws: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5}
    draws[rng.choice(list(draws))] = rng.choice((odd_value(rng), rng.random() * 3 - 1))
    if rng.random() < 0.4:
        Sampling(**draws)
    how: dict[str, Any] = {"serial": False, "chunk": None, "deep_rows": 5, "deep": True, "progress": None,
                           "cancel": None}
    how[rng.choice(list(how))] = rng.choice((odd_value(rng), rng.randrange(-1, 20000), odd_text(rng)))
    if rng.random() < 0.4:
        Prefill(**how)
    layout = Layout(bench.config, Limits(**fields))  # type: ignore[arg-type]
    sizes = [deep.size_bytes() for deep in deep_layouts(layout)]
    assert sizes == sorted(sizes, reverse=True)
    pack = Pack.open(bench.pack)
    found = plan(layout, pack)
    assert sum(found.device.values()) > 0
    assert layout.rows_cap >= layout.limits.rows
    found.require_fits(rng.choice((0, 1 << 20, 1 << 40)), layout.limits)


def _manifest(rng: random.Random, bench: Bench) -> None:
    files = bench.folder / "files"
    files.mkdir(exist_ok=True)
    made = {"format": 1, "bytes": 5, "files": [{"name": "a", "size": 5, "sha256": "0" * 64},
                                               {"name": "b", "size": 0, "sha256": "1" * 64}]}
    made["digest"] = _DIGEST
    path, cache = bench.folder / "m.json", bench.folder / "digests.json"
    raw = json.dumps(mangle_json(rng, made, rng.choice((1, 2)))).encode()
    fuzz_pack.fresh(path).write_bytes(raw if rng.random() < 0.6 else mangle_bytes(rng, raw))
    stored = {"format": 1, "entries": {"1:2:3:4:5": {"sha256": "0" * 64, "recorded_ns": 7}}}
    raw = json.dumps(mangle_json(rng, stored, rng.choice((1, 2)))).encode()
    fuzz_pack.fresh(cache).write_bytes(raw if rng.random() < 0.7 else mangle_bytes(rng, raw))
    name = rng.choice((b"a", b"\xff\xfe", "é".encode(), b"x\ny", b" "))
    fuzz_pack.fresh(files / os.fsdecode(name)).write_bytes(b"12345"[:rng.randrange(6)])
    try:
        of = Manifest.of(files, cache=cache)
        assert len(of.digest) == 64 and of.files
        of.save(bench.folder / "saved.json")
        assert Manifest.load(bench.folder / "saved.json") == of
    finally:
        for one in files.iterdir():
            one.unlink()
    Manifest.load(path)


def _images(rng: random.Random, bench: Bench) -> None:
    path = bench.folder / "manifest.json"
    kernel = {"regs": 1, "shared_bytes": 0, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0,
              "max_threads": 32, "barriers": 0, "params": [[0, 8], [8, 4]]}
    good: dict[str, Any] = {
        "format": 1, "tool": {"nvrtc": "13.0"}, "options": ["-a"], "option_digest": "x", "source_digest": "y",
        "images": [{"family": "glue", "arch": "sm_80", "file": "f", "sha256": "0", "size_bytes": 1,
                    "source_digest": "z", "kernels": {"k": kernel}}]}
    kind = rng.random()
    if kind < 0.4:
        try:
            read_cubin(mangle_bytes(rng, fuzz_pack.tiny_cubin()))
        except ValueError as error:     # its documented error: only the build and digested images reach it
            assert str(error).startswith("no cubin")
        return
    if kind < 0.7:
        record: dict[str, Any] = {
            "format": 1, "tool": {}, "option_digest": "", "kernels": {"k": {
                "family": "glue", "source_sha256": "0", "block": 32, "params": [[0, 8]], "archs": {"sm_80": {
                    "regs": 1, "shared_bytes": 0, "stack_bytes": 0, "spill_store_bytes": 0,
                    "spill_load_bytes": 0, "blocks_per_sm": 1, "text_sha256": "0"}}}}}
        raw = json.dumps(mangle_json(rng, record, 2)).encode()
        fuzz_pack.fresh(path).write_bytes(raw if rng.random() < 0.6 else mangle_bytes(rng, raw))
        found = resources.load(path)
        assert found is not None and list(resources.stale_sources(found))
        return
    raw = json.dumps(mangle_json(rng, good, 2)).encode()
    fuzz_pack.fresh(path).write_bytes(raw if rng.random() < 0.6 else mangle_bytes(rng, raw))
    catalog.read_manifest(path)


def _launch(rng: random.Random, bench: Bench) -> None:
    spec = rng.choice(catalog.specs())
    given: dict[str, Any] = {a.name: 1.0 if a.kind == F32 else 256 for a in spec.args}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(given) or ["x"])
        if rng.random() < 0.2:
            given[odd_text(rng)] = given.pop(name, 0)
        else:
            given[name] = odd_value(rng)
    bind._names_fit(spec, given)
    values = [bind._value(spec, arg, given[arg.name]) for arg in spec.args]
    assert [v.nbytes for v in values] == [size for _, size in spec.offsets()]
    bind._grid(spec, tuple(odd_value(rng) if rng.random() < 0.3 else rng.randrange(1, 9)
                           for _ in range(rng.randrange(1, 5))))


def _synth(rng: random.Random, bench: Bench) -> None:
    text = "synth:" + mangle_bytes(rng, b"micro?seed=3&ngram_rows=200&locality=0.5&mixed=0").decode(
        "utf-8", "surrogateescape")
    open_pack(text)


def _engine(rng: random.Random, bench: Bench) -> None:
    """The whole way on the simulator: open a mangled pack; what opens makes a token; ledgers end empty."""
    class Kept(Ledger):
        def __init__(self) -> None:
            super().__init__()
            bench.ledgers.append(self)

    real = engine_module.Ledger
    engine_module.Ledger = Kept  # type: ignore[misc]
    try:
        if rng.random() < 0.8:
            _mangle_pack(rng, bench)
        limits = Limits(context_tokens=rng.choice((8, 65)), graph=rng.random() < 0.3,
                        device_bytes=rng.choice((0, 0, 0, 4096, 1 << 20)))
        with engine_module.Engine.open(bench.pack, limits, device="sim") as engine:
            engine.generate([odd_int(rng) if rng.random() < 0.3 else 5], max_new_tokens=1)
    finally:
        engine_module.Ledger = real  # type: ignore[misc]
        bench.restore()


def _tables(rng: random.Random, bench: Bench) -> None:
    """Device tables of odd sizes: what is published is what the device holds; too much is refused."""
    ledger = Ledger()
    bench.ledgers.append(ledger)
    limits = Limits(context_tokens=rng.randrange(1, 1000), sequences=rng.randrange(1, 6),
                    rows=rng.randrange(1, 17))
    words = np.random.default_rng(rng.randrange(1 << 32))
    with Context(0, ledger=ledger) as ctx, Stream(ctx, "fuzz") as stream, \
            DeviceTables(ctx, Layout(bench.config, limits)) as tables:
        n_slots, n_pages = tables.pages.shape
        tables.touch_pages(0, 0, n_slots * n_pages)
        for _ in range(rng.randrange(1, 5)):
            for part in (tables.rows, tables.runs):
                part.view(np.uint32)[:] = words.integers(0, 1 << 32, part.view(np.uint32).shape, np.uint32)
            for _ in range(rng.randrange(3)):
                i_slot, first = rng.randrange(n_slots), rng.randrange(n_pages)
                count = rng.randrange(n_pages - first + 1)
                run = tables.pages[i_slot, first:first + count]
                run["kv"], run["index"] = words.integers(0, 1 << 63, count), words.integers(0, 1 << 63, count)
                tables.touch_pages(i_slot, first, count)
            tables.publish(stream)
            head = np.empty(tables.spans["rows"].size_bytes, np.uint8)
            copy_to_host(stream, head, tables.spans["rows"])
            assert head.tobytes() == tables.rows.tobytes()
            pages = np.empty(tables.pages.nbytes, np.uint8)
            copy_to_host(stream, pages, int(tables.slots[0]["pages"]))
            assert pages.tobytes() == tables.pages.tobytes(), "pages on the device are not those announced"
        tables.store(stream, "extra", np.zeros(rng.choice((1, 64, 4096, 1 << 20)), np.uint8))


TARGETS = (Target("header", 30, _header), Target("pack", 14, _pack), Target("config", 20, _config),
           Target("ngram", 10, _ngram), Target("ids", 8, _ids), Target("limits", 6, _limits),
           Target("manifest", 4, _manifest), Target("images", 4, _images), Target("launch", 4, _launch),
           Target("synth", 1, _synth))
DEVICE_TARGETS = (Target("engine", 3, _engine), Target("tables", 1, _tables))
