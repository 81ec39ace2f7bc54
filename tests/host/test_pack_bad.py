"""Packs that must be refused: each case with the error's fields and what its message tells one to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.errors import CheckpointError
from flashnext_drv.model.pack import Pack

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
HEAD = "lm_head"
NGRAM = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
STEM = "model.language_model.layers.0.linear_attn"
ITEM = {"F16": 2, "BF16": 2, "I16": 2, "I32": 4, "F32": 4, "I64": 8, "F8_E4M3": 1}


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header; length: what its first 8 bytes claim."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str = "F16", shape: object = (4,), first: object = 0, end: object = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.json and nothing else."""
    (tmp_path / "config.json").write_bytes((MICRO / "config.json").read_bytes())
    return tmp_path


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """micro with some tensors replaced, dropped (None) or added: name -> (dtype, shape[, bytes])."""

    def make(**changes: tuple[Any, ...] | None) -> Path:
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        fresh = set(changes) - set(Pack.open(MICRO).tensors)  # new names go into the last shard
        for file in MICRO.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).symlink_to(file)
                continue
            blob = file.read_bytes()
            length = int.from_bytes(blob[:8], "little")
            header = json.loads(blob[8 : 8 + length])
            mine = set(changes) & set(header) | (
                fresh if file.name == "model-00002-of-00002.safetensors" else set()
            )
            if not mine:
                (tmp_path / file.name).symlink_to(file)
                continue
            new: dict[str, Any] = {}
            pieces: list[bytes] = []
            at, data = 0, memoryview(blob)[8 + length :]
            todo: dict[str, Any] = {
                n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
                for n, e in header.items()
                if n != "__metadata__"
            }
            todo |= {name: changes[name] for name in sorted(mine)}
            for name, value in todo.items():
                if value is None:
                    continue
                size = int(np.prod(value[1], dtype=np.int64)) * ITEM[value[0]]
                piece = value[2] if len(value) == 3 else bytes(size)
                assert len(piece) == size
                new[name] = {"dtype": value[0], "shape": list(value[1]), "data_offsets": [at, at + size]}
                pieces.append(piece)
                at += size
            raw_file(tmp_path / file.name, new, b"".join(pieces))
        return tmp_path

    return make


def refused(folder: Path, match: str, check: bool = True) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        pack = Pack.open(folder)
        if check:
            pack.check()
    assert "\n" not in str(caught.value) and "; " in str(caught.value)  # one line, and what to do
    return caught.value


# Not a pack.


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert refused(tmp_path / "no", "does not exist").folder == str(tmp_path / "no")


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    assert "not a folder" in str(refused(tmp_path / "x", "not a pack"))


def test_folder_without_config(tmp_path: Path) -> None:
    assert "config.json is missing" in str(refused(tmp_path, "not a pack"))


def test_folder_without_tensors(folder: Path) -> None:
    assert refused(folder, r"not a pack: no \*.safetensors").folder == str(folder)


