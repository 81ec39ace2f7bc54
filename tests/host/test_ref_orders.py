"""Bit oracles of the orders against exact rational arithmetic and hand-made cases."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from flashnext_drv.ref import orders


def round_to_f32(exact: Fraction) -> np.float32:
    """`exact` rounded to nearest even fp32, with subnormals and overflow, by integers alone."""
    if exact == 0:
        return np.float32(0.0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** max(exponent - 23, -149)
    count = round(size / unit)                      # Python rounds halves to even
    value = count * unit
    return np.float32((-1 if exact < 0 else 1) * (float(value) if value < 2**128 else np.inf))


def random_bits(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("kind", ["any", "near one", "subnormal result", "double rounding"])
def test_fma_rounds_once(kind: str) -> None:
    n = 1500
    bits = random_bits(7, (3, n))
    if kind == "near one":
        bits[:2] = (bits[:2] & 0x807FFFFF) | 0x3F800000
        bits[2] = (bits[2] & 0x807FFFFF) | ((90 + bits[2] % 45).astype(np.uint32) << 23)
    if kind == "subnormal result":
        bits[0] = (bits[0] & 0x807FFFFF) | (30 << 23)
        bits[1] = (bits[1] & 0x807FFFFF) | (90 << 23)
        bits[2] &= 0x80FFFFFF
    if kind == "double rounding":                   # product just beside a midpoint of c's last place
        bits[0] = 0x3F800001 + (bits[0] & 0xFF)
        bits[1] = (bits[1] & 0x8000000F) | 0x33800000
        bits[2] = (bits[2] & 0x7FFFFF) | 0x3F800000
    a, b, c = bits.view(np.float32)
    got = orders.fma32(a, b, c)
    for i in range(n):
        if np.isfinite([a[i], b[i], c[i]]).all():
            want = round_to_f32(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i])))
            assert got[i] == want, f"{kind} {i}: fma({a[i]!r}, {b[i]!r}, {c[i]!r}) = {got[i]!r}, not {want!r}"


def test_fma_differs_from_two_roundings_where_it_must() -> None:
    a = np.float32(1 + 2**-23)
    assert orders.fma32(a, a, np.float32(-1)) == np.float32(2**-22 + 2**-46)
    assert a * a - np.float32(1) == np.float32(2**-22)


def test_fma_of_nonfinite_values_is_canonical() -> None:
    inf = np.float32(np.inf)
    got = orders.fma32(np.array([inf, 0, 1, inf], np.float32), np.array([0, inf, 1, 2], np.float32),
                       np.array([1, 1, np.nan, 5], np.float32))
    assert [hex(v) for v in got.view(np.uint32)] == ["0x7fffffff"] * 3 + ["0x7f800000"]


def test_trees_add_in_the_named_order() -> None:
    x = np.random.default_rng(3).standard_normal((5, 32)).astype(np.float32) * 1e3
    lanes = [x[:, i] for i in range(32)]
    for mask in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i ^ mask] for i in range(32)]
    assert all((lane == lanes[0]).all() for lane in lanes)
    assert (orders.warp_sum(x) == lanes[0]).all()
    leaf = x[:, :8].T
    want = ((leaf[0] + leaf[1]) + (leaf[2] + leaf[3])) + ((leaf[4] + leaf[5]) + (leaf[6] + leaf[7]))
    assert (orders.tree(leaf) == want).all()
    serial = leaf[0]
    for row in leaf[1:]:
        serial = serial + row
    assert (orders.tree(leaf) != serial).any(), "the data does not tell a tree from a serial sum"
    assert (orders.tree(leaf[:2]) == leaf[0] + leaf[1]).all() and (orders.tree(leaf[:1]) == leaf[0]).all()
    assert (orders.warp_sum4(x[:, :4]) == (x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3])).all()


def test_fma_chain_starts_from_the_given_value_and_keeps_order() -> None:
    r = np.random.default_rng(4)
    a, b = r.standard_normal((2, 6, 9)).astype(np.float32)
    acc = np.full(6, 0.5, np.float32)
    for k in range(9):
        acc = orders.fma32(a[:, k], b[:, k], acc)
    assert (orders.fma_chain(a, b, 0.5) == acc).all()


def test_hadamard_stage_order_and_scale() -> None:
    x = np.random.default_rng(5).standard_normal((2, 128)).astype(np.float32)
    v = x.copy()
    for bit in range(7):
        new = v.copy()
        for i in range(128):
            if not i >> bit & 1:
                new[:, i] = v[:, i] + v[:, i | 1 << bit]
                new[:, i | 1 << bit] = v[:, i] - v[:, i | 1 << bit]
        v = new
    assert (orders.hadamard128(x) == v * np.float32(0.088388347648)).all()
    sylvester = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)])
    np.testing.assert_allclose(orders.hadamard128(x), x @ sylvester / np.sqrt(128), atol=2e-6)


def exact_mma(a: np.ndarray, b: np.ndarray, c: float, model: orders.MmaModel) -> float:
    """One element of one block of products in exact rationals: an independent statement of the model."""
    def exponent16(v: np.float16) -> int:
        return max(int(v.view(np.uint16)) >> 10 & 31, 1) - 15

    terms = [(Fraction(float(x)) * Fraction(float(y)), exponent16(x) + exponent16(y))
             for x, y in zip(a, b, strict=True)]
    terms.append((Fraction(c), max(int(np.float32(c).view(np.uint32)) >> 23 & 255, 1) - 127))
    live = [e for value, e in terms if value]
    unit = Fraction(2) ** (max([*live, model.least_exponent]) - model.fraction_bits)
    total = sum(((abs(v) // unit) * (1 if v > 0 else -1) for v, _ in terms), Fraction(0)) * unit
    if not total:
        return 0.0
    size = abs(total)
    top = size.numerator.bit_length() - size.denominator.bit_length()
    top -= Fraction(2) ** top > size
    last = Fraction(2) ** max(top - 23, -149)
    return float((size // last) * last) * (1 if total > 0 else -1)


@pytest.mark.parametrize("generation", ["sm_90", "sm_80"])
@pytest.mark.parametrize("spread", [1, 12])
def test_mma_step_against_exact_rationals(generation: str, spread: int) -> None:
    r = np.random.default_rng(11 + spread)
    scale = np.exp2(r.integers(-spread, 2, (12, 4, 16)))
    a = (r.standard_normal((12, 4, 16)) * scale).astype(np.float16)
    b = r.standard_normal((12, 3, 16)).astype(np.float16)
    b[..., 1], a[..., 1] = b[..., 0], -a[..., 0]    # a cancelling pair
    c = (r.standard_normal((12, 4, 3)) * np.exp2(r.integers(-20, 12, (12, 4, 3)))).astype(np.float32)
    got = orders.mma_step(a, b, c, generation)
    model = orders.GENERATIONS[generation]
    for index in np.ndindex(*got.shape):
        batch, m, n = index
        acc = float(c[index])
        for k in range(0, 16, model.step):
            cut = slice(k, k + model.step)
            acc = exact_mma(a[batch, m, cut], b[batch, n, cut], acc, model)
        assert float(got[index]) == acc, f"{generation} {index}"


def test_mma_generations_and_plain_sums_differ() -> None:
    r = np.random.default_rng(2)
    a, b = r.standard_normal((8, 512)).astype(np.float16), r.standard_normal((4, 512)).astype(np.float16)
    new, old = orders.mma_chain(a, b, "sm_90"), orders.mma_chain(a, b, "sm_80")
    assert (new != old).any()
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(new - exact).max() < 2e-3 and (new != exact.astype(np.float32)).any()


def test_mma_chain_is_steps_in_rising_k() -> None:
    r = np.random.default_rng(6)
    a, b = r.standard_normal((3, 48)).astype(np.float16), r.standard_normal((2, 48)).astype(np.float16)
    acc = np.zeros((1, 3, 2), np.float32)
    for k in range(0, 48, 16):
        acc = orders.mma_step(a[None, :, k:k + 16], b[None, :, k:k + 16], acc)
    assert (orders.mma_chain(a, b) == acc[0]).all()
    tail = orders.mma_chain(a[:, 16:], b[:, 16:], start=orders.mma_chain(a[:, :16], b[:, :16]))
    assert (tail == acc[0]).all()


def test_mma_nonfinite_subnormal_and_bf16() -> None:
    a = np.zeros((1, 1, 16), np.float16)
    b = np.ones((1, 1, 16), np.float16)
    a[0, 0, 3] = np.inf
    assert np.isposinf(orders.mma_step(a, b, np.zeros((1, 1, 1)))[0, 0, 0])
    a[0, 0, 5] = -np.inf
    assert orders.mma_step(a, b, np.zeros((1, 1, 1))).view(np.uint32)[0, 0, 0] == 0x7FFFFFFF
    a[...] = 0
    a.view(np.uint16)[0, 0, 0] = 1                  # 2^-24, the least fp16 subnormal
    assert orders.mma_step(a, b, np.zeros((1, 1, 1)))[0, 0, 0] == np.float32(2**-24)
    tiny = np.full((1, 1, 1), 2**-140, np.float32)
    assert orders.mma_step(a * 0, b, tiny)[0, 0, 0] == tiny[0, 0, 0]
    one, three = 0x3F80, 0x4040
    x, y = np.full((1, 1, 16), one, np.uint16), np.full((1, 1, 16), three, np.uint16)
    assert orders.mma_step(x, y, np.full((1, 1, 1), 2.0), bf16=True)[0, 0, 0] == 50.0


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="32 lanes"):
        orders.warp_sum(np.zeros((2, 31)))
    with pytest.raises(ValueError, match="leaves"):
        orders.tree(np.zeros((3, 4)))
    with pytest.raises(ValueError, match="128 elements"):
        orders.hadamard128(np.zeros(64))
    with pytest.raises(ValueError, match="multiple of 16"):
        orders.mma_chain(np.zeros((1, 8), np.float16), np.zeros((1, 8), np.float16))
    with pytest.raises(ValueError, match="float16"):
        orders.mma_chain(np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32))
