"""Cases of the token family: operands, and what each kernel is held to (cases_ahead.py, cases_edits.py too).

Called by check/contract.py through `build`.  References are exact (copies, integers, fp32 steps of a named
order) but for rotary rows and the n-gram mixer, whose bounds are derived below from their rounding points.
What must stay true: operands depend on (name, case, seed) alone, and rows that take no part hold poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import FORMAT_F16, ROW, SLOT
from ..ref.exl3 import codebook, row_states
from . import cases_ahead, cases_edits, draw_model
from .contract import Operands, bits, poison
from .draw_model import Sampling
from .operands import (
    F32_ULP,
    from_fragment,
    from_tiles,
    near,
    round_table,
    run_table,
    same_bits,
    signed,
    to_tiles,
    untouched,
    within_f16,
)

__all__ = ["build", "decode_ngram_rows", "hash_rows", "logits_rows", "rope_exact", "slot_table"]

Arrays = dict[str, NDArray[Any]]
F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]

_EOS: Final = 11
_MULTIPLIERS: Final = (23703573157769, 20109073645365, 8052911324071)   # of the published model


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one declared case.  Raises KeyError on a kernel that is not of this family."""
    return _BUILDERS[name](case, seed)


# --- embed_rows ---------------------------------------------------------------------------------------------