def test_unreadable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    error = refused(folder, "pack folder cannot be read")
    assert error.folder == str(folder) and "Permission denied" in str(error) and "permissions" in str(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folder_without_read_permission(folder: Path) -> None:
    folder.chmod(0o300)
    try:
        assert refused(folder, "cannot be read").folder == str(folder)
    finally:
        folder.chmod(0o700)


def test_unreadable_file(folder: Path) -> None:
    (folder / "a.safetensors").mkdir()
    error = refused(folder, "file cannot be read")
    assert error.file == str(folder / "a.safetensors")


# Headers: truncated, overlong, lying.


def test_file_shorter_than_a_length(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"1234567")
    error = refused(folder, "is truncated")
    assert (error.file, error.size_bytes) == (str(folder / "a.safetensors"), 7)


@pytest.mark.parametrize("length", [0, 1, 1000, 2**62, 2**64 - 1])
def test_header_length_that_does_not_fit(folder: Path, length: int) -> None:
    raw_file(folder / "a.safetensors", {"t": entry()}, bytes(8), length)
    error = refused(folder, "header does not fit")
    assert error.header_bytes == length and error.size_bytes == (folder / "a.safetensors").stat().st_size


@pytest.mark.parametrize("header", [b"{]", b"\xff\xfe{}", b'{"t": ', b"[" * 100_000])
def test_header_that_is_not_json(folder: Path, header: bytes) -> None:
    raw_file(folder / "a.safetensors", header)
    assert refused(folder, "header is not JSON").header_bytes == len(header)


@pytest.mark.parametrize(
    "header", [b"[]", b"17", b'{"t": 5}', b'{"t": {"dtype": "F16"}}', b'{"__metadata__": [1]}']
)
def test_header_of_another_shape(folder: Path, header: bytes) -> None:
    raw_file(folder / "a.safetensors", header)
    assert refused(folder, "header is malformed").file == str(folder / "a.safetensors")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("dtype", entry(dtype="F13")),
        ("dtype", {"dtype": ["F16"], "shape": [4], "data_offsets": [0, 8]}),
        ("shape", entry(shape=[-4])),
        ("shape", entry(shape=[True])),
        ("shape", entry(shape=4)),
        ("shape", entry(shape=[4.0])),
        ("data_offsets", entry(first=8, end=0)),
        ("data_offsets", entry(first=-8, end=0)),
        ("data_offsets", entry(end=16)),
        ("data_offsets", entry(end="8")),
        ("data_offsets", entry(shape=[5])),
        ("data_offsets", entry(shape=[2**40, 2**40])),
        ("data_offsets", entry(dtype="F32")),
    ],
)
def test_lying_entry(folder: Path, field: str, bad: dict[str, object]) -> None:
    raw_file(folder / "a.safetensors", {"t": bad}, bytes(8))
    error = refused(folder, "header is malformed")
    assert (error.tensor, error.field, error.file) == ("t", field, str(folder / "a.safetensors"))


