"""The attn kernels against their contract: every case, rows alone and among others, page layouts, bit
oracles of the orders that use tensor cores, and planted faults that the expectations must report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import attn_pages, cases_attn_qsa, contract
from flashnext_drv.check.draw_model import exp32
from flashnext_drv.check.operands import from_fragment, from_tiles, is_tiles, signed
from flashnext_drv.errors import ContractError
from flashnext_drv.kernels import attn
from flashnext_drv.kernels.spec import Case
from flashnext_drv.ref.orders import canonical, fma32, mma_chain, warp_sum

pytestmark = pytest.mark.sim
ALL = [(spec.name, case) for spec in attn.KERNELS for case in spec.cases]
# mma slot s of a q.k or index step takes this element of its 16
SLOTS = np.array([4 * (s % 8 // 2) + 2 * (s // 8) + s % 2 for s in range(16)])


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[contract.CheckDevice]:
    with contract.CheckDevice(request.config.getoption("--device", "sim"), families=("attn",)) as opened:
        yield opened


def find(kernel: str, name: str) -> Case:
    return next(case for known, case in ALL if known == kernel and case.name == name)


def variant(kernel: str, name: str, **dims: Any) -> Case:
    base = find(kernel, name)
    return Case(f"{name}+{dims}", {**base.dims, **dims})


def run(device: contract.CheckDevice, kernel: str, case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    return contract.run_case(device, kernel, case, seed).outputs


def generation(device: contract.CheckDevice) -> str:
    return "sm_90" if device.ctx.facts.cc >= (9, 0) else "sm_80"


def raw(x: np.ndarray) -> bytes:
    return contract.canonical_bytes(x)


def slots(x: np.ndarray) -> np.ndarray:
    """(..., K) with every group of 16 in the order of the mma slots."""
    return np.ascontiguousarray(x.reshape(*x.shape[:-1], -1, 16)[..., SLOTS].reshape(x.shape))


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(device: contract.CheckDevice, kernel: str, case: Case) -> None:
    run(device, kernel, case)


@pytest.mark.parametrize(("kernel", "name"), [
    ("qsa_prep", "several_sequences"), ("qsa_prep", "far_apart"), ("index_score", "edges"),
    ("index_select", "edges"), ("qsa_attn", "budget_edges"), ("qsa_attn", "grouped_12"), ("qsa_attn", "far"),
    ("index_score_deep", "odd_runs"), ("qsa_merge", "grouped_12"), ("qsa_merge", "sixteen"),
    ("qsa_deep", "budget_edges"), ("qsa_deep", "rows_of_fragments")])
def test_row_alone_gives_the_bytes_it_gives_among_others(device: contract.CheckDevice, kernel: str,
                                                         name: str) -> None:
    rows = str(find(kernel, name)["rows"]).split(",")
    together = run(device, kernel, find(kernel, name))
    for r, row in enumerate(rows):
        alone = run(device, kernel, variant(kernel, name, rows=row))
        for output in set(together) - {"kv", "index"}:     # the case itself holds pages to an oracle in bits
            x, y = (from_tiles(x) if is_tiles(x) else x for x in (alone[output], together[output]))
            a, b = x[0], y[r]
            cut = tuple(slice(0, n) for n in a.shape)       # score and parts: strides differ
            assert raw(a) == raw(b[cut]), f"{output} of row {row}"


@pytest.mark.parametrize(("kernel", "name"), [("index_score", "edges"), ("index_score_deep", "odd_runs"),
                                              ("qsa_attn", "budget_16"), ("qsa_attn", "run"),
                                              ("qsa_deep", "budget_16"), ("qsa_deep", "runs")])
def test_page_layout_does_not_matter(device: contract.CheckDevice, kernel: str, name: str) -> None:
    modes = ("plain", "reversed", "permuted")
    plain, *others = (run(device, kernel, variant(kernel, name, pages=mode)) for mode in modes)
    for other in others:
        assert contract.hash_outputs(other) == contract.hash_outputs(plain)


@pytest.mark.parametrize(("kernel", "name"), [("index_score", "sixteen"), ("index_score_deep", "many_pages")])
def test_launch_width_of_scores_does_not_matter(device: contract.CheckDevice, kernel: str, name: str) -> None:
    cases = [variant(kernel, name, grid=grid) for grid in (1, 2, 5)]
    one, *others = (run(device, kernel, case) for case in cases)
    for other in others:
        assert contract.hash_outputs(other) == contract.hash_outputs(one)


@pytest.mark.parametrize(("kernel", "name"), [("qsa_prep", "over_a_page"), ("index_score", "run"),
                                              ("index_score_deep", "two_tiles"), ("index_select", "nan"),
                                              ("qsa_attn", "budget_edges"), ("qsa_merge", "budget_8"),
                                              ("qsa_deep", "five_parts"), ("qsa_deep", "budget_edges")])
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    device: contract.CheckDevice, kernel: str, name: str, in_any_order: Callable[..., None]
) -> None:
    in_any_order(4, lambda: contract.run_case(device, kernel, find(kernel, name)).sha256)


@pytest.mark.parametrize(("kernel", "name"), [
    ("index_score", "edges"), ("index_score", "nonfinite"), ("index_score", "real_budget"),
    ("index_score_deep", "odd_runs"), ("index_score_deep", "nonfinite"), ("index_score_deep", "many_pages")])
def test_scores_have_the_bits_of_their_order(device: contract.CheckDevice, kernel: str, name: str) -> None:
    case = find(kernel, name)
    operands, pages = contract.build_operands(kernel, case), attn_pages.Pages(case, 0, 1)
    memory = pages.like(operands.arrays["kv"], operands.arrays["index"])
    score = run(device, kernel, case)["score"]
    for r, (sequence, position) in enumerate(pages.rows):
        seen = attn_pages.blocks_seen(position)
        if seen <= case.int("budget"):
            continue
        blocks = np.arange(seen)
        keys = memory.pooled[pages.at[sequence][blocks // 16], blocks % 16]
        dots = mma_chain(slots(keys), slots(operands.arrays["iq16"][r]), generation(device))
        with np.errstate(invalid="ignore"):
            h = np.where((dots > 0) | np.isnan(dots), dots, np.float32(0))
            want = ((h[:, 0] + h[:, 1]) + (h[:, 2] + h[:, 3])) * np.float32(float.fromhex("0x1.6a09e6p-4"))
        assert raw(score[r, :seen]) == raw(want), f"row {r}"


@pytest.mark.parametrize("position", [5, 20, 40, 55])
def test_absent_values_are_zero_in_every_step(device: contract.CheckDevice, position: int) -> None:
    """Absent entries have the last token's value, an infinity here: 0 times it would be NaN."""
    run(device, "qsa_attn", variant("qsa_attn", "nonfinite_last", rows=f"0:{position}", budget=64))