def _embed_rows(case: Case, seed: int) -> Operands:
    n, cap, hidden, kind = (case.int(k) for k in ("rows", "cap", "hidden", "format"))
    vocab = 37
    table = bits(seed, "table", (vocab, hidden)).astype(np.uint16)      # NaNs and infinities among them
    rows = _rows(n, cap, token=bits(seed, "tokens", n) % vocab)

    def expect(out: Arrays) -> None:
        words = table[rows["token"][:n]]
        want = words.view(np.float16).astype(np.float32) if kind == FORMAT_F16 else _from_bf16(words)
        same_bits("streams", out["streams"].reshape(cap, 4, hidden)[:n], np.repeat(want[:, None], 4, axis=1))
        untouched("streams", out["streams"][n:])

    arrays = {"round": round_table(n, cap), "rows": rows, "table": table,
              "streams": poison((cap, 4 * hidden), _F32)}
    return Operands(arrays, {"format": kind, "hidden": hidden}, (-(-hidden // 512), cap, 1), [], ("streams",),
                    expect)


# --- rope_rows ----------------------------------------------------------------------------------------------

def rope_exact(theta: float, rope_dim: int, positions: list[int]) -> F64Array:
    """(positions, rope_dim / 2, 2) cos and sin of f32(t * f32(theta^(-2i / rope_dim))), fp64 from 40 digits.

    The frequency and the angle are rounded to fp32 here as the order says; what is left to compare is cos and
    sin.
    """
    half = rope_dim // 2
    out = np.empty((len(positions), half, 2))
    with localcontext() as context:
        context.prec = 40
        log_theta = Decimal(float(np.float32(theta))).ln()
        omega = [np.float32(float((-log_theta * (2 * i) / rope_dim).exp())) for i in range(half)]
        for row, t in enumerate(positions):
            for i in range(half):
                out[row, i] = _cos_sin(float(np.float32(t) * omega[i]))
    return out


@cache
def _cos_sin(angle: float) -> tuple[float, float]:
    """cos and sin by reduction with 60 digits of pi and Taylor series."""
    with localcontext() as context:
        context.prec = 50
        x = Decimal(angle) % (2 * _PI)
        cos, sin, term, n = Decimal(0), Decimal(0), Decimal(1), 0
        while abs(term) > Decimal(10) ** -40 or n < 8:
            if n % 2 == 0:
                cos += term if n % 4 == 0 else -term
            else:
                sin += term if n % 4 == 1 else -term
            n += 1
            term = term * x / n
        return float(cos), float(sin)


_PI: Final = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628621")


def _rope_rows(case: Case, seed: int) -> Operands:
    n, cap, half = case.int("rows"), case.int("cap"), case.int("rope_dim") // 2
    listed = str(case.dims.get("positions", ""))
    positions = [int(p) for p in listed.split()]
    if not positions:
        positions = [case.int("first") + case.int("step") * i for i in range(n)]
    theta = float(case["theta"])

    def expect(out: Arrays) -> None:
        for array, at in (("rope", positions), ("rope_block", [4 * (p // 4) for p in positions])):
            want = rope_exact(theta, 2 * half, at)
            # one rounding to fp32 of a value within 1e-15; a second 1e-15 for the reference's own conversion
            near(array, out[array][:n], want, F32_ULP * np.abs(want) + 2e-15)
            untouched(array, out[array][n:])

    arrays = {"round": round_table(n, cap), "rows": _rows(n, cap, position=np.array(positions)),
              "rope": poison((cap, half, 2), _F32), "rope_block": poison((cap, half, 2), _F32)}
    return Operands(arrays, {"theta": theta, "rope_dim": 2 * half}, (cap, 1, 1), [], ("rope", "rope_block"),
                    expect)


# --- ngram_rows ---------------------------------------------------------------------------------------------

def hash_rows(token: int, prev1: int, prev2: int, eos: int, sizes: NDArray[np.int64],
              offsets: NDArray[np.int64], multipliers: tuple[int, ...]) -> list[int]:
    """Table row of each head, in Python integers; prev1, prev2 are eos where the sequence has none."""
    second = token * multipliers[0] ^ prev1 * multipliers[1]
    third = second ^ (eos if prev1 == eos else prev2) * multipliers[2]
    half = len(sizes) // 2
    return [(second if h < half else third) % int(n) + int(at)
            for h, (n, at) in enumerate(zip(sizes, offsets, strict=True))]


def decode_ngram_rows(packed: NDArray[np.uint16], dim: int,
                      bias: NDArray[np.float16] | None) -> NDArray[np.float16]:
    """Rows (n, words) of a ring codec, or (n, dim) bf16, with their heads' bias (n, dim) or none -> f16."""
    if packed.shape[1] == dim:
        value = _from_bf16(packed)
    else:
        scale = np.ascontiguousarray(packed[:, :1]).view(np.float16).astype(np.float32)
        with np.errstate(invalid="ignore"):
            value = codebook("mul1")[row_states(packed.view(np.int16), dim)].astype(np.float32) * scale
    if bias is not None:
        value = value + bias.astype(np.float32)
    return value.astype(np.float16)


def _ngram_rows(case: Case, seed: int) -> Operands:
    n, cap, width, dim, heads = (case.int(k) for k in ("rows", "cap", "bits", "dim", "heads"))
    sizes = np.array([5 + 2 * h + h % 3 for h in range(heads)], np.int64)
    offsets = np.cumsum(sizes) - sizes
    words = 1 + dim * width // 16 if width else dim
    table = bits(seed, "table", (int(sizes.sum()), words)).astype(np.uint16)
    if width:                                                   # scales 2^-7 .. 2^-5, both signs
        table[:, 0] = 0x2000 | table[:, 0] & 0x8BFF
    else:                                                       # values 2^-6 .. 2
        table = (0x3C80 + table % 0x300 | table & 0x8000).astype(np.uint16)
    bias = (signed(seed, "bias", (heads, dim)) / 64).astype(np.float16)
    special = case.dims.get("special")
    if special == "midpoints":      # 1 .. 2 by 2^-7, and odd multiples of 2^-11: halfway between two of f16
        table = (0x3F80 + table % 0x80).astype(np.uint16)
        bias = ((2 * (bits(seed, "bias", (heads, dim)) % 8) + 1) * 2.0**-11).astype(np.float16)
    if special == "nonfinite":
        bias[0, 3], bias[heads - 1, 5] = np.nan, np.inf
        table[:: 3, 0] = 0x7C00     # scales
    ids = bits(seed, "ids", (3, n)) % np.uint32(248_320)
    if case.name == "eos_places":                               # every subset of the three places
        for i in range(n):
            for j in range(3):
                ids[j, i] = _EOS if i >> j & 1 else 100 + 10 * i + j
    has_bias, tiled, gathered = (int(case.dims.get(name, 0)) for name in ("bias", "tiled", "gathered"))
    used = bias if has_bias else None
    rows = _rows(n, cap) if gathered else _rows(n, cap, token=ids[0], prev1=ids[1], prev2=ids[2])
    named = np.array([hash_rows(int(ids[0, r]), int(ids[1, r]), int(ids[2, r]), _EOS, sizes, offsets,
                                _MULTIPLIERS) for r in range(n)], np.int64)
    stored = _filled(table[named.reshape(-1)], cap * heads).reshape(cap, -1) if gathered else table

    def expect(out: Arrays) -> None:
        rows16 = from_tiles(out["emb"]) if tiled else out["emb"]
        got = (rows16[:n, :heads * dim] if tiled else from_fragment(rows16[:n])).reshape(n, heads, dim)
        for r in range(n):
            same_bits(f"emb row {r}", got[r], decode_ngram_rows(table[named[r]], dim, used))
        untouched("emb", rows16[n:])
        untouched("emb", rows16[:, heads * dim:])

    emb = poison((cap, heads * dim), np.dtype(np.float16))
    arrays: Arrays = {"round": round_table(n, cap), "rows": rows, "table": stored,
                      "emb": to_tiles(emb) if tiled else emb}
    scalars: dict[str, int | float] = {"bits": width, "eos": _EOS, "n_heads": heads, "row_dim": dim,
                                       "tiled": tiled, "gathered": gathered}
    if gathered:
        scalars |= dict.fromkeys(("head_offsets", "head_sizes", "multipliers"), 0)
    else:
        arrays |= {"head_offsets": offsets, "head_sizes": sizes,
                   "multipliers": np.array(_MULTIPLIERS, np.int64)}
    if has_bias:
        arrays["head_bias"] = bias
    else:
        scalars["head_bias"] = 0
    return Operands(arrays, scalars, (heads, cap, 1), [], ("emb",), expect, ("table",) * gathered)


# --- ple_mix, and ple_gate, ple_conv, ple_tail on the same operands -----------------------------------------

_PLE_OFFSET: Final = 512
_PLE_EPS: Final = 1e-6


class _Mixer:
    """A case of the mixer: runs of `lengths` rows, of which run i lives in slot len(lengths) - 1 - i; the
    slot after them has no run."""

    def __init__(self, case: Case, seed: int) -> None:
        cap, hidden = case.int("cap"), case.int("hidden")
        self.lengths = [int(x) for x in str(case["runs"]).split()]
        self.n, self.cap, self.hidden, width = sum(self.lengths), cap, hidden, 4 * hidden
        self.key, self.streams = (signed(seed, x, (self.n, width), 2.0) for x in ("key", "streams"))
        self.value = signed(seed, "value", (self.n, hidden))
        if case.dims.get("special") == "nonfinite":
            self.key[0, 5], self.streams[1, hidden + 3], self.value[4, 2] = np.nan, np.inf, np.nan
        self.norms = {x: signed(seed, x, (width,), 0.5) for x in ("norm_key", "norm_query", "norm_conv")}
        self.conv = signed(seed, "conv", (width, 4))
        n_slots = len(self.lengths) + 1
        self.tails = signed(seed, "tails", (n_slots, 9, width), 4.0).astype(np.float16)
        self.state = np.full((n_slots, _PLE_OFFSET + self.tails[0].nbytes), 0xFF, np.uint8)
        self.state[:, _PLE_OFFSET:] = self.tails.reshape(n_slots, -1).view(np.uint8)
        self.slots = list(range(len(self.lengths)))[::-1]
        self.moves = [("slots", SLOT.itemsize * i + 8, "state", self.state.shape[1] * i)
                      for i in range(n_slots)]

    def arrays(self) -> Arrays:
        """Tables and inputs of all four kernels."""
        run = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return {"round": round_table(self.n, self.cap, len(self.lengths)),
                "rows": _rows(self.n, self.cap, run=run),
                "runs": run_table(self.lengths, self.slots, self.cap),
                "slots": np.zeros(len(self.tails), SLOT),
                **{x: _filled(getattr(self, x), self.cap) for x in ("key", "value", "streams")},
                **self.norms, "conv": self.conv, "state": self.state.reshape(-1).copy()}

    def scalars(self, *names: str) -> dict[str, int | float]:
        known = {"tail_offset": _PLE_OFFSET, "hidden": self.hidden, "eps": _PLE_EPS}
        return {name: known[name] for name in names}

    def runs(self, out: Arrays) -> Iterator[tuple[slice, NDArray[Any], NDArray[Any]]]:
        """Rows, tail before and tail after of each run; the rest of the state must be as it was."""
        after = out["state"].reshape(self.state.shape)
        kept = np.ascontiguousarray(after[:, _PLE_OFFSET:]).view(np.float16).reshape(self.tails.shape)
        same_bits("tail of a slot without run", kept[-1], self.tails[-1])
        assert (after[:, :_PLE_OFFSET] == 0xFF).all(), "state: bytes before the tail were written"
        first = 0
        for length, slot in zip(self.lengths, self.slots, strict=True):
            yield slice(first, first + length), self.tails[slot], kept[slot]
            first += length

    def gate(self, rows: slice) -> _Gate:
        return _gate64(self.key[rows], self.value[rows], self.streams[rows], self.norms)


def _ple_mix(case: Case, seed: int) -> Operands:
    m = _Mixer(case, seed)

    @np.errstate(invalid="ignore")
    def expect(out: Arrays) -> None:
        for rows, old, tail in m.runs(out):
            n, gate = rows.stop - rows.start, m.gate(rows)
            within_f16("tail", tail[9 - n:].reshape(gate.y.shape), gate.normed, gate.e_normed)
            same_bits("older tail", tail[:9 - n], old[n:])
            _streams64(out["streams"][rows], m.streams[rows], gate.y, gate.e_y,
                       np.concatenate((old, tail[9 - n:])), m.conv)
        untouched("streams", out["streams"][m.n:])

    return Operands(m.arrays(), m.scalars("tail_offset", "hidden", "eps"), (4, m.cap, 1), m.moves,
                    ("streams", "state"), expect)


def _ple_gate(case: Case, seed: int) -> Operands:
    m = _Mixer(case, seed)

    @np.errstate(invalid="ignore")
    def expect(out: Arrays) -> None:
        gate = m.gate(slice(0, m.n))
        near("g", out["g"][:m.n], gate.g, gate.e_g)
        within_f16("conv_in", out["conv_in"][:m.n].reshape(gate.y.shape), gate.normed, gate.e_normed)
        untouched("g", out["g"][m.n:])
        untouched("conv_in", out["conv_in"][m.n:])

    arrays = {**m.arrays(), "conv_in": poison((m.cap, 4 * m.hidden), np.dtype(np.float16)),
              "g": poison((m.cap, 4), _F32)}
    scalars = m.scalars("tail_offset", "hidden", "eps")     # the offset is for the kernels that follow
    return Operands(arrays, scalars, (4, m.cap, 1), m.moves, ("conv_in", "g"), expect)


def _gated(m: _Mixer, seed: int) -> tuple[F32Array, NDArray[np.float16]]:
    """Gates (n, 4) in (0, 1) and conv inputs (n, 4 hidden) as ple_gate might have left them."""
    g = (np.abs(signed(seed, "g", (m.n, 4))) / 2 + np.float32(0.25)).astype(np.float32)
    return g, signed(seed, "conv_in", (m.n, 4 * m.hidden), 4.0).astype(np.float16)


def _ple_conv(case: Case, seed: int) -> Operands:
    m = _Mixer(case, seed)
    g, conv_in = _gated(m, seed)

    @np.errstate(invalid="ignore")
    def expect(out: Arrays) -> None:
        y = g[..., None].astype(np.float64) * m.value[:, None].astype(np.float64)
        for rows, old, tail in m.runs(out):
            same_bits("tail", tail, old)
            _streams64(out["streams"][rows], m.streams[rows], y[rows], F32_ULP * np.abs(y[rows]),
                       np.concatenate((old, conv_in[rows])), m.conv)
        untouched("streams", out["streams"][m.n:])

    arrays = {**m.arrays(), "g": _filled(g, m.cap), "conv_in": _filled(conv_in, m.cap)}
    grid = (-(-4 * m.hidden // 512), -(-m.cap // 16), 1)
    return Operands(arrays, m.scalars("tail_offset", "hidden"), grid, m.moves, ("streams",), expect)


def _ple_tail(case: Case, seed: int) -> Operands:
    m = _Mixer(case, seed)
    conv_in = _gated(m, seed)[1]
    if case.dims.get("special") == "nonfinite":
        conv_in[12, 7], conv_in[3, 9] = np.nan, np.inf

    def expect(out: Arrays) -> None:
        for rows, old, tail in m.runs(out):
            same_bits("tail", tail, np.concatenate((old, conv_in[rows]))[-9:])

    arrays = {**m.arrays(), "conv_in": _filled(conv_in, m.cap)}
    grid = (-(-4 * m.hidden // 512), m.cap, 1)
    return Operands(arrays, m.scalars("tail_offset", "hidden"), grid, m.moves, ("state",), expect)


@dataclass(frozen=True)
class _Gate:
    """FP64 of rows (n, 4) and (n, 4, hidden), each with what the order may err by."""

    g: F64Array
    e_g: F64Array
    y: F64Array
    e_y: F64Array
    normed: F64Array
    e_normed: F64Array


@np.errstate(invalid="ignore")
def _gate64(key: F32Array, value: F32Array, streams: F32Array, norms: dict[str, F32Array]) -> _Gate:
    """u = 2^-24.  A sum of the order has `steps` = 2 ceil(H / 512) + 8 roundings on any path.  Of positive
    terms: relative steps u; then 1/rms has (steps + 2) u / 2 + 2 u.  The score's terms carry 4 more.
    The gate is monotone in the score: its error is its change over the score's error, and of its own
    6 u + u |root| (sigmoid 2.3 ulp).
    """
    n, hidden = value.shape
    u, shape, eps = F32_ULP, (n, 4, hidden), np.float64(np.float32(_PLE_EPS))
    steps = 2 * -(-hidden // 512) + 8
    k, s, v = (x.astype(np.float64) for x in (key.reshape(shape), streams.reshape(shape), value[:, None]))
    wk, wq, wc = (1.0 + norms[f"norm_{x}"].astype(np.float64).reshape(4, hidden)
                  for x in ("key", "query", "conv"))
    rk, rq = (1.0 / np.sqrt((x * x).mean(-1) + eps) for x in (k, s))
    terms = k * wk * s * wq
    scale = rk * rq / np.sqrt(hidden)
    score = terms.sum(-1) * scale
    e_root = ((steps + 2) / 2 + 2) * u
    e_score = (steps + 4) * u * np.abs(terms).sum(-1) * scale + np.abs(score) * (2 * e_root + 4 * u)
    g, low, high = (_ple_sigmoid(x) for x in (score, score - e_score, score + e_score))
    e_g = np.maximum(high - g, g - low) + g * u * (6 + np.sqrt(np.abs(score) + 1e-6))
    y = g[..., None] * v
    e_y = e_g[..., None] * np.abs(v) + u * np.abs(y)
    normed = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * wc
    return _Gate(g, e_g, y, e_y, normed, np.abs(normed) * ((e_g / g)[..., None] + e_root + 6 * u))


def _streams64(got: F32Array, streams: F32Array, y: F64Array, e_y: F64Array, past: NDArray[Any],
               conv: F32Array) -> None:
    """One run's streams against FP64 from the fp16 conv inputs as stored: past (9 + n, 4 hidden), row t of
    the run at t + 9.  u = 2^-24: four roundings of the taps, slope 1.1 and 6 u of silu, two additions."""
    u, shape, n = F32_ULP, y.shape, len(y)
    wide = past.astype(np.float64)
    parts = np.stack([wide[3 * j:3 * j + n] * conv[:, j].astype(np.float64) for j in range(4)])
    c = parts.sum(0).reshape(shape)
    silu = c / (1.0 + np.exp(-c))
    e_c = 1.1 * 4 * u * np.abs(parts).sum(0).reshape(shape) + 6 * u * np.abs(silu)
    want = streams.astype(np.float64).reshape(shape) + y + silu
    near("streams", got.reshape(shape), want, e_y + e_c + u * (np.abs(y + silu) + np.abs(want)))


def _ple_sigmoid(score: F64Array) -> F64Array:
    gate: F64Array = 1.0 / (1.0 + np.exp(-np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))))
    return gate


# --- draw_rows ----------------------------------------------------------------------------------------------

def logits_rows(seed: int, n: int, vocab: int, kind: str) -> F32Array:
    """(n, vocab) logits: "greedy" few distinct values with both zeros and infinities, "flat" one or two
    values, others bell-shaped with a few high ones."""
    raw = bits(seed, "logits", (n, vocab)).astype(np.int64)
    if kind == "greedy":
        return np.asarray(np.array([-np.inf, -1.5, -0.0, 0.0], np.float32)[raw & 3])
    if kind == "flat":
        return np.asarray((raw & 1) * (np.arange(n) % 2)[:, None], np.float32)
    bell = np.stack([signed(seed, f"bell{i}", (n, vocab), 4.0) for i in range(3)])
    out: F32Array = (bell[0] + bell[1] + bell[2] + 4.0 * (raw % 61 == 0)).astype(np.float32)
    return out


def slot_table(samplings: list[Sampling]) -> NDArray[Any]:
    """FnSlot of each sampling; the addresses are poison."""
    slots = poison((len(samplings),), SLOT)
    for slot, s in zip(slots, samplings, strict=True):
        slot["seed"], slot["temperature"], slot["top_k"] = s.seed, s.temperature, s.top_k
        slot["top_p"], slot["min_p"] = s.top_p, s.min_p
    return slots


_SAMPLED: Final = (
    Sampling(1, 1.0), Sampling(2, 0.7, 20, 0.95), Sampling(3, 1.0, 1), Sampling(4, 1.3, 5),
    Sampling(5, 1.0, 0, 0.5), Sampling(6, 1.0, 0, 1e-3), Sampling(7, 2.0, 0, 0.0),
    Sampling(8, 1.0, 0, 1.0, 0.05),
    Sampling(9, 0.9, 64, 0.9, 0.02), Sampling(10, 1.0, 511), Sampling(11, 1.0, 1 << 20),
    Sampling(12, 1e-3, 0, 0.9), Sampling(13, 50.0, 0, 0.999), Sampling(14, 50.0, 300),
    Sampling(2**64 - 1, 1.0, 20, 0.95), Sampling(0, 1e-38, 20, 0.95))
_FLAT: Final = (
    Sampling(1, 1.0, 0, 0.9), Sampling(2, 1.0, 2000), Sampling(3, 1.0, 1024), Sampling(4, 1.0, 300, 0.5),
    Sampling(5, 1.0, 0, 0.1), Sampling(6, 3.0, 3000, 0.99), Sampling(7, 1.0), Sampling(8, 1.0, 0, 0.5, 0.9))
_REAL: Final = (Sampling(7, 1.0, 20, 0.95), Sampling(8, 1.0, 0, 0.95), Sampling(9))


def _draw_rows(case: Case, seed: int) -> Operands:
    cap, vocab, kind = case.int("cap"), case.int("vocab"), str(case["kind"])
    choice = {"sampled": _SAMPLED, "flat": _FLAT, "real": _REAL}.get(kind, (Sampling(),) * cap)[:cap]
    logits = logits_rows(seed, cap, vocab, kind)
    emit = np.full(cap, 3)
    if kind == "greedy":
        logits[0] = np.where(np.arange(vocab) % 7 == 3, np.float32(2.5), logits[0])    # ties of the highest
        logits[1] = np.where(logits[1] > -1, np.float32(-0.0), logits[1])
        logits[1, vocab - 2] = 0.0                                  # +0 ties with the -0 before it
    if kind == "nan":
        logits[0, vocab - 1] = np.nan
        logits[1, 3] = -np.nan
        choice = (Sampling(), Sampling(5, 1.0, 4, 0.9), Sampling(6, 1.0))
    if cap > 3:
        emit[2] = 1                                                 # logits alone: no draw
    slot = np.arange(cap)[::-1]
    rows = _rows(cap, cap, slot=slot, position=bits(seed, "position", cap) % 262_144, emit=emit)
    slots = slot_table(list(choice)[::-1])

    def expect(out: Arrays) -> None:
        for r in range(cap):
            if emit[r] & 2:
                want = draw_model.draw(logits[r], choice[r], int(rows["position"][r]))
                got = int(out["tokens"][r]), int(out["status"][r])
                assert got == want, f"row {r} {choice[r]}: (token, status) {got}, by draw_v1 {want}"
            else:
                untouched("tokens", out["tokens"][r:r + 1])
                untouched("status", out["status"][r:r + 1])

    u32 = np.dtype(np.uint32)
    arrays = {"round": round_table(cap, cap), "rows": rows, "slots": slots, "logits": logits,
              "tokens": poison((cap,), u32), "status": poison((cap,), u32)}
    return Operands(arrays, {"vocab": vocab}, (cap, 1, 1), [], ("tokens", "status"), expect)


# --- shared -------------------------------------------------------------------------------------------------
_F32: Final = np.dtype(np.float32)

_BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "embed_rows": _embed_rows, "rope_rows": _rope_rows, "ngram_rows": _ngram_rows, "ple_mix": _ple_mix,
    "ple_gate": _ple_gate, "ple_conv": _ple_conv, "ple_tail": _ple_tail, "draw_rows": _draw_rows,
    **cases_ahead.BUILDERS, **cases_edits.BUILDERS}


def _rows(n: int, cap: int, **fields: NDArray[Any]) -> NDArray[Any]:
    """FnRow[cap]: n live rows with the given fields, all else poison."""
    rows = poison((cap,), ROW)
    for name, values in fields.items():
        rows[name][:n] = values
    return rows


def _filled(x: NDArray[Any], cap: int) -> NDArray[Any]:
    out = poison((cap, *x.shape[1:]), x.dtype)
    out[:len(x)] = x
    return out


def _from_bf16(words: NDArray[np.uint16]) -> F32Array:
    return (words.astype(np.uint32) << 16).view(np.float32)