def test_truncated_data(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes((MICRO / "model-00001-of-00002.safetensors").read_bytes()[:-1])
    error = refused(folder, "header is malformed")
    assert error.field == "data_offsets" and "truncated file or lying header" in str(error)


def test_overlong_file(folder: Path) -> None:
    raw_file(folder / "a.safetensors", {"t": entry()}, bytes(11))
    error = refused(folder, "is overlong")
    assert error.file == str(folder / "a.safetensors") and "last 3 bytes" in str(error)


def test_overlapping_tensors(folder: Path) -> None:
    raw_file(folder / "a.safetensors", {"t": entry(), "u": entry(first=4, end=12)}, bytes(12))
    error = refused(folder, "tensors overlap")
    assert (error.tensor, error.other) == ("u", "t") and "4 bytes belong to both" in str(error)


def test_hole_between_tensors(folder: Path) -> None:
    raw_file(folder / "a.safetensors", {"t": entry(), "u": entry(first=9, end=17)}, bytes(17))
    assert refused(folder, "has a hole").tensor == "u"


# Duplicates.


def test_name_twice_in_one_header(folder: Path) -> None:
    one = json.dumps(entry())
    raw_file(folder / "a.safetensors", f'{{"t": {one}, "u": {one}, "t": {one}}}'.encode(), bytes(8))
    error = refused(folder, "stored twice")
    assert error.tensor == "t" and error.file == error.second_file == str(folder / "a.safetensors")


def test_name_in_two_files_names_both(folder: Path) -> None:
    raw_file(folder / "a.safetensors", {"t": entry()}, bytes(8))
    raw_file(folder / "b.safetensors", {"t": entry()}, bytes(8))
    error = refused(folder, "stored twice")
    assert (error.tensor, error.file, error.second_file) == (
        "t",
        str(folder / "a.safetensors"),
        str(folder / "b.safetensors"),
    )


# Tensors of a whole pack.


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.trellis",
        "lm_head.suh",
        "model.language_model.embed_tokens.weight",
        f"{STEM}.A_log",
        f"{STEM}.in_proj_a.weight",
        "model.language_model.layers.3.mlp.experts.15.down_proj.svh",
        "model.language_model.layers.2.mlp.gate.weight",
        "model.language_model.hyper_connection_mixer.hc_norm.weight",
    ],
)
def test_missing_tensor(broken: Callable[..., Path], name: str) -> None:
    error = refused(broken(**{name: None}), "is missing")
    assert error.tensor in (name, name.removesuffix(".weight") + ".trellis") and "fetch" in str(error)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("lm_head.suh", "F32", (128,)),
        ("lm_head.suh", "F16", (256,)),
        ("lm_head.svh", "F16", (512, 1)),
        ("lm_head.trellis", "I32", (8, 32, 64)),
        ("lm_head.trellis", "I16", (8, 2048)),
        ("model.language_model.embed_tokens.weight", "F32", (512, 128)),
        ("model.language_model.embed_tokens.weight", "BF16", (128, 512)),
        (f"{STEM}.A_log", "I16", (3,)),
        (f"{STEM}.norm.weight", "BF16", (256,)),
        (f"{STEM}.in_proj_a.weight", "F32", (3, 128)),
        (f"{STEM}.conv1d.weight", "BF16", (640, 4)),
        (f"{NGRAM}.head_bias", "F32", (4, 160)),
        (f"{NGRAM}.head_offsets", "I32", (4,)),
        (f"{NGRAM}.shard_0.trellis", "I16", (448, 43)),
    ],
)
def test_wrong_dtype_or_shape(
    broken: Callable[..., Path], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    error = refused(broken(**{name: (dtype, shape)}), "wrong dtype or shape")
    assert (error.tensor, error.dtype, error.shape) == (name, dtype, list(shape))
    assert Path(error.file).suffix == ".safetensors" and error.because


def test_linear_of_other_sizes_than_the_model(broken: Callable[..., Path]) -> None:
    folder = broken(lm_head__trellis=("I16", (8, 40, 64)), lm_head__svh=("F16", (640,)))
    error = refused(folder, "wrong dtype or shape")
    assert error.tensor == "lm_head.trellis" and "640 outputs, the model needs 128 and 512" in str(error)


@pytest.mark.parametrize(
    ("words", "bits"), [(0, 0.0), (8, 0.5), (72, 4.5), (88, 5.5), (144, 9.0), (52, 3.25), (1024, 64.0)]
)
def test_impossible_width(broken: Callable[..., Path], words: int, bits: float) -> None:
    error = refused(broken(lm_head__trellis=("I16", (8, 32, words))), "impossible width")
    assert (error.tensor, error.bits) == ("lm_head.trellis", bits) and "1..8" in str(error)


def test_half_width_without_mul1(broken: Callable[..., Path]) -> None:
    folder = broken(lm_head__trellis=("I16", (8, 32, 40)), lm_head__mul1=None)
    error = refused(folder, "impossible width")
    assert (error.bits, error.codebook) == (2.5, "3inst") and "mul1 only" in str(error)


def test_both_codebook_markers(broken: Callable[..., Path]) -> None:
    error = refused(
        broken(lm_head__mcg=("I32", (), 0xCBAC1FED.to_bytes(4, "little"))), "both codebook markers"
    )
    assert (error.tensor, error.other) == ("lm_head.mcg", "lm_head.mul1")


def test_marker_with_another_value(broken: Callable[..., Path]) -> None:
    error = refused(broken(lm_head__mul1=("I32", (), (1).to_bytes(4, "little"))), "wrong value")
    assert (error.tensor, error.value) == ("lm_head.mul1", "0x00000001") and "0x83DCD12D" in str(error)


@pytest.mark.parametrize(("k", "n"), [(144, 512), (128, 528), (0, 512)])
def test_dims_that_are_no_multiple_of_128(broken: Callable[..., Path], k: int, n: int) -> None:
    error = refused(broken(lm_head__trellis=("I16", (k // 16, n // 16, 64))), "unsupported dims")
    assert (error.tensor, error.k, error.n) == ("lm_head.trellis", k, n) and "128" in str(error)


def test_linear_both_quantized_and_plain(broken: Callable[..., Path]) -> None:
    error = refused(broken(lm_head__weight=("F16", (512, 128))), "stored twice")
    assert (error.tensor, error.other) == ("lm_head.trellis", "lm_head.weight")


def test_bias_that_the_model_does_not_have(broken: Callable[..., Path]) -> None:
    error = refused(broken(lm_head__bias=("F16", (512,))), "wrong dtype or shape")
    assert error.tensor == "lm_head.bias" and "has a bias" in str(error)


@pytest.mark.parametrize("part", ["mlp.experts.5.up_proj", "mlp.shared_expert.down_proj"])
def test_plain_expert(broken: Callable[..., Path], part: str) -> None:
    """The expert kernels know the EXL3 forms alone."""
    name = f"model.language_model.layers.0.{part}"
    changes: dict[str, Any] = {f"{name}.{end}": None for end in ("trellis", "suh", "svh", "mul1")}
    error = refused(broken(**changes, **{f"{name}.weight": ("F16", (128, 128))}), "wrong dtype or shape")
    assert error.tensor == f"{name}.weight" and "experts as EXL3" in str(error)


@pytest.mark.parametrize("part", ["key_proj", "value_proj"])
def test_quantized_matrix_that_shares_its_operand(broken: Callable[..., Path], part: str) -> None:
    """Key and value read one operand, which is not rotated: EXL3 weights would give wrong sums unseen."""
    name = f"model.language_model.layers.1.ple.{part}"
    n, k = Pack.open(MICRO).tensors[f"{name}.weight"].shape
    quantized: dict[str, Any] = {
        f"{name}.trellis": ("I16", (k // 16, n // 16, 64)),
        f"{name}.suh": ("F16", (k,)),
        f"{name}.svh": ("F16", (n,)),
    }
    error = refused(broken(**{f"{name}.weight": None}, **quantized), "wrong dtype or shape")
    assert error.tensor == f"{name}.trellis" and "F16 or BF16" in str(error)


def test_quantized_token_embedding(broken: Callable[..., Path]) -> None:
    name = "model.language_model.embed_tokens"
    error = refused(broken(**{f"{name}.trellis": ("I16", (512, 65))}), "token embedding is quantized")
    assert error.tensor == f"{name}.trellis" and "--embed_bits" in str(error)


def test_fused_experts(broken: Callable[..., Path]) -> None:
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    error = refused(broken(**{name: ("BF16", (16, 256, 128))}), "experts are fused")
    assert error.tensor == name and "convert" in str(error)


def test_wrong_mtp_tensor_is_no_remark(broken: Callable[..., Path]) -> None:
    error = refused(broken(**{"mtp.pre_fc_norm_embedding.weight": ("BF16", (64,))}), "wrong dtype or shape")
    assert error.tensor == "mtp.pre_fc_norm_embedding.weight"


# n-gram tables.


def test_pack_without_table(tmp_path: Path) -> None:
    for file in MICRO.iterdir():
        if not file.name.startswith("ngram"):
            (tmp_path / file.name).symlink_to(file)
    error = refused(tmp_path, "n-gram table is missing")
    assert error.layer == 1 and "not listed in the index" in str(error)


def test_missing_first_shard(broken: Callable[..., Path]) -> None:
    assert refused(broken(**{f"{NGRAM}.shard_0.trellis": None}), "shards are missing").shards == [0]


def test_missing_last_shard(broken: Callable[..., Path]) -> None:
    error = refused(broken(**{f"{NGRAM}.shard_1.trellis": None}), "table is too short")
    assert error.rows == 448 and "row 890" in str(error)


def test_table_in_two_layouts(broken: Callable[..., Path]) -> None:
    error = refused(broken(**{f"{NGRAM}.trellis": ("I16", (896, 41))}), "table is stored twice")
    assert f"{NGRAM}.trellis" in error.tensors


def test_shards_of_different_widths(broken: Callable[..., Path]) -> None:
    error = refused(broken(**{f"{NGRAM}.shard_1.trellis": ("I16", (448, 51))}), "shards differ")
    assert error.tensor == f"{NGRAM}.shard_1.trellis"


def test_short_shard_in_the_middle(broken: Callable[..., Path]) -> None:
    folder = broken(
        **{f"{NGRAM}.shard_1.trellis": ("I16", (440, 41)), f"{NGRAM}.shard_2.trellis": ("I16", (448, 41))}
    )
    assert refused(folder, "shards differ").tensor == f"{NGRAM}.shard_1.trellis"


@pytest.mark.parametrize("bits", [0, 9])
def test_impossible_row_width(broken: Callable[..., Path], bits: int) -> None:
    changes = {f"{NGRAM}.shard_{i}.trellis": ("I16", (448, 1 + 10 * bits)) for i in (0, 1)}
    assert refused(broken(**changes), "impossible width").bits == bits


def test_trellis_table_without_head_bias(broken: Callable[..., Path]) -> None:
    error = refused(broken(**{f"{NGRAM}.head_bias": None}), "head_bias do not belong together")
    assert error.tensor == f"{NGRAM}.shard_0.trellis" and error.head_bias == "missing"


def test_plain_table_with_head_bias(broken: Callable[..., Path]) -> None:
    changes: dict[str, Any] = {f"{NGRAM}.shard_{i}.trellis": None for i in (0, 1)}
    changes |= {f"{NGRAM}.shard_{i}.weight": ("BF16", (448, 160)) for i in (0, 1)}
    error = refused(broken(**changes), "head_bias do not belong together")
    assert error.head_bias == f"{NGRAM}.head_bias"


def test_fp8_table(broken: Callable[..., Path]) -> None:
    changes: dict[str, Any] = {f"{NGRAM}.shard_{i}.trellis": None for i in (0, 1)}
    changes |= {f"{NGRAM}.shard_{i}.weight": ("F8_E4M3", (448, 160)) for i in (0, 1)}
    error = refused(broken(**changes), "n-gram table is FP8")
    assert error.dtype == "F8_E4M3" and "not supported" in str(error)


@pytest.mark.parametrize(
    ("part", "index"), [("layer_multipliers", 2), ("head_offsets", 1), ("head_vocab_sizes", 3)]
)
def test_constant_that_differs_from_the_formula(broken: Callable[..., Path], part: str, index: int) -> None:
    good = Pack.open(MICRO).read(f"{NGRAM}.{part}")
    bad = good.copy()
    bad[index] += 2
    error = refused(
        broken(**{f"{NGRAM}.{part}": ("I64", good.shape, bad.tobytes())}), "differs from the formula"
    )
    assert (error.tensor, error.index, error.stored, error.formula) == (
        f"{NGRAM}.{part}",
        index,
        int(bad[index]),
        int(good[index]),
    )


# While a pack is in use.


def test_file_that_shrank_after_opening(tmp_path: Path) -> None:
    for file in MICRO.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pack = Pack.open(tmp_path)
    os.truncate(tmp_path / "model-00001-of-00002.safetensors", 60000)
    with pytest.raises(CheckpointError, match="lost bytes since it was opened") as caught:
        pack.read("model.language_model.embed_tokens.weight")
    assert caught.value.tensor == "model.language_model.embed_tokens.weight"


def test_file_that_vanished_after_opening(tmp_path: Path) -> None:
    for file in MICRO.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pack = Pack.open(tmp_path)
    (tmp_path / "ngram_embedding.safetensors").unlink()
    with pytest.raises(CheckpointError, match="file cannot be read") as caught:
        pack.read(f"{NGRAM}.head_bias")
    assert caught.value.file == str(tmp_path / "ngram_embedding.safetensors")


@pytest.mark.parametrize(("size", "text"), [
    (2**63, "expected a list of sizes"), (2**63 - 1, f"takes {2 * (2**63 - 1)} bytes"),
    (-1, "a list of sizes")])
def test_axes_end_where_numpy_ends(folder: Path, size: int, text: str) -> None:
    raw_file(folder / "model.safetensors", {"t": entry(shape=[size])}, bytes(8))
    with pytest.raises(CheckpointError, match=text):
        Pack.open(folder)
