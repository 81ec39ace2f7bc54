"""Contract cases of moe_deep_gu and moe_deep_down: tiles of sorted rows, lines of any width and format.

Called by cases_moe_deep.py; weights and chains are those of cases_exl3.py.  The oracle, bit by bit, is taken
of the rows at the ends of tiles, of 8 and of 64 rows; the order check compares all of them with decode's
kernels.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.exl3 import dot_segments, gu_segments
from ..kernels.spec import Case
from ..kernels.tables import LINE, WEIGHT
from ..ref.orders import GENERATIONS, canonical, hadamard128
from .cases_exl3 import Dot, Weights, make_weights, operand_rows, unit_chain, unit_ranges
from .contract import Operands, poison
from .moe_layer import Layer
from .operands import (
    F32_ULP,
    field_at,
    from_tiles,
    rotated,
    same_bits,
    sigmoid64,
    to_tiles,
    untouched,
    within_f16,
)

__all__ = ["down", "finished", "gate_up"]

Arrays = dict[str, NDArray[Any]]
F32Array = NDArray[np.float32]
_ENDS: Final = (0, 7, 8, 63, 64)  # rows of a tile for the oracle, besides its last


class _Lines:
    """Lines of a case: "<width>:<format of gate>,<of up>,<of down>" separated by ";", the shared one last."""

    def __init__(self, case: Case, seed: int, parts: tuple[str, ...]) -> None:
        self.layer, self.hidden = Layer(case, seed), case.int("hidden")
        texts = [text.strip().split(":") for text in str(case["lines"]).split(";")]
        self.widths = [int(width) for width, _ in texts]
        self.width_cap = max(self.widths)
        self.table = np.zeros(len(texts), LINE)
        self.table["width"] = self.widths
        self.weights: dict[tuple[int, str], Weights] = {}
        self.arrays: Arrays = {"lines": self.table}
        self.relocations: list[tuple[str, int, str, int]] = []
        for e, (_, forms) in enumerate(texts):
            for part, form in zip(("gate", "up", "down"), forms.split(","), strict=True):
                codebook, bits = form.split("_")
                k, n = (self.widths[e], self.hidden) if part == "down" else (self.hidden, self.widths[e])
                dot = Dot("exl3", codebook, float(bits), k, n)
                self.table[e][part]["format"] = dot.format
                if part in parts:
                    self.weights[e, part] = make_weights(seed, f"{part}{e}", dot)
                    self.point(e, part, "data", self.weights[e, part].data)

    def point(self, e: int, part: str, field: str, values: NDArray[Any]) -> None:
        """An array of its own for one address of a line."""
        name = f"{part}_{field}{e}"
        self.arrays[name] = values
        at = e * LINE.itemsize + field_at(LINE, part) + field_at(WEIGHT, field)
        self.relocations.append(("lines", at, name, 0))

    def scales(self, part: str) -> dict[int, NDArray[np.float16]]:
        """suh or svh ("gate_svh", ...) of every line, by expert; in the table too."""
        out = {}
        for e, width in enumerate(self.widths):
            size = self.hidden if part == "down_svh" else width
            out[e] = self.layer.scales(part, e, size)
            self.point(e, part[: -len("_suh")], part[-len("suh") :], out[e])
        return out

    def operands(self, seed: int, name: str, data: str, k: int) -> NDArray[np.float16]:
        """(pairs_cap, k) by position, poison in padding and beyond a down projection's inputs."""
        out = poison((self.layer.pairs_cap, k), np.float16)
        for expert, first, n_rows in self.layer.plan.tiles:
            own = k if name != "h" else self.widths[expert]
            rows = operand_rows(seed, f"{name}{first}", max(n_rows, 2), own, data)[:n_rows]
            out[first : first + n_rows, :own] = rows
        return out

    def seen(self) -> list[tuple[int, NDArray[np.int64]]]:
        """(expert, positions) of the rows that the oracle is asked about, tile by tile."""
        return [
            (expert, first + np.unique([at for at in (*_ENDS, n_rows - 1) if at < n_rows]))
            for expert, first, n_rows in self.layer.plan.tiles
        ]


