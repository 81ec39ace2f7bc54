"""Reading packs: layout of published files, unaligned bytes, groups, n-gram tables, vectors."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.errors import CheckpointError, UsageError
from flashnext_drv.kernels.tables import FORMAT_BF16, FORMAT_F16, exl3_format
from flashnext_drv.model.pack import Pack

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
NGRAM = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
NUMPY = {
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F8_E4M3": "|u1",
}

Spec = tuple[str, tuple[int, ...], np.ndarray[Any, Any]]


def write_file(path: Path, tensors: dict[str, Spec], pad: int = 0) -> None:
    """A safetensors file; pad: spaces behind the header, to move the data to any alignment."""
    header, blobs, at = {}, [], 0
    for name, (dtype, shape, values) in tensors.items():
        blob = np.ascontiguousarray(values, dtype=NUMPY[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    raw = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(blobs))


def folder_with(tmp_path: Path, **files: dict[str, Spec]) -> Path:
    (tmp_path / "config.json").write_bytes((MICRO / "config.json").read_bytes())
    for i, (name, tensors) in enumerate(files.items()):
        write_file(tmp_path / f"{name}.safetensors", tensors, pad=i)
    return tmp_path


def linear(prefix: str, k: int = 128, n: int = 128, bits: float = 3, book: str = "mul1") -> dict[str, Spec]:
    words = int(16 * bits)
    shape = (k // 16, n // 16, words)
    out: dict[str, Spec] = {
        f"{prefix}.trellis": ("I16", shape, np.arange(np.prod(shape)) % 32768),
        f"{prefix}.suh": ("F16", (k,), np.linspace(0.5, 1, k)),
        f"{prefix}.svh": ("F16", (n,), np.linspace(1, 2, n)),
    }
    if book != "3inst":
        value = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[book]
        out[f"{prefix}.{book}"] = ("I32", (), np.array(value, dtype=np.uint32).view(np.int32))
    return out


def test_micro_is_complete_and_tables_outside_the_index_are_found() -> None:
    pack = Pack.open(MICRO)
    pack.check()
    index = json.loads((MICRO / "model.safetensors.index.json").read_text())["weight_map"]
    outside = set(pack.tensors) - set(index)
    assert f"{NGRAM}.shard_0.trellis" in outside and "mtp.hyper_connection_mixer.hc_norm.weight" in outside
    assert pack.remarks == [] and pack.has_mtp
    assert len(pack.experts(0)) == 16 and pack.experts(4)[15][2].n == 128


def test_bytes_are_those_the_safetensors_library_reads() -> None:
    from safetensors import safe_open

    pack = Pack.open(MICRO)
    seen = 0
    for file in ("model-00002-of-00002.safetensors", "ngram_embedding.safetensors"):
        with safe_open(MICRO / file, framework="np") as stream:
            for name in stream.keys():  # noqa: SIM118 (no mapping)
                if pack.tensors[name].dtype != "BF16":  # which numpy does not know
                    assert pack.read(name).tobytes() == stream.get_tensor(name).tobytes(), name
                    seen += 1
    assert seen > 400


def test_every_alignment_reads_alike(tmp_path: Path) -> None:
    values = np.arange(37, dtype=np.float16)
    for pad in range(8):
        write_file(tmp_path / f"{pad}.safetensors", {f"t{pad}": ("F16", (37,), values)}, pad)
    (tmp_path / "config.json").write_bytes((MICRO / "config.json").read_bytes())
    pack = Pack.open(tmp_path)
    assert {pack.tensors[f"t{pad}"].offset % 8 for pad in range(8)} == set(range(8))
    for pad in range(8):
        got = pack.read(f"t{pad}")
        assert got.ctypes.data % 2 == 0 and np.array_equal(got, values)


def test_read_into_takes_any_range_from_many_threads() -> None:
    pack = Pack.open(MICRO)
    name = "model.language_model.embed_tokens.weight"
    whole = pack.read(name).view(np.uint8).reshape(-1)
    dest = np.zeros(whole.size, dtype=np.uint8)
    cuts = [0, 1, 999, 70001, whole.size]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: pack.read_into(name, dest[cuts[i] : cuts[i + 1]], cuts[i]), range(4)))
    assert np.array_equal(dest, whole)
    for first, size in ((-1, 4), (whole.size - 3, 4), (0, whole.size + 1)):
        with pytest.raises(UsageError):
            pack.read_into(name, np.zeros(size, dtype=np.uint8), first)


@pytest.mark.parametrize("book", ["mul1", "mcg", "3inst"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_width_and_codebook_come_from_the_tensors(tmp_path: Path, bits: int, book: str) -> None:
    pack = Pack.open(folder_with(tmp_path, a=linear("x", 256, 384, bits, book)))
    info = pack.linear("x")
    assert (info.k, info.n, info.bits, info.codebook) == (256, 384, bits, book)
    assert info.format == exl3_format(bits, book) and info.is_exl3
    assert set(info.parts) == {"trellis", "suh", "svh"}


@pytest.mark.parametrize("bits", [1.5, 2.5, 3.5])
def test_half_widths(tmp_path: Path, bits: float) -> None:
    assert Pack.open(folder_with(tmp_path, a=linear("x", bits=bits))).linear("x").bits == bits


def test_legacy_sign_words_become_signs(tmp_path: Path) -> None:
    parts = linear("x", 128, 256, 5, "3inst")
    del parts["x.suh"], parts["x.svh"]
    words = np.array([0b1010_0000_0000_0001, 0, 0xFFFF, 1, 2, 4, 8, 16], dtype=np.uint16).view(np.int16)
    parts["x.su"] = ("I16", (8,), words)
    parts["x.sv"] = ("I16", (16,), np.zeros(16, dtype=np.int16))
    pack = Pack.open(folder_with(tmp_path, a=parts))
    info = pack.linear("x")
    suh = pack.scale(info, "suh")
    assert set(info.parts) == {"trellis", "su", "sv"} and suh.dtype == np.float16
    assert [i for i in range(16) if suh[i] == -1] == [0, 13, 15]
    assert (suh[16:32] == 1).all() and (suh[32:48] == -1).all() and suh[48] == -1 and suh[65] == -1
    assert (pack.scale(info, "svh") == 1).all() and pack.scale(info, "svh").shape == (256,)


def test_plain_linears_and_bias(tmp_path: Path) -> None:
    pack = Pack.open(
        folder_with(
            tmp_path,
            a={
                "h.weight": ("F16", (48, 128), np.ones((48, 128))),
                "h.bias": ("F16", (48,), np.ones(48)),
                "b.weight": ("BF16", (1, 32), np.full((1, 32), 0x3F80)),
            },
        )
    )
    assert (pack.linear("h").format, pack.linear("h").k, pack.linear("h").n) == (FORMAT_F16, 128, 48)
    assert pack.linear("h").parts == {"weight": "h.weight", "bias": "h.bias"} and not pack.linear("h").is_exl3
    assert (pack.linear("b").format, pack.linear("b").bits) == (FORMAT_BF16, 16.0)


def test_vectors_widen_exactly(tmp_path: Path) -> None:
    pack = Pack.open(
        folder_with(
            tmp_path,
            a={
                "f16": ("F16", (3,), np.array([1.5, -(2.0**-24), 65504.0])),
                "f32": ("F32", (2,), np.array([0.1, -3.0])),
                "bf16": ("BF16", (2, 1), np.array([[0x3FC0], [0xC2F7]])),
                "ids": ("I64", (1,), np.array([5])),
            },
        )
    )
    assert pack.vector("f16").tolist() == [1.5, -(2.0**-24), 65504.0]
    assert pack.vector("bf16").tolist() == [[1.5], [-123.5]]
    assert pack.vector("f32").dtype == np.float32 and pack.vector("f32")[0] == np.float32(0.1)
    with pytest.raises(CheckpointError) as caught:
        pack.vector("ids")
    assert (caught.value.tensor, caught.value.dtype) == ("ids", "I64")


def ngram_files(layout: str, prefix: str = NGRAM, rows: int = 896, parts: int = 3) -> dict[str, Spec]:
    sizes = np.array([211, 223, 227, 229])
    constants: dict[str, Spec] = {
        f"{prefix}.head_bias": ("F16", (4, 160), np.zeros((4, 160))),
        f"{prefix}.head_offsets": ("I64", (4,), np.cumsum(sizes) - sizes),
        f"{prefix}.head_vocab_sizes": ("I64", (4,), sizes),
        f"{prefix}.layer_multipliers": (
            "I64",
            (3,),
            np.array([4295158889763781, 17440218147737327, 1270917961434445]),
        ),
    }
    table = np.arange(rows * 41).reshape(rows, 41) % 32768
    if layout == "one":
        return constants | {f"{prefix}.trellis": ("I16", (rows, 41), table)}
    step = -(-rows // parts)
    for i in reversed(range(parts)):  # order of the file is not the order of the shards
        piece = table[i * step : (i + 1) * step]
        constants[f"{prefix}.shard_{i}.trellis"] = ("I16", piece.shape, piece)
    return constants


@pytest.mark.parametrize("prefix", [NGRAM, "ngram_embedding"])
@pytest.mark.parametrize("layout", ["one", "shards"])
def test_ngram_layouts_give_the_same_rows(tmp_path: Path, layout: str, prefix: str) -> None:
    pack = Pack.open(folder_with(tmp_path, a=ngram_files(layout, prefix)))
    info = pack.ngram()
    assert (info.rows, info.row_bytes, info.codec, info.bits, info.row_dim) == (896, 82, 4, 4, 160)
    assert info.head_bias == f"{prefix}.head_bias" and info.head_sizes.tolist() == [211, 223, 227, 229]
    rows = np.concatenate([pack.read(name) for name, _, _ in info.sources])
    assert np.array_equal(rows.reshape(-1), np.arange(896 * 41) % 32768)
    assert [first for _, first, _ in info.sources] == ([0] if layout == "one" else [0, 299, 598])
    assert sum(n for _, _, n in info.sources) == 896


def test_twelve_shards_are_ordered_by_number(tmp_path: Path) -> None:
    info = Pack.open(folder_with(tmp_path, a=ngram_files("shards", parts=12))).ngram()
    assert [name.split("shard_")[1].split(".")[0] for name, _, _ in info.sources] == [
        str(i) for i in range(12)
    ]


def test_plain_bf16_table(tmp_path: Path) -> None:
    stem = NGRAM.removesuffix(".ngram_embedding")
    files: dict[str, Spec] = {
        f"{NGRAM}.shard_0.weight": ("BF16", (448, 160), np.zeros((448, 160))),
        f"{NGRAM}.shard_1.weight": ("BF16", (448, 160), np.ones((448, 160))),
        f"{stem}.ngram_heads_vocab_sizes": ("I64", (4,), np.array([211, 223, 227, 229])),
    }
    info = Pack.open(folder_with(tmp_path, a=files)).ngram()
    assert (info.codec, info.bits, info.row_bytes, info.head_bias, info.rows) == ("bf16", 0, 320, None, 896)
    assert info.multipliers.tolist() == [4295158889763781, 17440218147737327, 1270917961434445]


def test_missing_mtp_mixer_is_a_remark(tmp_path: Path) -> None:
    for file in MICRO.iterdir():
        if not file.name.startswith("mtp_"):
            (tmp_path / file.name).symlink_to(file)
    pack = Pack.open(tmp_path)
    pack.check()
    assert len(pack.remarks) == 1 and "mtp.hyper_connection_mixer" in pack.remarks[0]
    assert "mtp_hyper_connection_mixer_patch.safetensors" in pack.remarks[0] and not pack.has_mtp


def test_header_of_many_names_is_quick(tmp_path: Path) -> None:
    """30,000 names in well under the time that any step per pair of names would take."""
    names = {
        f"model.language_model.layers.{i % 48}.mlp.experts.{i}.gate_proj.suh": ("F16", (1,), np.ones(1))
        for i in range(30_000)
    }
    pack = Pack.open(folder_with(tmp_path, a=names))
    assert len(pack.tensors) == 30_000


def some_parts(pack: Pack) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """An expert's nine tensors and one of another file, in no order, with room for each."""
    stem = "model.language_model.layers.2.mlp.experts.5"
    names = [f"{stem}.{p}_proj.{part}" for part in ("svh", "trellis", "suh") for p in ("up", "down", "gate")]
    names.insert(4, f"{NGRAM}.shard_0.trellis")
    return {name: np.full(pack.tensor(name).size, 0xA5, np.uint8) for name in names}