def test_nothing_is_read_behind_the_last_page(device: contract.CheckDevice) -> None:
    """The row's last token ends its page and half of its one part is absent: an absent entry's token would
    lie on a page that the sequence does not have."""
    run(device, "qsa_attn", variant("qsa_attn", "one", rows="0:63", budget=8))


@pytest.mark.parametrize("name", ["part_ends", "budget_edges", "group_9", "nonfinite", "large"])
def test_qsa_attn_has_the_bits_of_its_order(device: contract.CheckDevice, name: str) -> None:
    case = find("qsa_attn", name)
    n_q, n_kv, budget = case.int("n_q"), case.int("n_kv"), case.int("budget")
    operands, pages = contract.build_operands("qsa_attn", case), attn_pages.Pages(case, 0, n_kv)
    memory = pages.like(operands.arrays["kv"], operands.arrays["index"])
    got = run(device, "qsa_attn", case)
    for r, (sequence, position) in enumerate(pages.rows):
        tokens = attn_pages.attended(position, budget, operands.arrays["sel"][r])
        for h, first in ((h, first) for h in range(n_q) for first in range(0, len(tokens), 64)):
            page, entry = pages.entry(sequence, tokens[first:first + 64])
            keys, values = (x[page, entry, h // (n_q // n_kv)] for x in (memory.k, memory.v))
            wanted = part_bits(operands.arrays["q16"][r, h], keys, values, generation(device))
            for output, want in zip(("part_m", "part_l", "part_o"), wanted, strict=True):
                assert raw(got[output][r, h, first // 64]) == raw(want), f"{output} {r} {h} {first}"


def part_bits(q: np.ndarray, k: np.ndarray, v: np.ndarray, model: str) -> tuple[np.ndarray, ...]:
    """qsa_attn_v1 of one part and head: m, l and o as stored."""
    n = len(k)
    with np.errstate(invalid="ignore", over="ignore"):
        s = mma_chain(slots(k), slots(q[None]), model)[:, 0] * np.float32(0.0625)
        m = s.max()
        e = np.zeros(64, np.float32)
        e[:n] = exp32(s - m)
        length = warp_sum(e[:32] + e[32:])
        weights, padded = e.astype(np.float16), np.zeros((64, 256), np.float16)
        padded[:n] = v
        used = -(-n // 16) * 16
        out = mma_chain(padded.T[:, :used], weights[None, :used], model)[:, 0]
    return canonical(m), canonical(length), out


def test_merge_has_the_bits_of_its_order(device: contract.CheckDevice) -> None:
    case = variant("qsa_merge", "plain_f16", rows="0:255,1:64,2:20", budget=64)
    operands = contract.build_operands("qsa_merge", case)
    a, x = operands.arrays, run(device, "qsa_merge", case)["x"]
    for r, (_, position) in enumerate(attn_pages.parse_rows(case)):
        n = position // 64 + 1
        m, length, o = a["part_m"][r, :, 0], a["part_l"][r, :, 0], a["part_o"][r, :, 0]
        for p in range(1, n):
            top = np.maximum(m, a["part_m"][r, :, p])
            old, new = exp32(m - top), exp32(a["part_m"][r, :, p] - top)
            length = fma32(a["part_l"][r, :, p], new, length * old)
            o = fma32(a["part_o"][r, :, p], new[:, None], o * old[:, None])
            m = top
        gate = a["q"][r, :, 256:]
        t = exp32(-np.abs(gate))
        with np.errstate(over="ignore"):
            act = np.where(gate < 0, t, np.float32(1)) / (t + np.float32(1))
            want = ((o / length[:, None]) * act).astype(np.float16)
        assert raw(from_fragment(x[r])) == raw(want.reshape(-1)), f"row {r}"


# ---- planted faults: the kernel gets another operand than the expectation knows of, and the case must fail

def swapped_rope(arrays: dict[str, np.ndarray]) -> None:
    arrays["rope_block"] = arrays["rope"]


def half_queries(arrays: dict[str, np.ndarray]) -> None:
    arrays["q"] = arrays["q"].astype(np.float16).astype(np.float32)


def one_key_more(arrays: dict[str, np.ndarray]) -> None:
    arrays["rows"] = arrays["rows"].copy()
    arrays["rows"]["position"][:1] += 4


def one_less(arrays: dict[str, np.ndarray]) -> None:
    arrays["rows"] = arrays["rows"].copy()
    arrays["rows"]["position"][:1] -= 1


def last_block_first(arrays: dict[str, np.ndarray]) -> None:
    arrays["sel"] = arrays["sel"].copy()
    arrays["sel"][7, -1] = arrays["sel"][7, 0]


def no_flag(arrays: dict[str, np.ndarray]) -> None:
    arrays["flag"] = np.zeros_like(arrays["flag"])


def rounded_sums(arrays: dict[str, np.ndarray]) -> None:
    arrays["part_l"] = arrays["part_l"].astype(np.float16).astype(np.float32)


def last_score_higher(arrays: dict[str, np.ndarray]) -> None:
    arrays["score"] = arrays["score"].copy()
    arrays["score"][0, 24] = np.nextafter(arrays["score"][0, 24], np.float32(np.inf))


@pytest.mark.parametrize(("kernel", "name", "plant"), [
    ("qsa_prep", "four_rows", swapped_rope), ("qsa_prep", "first_token", half_queries),
    ("index_score", "one_beyond", one_key_more), ("index_score_deep", "one_beyond", one_key_more),
    ("index_select", "all_equal", last_score_higher),
    ("qsa_attn", "one", one_key_more), ("qsa_attn", "part_ends", one_less), ("qsa_attn", "budget_16",
                                                                             last_block_first),
    ("qsa_deep", "one", one_key_more), ("qsa_deep", "part_ends", one_less),
    ("qsa_deep", "budget_16", last_block_first), ("qsa_deep", "flagged", no_flag),
    ("qsa_merge", "flagged", no_flag), ("qsa_merge", "plain_f16", rounded_sums)])
def test_planted_fault_is_reported(device: contract.CheckDevice, kernel: str, name: str, plant: Any) -> None:
    case = find(kernel, name)
    operands = contract.build_operands(kernel, case)
    plant(operands.arrays)
    with pytest.raises(ContractError):
        contract.run_case(device, kernel, case, operands=operands)


@pytest.mark.parametrize("how", ["f16_chain", "f16_sum", "no_tail"])
def test_bounds_refuse_a_coarser_arithmetic(how: str) -> None:
    """What a lazier kernel would give must miss the FP64 bound."""
    q = signed(1, "q", (256,), 4.0).astype(np.float16)
    k, v = (signed(1, name, (64, 256)).astype(np.float16) for name in "kv")
    m, length, out = part_bits(q, k, v, "sm_90")
    exact = [x.astype(np.float64) for x in (q, k, v)]
    cases_attn_qsa.check_part("true", *exact, m, length, out)
    s = mma_chain(k, q[None])[:, 0] * np.float32(0.0625)
    if how == "f16_chain":
        total = np.zeros(64, np.float16)
        for i in range(256):
            total = (total + k[:, i] * q[i]).astype(np.float16)
        m = (total.astype(np.float32) * np.float32(0.0625)).max()
    elif how == "f16_sum":
        length = exp32(s - s.max()).astype(np.float16).sum(dtype=np.float16)
    else:
        _, length, out = part_bits(q, k[:61], v[:61], "sm_90")
    with pytest.raises(AssertionError):
        cases_attn_qsa.check_part(how, *exact, m, length, out)