def finished(units: F32Array, svh: NDArray[np.float16]) -> F32Array:
    """Bit oracle: units (u, rows, n) added in rising order, Hadamard, times svh -> (rows, n)."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = units[0]
        for unit in units[1:]:
            total = total + unit
        turned = hadamard128(total.reshape(len(total), -1, 128)).reshape(total.shape)
        return canonical(turned * svh.astype(np.float32))


def _dots(x: NDArray[np.float16], w: Weights, n_units: int, svh: NDArray[np.float16]) -> dict[str, F32Array]:
    """Finished outputs (rows, n) of operand x (rows, k) on each known generation."""
    ranges = unit_ranges(w.value.shape[1], n_units)
    return {
        generation: finished(
            np.stack(
                [
                    unit_chain(np.ascontiguousarray(x[:, u]), Weights(w.data, w.value[:, u]), generation)
                    for u in ranges
                ]
            ),
            svh,
        )
        for generation in GENERATIONS
    }


def gate_up(case: Case, seed: int) -> Operands:
    """Operands of moe_deep_gu."""
    x, data = _Lines(case, seed, ("gate", "up")), str(case.dims.get("data", ""))
    svh = {part: x.scales(f"{part}_svh") for part in ("gate", "up")}
    suh, layer = x.scales("down_suh"), x.layer
    rows = {part: x.operands(seed, part, data, x.hidden) for part in ("gate", "up")}
    wants: list[tuple[NDArray[np.int64], int, list[tuple[NDArray[Any], NDArray[Any]]]]] = []

    def oracle() -> None:
        for expert, at in x.seen():
            units = gu_segments(x.hidden, x.widths[expert])
            both = [
                _dots(rows[part][at], x.weights[expert, part], units, svh[part][expert])
                for part in ("gate", "up")
            ]
            found = []
            for generation in GENERATIONS:
                gate, up = (dots[generation].astype(np.float64) for dots in both)
                with np.errstate(invalid="ignore", over="ignore"):
                    h = gate * sigmoid64(gate) * up * suh[expert].astype(np.float64)
                    found.append(rotated(h, 8 * F32_ULP))
            wants.append((at, x.widths[expert], found))

    def expect(got: Arrays) -> None:
        if not wants:
            oracle()
        h = from_tiles(got["h"])
        for at, width, found in wants:
            _one_of(f"rows {at}", h[at, :width], found)
        for expert, first, n_rows in layer.plan.tiles:
            untouched("h beyond the width", h[first : first + n_rows, x.widths[expert] :])
            untouched("gate beyond the width", got["gate"][first : first + n_rows, x.widths[expert] :])
        untouched("h of padding", h[layer.padding()])
        untouched("gate of padding", got["gate"][layer.padding()])

    k_blocks = x.hidden // 64
    images = np.stack([to_tiles(rows[part]) for part in ("gate", "up")])
    assert images.shape[1:3] == (layer.pairs_cap // 64, k_blocks)
    return Operands(
        arrays={
            **layer.tables(),
            **x.arrays,
            "x": images,
            "h": to_tiles(poison((layer.pairs_cap, x.width_cap), np.float16)),
            "gate": poison((layer.pairs_cap, max(x.hidden, x.width_cap)), np.float32),
            "routes": layer.routes,
        },
        scalars={
            "hidden": x.hidden,
            "width_cap": x.width_cap,
            "pairs_cap": layer.pairs_cap,
            "n_slots": layer.n_slots,
        },
        grid=(2, 1, 1),  # a block takes several pieces
        relocations=x.relocations,
        outputs=("h", "gate"),
        expect=expect,
    )


def _one_of(name: str, got: NDArray[Any], found: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """f16 of what one of the generations gives."""
    missed: AssertionError | None = None
    for want, before in found:
        try:
            within_f16(name, got, want, before)
        except AssertionError as error:
            missed = missed or error
        else:
            return
    assert missed is not None, f"{name}: no generation"
    raise missed


def down(case: Case, seed: int) -> Operands:
    """Operands of moe_deep_down."""
    x, data = _Lines(case, seed, ("down",)), str(case.dims.get("data", ""))
    svh, layer = x.scales("down_svh"), x.layer
    h = x.operands(seed, "h", data, x.width_cap)
    wants: list[tuple[NDArray[np.int64], dict[str, F32Array]]] = []

    def oracle() -> None:
        for expert, at in x.seen():
            width = x.widths[expert]
            units = dot_segments(width, x.hidden)
            wants.append((at, _dots(h[at, :width], x.weights[expert, "down"], units, svh[expert])))

    def expect(got: Arrays) -> None:
        if not wants:
            oracle()
        v = got["v"]
        for at, found in wants:
            mine = canonical(v[at])
            if not any((mine.view(np.uint32) == want.view(np.uint32)).all() for want in found.values()):
                same_bits(f"rows {at}", mine, found["sm_90"])
        untouched("v of padding", v[layer.padding()])

    return Operands(
        arrays={
            **layer.tables(),
            **x.arrays,
            "h": to_tiles(h),
            "v": poison((layer.pairs_cap, x.hidden), np.float32),
            "routes": layer.routes,
        },
        scalars={"hidden": x.hidden, "width_cap": x.width_cap, "n_slots": layer.n_slots},
        grid=(2, 1, 1),
        relocations=x.relocations,
        outputs=("v",),
        expect=expect,
    )
