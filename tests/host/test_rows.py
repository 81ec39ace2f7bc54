"""Rows of an n-gram table read one by one: the table's bytes, hashed as the kernel does, or a typed error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.errors import CheckpointError, UsageError
from flashnext_drv.model import fill
from flashnext_drv.model.layout import Layout, Limits
from flashnext_drv.model.ngram import NgramInfo
from flashnext_drv.model.pack import Pack, PackBase
from flashnext_drv.model.rows import FileRows, RuleRows, ngram_staging_bytes, row_reader
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.ref.token import HashTables, ngram_hash
from flashnext_drv.state.ngram import TableRows

EOS = 7


def whole(pack: PackBase) -> np.ndarray:
    """(rows, row_bytes) u8: the table in one piece."""
    info = pack.ngram()
    parts = [pack.read(name).reshape(n, -1).view(np.uint8) for name, _, n in info.sources]
    return np.concatenate(parts)


@pytest.fixture(scope="module", params=[False, True], ids=["shards", "one"])
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SynthPack, Pack]:
    """The same bytes as rules and on disk, in shards of 4 bits or in one piece of 3."""
    made = SynthPack("micro", 5, mixed=request.param)
    folder = tmp_path_factory.mktemp("rows") / "pack"
    made.write(folder)
    return made, Pack.open(folder)


def test_rows_are_the_tables_bytes(packs: tuple[SynthPack, Pack], case_seed: int) -> None:
    """Every row once, and many at random with repeats: of rules and of files."""
    table = whole(packs[0])
    some = np.random.default_rng(case_seed).integers(0, len(table), 3000)
    for pack, kind in zip(packs, (RuleRows, FileRows), strict=True):
        reader = row_reader(pack, pack.ngram())
        assert isinstance(reader, kind) and reader.row_bytes == table.shape[1]
        for rows in (np.arange(len(table)), some, some[:1], some[:0]):
            got = np.zeros((len(rows), reader.row_bytes), np.uint8)
            reader.read(rows, got)
            assert np.array_equal(got, table[rows]), f"seed {case_seed}, {kind.__name__}, {len(rows)} rows"


@pytest.mark.parametrize("i_ple", [0, 1])
def test_rows_named_by_tokens_are_the_references(i_ple: int, case_seed: int) -> None:
    """Along a sequence with ends in it, for the first and a second layer's constants."""
    config = SynthPack("micro").config
    made = config.ngram(i_ple)
    constants = (made.sizes, made.offsets, made.multipliers)
    sizes, offsets, multipliers = (np.array(values, np.int64) for values in constants)
    info = NgramInfo(made.rows, 82, 160, 4, None, offsets, sizes, multipliers, ())
    ids = np.random.default_rng(case_seed).integers(0, 512, 400)
    ids[np.random.default_rng(case_seed + 1).integers(0, 400, 60)] = EOS
    past = np.concatenate(([EOS, EOS], ids)).astype(np.uint32)
    want = ngram_hash(ids.tolist(), [EOS, EOS], EOS, HashTables(multipliers, sizes, offsets))
    assert np.array_equal(info.rows_of(past[2:], past[1:-1], past[:-2], EOS), want), f"seed {case_seed}"


