"""The reference on whole EXL3 packs: FP64 and contract rounding against goldens, choices, states at any
position.

exl3_micro lies in tests/data; exl3_tiny is found through `--golden DIR` (slow).
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.ref import model as ref
from flashnext_drv.ref.files import FolderWeights
from flashnext_drv.ref.rounding import CONTRACT, CONTRACT_FP32, Rounding

MICRO = Path(__file__).resolve().parents[1] / "data" / "exl3_micro"
CASES = ("p1", "p3", "p17", "p64", "p150", "p300", "inc110")
LONG = ("p17", "p64", "p150", "p300", "inc110")


class Golden:
    """One golden folder: model, dimensions and arrays."""

    def __init__(self, folder: Path):
        weights = FolderWeights(folder / "pack")
        self.dims = ref.Dims.from_config(weights.config())
        self.model = ref.Model(self.dims, weights)
        self.weights = weights
        with np.load(folder / "golden.npz", allow_pickle=False) as file:
            self.arrays = {name: file[name] for name in file.files}

    def want(self, case: str) -> ref.Trace:
        return ref.Trace.from_arrays(self.arrays, case, self.dims.sparse_layers)

    def ids(self, case: str) -> np.ndarray:
        return self.arrays[f"{case}.input_ids"]

    def run(self, model: ref.Model, case: str) -> ref.Trace:
        """One pass; inc110 is 40 tokens, then single ones."""
        ids, state = self.ids(case), model.new_state()
        if case != "inc110":
            return model.step(ids, state)
        return ref.Trace.join([model.step(ids[:40], state),
                               *(model.step(ids[i:i + 1], state) for i in range(40, 110))])


@pytest.fixture(scope="module")
def micro() -> Golden:
    return Golden(MICRO)


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest) -> Golden:
    folder = request.config.getoption("--golden")
    if not folder or not (Path(folder) / "exl3_tiny").is_dir():
        pytest.skip("exl3_tiny needs --golden DIR")
    return Golden(Path(folder) / "exl3_tiny")


def check_exact(golden: Golden, case: str) -> None:
    want, got = golden.want(case), golden.run(golden.model, case)
    # the golden logits (up to 2.7) are fp64 rounded to fp32: half a unit in the last place is 1.2e-7
    np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=1.3e-7)
    np.testing.assert_array_equal(got.router_ids, want.router_ids)
    np.testing.assert_array_equal(got.qsa_blocks, want.qsa_blocks)
    np.testing.assert_array_equal(got.qsa_tie, golden.arrays[f"{case}.qsa_tie"])
    report = ref.compare_choices(got, want)
    assert report.ok and {d.kind for d in report.differences} <= {"argmax"}, report


def check_contract(golden: Golden, case: str, bound: float) -> None:
    for rounding in (CONTRACT, CONTRACT_FP32):
        got, want = golden.run(golden.model.with_rounding(rounding), case), golden.want(case)
        report = ref.compare_choices(want, got)
        assert report.ok, f"{case} {rounding}\n{report}"
        assert report.compared > report.skipped, f"too little was compared\n{report}"
        if case in LONG:
            median = ref.median_error(got.logits, want.logits)
            assert bound / 2.5 < median <= bound, f"{case} {rounding}: median error {median:.6f}"
        worst = np.abs(got.logits - want.logits)[report.agreed].max()
        assert worst < 3 * bound, f"{case} {rounding}: worst error {worst:.6f} where all choices agree"


@pytest.mark.parametrize("case", CASES)
def test_micro_exact(case: str, micro: Golden) -> None:
    check_exact(micro, case)


@pytest.mark.parametrize("case", CASES)
def test_micro_contract_rounding(case: str, micro: Golden) -> None:
    check_contract(micro, case, 0.00075)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tiny_exact(case: str, tiny: Golden) -> None:
    check_exact(tiny, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tiny_contract_rounding(case: str, tiny: Golden) -> None:
    check_contract(tiny, case, 0.0012)


class HalfStreams(Rounding):
    """Planted control: everything that the contract keeps in fp32 is stored in fp16."""

    def single(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float64).astype(np.float16).astype(np.float64)


@pytest.mark.parametrize("case", ["p64", "inc110"])
def test_the_median_bound_tells_fp16_streams(case: str, micro: Golden) -> None:
    got = micro.run(micro.model.with_rounding(HalfStreams(fp16=True, fp32=True)), case)
    assert ref.median_error(got.logits, micro.want(case).logits) > 0.00075


def test_micro_sublayer_outputs(micro: Golden) -> None:
    trace = micro.model.step(micro.ids("p17"), micro.model.new_state(), keep_outputs=True)
    names = [name for name in micro.arrays if name.startswith(("p17.L", "p17.mixer"))]
    assert len(names) == 30
    for name in names:
        np.testing.assert_allclose(trace.outputs[name.removeprefix("p17.")], micro.arrays[name], rtol=2e-7,
                                   atol=1e-9, err_msg=name)
    streams = micro.model.step(micro.ids("p64"), micro.model.new_state(), keep_outputs=True).outputs
    for i in range(micro.dims.n_layers):
        np.testing.assert_allclose(streams[f"L{i}.streams"], micro.arrays["p64.streams"][i], rtol=2e-7,
                                   atol=1e-9)


def test_hash_constants_of_the_pack(micro: Golden) -> None:
    stored = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    made = micro.dims.hash_tables(0)
    np.testing.assert_array_equal(made.multipliers, micro.weights[f"{stored}.layer_multipliers"])
    np.testing.assert_array_equal(made.sizes, micro.weights[f"{stored}.head_vocab_sizes"])
    np.testing.assert_array_equal(made.offsets, micro.weights[f"{stored}.head_offsets"])


def test_state_survives_export_and_restore(micro: Golden) -> None:
    model, ids = micro.model.with_rounding(CONTRACT_FP32), micro.ids("p64")
    state = model.new_state()
    model.step(ids[:41], state)
    copy = ref.State.restore(state.export(), 41, micro.dims.n_layers, fp16=True)
    np.testing.assert_array_equal(model.step(ids[41:], state).logits, model.step(ids[41:], copy).logits)
    with pytest.raises(ValueError, match="41 tokens, not 40"):
        ref.State.restore(copy.export() | {"L3.k": copy.export()["L3.k"][:41]}, 40, micro.dims.n_layers,
                          fp16=True)


def test_synthetic_state_has_the_documented_form_and_bytes(micro: Golden) -> None:
    arrays, d = ref.synthetic_state(micro.dims, 1003, 5), micro.dims
    assert {name: (a.shape, a.dtype.name) for name, a in arrays.items()} == {
        **{f"L3.{name}": ((1003, 2, 256), "float16") for name in "kv"},
        "L3.raw": ((1003, 128), "float16"), "L3.pooled": ((250, 128), "float16"),
        **{f"L{i}.recurrent": ((3, 128, 128), "float32") for i in range(3)},
        **{f"L{i}.conv": ((3, d.gdn.channels), "float16") for i in range(3)},
        "L1.ple_conv": ((9, 512), "float16"), "ids": ((2,), "int64")}
    for name, value in arrays.items():
        if name != "ids":
            size = np.abs(value.astype(np.float64)) * (16 if name.endswith("recurrent") else 1)
            assert size.min() >= 0.125 and size.max() < 2
            assert abs(np.sign(value.astype(np.float64)).mean()) < 0.1
    longer = ref.synthetic_state(micro.dims, 1007, 5)
    np.testing.assert_array_equal(longer["L3.k"][:1003], arrays["L3.k"])
    assert (ref.synthetic_state(micro.dims, 1003, 6)["L3.k"] != arrays["L3.k"]).mean() > 0.9
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
    assert digest == "23922111e81847f623bf44843d41a871302f76a7b6fa79cc34e1cc46e2204f1e"


def test_steps_from_a_synthetic_state_select_among_all_blocks(micro: Golden) -> None:
    position, ids = 30_000, [5, 7, 300, 12, 9]
    arrays = ref.synthetic_state(micro.dims, position, 1)
    exact = micro.model.step(ids, ref.State.restore(arrays, position, micro.dims.n_layers, fp16=False))
    model = micro.model.with_rounding(CONTRACT)
    state = ref.State.restore(arrays, position, micro.dims.n_layers, fp16=True)
    got = model.step(ids, state)
    assert state.position == 30_005 and len(state.layers[3]["pooled"]) == 7501
    assert np.isfinite(got.logits).all() and exact.qsa_blocks.max() > 6000 and exact.qsa_blocks.min() < 1000
    report = ref.compare_choices(exact, got, ref.ChoiceBounds(0.02, 0.02, 0.02))
    assert report.ok, report


@pytest.mark.slow
def test_synthetic_state_at_the_end_of_the_context(micro: Golden) -> None:
    arrays = ref.synthetic_state(micro.dims, 262_000, 1)
    model = micro.model.with_rounding(CONTRACT)
    state = ref.State.restore(arrays, 262_000, micro.dims.n_layers, fp16=True)
    trace = model.step(np.arange(144) * 37 % 512, state)
    assert state.position == 262_144 and len(state.layers[3]["pooled"]) == 65_536
    assert np.isfinite(trace.logits).all() and trace.qsa_blocks.max() > 65_000


def test_compare_choices_tells_near_ties_from_errors_and_follows_dependence(micro: Golden) -> None:
    want = micro.want("p64")
    layer, position = np.unravel_index(np.argmin(want.router_gap[:3]), want.router_gap[:3].shape)
    wrong = want.router_ids.copy()
    wrong[layer, position, -1] = next(e for e in range(16) if e not in wrong[layer, position])
    changed = dataclasses.replace(want, router_ids=wrong)
    gap = float(want.router_gap[layer, position])
    report = ref.compare_choices(want, changed, ref.ChoiceBounds(gap * 1.01, 0, 0))
    assert report.ok and len(report.differences) == 1 and "near tie: experts" in str(report)
    assert report.skipped > 0 and not report.agreed[position:].any() and report.agreed[:position].all()
    report = ref.compare_choices(want, changed, ref.ChoiceBounds(gap * 0.99, 0, 0))
    assert not report.ok and f"WRONG: experts at position {position} layer {layer}" in str(report)
    later = wrong.copy()                            # behind the first difference in both senses: not judged
    later[3, min(position + 1, 63)] = (later[3, min(position + 1, 63)] + 8) % 16
    again = ref.compare_choices(want, dataclasses.replace(want, router_ids=later),
                                ref.ChoiceBounds(gap * 1.01, 0, 0))
    assert again.ok and again.compared == report.compared
    shuffled = dataclasses.replace(want, router_ids=want.router_ids[..., ::-1],
                                   qsa_blocks=want.qsa_blocks[..., ::-1])
    assert not ref.compare_choices(want, shuffled).differences


def test_argmax_and_blocks_are_judged_too(micro: Golden) -> None:
    want = micro.want("p64")
    logits, blocks = want.logits.copy(), want.qsa_blocks.copy()
    order = np.argsort(logits[20])
    logits[20, order[-2]] = logits[20, order[-1]] + 1
    report = ref.compare_choices(want, dataclasses.replace(want, logits=logits), ref.ChoiceBounds(0, 0, 0))
    assert [(d.kind, d.position) for d in report.differences] == [("argmax", 20)] and report.skipped == 0
    position = int(np.argmin(want.qsa_margin[0]))
    outside = set(range((position + 1) // 4)) - set(blocks[0, position].tolist())
    blocks[0, position, 0] = min(outside)
    report = ref.compare_choices(want, dataclasses.replace(want, qsa_blocks=blocks),
                                 ref.ChoiceBounds(0, 0, 0))
    assert [(d.kind, d.position, d.layer) for d in report.differences] == [("blocks", position, 3)]
    with pytest.raises(ValueError, match="cannot be compared"):
        ref.compare_choices(want, micro.want("p17"))


def test_median_error_is_over_positions_of_the_largest() -> None:
    a, b = np.zeros((3, 4)), np.zeros((3, 4))
    b[0, 1], b[1, 2], b[2, :] = 5.0, -2.0, 1.0
    assert ref.median_error(a, b) == 2.0
    with pytest.raises(ValueError, match="shape"):
        ref.median_error(a, b[:2])
