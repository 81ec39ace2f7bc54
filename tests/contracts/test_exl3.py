"""The linear kernels against their contract: every case, the decoder through the shipped kernel, rows alone
and among others, both widths, both mma generations, layouts, and planted faults that must be reported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.check import cases_exl3, contract
from flashnext_drv.check.contract import CheckDevice, Operands
from flashnext_drv.check.operands import same_bits
from flashnext_drv.errors import ContractError
from flashnext_drv.kernels import exl3
from flashnext_drv.kernels.exl3 import (
    GDN_IN_SEGMENT_INPUTS,
    OUT_SEGMENT_INPUTS,
    PAIRS,
    dot_segments,
    fragment_order_rows,
    fragment_order_weights,
    gu_segments,
)
from flashnext_drv.kernels.spec import Case
from flashnext_drv.kernels.tables import CODEBOOKS
from flashnext_drv.ref.exl3 import codebook, decode_linear, tile_states
from flashnext_drv.sim import control

Give = Callable[[str], CheckDevice]
ALL = [(spec.name, case) for spec in exl3.KERNELS for case in spec.cases]


def run(check_device: Give, kernel: str, case: Case, seed: int = 0, operands: Operands | None = None) -> dict:
    return contract.run_case(check_device("exl3"), kernel, case, seed, operands).outputs


def gemv_case(linears: str, rows: int, rows_cap: int, **dims: str) -> Case:
    return Case("test", {"linears": linears, "rows": rows, "rows_cap": rows_cap, **dims})


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(check_device: Give, case_seed: int, kernel: str, case: Case) -> None:
    run(check_device, kernel, case, case_seed)


# ---- the decoder through the shipped kernel --------------------------------------------------------------


def read_weights(check_device: Give, trellis: np.ndarray, name: str, inputs: range) -> np.ndarray:
    """Rows `inputs` of W_q (len(inputs), N) f16, as linear_gemv_n16 multiplies them with one-hot operands."""
    k, n = 16 * trellis.shape[0], 16 * trellis.shape[1]
    case = gemv_case(f"{name}_{trellis.shape[2] / 16:g} {k}x{n}", len(inputs), 16)
    operands = contract.build_operands("linear_gemv_n16", case)
    x = np.zeros((16, k), np.float16)
    x[np.arange(len(inputs)), list(inputs)] = 1
    operands.arrays["w0"] = np.ascontiguousarray(trellis)
    operands.arrays["x0"] = fragment_order_rows(x)
    operands.expect = lambda arrays: None  # the caller compares
    part = run(check_device, "linear_gemv_n16", case, operands=operands)["part0"][:, : len(inputs)]
    covered = np.arange(part.shape[0])[:, None] == np.array(inputs)[None] // (k // part.shape[0])
    assert (part[~covered] == 0).all(), "a unit without the hot input is not zero"
    full = part.sum(axis=0)
    weights = full.astype(np.float16)
    assert (weights.astype(np.float32) == full).all(), "a sum with one term is no f16 value"
    return weights


@pytest.mark.parametrize(("name", "width"), PAIRS, ids=[f"{c}_{b:g}" for c, b in PAIRS])
def test_golden_tiles_come_out_of_the_kernel(
    check_device: Give, data_dir: Path, name: str, width: float
) -> None:
    data = np.load(data_dir / "exl3_vectors" / "tiles.npz")
    words = data[f"{name}_{width:g}.words"]
    trellis = np.zeros((8, 8, words.shape[1]), np.int16)
    trellis[0, 1], trellis[0, 6] = words  # an odd and an even tile of a pair
    got = read_weights(check_device, trellis, name, range(16))
    values = data[f"{name}_{width:g}.values"]
    same_bits("tile 0", got[:, 16:32].copy(), values[0])
    same_bits("tile 1", got[:, 96:112].copy(), values[1])


@pytest.mark.parametrize("linear", ["lin0", "lin1", "lin2", "lin3"])
def test_golden_linears_come_out_of_the_kernel(check_device: Give, data_dir: Path, linear: str) -> None:
    data = np.load(data_dir / "exl3_vectors" / "linears.npz")
    trellis, want = data[f"{linear}.trellis"], data[f"{linear}.W_q"]
    name = next((c for c in ("mcg", "mul1") if f"{linear}.{c}" in data), "3inst")
    for first in range(0, want.shape[0], 16):
        got = read_weights(check_device, trellis, name, range(first, first + 16))
        same_bits(f"rows from {first}", got, want[first : first + 16])


@pytest.mark.parametrize("name", CODEBOOKS)
def test_all_states_of_a_codebook_come_out_of_the_kernel(
    check_device: Give, data_dir: Path, name: str
) -> None:
    shape = (8, 768, 4 * 16)  # 128 inputs x 12288 outputs, 4 bits
    trellis = contract.bits(7, f"states {name}", (*shape[:2], shape[2] // 2)).astype("<u4").view("<i2")
    states = tile_states(trellis)
    assert np.unique(states).size == 65536, "the words miss a state: choose another seed"
    want = decode_linear(trellis, name)
    for first in range(0, 128, 16):
        got = read_weights(check_device, trellis, name, range(first, first + 16))
        same_bits(f"inputs from {first}", got, want[first : first + 16])
    info = json.loads((data_dir / "exl3_vectors" / "info.json").read_text())
    assert hashlib.sha256(codebook(name).astype("<f2").tobytes()).hexdigest() == info["codebook_sha256"][name]


# ---- equalities ------------------------------------------------------------------------------------------


LINEARS = "mul1_5 512x256; mul1_2.5 512x128; f16 512x48; bf16 512x5; mcg_4 512x128"


def rows_only(case: Case, kernel: str, keep: list[int], seed: int = 3) -> Operands:
    """Operands of `case` with its rows replaced by rows `keep` of the same launch with 16 rows."""
    full = contract.build_operands("linear_gemv_n16", gemv_case(str(case["linears"]), 16, 16), seed)
    made = contract.build_operands(kernel, case, seed)
    for name in [n for n in made.arrays if n.startswith("x")]:
        made.arrays[name][: len(keep)] = full.arrays[name][keep]
    made.expect = lambda arrays: None
    return made


@pytest.mark.parametrize(
    ("kernel", "cap", "keep"),
    [
        ("linear_gemv_n8", 8, [5]),
        ("linear_gemv_n8", 1, [15]),
        ("linear_gemv_n8", 2, [9, 2]),
        ("linear_gemv_n8", 8, [3, 14, 0]),
        ("linear_gemv_n8", 8, [7, 6, 5, 4, 3, 2, 1]),
        ("linear_gemv_n16", 16, [11]),
        ("linear_gemv_n16", 12, [15, 0, 8, 7, 1, 2, 3, 4, 5]),
    ],
)
def test_row_keeps_its_bytes_in_any_company(
    check_device: Give, kernel: str, cap: int, keep: list[int]
) -> None:
    whole = gemv_case(LINEARS, 16, 16)
    together = run(
        check_device, "linear_gemv_n16", whole, operands=rows_only(whole, "linear_gemv_n16", list(range(16)))
    )
    case = gemv_case(LINEARS, len(keep), cap)
    apart = run(check_device, kernel, case, operands=rows_only(case, kernel, keep))
    for name, part in apart.items():
        same_bits(name, part[:, : len(keep)], together[name][:, keep])


@pytest.mark.parametrize("generation", ["sm_80", "sm_90"])
def test_bytes_are_those_of_the_chain_of_the_device(device_name: str, generation: str) -> None:
    if device_name != "sim":
        pytest.skip("a GPU has one generation; the simulator can be told")
    case = gemv_case("mul1_3 1024x128; bf16 512x20", 3, 8)
    control.set_generation(generation)
    try:
        with CheckDevice(device_name, families=("exl3",)) as device:
            parts = contract.run_case(device, "linear_gemv_n8", case, 1).outputs
    finally:
        control.set_generation("sm_90")
    dots = [cases_exl3.parse_linear(text) for text in str(case["linears"]).split(";")]
    for j, dot in enumerate(dots):
        w = cases_exl3.make_weights(1, f"w{j}", dot)
        x = cases_exl3.operand_rows(1, f"x{j}", 3, dot.k)
        for u, unit in enumerate(cases_exl3.unit_ranges(dot.k, dot.units)):
            cut = cases_exl3.Weights(w.data, w.value[:, unit], w.bf16)
            same_bits(
                f"linear {j} unit {u}",
                parts[f"part{j}"][u, :3],
                cases_exl3.unit_chain(np.ascontiguousarray(x[:, unit]), cut, generation),
            )


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("linear_input", "mixed"),
        ("linear_gemv_n8", "mixed"),
        ("linear_gemv_n16", "leaves8"),
        ("linear_finish", "leaves"),
    ],
)
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    check_device: Give, kernel: str, name: str, in_any_order: Callable[..., None]
) -> None:
    in_any_order(4, lambda: contract.run_case(check_device("exl3"), kernel, find(kernel, name)).sha256)


def test_a_linear_has_its_bytes_with_and_without_others(check_device: Give) -> None:
    texts = LINEARS.split("; ")
    together = run(check_device, "linear_gemv_n8", gemv_case(LINEARS, 3, 8))
    for j, text in enumerate(texts):
        case = gemv_case(text, 3, 8)
        made = contract.build_operands("linear_gemv_n8", case)
        whole = contract.build_operands("linear_gemv_n8", gemv_case(LINEARS, 3, 8))
        made.arrays["w0"] = whole.arrays[f"w{j}"]
        k = int(made.arrays["linears"][0]["k"])
        made.arrays["x0"] = np.ascontiguousarray(whole.arrays[f"x{j}"][:, :k])
        made.expect = lambda arrays: None
        same_bits(
            text, run(check_device, "linear_gemv_n8", case, operands=made)["part0"], together[f"part{j}"]
        )


# ---- the parts that kernels and host share ---------------------------------------------------------------


def test_segments_of_the_real_shapes_are_what_the_orders_say() -> None:
    real = {
        (2560, 10240): 4,
        (2560, 6144): 8,
        (2560, 12288): 4,
        (2560, 512): 8,
        (2560, 640): 8,
        (640, 2560): 2,
        (2560, 248320): 1,
        (10240, 320): 32,
        (10240, 4): 32,
        (320, 10240): 1,
        (2560, 1): 8,
        (2560, 48): 8,
    }
    assert {shape: dot_segments(*shape) for shape in real} == real
    assert dot_segments(6144, 2560, exl3.leaves(6144), OUT_SEGMENT_INPUTS) == 1 and exl3.leaves(6144) == 8
    assert gu_segments(2560, 640) == 4
    assert [dot_segments(2560, n, 1, GDN_IN_SEGMENT_INPUTS) for n in (10240, 6144)] == [2, 2]
    assert [exl3.leaves(128 * n) for n in (1, 2, 3, 4, 6, 12, 48, 40)] == [1, 2, 1, 4, 2, 4, 8, 8]


def test_fragment_order_is_the_register_order_of_the_mma() -> None:
    k = np.arange(32)
    order = fragment_order_rows(k)
    i = np.arange(16)
    assert (order[:16] == 2 * (i >> 2) + (i & 1) + 8 * (i >> 1 & 1)).all() and (
        order[16:] == order[:16] + 16
    ).all()
    w = np.arange(17 * 32, dtype=np.uint16).reshape(17, 32)
    tiles = fragment_order_weights(w)
    assert tiles.shape == (2, 2, 256) and (tiles[1].reshape(2, 32, 8)[:, 4:] == 0).all()
    for lane, q, c in [(0, 0, 0), (5, 1, 1), (31, 3, 0), (18, 2, 1)]:
        output, inside = lane // 4 + 8 * (q & 1), 2 * (lane % 4) + c + 8 * (q >> 1)
        assert tiles[0, 1, 8 * lane + 2 * q + c] == w[output, 16 + inside]


# ---- planted faults --------------------------------------------------------------------------------------


def spoiled(kernel: str, case: Case, spoil: Callable[[Operands], None]) -> Operands:
    made = contract.build_operands(kernel, case)
    spoil(made)
    return made


def find(kernel: str, name: str) -> Case:
    return next(case for known, case in ALL if known == kernel and case.name == name)


def flip_one_code(made: Operands) -> None:
    made.arrays["w0"].reshape(-1).view(np.uint16)[77] ^= 1


def drop_a_segment(made: Operands) -> None:
    made.grid = (made.grid[0] - 1, *made.grid[1:])


def longer_segments(made: Operands) -> None:
    made.arrays["linears"]["segments"] //= 2
    made.arrays["linears"]["n_warps"] //= 2


def other_codebook(made: Operands) -> None:
    made.arrays["linears"]["w"]["format"] ^= np.uint32(3 << 16)


def other_width(made: Operands) -> None:
    made.arrays["linears"]["w"]["format"] -= np.uint32(2 << 8)


def natural_order(made: Operands) -> None:
    made.arrays["x0"] = np.ascontiguousarray(made.arrays["x0"][:, ::-1])


def one_row_more(made: Operands) -> None:
    made.arrays["round"]["n_rows"] += 1


@pytest.mark.parametrize(
    "spoil",
    [
        flip_one_code,
        drop_a_segment,
        longer_segments,
        other_codebook,
        other_width,
        natural_order,
        one_row_more,
    ],
    ids=lambda f: f.__name__,
)
def test_planted_fault_of_the_product_is_reported(
    check_device: Give, spoil: Callable[[Operands], None]
) -> None:
    case = gemv_case("mul1_3 1024x128", 3, 8)
    with pytest.raises(ContractError):
        run(check_device, "linear_gemv_n8", case, operands=spoiled("linear_gemv_n8", case, spoil))


def one_row_less(made: Operands) -> None:
    made.arrays["round"]["n_rows"] -= 1


def other_scale(name: str) -> Callable[[Operands], None]:
    def spoil(made: Operands) -> None:  # a copy: the expectation keeps the array itself
        made.arrays[name] = (made.arrays[name].view(np.uint16) ^ np.uint16(1 << 9)).view(np.float16)

    return spoil


def shorter(made: Operands) -> None:
    made.arrays["linears"]["k"] -= np.uint32(16)


def fewer_leaves(made: Operands) -> None:
    made.arrays["linears"]["leaves"] = 2
    made.arrays["linears"]["segments"] = 4


@pytest.mark.parametrize(
    ("kernel", "text", "spoil"),
    [
        ("linear_finish", "mul1_3 1024x128/8", fewer_leaves),
        (
            "linear_finish",
            "mul1_3 256x128",
            other_scale("svh0"),
        ),
        ("linear_finish", "f16 512x20", one_row_less),
        (
            "linear_input",
            "mul1_3 256x128",
            other_scale("suh0"),
        ),
        ("linear_input", "f16 64x4", shorter),
    ],
)
def test_planted_fault_of_input_and_finish_is_reported(
    check_device: Give, kernel: str, text: str, spoil: Callable[[Operands], None]
) -> None:
    case = gemv_case(text, 2, 4)
    with pytest.raises(ContractError):
        run(check_device, kernel, case, operands=spoiled(kernel, case, spoil))


def test_an_unknown_format_gives_nan_and_no_guess(check_device: Give) -> None:
    case = gemv_case("mul1_3 256x128", 2, 8)
    made = contract.build_operands("linear_gemv_n8", case)
    made.arrays["linears"]["w"]["format"] = 9
    made.expect = lambda arrays: None
    part = run(check_device, "linear_gemv_n8", case, operands=made)["part0"]
    assert np.isnan(part[:, :2]).all()