def test_products_beyond_63_bits_wrap_as_on_the_device() -> None:
    """Multipliers of a pack may be any odd numbers: the remainder is that of the wrapped signed value."""
    sizes, multipliers = np.array([211, 223], np.int64), np.array([(1 << 62) + 1, (1 << 61) + 1, 5], np.int64)
    info = NgramInfo(434, 82, 160, 4, None, np.array([0, 211]), sizes, multipliers, ())
    ids = np.array([3, 500, 262_143], np.uint32)

    def signed(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    got = info.rows_of(ids, ids[::-1], ids, EOS)
    for row, token, prev1, prev2 in zip(got, ids.tolist(), ids[::-1].tolist(), ids.tolist(), strict=True):
        second = signed(token * int(multipliers[0])) ^ signed(prev1 * int(multipliers[1]))
        assert row.tolist() == [second % 211, 211 + (second ^ prev2 * 5) % 223]
    assert min(signed(500 * int(m)) for m in multipliers[:2]) < 0


def test_words_of_rows_are_those_of_the_whole_fill(case_seed: int) -> None:
    for n_words in (1, 4, 31, 51):
        rule, other = fill.rows(case_seed + 9, n_words), fill.rows(case_seed + 1, n_words)
        i_rows = np.random.default_rng(case_seed).integers(0, 1 << 31, 300)
        keys = np.where(i_rows % 2 == 0, np.uint64(rule.key), np.uint64(other.key))
        got = fill.table_words(rule, i_rows, keys)
        for words, i_row in zip(got, i_rows.tolist(), strict=True):
            want = fill.fill_words(other if i_row % 2 else rule, i_row * n_words, n_words)
            assert np.array_equal(words, want), f"seed {case_seed}, {n_words} words, row {i_row}"
    with pytest.raises(UsageError):
        fill.table_words(fill.words(1), np.zeros(1, np.int64), np.zeros(1, np.uint64))


def test_a_file_that_lost_rows_is_an_error_that_names_it(tmp_path: Path) -> None:
    SynthPack("micro", 5).write(tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    reader, rows = row_reader(pack, pack.ngram()), np.arange(pack.ngram().rows)
    got = np.zeros((len(rows), reader.row_bytes), np.uint8)
    file = pack.tensor(pack.ngram().sources[0][0]).file
    whole_file = file.read_bytes()
    for size in (len(whole_file) - 1, len(whole_file) // 2, 0):
        file.write_bytes(whole_file[:size])
        with pytest.raises(CheckpointError) as caught:
            reader.read(rows, got)
        assert (caught.value.file, caught.value.size_bytes) == (str(file), size)
    file.unlink()
    with pytest.raises(CheckpointError) as gone:
        reader.read(rows[-1:], got[-1:])
    assert gone.value.file == str(file) and gone.value.because
    file.write_bytes(whole_file)
    reader.read(rows, got)
    assert np.array_equal(got, whole(pack))


def test_nothing_stays_open(tmp_path: Path) -> None:
    SynthPack("micro", 5).write(tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    reader, rows = row_reader(pack, pack.ngram()), np.arange(pack.ngram().rows)
    got = np.zeros((len(rows), reader.row_bytes), np.uint8)
    before = os.listdir("/proc/self/fd")
    reader.read(rows, got)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    pack.tensor(pack.ngram().sources[0][0]).file.write_bytes(b"")
    with pytest.raises(CheckpointError):
        reader.read(rows, got)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_staging_holds_the_rows_of_every_layer() -> None:
    pack = SynthPack("micro")
    layout = Layout(pack.config, Limits(context_tokens=64, rows=3, ngram="mapped"))
    assert ngram_staging_bytes(layout, pack, 4, times=2) == 2 * -(-4 * 4 * 82 // 256) * 256
    assert layout.work["ngram"] >= 4 * 4 * 320


def test_more_tokens_than_are_read_at_a_time(case_seed: int) -> None:
    pack = SynthPack("micro", 6)
    tables, info = TableRows(Layout(pack.config, Limits(context_tokens=64)), pack), pack.ngram()
    past = np.random.default_rng(case_seed).integers(0, 512, 2502).astype(np.uint32)
    token, prev1, prev2 = past[2:], past[1:-1], past[:-2]
    got = np.full(2501 * tables.row_bytes[0], 0xFF, np.uint8)
    tables.read(0, token, prev1, prev2, got)
    want = whole(pack)[info.rows_of(token, prev1, prev2, EOS).reshape(-1)].reshape(-1)
    assert np.array_equal(got[: want.size], want) and (got[want.size :] == 0xFF).all(), f"seed {case_seed}"
