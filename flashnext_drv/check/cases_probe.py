"""Contract cases of the probe family: elementary functions, mma bits, warp collectives, barriers.

Called by check/contract.py.  References: numpy's FP64 functions with bounds in ulps (one ulp of numpy's own
error is 2^-29 of ours), Python integers and decimals, and the mma model; never the kernels' text.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.probe import MATH_FUNCTIONS
from ..kernels.spec import Case
from . import mma_model
from .contract import Operands, bits, poison

__all__ = ["ULPS", "build", "ulp_errors"]

Arrays = dict[str, NDArray[Any]]
F64 = NDArray[np.float64]

ULPS: Final = {
    "exp2": 1.0,
    "exp": 1.25,
    "log": 1.0,
    "log1p01": 1.0,
    "sigmoid": 2.5,
    "silu": 3.0,
    "softplus": 1.75,
    "rsqrt": 1.5,
    "rcp": 0.5,
    "div3": 0.5,
    "sqrt": 0.5,
    "fma": 0.5,
}
_REFERENCES: Final[dict[str, Callable[[F64], F64]]] = {
    "exp2": np.exp2,
    "exp": np.exp,
    "log": np.log,
    "log1p01": np.log1p,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "div3": lambda x: x / 3,
    "sqrt": np.sqrt,
    "fma": lambda x: x * x - 1,
}
_HALF_SCALE: Final = 0.088388347648


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a probe kernel.  Raises KeyError for another kernel."""
    builders = {
        "math_sweep": _math_sweep,
        "math_f64": _math_f64,
        "mma_tiles_f16": _mma_tiles,
        "mma_tiles_bf16": _mma_tiles,
        "warp_ops": _warp_ops,
        "barrier_turns": _turns,
        "shared_wide": _wide,
    }
    return builders[name](name, case, seed)


def ulp_errors(found: NDArray[np.float32], exact: F64) -> F64:
    """|found - exact| in ulps of f32 at `exact`; 0 where exact is beyond f32 or found is not finite and
    should not be."""
    with np.errstate(all="ignore"):
        size = np.abs(exact)
        unit = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 24, -149))
        inside = np.isfinite(exact) & (size < 3.4028235e38)
        off = np.abs(found.astype(np.float64) - exact) / unit
    return np.where(inside, np.where(np.isfinite(off), off, np.inf), 0.0)


def _math_sweep(name: str, case: Case, seed: int) -> Operands:
    function, start, step, n = str(case["function"]), case.int("start"), case.int("step"), case.int("n")
    words = (np.uint64(start) + np.arange(n, dtype=np.uint64) * np.uint64(step)).astype(np.uint32)
    x = words.view(np.float32)

    def expect(arrays: Arrays) -> None:
        found = arrays["y"].view(np.float32)
        with np.errstate(all="ignore"):
            _check_function(function, words, x, found.view(np.uint32), found)

    return Operands(
        # as floats where they are, so that all NaN patterns compare as one
        {"y": poison(n, np.uint32 if function == "f2h_f2b" else np.float32)},
        {"which": MATH_FUNCTIONS.index(function), "start": start, "step": step, "n": n},
        (4, 1, 1),
        [],
        ("y",),
        expect,
    )


