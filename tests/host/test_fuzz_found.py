"""What fuzzing found, one test each: inputs that once ended in another error than ours, or in no time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.cli.ids import parse_ids, parse_rows
from flashnext_drv.engine.sequence import Sampling, checked_ids
from flashnext_drv.errors import BuildError, CheckpointError, ContractError, UsageError
from flashnext_drv.kernels import bind, catalog
from flashnext_drv.kernels.cubin import read_cubin
from flashnext_drv.kernels.spec import F32, Arg
from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.header import read_header
from flashnext_drv.model.layout import Limits
from flashnext_drv.model.manifest import FileEntry, Manifest
from flashnext_drv.model.ngram import ngram_info
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.primes import is_prime
from flashnext_drv.model.synth_models import MODELS
from tools import fuzz_pack

pytestmark = pytest.mark.host
CPU_S = 2.0     # far above what any of these takes; without its fix each takes minutes or all memory


@pytest.fixture(autouse=True)
def _quick() -> Any:
    start = time.process_time()
    yield
    assert time.process_time() - start < CPU_S


def micro(**fields: object) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(MODELS["micro"].config_json(None)))
    raw["text_config"].update(fields)
    return raw


def one_tensor(path: Path, entry: object) -> Path:
    raw = json.dumps({"a": entry}).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    return path


# Headers.


def test_a_shape_whose_product_python_cannot_write(tmp_path: Path) -> None:
    entry = {"dtype": "F16", "shape": [10**4000] * 3, "data_offsets": [0, 0]}
    with pytest.raises(CheckpointError, match="malformed"):
        read_header(one_tensor(tmp_path / "x.safetensors", entry))


def test_a_shape_with_more_axes_than_numpy_has(tmp_path: Path) -> None:
    entry = {"dtype": "F16", "shape": [0] + [1] * 70, "data_offsets": [0, 0]}
    with pytest.raises(CheckpointError, match="71 axes"):
        read_header(one_tensor(tmp_path / "x.safetensors", entry))


def test_a_name_doubled_among_very_many(tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(60_000)]
    raw = ("{" + ",".join(f'"{n}":1' for n in [*names, names[-1]]) + "}").encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(CheckpointError, match="stored twice") as caught:
        read_header(path)
    assert caught.value.tensor == "t59999"


def test_a_pipe_in_a_pack_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        ModelConfig.load(tmp_path)


# config.json.


@pytest.mark.parametrize("field", ["num_hidden_layers", "ngram_size", "heads_per_ngram"])
def test_counts_that_would_take_all_memory(field: str) -> None:
    fields: dict[str, Any] = {field: 1 << 39}
    if field == "num_hidden_layers":
        fields["layer_types"] = None
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(micro(**fields), strict=False)
    assert caught.value.field == field


def test_ngram_sizes_far_out_take_no_time() -> None:
    raw = micro(ngram_vocab_size_base=(1 << 40) - 1000, heads_per_ngram=32)
    made = ModelConfig.from_json(raw, strict=False).ngram()
    assert len(set(made.sizes)) == 64
    assert all(size % d for size in made.sizes for d in (2, 3, 5, 7, 11, 13, 17))


def test_primes_are_those_of_trial_division() -> None:
    def slow(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

    # 3215031751 and the last are products of two primes that deceive few bases
    assert [n for n in range(4000) if is_prime(n)] == [n for n in range(4000) if slow(n)]
    assert not is_prime(3_215_031_751) and not is_prime(341_550_071_728_321)
    assert is_prime(20_000_003) and is_prime((1 << 61) - 1) and not is_prime((1 << 61) - 3)


def test_a_layer_type_that_is_no_word() -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(micro(layer_types=[["full_attention"]] * 4))
    assert caught.value.field == "layer_types"


def test_a_message_stays_one_line_whatever_the_value() -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(micro(hidden_act="a\nb\ud800" + "c" * 5000))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    str(caught.value).encode()      # and can be written to any stream
    assert caught.value.value.startswith("a\nb"), "the field itself is whole"
    assert "bits" in str(UsageError("x", value=10**5000))


# The n-gram table.


@pytest.mark.parametrize(("old", "new"), [
    ("shard_1.", "shard_999999999."), ("shard_1.", f"shard_{'9' * 5000}."),
    ("layers.1.", f"layers.{'1' * 5000}.")])
def test_numbers_in_names_that_are_far_too_large(tmp_path: Path, old: str, new: str) -> None:
    config = ModelConfig.from_json(fuzz_pack.base_config())
    entries = {name.replace(old, new): e for name, e in fuzz_pack.ngram_entries(config).items()}
    header, data, size = fuzz_pack.header_of(entries)
    path = tmp_path / "t.safetensors"
    fuzz_pack.write_file(path, json.dumps(header).encode(), data, size)
    pack = Pack(tmp_path, config, [read_header(path)])
    if old == "layers.1.":      # such a name names no layer, so the table is the only PLE layer's
        assert ngram_info(pack).rows >= 1
        return
    with pytest.raises(CheckpointError, match="n-gram"):
        ngram_info(pack)


def test_the_first_missing_shards_are_named(tmp_path: Path) -> None:
    config = ModelConfig.from_json(fuzz_pack.base_config())
    entries = {n: e for n, e in fuzz_pack.ngram_entries(config, 11).items() if "shard_3." not in n}
    header, data, size = fuzz_pack.header_of(entries)
    path = tmp_path / "t.safetensors"
    fuzz_pack.write_file(path, json.dumps(header).encode(), data, size)
    with pytest.raises(CheckpointError) as caught:
        ngram_info(Pack(tmp_path, config, [read_header(path)]))
    assert (caught.value.shards, caught.value.n_missing) == ([3], 1)


# Manifests and the digest cache.


def test_file_names_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    made = Manifest.of(tmp_path, cache=tmp_path.parent / "digests.json", use_cache=False)
    made.save(tmp_path.parent / "m.json")
    assert Manifest.load(tmp_path.parent / "m.json") == made


@pytest.mark.parametrize("change", [{"size": float("inf")}, {"name": "\ud800"}, {"size": [1]}])
def test_a_manifest_with_impossible_entries(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = {"name": "a", "size": 1, "sha256": "0" * 64} | change
    (tmp_path / "m.json").write_text(json.dumps({"format": 1, "digest": "0" * 64, "files": [entry]}))
    with pytest.raises(CheckpointError, match="manifest"):
        Manifest.load(tmp_path / "m.json")


def test_a_cached_digest_must_be_one(tmp_path: Path) -> None:
    folder, cache = tmp_path / "pack", tmp_path / "digests.json"
    folder.mkdir()
    (folder / "a").write_bytes(b"x")
    stat = (folder / "a").stat()
    key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    cache.write_text(json.dumps({"format": 1, "entries": {key: {"sha256": "z" * 64, "recorded_ns": 1}}}))
    assert Manifest.of(folder, cache=cache).files == (
        FileEntry("a", 1, "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"),)


# Token ids, rows, limits.


@pytest.mark.parametrize("text", ["," * 200_000 + "x", " " * 200_000 + "x", "1," * 100_000 + "?",
                                  "[" * 100_000, "9" * 5000, "1 2 " + "7" * 10_000])
def test_ids_of_any_length_are_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ids(text, "--ids")


def test_rows_with_numbers_far_too_large() -> None:
    with pytest.raises(UsageError):
        parse_rows("0:" + "9" * 5000, 10)


@pytest.mark.parametrize("ids", [[[1], [1, 2]], [1, [2]], [10**400], {}, "12", [1.5], None])
def test_prompts_that_are_no_flat_list(ids: object) -> None:
    with pytest.raises(UsageError):
        checked_ids(ids, 256)


@pytest.mark.parametrize("fields", [{"temperature": "1"}, {"temperature": 10**400}, {"top_p": None},
                                    {"min_p": float("nan")}, {"top_k": "3"}, {"top_k": 1.5}, {"seed": {}},
                                    {"seed": 0.5}, {"temperature": float("inf")}])
def test_sampling_of_another_type(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**fields)
    assert Sampling(temperature=np.float32(0.5), top_k=np.uint32(3)).top_k == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [3, None, "shuffled:" + "9" * 5000, "shuffled:", "shuffled:٣", "x"])
def test_page_orders_of_another_kind(order: Any) -> None:
    with pytest.raises(UsageError, match="page_order"):
        Limits(page_order=order)


# Kernel images and launches.


@pytest.mark.parametrize("text", ["3", "[]", '{"format": 1, "images": {"a": 1}}',
                                  '{"format": 1, "tool": {}, "options": [], "option_digest": "", '
                                  '"source_digest": "", "images": [{"family": "", "arch": "", "file": "", '
                                  '"sha256": "", "size_bytes": 1, "source_digest": "", "kernels": []}]}'])
def test_an_image_manifest_of_another_form(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BuildError):
        catalog.read_manifest(tmp_path / "manifest.json")


def test_a_cubin_with_a_name_that_never_ends() -> None:
    data = bytearray(b"\x7fELF\x02\x01" + bytes(34) + (64).to_bytes(8, "little") + bytes(200))
    data[58:64] = bytes((64, 0, 1, 0, 0, 0))        # one section, whose name lies behind the file
    data[64:68] = (10**6).to_bytes(4, "little")
    with pytest.raises(ValueError, match="no cubin"):
        read_cubin(bytes(data))


def test_a_cubin_whose_sections_lie_beyond_any_file() -> None:
    data = bytearray(fuzz_pack.tiny_cubin())
    data[40:48] = b"\xff" * 8
    with pytest.raises(ValueError, match="no cubin"):
        read_cubin(bytes(data))


@pytest.mark.parametrize("value", [10**400, 1e39, 3.4028235677973366e38])
def test_a_number_that_no_f32_holds(value: float) -> None:
    spec = catalog.spec("site_norm")
    with pytest.raises(ContractError, match="f32"):
        bind._value(spec, Arg("eps", F32, ""), value)
    assert bind._value(spec, Arg("eps", F32, ""), 3.4028235e38) == np.float32(3.4028235e38)
    assert np.isinf(bind._value(spec, Arg("eps", F32, ""), float("inf")))


@pytest.mark.parametrize("grid", [(1, "2"), (None,), (1.5, 2), (True,)])
def test_a_grid_of_something_else(grid: Any) -> None:
    with pytest.raises(ContractError, match="grid"):
        bind._grid(catalog.spec("site_norm"), grid)