def test_neighbours_are_read_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    really = os.preadv

    def counting(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(len(buffers))
        return really(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    pack = Pack.open(MICRO)
    parts = some_parts(pack)
    pack.read_parts(list(parts.items()))
    assert all(got.tobytes() == pack.read(name).tobytes() for name, got in parts.items())
    assert 2 <= len(calls) < len(parts) and sum(calls) > len(parts), "markers between parts are read over"
    pack.read_parts([])
    half = {name: np.zeros(got.size // 2, np.uint8) for name, got in parts.items()}
    pack.read_parts(list(half.items()))
    assert all(got.tobytes() == parts[name][: got.size].tobytes() for name, got in half.items())


def test_how_far_apart_neighbours_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """4096 bytes between two are read over, more are not; none at all is best."""
    calls: list[tuple[int, list[int]]] = []
    really = os.preadv

    def counting(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append((offset, [len(buffer) for buffer in buffers]))
        return really(fd, buffers, offset)

    sizes = {"a": 8, "between": 2048, "b": 16, "c": 24, "more": 2049, "d": 32}
    files: dict[str, Spec] = {name: ("F16", (n,), np.arange(n)) for name, n in sizes.items()}
    pack = Pack.open(folder_with(tmp_path, a=files))
    monkeypatch.setattr(os, "preadv", counting)
    parts = {name: np.zeros(2 * sizes[name], np.uint8) for name in ("c", "a", "d", "b")}
    pack.read_parts(list(parts.items()))
    assert calls == [(pack.tensor("a").offset, [16, 4096, 32, 0, 48]), (pack.tensor("d").offset, [64])]
    assert all(got.tobytes() == pack.read(name).tobytes() for name, got in parts.items())


@pytest.mark.parametrize("gives", [0, 100, None])
def test_a_read_that_falls_short_is_done_in_parts(monkeypatch: pytest.MonkeyPatch, gives: int | None) -> None:
    """The system may give less than asked, or refuse the call."""

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        if gives is None:
            raise OSError(22, "Invalid argument")
        return os.preadv_really(fd, [memoryview(buffers[0])[:gives]], offset)  # type: ignore[attr-defined]

    pack = Pack.open(MICRO)
    parts = some_parts(pack)
    monkeypatch.setattr(os, "preadv_really", os.preadv, raising=False)
    monkeypatch.setattr(os, "preadv", short)
    pack.read_parts(list(parts.items()))
    assert all(got.tobytes() == pack.read(name).tobytes() for name, got in parts.items())


def test_parts_of_a_file_at_fault(tmp_path: Path) -> None:
    pack = Pack.open(folder_with(tmp_path, a=linear("lm_head"), b=linear("other")))
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-300])
    names = [name for name in pack.tensors if pack.tensor(name).size]
    parts = [(name, np.zeros(pack.tensor(name).size, np.uint8)) for name in names]
    with pytest.raises(CheckpointError, match="lost bytes"):
        pack.read_parts(parts)
    with pytest.raises(UsageError):
        pack.read_parts([(names[0], np.zeros(pack.tensor(names[0]).size + 1, np.uint8))])
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        pack.read_parts(parts)