def _check_function(
    function: str,
    words: NDArray[np.uint32],
    x: NDArray[np.float32],
    y: NDArray[np.uint32],
    found: NDArray[np.float32],
) -> None:
    number = ~np.isnan(x)
    if function == "f2h_f2b":
        half = np.where(number, x.astype(np.float16).view(np.uint16), 0x7FFF)
        rounded = (words.astype(np.uint64) + 0x7FFF + (words >> 16 & 1)) >> 16
        brain = np.where(number, rounded.astype(np.uint32), 0x7FFF)
        _same(y, half.astype(np.uint32) | brain << 16)
    elif function in ("h2f", "b2f"):
        low = words.astype(np.uint16)
        wanted = (
            low.view(np.float16).astype(np.float32)
            if function == "h2f"
            else (low.astype(np.uint32) << 16).view(np.float32)
        )
        _same_floats(found, wanted)
    elif function == "u32_to_f32":
        _same_floats(found, words.astype(np.float32))
    elif function == "max":
        other = _reversed_bits(words).view(np.float32)
        wanted = np.maximum(x, other)
        zero = (x == 0) & (other == 0)
        wanted = np.where(
            zero, np.where(np.signbit(x) & np.signbit(other), np.float32(-0.0), np.float32(0)), wanted
        )
        _same_floats(found, wanted.astype(np.float32))
    else:
        in_domain = number
        if function == "log1p01":
            in_domain = number & (x >= 0) & (x <= 1)
        wide = x.astype(np.longdouble) if function == "fma" else x.astype(np.float64)
        exact = np.asarray(_REFERENCES[function](wide), np.float64)  # type: ignore[arg-type]
        if function == "silu":
            in_domain &= x > -np.inf
        errors = np.where(in_domain & ~np.isnan(exact), ulp_errors(found, exact), 0)
        i = int(errors.argmax())
        point = f"{function}({float(x[i]).hex()}) = {float(found[i]).hex()}"
        assert errors[i] <= ULPS[function] + 1e-6, f"{point}: {errors[i]:.3f} ulp, bound {ULPS[function]}"
        bad = in_domain & (np.isnan(found) != np.isnan(exact))
        assert not bad.any(), f"{function}: NaN at {x[bad][0]!r} is not where the reference has one"
        big = in_domain & np.isinf(exact) & (found != exact.astype(np.float32))
        assert not big.any(), f"{function}({float(x[big][0]).hex()}) = {found[big][0]!r}, not infinite"
        assert np.isnan(found[~number]).all(), f"{function}: a NaN was lost"


