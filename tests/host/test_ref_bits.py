"""Bit oracles of linears: FP64 within the accumulation's bound, and sensitive to every part of the order."""

from __future__ import annotations

import numpy as np
import pytest

from flashnext_drv.ref import bits, exl3, orders


def random_linear(seed: int, k: int, n: int, width: int = 3) -> exl3.Linear:
    r = np.random.default_rng(seed)
    trellis = r.integers(-32768, 32768, (k // 16, n // 16, 16 * width), dtype=np.int16)
    suh = (r.choice([-1, 1], k) * r.uniform(0.8, 1.2, k) / np.sqrt(k)).astype(np.float16)
    svh = (r.choice([-1, 1], n) * r.uniform(0.8, 1.2, n)).astype(np.float16)
    return exl3.Linear.from_parts({"trellis": trellis, "suh": suh, "svh": svh,
                                   "mul1": np.int32(0x83DCD12D - 2**32)})


def rows(seed: int, n_rows: int, k: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_rows, k)).astype(np.float32)


@pytest.mark.parametrize(("k", "n", "leaves"), [(256, 384, 1), (1024, 128, 8), (640, 256, 1), (512, 128, 4)])
def test_exl3_linear_bits_err_only_by_accumulation(k: int, n: int, leaves: int) -> None:
    linear, x = random_linear(1, k, n), rows(2, 3, k)
    got = bits.exl3_linear_bits(linear, x, leaves=leaves)
    operand = bits.linear_input_bits(x, linear.suh).astype(np.float64)
    exact = exl3.rotate(operand @ linear.w_q.astype(np.float64)) * linear.svh.astype(np.float64)
    # a k16 step cuts 17 terms by up to 2^-25 of the largest (below 4 * |sum|'s scale 1) and the sum by 2^-23
    assert np.abs(got - exact).max() < k / 16 * 2.0**-20 * np.abs(exact).max()
    assert (got != exact.astype(np.float32)).any()
    np.testing.assert_allclose(operand, linear.operand(x), rtol=2**-10, atol=1e-6)


def test_every_part_of_the_order_shows() -> None:
    linear, x = random_linear(3, 1024, 256), rows(4, 4, 1024)
    base = bits.exl3_linear_bits(linear, x, segments=4)
    assert (base != bits.exl3_linear_bits(linear, x, segments=2)).any()
    assert (base != bits.exl3_linear_bits(linear, x, leaves=4, segments=1)).any()
    assert (base != bits.exl3_linear_bits(linear, x, segments=4, generation="sm_80")).any()
    np.testing.assert_array_equal(base[2:3], bits.exl3_linear_bits(linear, x[2:3], segments=4))


def test_sum_units_adds_segments_in_order_and_leaves_by_the_tree() -> None:
    parts = (np.random.default_rng(5).standard_normal((8, 3, 7)) * 100).astype(np.float32)
    leaf = [(parts[i, 0] + parts[i, 1]) + parts[i, 2] for i in range(8)]
    want = ((leaf[0] + leaf[1]) + (leaf[2] + leaf[3])) + ((leaf[4] + leaf[5]) + (leaf[6] + leaf[7]))
    np.testing.assert_array_equal(bits.sum_units(parts.reshape(24, 7), 8), want)


@pytest.mark.parametrize(("k", "n", "leaves", "least", "want"), [
    (2560, 640, 1, 256, 8), (2560, 12288, 1, 256, 4), (2560, 248320, 1, 256, 1), (10240, 320, 1, 256, 32),
    (640, 2560, 1, 256, 2), (128, 128, 1, 256, 1), (10240, 4, 1, 256, 32),
    (2560, 640, 1, 512, 4), (6144, 2560, 8, 512, 1), (2560, 10240, 1, 1024, 2), (2560, 6144, 1, 1024, 2)])
def test_segments_of_the_real_shapes(k: int, n: int, leaves: int, least: int, want: int) -> None:
    assert bits.dot_segments(k, n, leaves, least) == want


def test_plain_bf16_equals_f16_where_the_split_is_trivial_and_is_exact_enough_elsewhere() -> None:
    r = np.random.default_rng(6)
    w = r.integers(-8, 9, (5, 64)).astype(np.float32)          # exact in f16 and bf16
    w_bf16 = (w.view(np.uint32) >> 16).astype(np.uint16)
    x = r.integers(-8, 9, (2, 64)).astype(np.float32)
    want = (x.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(bits.plain_linear_bits(w.astype(np.float16), x), want)
    np.testing.assert_array_equal(bits.plain_linear_bits(w_bf16, x), want)
    x = rows(7, 2, 64)
    got = bits.plain_linear_bits(w_bf16, x)
    exact = x.astype(np.float16).astype(np.float64) @ w.T.astype(np.float64)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-5)


def test_bf16_parts_add_up_exactly() -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    hi, lo = bits.bf16_parts(finite)
    total = sum((part.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for part in (hi, lo))
    np.testing.assert_array_equal(total, finite.astype(np.float64))
    hi, lo = bits.bf16_parts(np.array([np.inf, -np.inf, np.nan], np.float16))
    assert hi.tolist() == [0x7F80, 0xFF80, 0x7FFF] and lo.tolist() == [0, 0, 0]


def test_moe_sum_uses_leaves_of_expert_ranges() -> None:
    r = np.random.default_rng(8)
    values, shared = r.standard_normal((4, 128)).astype(np.float32), r.standard_normal(128).astype(np.float32)
    weights, experts = np.array([0.4, 0.3, 0.2, 0.1], np.float32), np.array([0, 1, 6, 15])
    first = orders.fma32(weights[1], values[1], weights[0] * values[0])
    want = orders.fma32(np.float32(0.7), shared, (first + weights[2] * values[2]) + weights[3] * values[3])
    got = bits.moe_sum_bits(values, experts, weights, 16, shared, 0.7)
    np.testing.assert_array_equal(got, want)
    assert (bits.moe_sum_bits(values, experts, weights, 64, shared, 0.7) != got).any()
