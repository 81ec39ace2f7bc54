"""Synthetic packs: the same bytes from every place, sizes of the real geometry, sane numbers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.errors import CapacityError, UsageError
from flashnext_drv.kernels.move import SYNTH_FILL
from flashnext_drv.model import fill
from flashnext_drv.model.fill import FillRule
from flashnext_drv.model.inventory import group_of
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.ref import move as ref

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
KEY = 0x0123456789ABCDEF
RULES = {
    "words": fill.words(KEY),
    "rows": fill.rows(KEY, 51),
    "short_rows": fill.rows(KEY, 11),
    "signed": fill.signed(KEY, 0x2D55, 0x3000),
    "bell_f16": fill.bell(KEY, 12, bf16=False),
    "bell_norm": fill.bell(KEY, 7, bf16=True, shift=1, add=128),
    "bell_shared": fill.bell(KEY, 7, bf16=True, own=91, shared=90, key2=5, cols=130, group_rows=3),
    "bell_one_vector": fill.bell(KEY, 9, bf16=False, own=0, shared=128, key2=5, cols=7, group_rows=10**6),
    "uniform": fill.uniform(KEY, 5, bf16=True, first=-128, count=112),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("first", "count"), [(0, 700), (1, 1), (129, 2011), (5 * 10**9 + 3, 300)])
def test_numpy_fill_equals_the_reference(rule: FillRule, first: int, count: int) -> None:
    arguments = rule.arguments(first, count)
    assert set(arguments) == {arg.name for arg in SYNTH_FILL.args} - {"dst"}
    assert np.array_equal(fill.fill_words(rule, first, count), ref.synth_fill(first, count, arguments))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_any_cut_gives_the_same_bytes(rule: FillRule) -> None:
    whole = fill.fill_words(rule, 0, 80_000).view(np.uint8)
    for first, size in ((0, 1), (1, 160_000 - 1), (65_534, 5), (32_767, 65_537), (131_071, 28_929)):
        piece = np.zeros(size, dtype=np.uint8)
        fill.fill_into(rule, piece, first)
        assert np.array_equal(piece, whole[first : first + size]), (first, size)


def test_values_of_the_rules() -> None:
    scales = fill.fill_words(RULES["rows"], 0, 51 * 1000)[::51].view(np.float16).astype(np.float64)
    assert scales.min() >= 2**-7 and scales.max() < 2**-5
    signed = fill.fill_words(RULES["signed"], 0, 10_000).view(np.float16).astype(np.float64)
    low, high = (float(np.uint16(bits).view(np.float16)) for bits in (0x2D55, 0x3000))
    assert low <= np.abs(signed).min() and np.abs(signed).max() < high and 4800 < (signed < 0).sum() < 5200
    bell = fill.fill_words(RULES["bell_f16"], 0, 100_000).view(np.float16).astype(np.float64) * 2**12
    assert abs(bell.mean()) < 1 and 36 < bell.std() < 38 and bell.min() >= -128 and bell.max() <= 127


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("model", ["micro", "tiny"])
def test_written_bytes_are_read_bytes(tmp_path: Path, model: str, mixed: bool) -> None:
    made = SynthPack(model, 7, mixed=mixed)
    told: list[tuple[int, int]] = []
    made.write(tmp_path / "pack", lambda name, done, total: told.append((done, total)))
    disk = Pack.open(tmp_path / "pack")
    disk.check()
    made.check()
    assert disk.config == made.config and set(disk.tensors) == set(made.tensors) and disk.remarks == []
    for name, tensor in made.tensors.items():
        assert (tensor.dtype, tensor.shape) == (disk.tensors[name].dtype, disk.tensors[name].shape)
        assert made.read(name).tobytes() == disk.read(name).tobytes(), name
        rule = made.fill_plan(name)
        if rule is not None:
            assert fill.fill_words(rule, 0, tensor.size // 2).tobytes() == disk.read(name).tobytes(), name
    assert max(done for done, _ in told) == told[0][1] == sum(t.size for t in made.tensors.values())
    assert {t.offset % 8 for t in disk.tensors.values()} >= {1, 5}
    index = json.loads((tmp_path / "pack" / "model.safetensors.index.json").read_text())["weight_map"]
    outside = {group_of(name) for name in set(disk.tensors) - set(index)}
    assert outside == {"ngram", "mtp"} and all((tmp_path / "pack" / f).exists() for f in index.values())


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    digests = []
    for i, seed in enumerate((3, 3, 4)):
        SynthPack("micro", seed).write(tmp_path / str(i))
        digests.append(Pack.open(tmp_path / str(i)).manifest(tmp_path / "cache.json").digest)
    assert digests[0] == digests[1] != digests[2]


def test_bytes_do_not_change_between_versions(tmp_path: Path) -> None:
    """Receipts name packs by their digest: a change of any rule must be meant, and then changes this
    number."""
    SynthPack("micro", 0).write(tmp_path / "pack")
    digest = Pack.open(tmp_path / "pack").manifest(tmp_path / "cache.json").digest
    assert digest == "d18a4d29cd387e67335c46f9bd8538b79990d10c68418845bf02db4e03b5e8fd"


def test_dimensions_are_those_of_the_golden_packs() -> None:
    golden = Pack.open(MICRO)
    made = SynthPack("micro")
    assert made.config == golden.config
    shapes = {name: (t.dtype, t.shape) for name, t in made.tensors.items()}
    theirs = {name: (t.dtype, t.shape) for name, t in golden.tensors.items()}
    assert {n: s for n, s in theirs.items() if shapes.get(n) != s and "shard_" not in n} == {}
    assert {n for n in set(shapes) - set(theirs) if "shard_" not in n} == set()


def test_mixed_deals_out_every_width_and_codebook() -> None:
    pack = SynthPack("micro", mixed=True)
    pairs: dict[bool, set[tuple[float, str]]] = {True: set(), False: set()}
    legacy = 0
    for name in pack.tensors:
        if name.endswith(".trellis") and "ngram" not in name:
            info = pack.linear(name.removesuffix(".trellis"))
            pairs[".experts." in name].add((info.bits, info.codebook))
            legacy += "sv" in info.parts
    assert len(pairs[True]) == len(pairs[False]) == 27 and legacy > 3
    assert pack.ngram().codec == 3 and len(pack.ngram().sources) == 1


def test_full_has_the_real_geometry() -> None:
    pack = SynthPack("full", 1)
    pack.check()
    size: Counter[str] = Counter()
    for tensor in pack.tensors.values():
        size[group_of(tensor.name)] += tensor.size
    assert size["experts"] == 24_576 * (1_862_400 + 12)
    assert pack.ngram().rows == 320_001_536 and pack.ngram().row_bytes == 102
    assert size["ngram"] == 320_001_536 * 102 + 5400
    assert pack.ngram().multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]
    # A published pack has 304,240 tensors, 987 of them of the vision tower: 164 linears of 5 parts, 167
    # plain ones.
    assert len(pack.ngram().sources) == 128 and len(pack.tensors) == 304_240 - 987
    assert pack.has_mtp and pack.linear("mtp.fc_hidden").bits == 4 and pack.linear("lm_head").bits == 5


def test_fewer_ngram_rows_keep_the_head_structure() -> None:
    info = SynthPack("quarter", ngram_rows=100_000).ngram()
    assert 100_000 <= info.rows < 110_000 and len(set(info.head_sizes.tolist())) == 16
    assert info.head_offsets.tolist() == [int(info.head_sizes[:i].sum()) for i in range(16)]


def test_scales_keep_outputs_near_one() -> None:
    for mixed in (False, True):
        pack = SynthPack("tiny", 2, mixed=mixed)
        for i_layer in range(pack.config.n_layers):
            for linear in pack.experts(i_layer)[3]:
                rms = {"3inst": 1.243711, "mcg": 1.244112, "mul1": 1.000312}[linear.codebook]
                suh = pack.scale(linear, "suh").astype(np.float64)
                svh = pack.scale(linear, "svh").astype(np.float64)
                gain = np.sqrt((suh**2).mean() * linear.k * (svh**2).mean()) * rms
                assert 0.85 < gain < 1.15, (linear.prefix, gain)


def test_locality_makes_rows_alike() -> None:
    """Cosine between embeddings of different tokens is near the knob; router rows agree inside groups of 4
    only."""
    for locality in (0.0, 0.5, 1.0):
        pack = SynthPack("tiny", 1, locality=locality)
        embed = pack.vector(f"{pack.config.names.embed}.weight").astype(np.float64)
        unit = embed / np.linalg.norm(embed, axis=1, keepdims=True)
        cosine = unit[:400] @ unit[400:800].T
        assert abs(cosine.mean() - locality) < 0.03, locality
        router = pack.vector(f"{pack.config.names.mlp(3)}.gate.weight").astype(np.float64)
        unit = router / np.linalg.norm(router, axis=1, keepdims=True)
        same = np.arange(16)[:, None] // 4 == np.arange(16) // 4
        inside = (unit @ unit.T)[same & ~np.eye(16, dtype=bool)]
        assert abs(inside.mean() - locality) < 0.06 and abs((unit @ unit.T)[~same].mean()) < 0.06
        assert 0.25 < embed.std() < 0.33


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"model": "giant"}, "no such synthetic model"),
        ({"locality": 1.5}, "locality"),
        ({"seed": -1}, "seed"),
        ({"ngram_rows": 5}, "ngram_rows"),
        ({"ngram_rows": 1 << 40}, "ngram_rows"),
    ],
)
def test_bad_knobs(knobs: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        SynthPack(**{"model": "micro", **knobs})  # type: ignore[arg-type]


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(UsageError, match="not empty") as caught:
        SynthPack("micro").write(tmp_path)
    assert caught.value.folder == str(tmp_path) and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_full_disk_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SynthPack, "_write_file", full)
    with pytest.raises(CapacityError, match="No space left") as caught:
        SynthPack("micro").write(tmp_path / "pack")
    assert caught.value.folder == str(tmp_path / "pack")


def test_rules_out_of_range() -> None:
    with pytest.raises(UsageError):
        fill.bell(KEY, 15, bf16=False)
    with pytest.raises(UsageError):
        fill.signed(KEY, 0x3000, 0x3000)