def _math_f64(name: str, case: Case, seed: int) -> Operands:
    kind, n = str(case["kind"]), case.int("n")
    raw = np.asarray(bits(seed, f"math_f64.{kind}", (n,))).astype(np.float64)
    quarter = 1.5707963267948966
    if kind == "angles":  # the angles of positions: every size up to 262,143
        x = np.ldexp(raw, -32 + 18) * np.where(np.arange(n) % 3 == 0, 2.0**-12, 1.0)
        x[0], x[1], x[2] = 262143.0, 262142.99999999997, 1.0
    elif kind == "quadrants":  # next to multiples of pi/2, where the reduction cancels
        x = (raw % 190000) * quarter + (np.arange(n) % 5 - 2) * 1e-9
        x = np.where(np.arange(n) % 2 == 0, x, -x)
    elif kind == "exponents":
        x = np.ldexp(raw, -32) * 1400 - 720
        x[: n // 2] = np.ldexp(raw[: n // 2], -32) * 40 - 30
    else:
        x = np.resize(
            np.array(
                [
                    0.0,
                    -0.0,
                    1e-300,
                    -1e-300,
                    299999.0,
                    3e5,
                    -3e5,
                    1e9,
                    np.inf,
                    -np.inf,
                    np.nan,
                    709.78,
                    709.79,
                    -708.4,
                    -745.13,
                    -745.2,
                    -800.0,
                    2.0**-1074,
                ]
            ),
            n,
        )

    def expect(arrays: Arrays) -> None:
        with localcontext() as context:
            context.prec = 60
            for value, (s, c, e) in zip(x.tolist(), arrays["y"].tolist(), strict=True):
                _check_point(value, s, c, e)

    return Operands({"x": x, "y": poison((n, 3), np.float64)}, {"n": n}, (4, 1, 1), [], ("y",), expect)


_PI: Final = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def _check_point(x: float, s: float, c: float, e: float) -> None:
    if not abs(x) < 3e5:
        assert np.isnan(s) and np.isnan(c), f"sincos({x!r}) = {s!r}, {c!r}: not NaN beyond the range"
    else:
        exact = Decimal(x)
        turns = (exact / (2 * _PI)).to_integral_value()
        r = exact - turns * 2 * _PI
        sine, cosine, term, k = Decimal(0), Decimal(0), Decimal(1), 0
        while abs(term) > Decimal("1e-30") or k < 4:
            if k & 1:
                sine += -term if k & 2 else term
            else:
                cosine += -term if k & 2 else term
            k += 1
            term *= r / k
        for name, got, want in (("sin", s, sine), ("cos", c, cosine)):
            assert abs(Decimal(got) - want) < Decimal("1e-15"), (
                f"{name}({x!r}) = {got!r}, error {float(Decimal(got) - want):.2e}"
            )
            assert abs(float(np.float32(got)) - float(want)) <= 2 * max(
                abs(float(want)) * 2.0**-23, 2.0**-49
            ), f"{name}({x!r}) in f32"
    if np.isnan(x):
        assert np.isnan(e), "exp(NaN) is a number"
        return
    if x > 709.782712893384:
        assert e == np.inf, f"exp({x!r}) = {e!r}"
        return
    want = Decimal(x).exp() if x > -800 else Decimal(0)
    bound = max(want * Decimal("5e-16"), Decimal(2) ** -1074)
    assert abs(Decimal(e) - want) <= bound, f"exp({x!r}) = {e!r}"


def _mma_tiles(name: str, case: Case, seed: int) -> Operands:
    bf16, n = name.endswith("bf16"), case.int("n")
    a, b, c = mma_model.operands(str(case["family"]), bf16, n, seed)

    def expect(arrays: Arrays) -> None:
        found = arrays["d"].view(np.uint32)
        off = {
            m: int((found != mma_model.mma(a, b, c, bf16, m).view(np.uint32)).sum())
            for m in (mma_model.SM90, mma_model.SM80)
        }
        assert 0 in off.values(), (
            f"{min(off.values())} of {found.size} outputs differ from the model of sm_90 and of sm_80"
        )

    return Operands(
        {"a": a, "b": b, "c": c, "d": poison((n, 16, 8), np.float32)},
        {"n": n},
        (-(-n // 4), 1, 1),
        [],
        ("d",),
        expect,
    )


def _warp_ops(name: str, case: Case, seed: int) -> Operands:
    x = (np.asarray(bits(seed, "warp_ops.x", (128,))).astype(np.float64) / 2.0**31 - 1).astype(np.float32)
    if case.int("special"):
        x[5], x[40], x[70], x[71] = np.inf, np.nan, -np.inf, np.inf
    k = np.asarray(bits(seed, "warp_ops.k", (256,))).view(np.uint64)
    counts = np.array([0, 2**64 - 1, 0, 0], np.uint64)

    def expect(arrays: Arrays) -> None:
        with np.errstate(all="ignore"):
            _same_floats(arrays["f"], _warp_floats(x))
        _same(arrays["u"], _warp_words(x, k))
        total = int(sum(int(v) for v in k) % 2**64)
        assert arrays["counts"].tolist() == [total, int(k.min()), int(k.max()), 0xFFFFFFFF | 4 * 496 << 32]

    return Operands(
        {
            "x": x,
            "k": k,
            "f": poison((11, 128), np.float32),
            "u": poison((16, 128), np.uint64),
            "counts": counts,
        },
        {},
        (1, 1, 1),
        [],
        ("f", "u", "counts"),
        expect,
    )


def _warp_floats(x: NDArray[np.float32]) -> NDArray[np.float32]:
    lanes = np.arange(32)
    rows = np.zeros((11, 4, 32), np.float32)
    for w in range(4):
        v = x[32 * w : 32 * w + 32]
        rows[0, w], rows[1, w] = v[(lanes * 7 + 3) & 31], v[lanes ^ 5]
        rows[2, w], rows[3, w] = (
            v[np.where(lanes >= 3, lanes - 3, lanes)],
            v[np.where(lanes + 9 < 32, lanes + 9, lanes)],
        )
        tree, largest, four = v.copy(), v.copy(), v.copy()
        for m in (16, 8, 4, 2, 1):
            tree, largest = tree + tree[lanes ^ m], np.maximum(largest, largest[lanes ^ m])
        for m in (1, 2):
            four = four + four[lanes ^ m]
        rows[4, w], rows[5, w], rows[6, w] = tree, largest, four
        values = np.stack([v, v * np.float32(0.5), v - np.float32(1), v + np.float32(3)], axis=1).reshape(128)
        for bit in range(7):
            pairs = values.reshape(-1, 2, 1 << bit)
            values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(128)
        rows[7:11, w] = (values * np.float32(_HALF_SCALE)).reshape(32, 4).T
    return rows.reshape(11, 128)


def _warp_words(x: NDArray[np.float32], k: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = 2**32 - 1
    out = np.zeros((16, 128), np.uint64)
    for t in range(128):
        w, lane = t // 32, t % 32
        warp = [int(v) for v in k[32 * w : 32 * w + 32]]
        mine = warp[lane]
        a, b = mine & mask, mine >> 32
        wide = b << 32 | a
        rows: list[int] = [
            warp[31 - lane],
            warp[lane ^ 16],
            sum(warp) % 2**64,
            sum(v & mask for v in warp) & mask,
            sum((v & 1) << i for i, v in enumerate(warp)),
            int((x[32 * w : 32 * w + 32] > 0.5).any()) | int((x[32 * w : 32 * w + 32] > -2).all()) << 1,
        ]
        g, p = lane >> 2, 2 * (lane & 3)
        for i in range(4):
            row = [[(32 * w + 8 * i + r) * 8 + q for q in range(8)] for r in range(8)]
            rows.append(row[g][p] | row[g][p + 1] << 16 | row[p][g] << 32 | row[p + 1][g] << 48)
        clz = 32 - a.bit_length()
        ffs = (a & -a).bit_length()
        rows.append(a.bit_count() | clz << 8 | ffs << 16 | int(f"{b:032b}"[::-1], 2) << 32)
        rows.append((a * b >> 32) | ((sum(a.to_bytes(4, "little")) + b) & mask) << 32)
        rows.append((wide >> lane & mask) | ((wide << lane) >> 32 & mask) << 32)
        rows.append(mine * int(k[t ^ 1]) >> 64)
        rows.append(min(a, b) | max(a, b) << 32)
        sa, sb = a - (a >> 31 << 32), b - (b >> 31 << 32)
        rows.append((min(sa, sb) & mask) | (max(sa, sb) & mask) << 32)
        out[:, t] = rows
    return out


def _turns(name: str, case: Case, seed: int) -> Operands:
    blocks, turns = case.int("blocks"), case.int("turns")
    x = np.asarray(bits(seed, "turns", (blocks, 256)))

    def expect(arrays: Arrays) -> None:
        _same(arrays["y"], np.roll(x, -turns, axis=1) + np.uint32(turns))

    return Operands(
        {"x": x, "y": poison((blocks, 256), np.uint32)}, {"turns": turns}, (blocks, 1, 1), [], ("y",), expect
    )


def _wide(name: str, case: Case, seed: int) -> Operands:
    blocks = case.int("blocks")
    x = np.asarray(bits(seed, "wide", (blocks, 1024)))

    def expect(arrays: Arrays) -> None:
        _same(arrays["y"], x[:, ::-1])

    return Operands(
        {"x": x, "y": poison((blocks, 1024), np.uint32)}, {}, (blocks, 1, 1), [], ("y",), expect
    )


def _reversed_bits(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    out = np.zeros_like(words)
    for i in range(32):
        out |= (words >> np.uint32(i) & np.uint32(1)) << np.uint32(31 - i)
    return out


def _same(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    off = np.argwhere(found != wanted)
    if off.size:
        at = tuple(off[0])
        raise AssertionError(
            f"{len(off)} of {found.size} differ, first at {at}: {found[at]:#x}, not {wanted[at]:#x}"
        )


def _same_floats(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Bit for bit, all NaNs alike."""
    nan = np.isnan(wanted)
    assert (np.isnan(found) == nan).all(), "NaNs are not where they should be"
    _same(
        np.where(nan, np.uint32(0), found.view(np.uint32)),
        np.where(nan, np.uint32(0), wanted.view(np.uint32)),
    )
