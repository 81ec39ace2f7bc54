"""numpy dtypes of the device tables in cuda_src/tables.cuh, token/ahead.cuh and token/edits.cuh; a host test
compares sizes and offsets of both sides.

Used by state/tables.py (host shadows) and the contract cases.  Field meanings stand there.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["AHEAD", "CACHE", "CODEBOOKS", "COUNTERS", "DRAWN", "EDIT", "EDITS", "EMIT_EDITED", "FILL",
           "FORMAT_BF16", "FORMAT_EXL3", "FORMAT_F16", "HOME", "LINE", "LINEAR", "MOST_STOPS", "NO_LINE",
           "PAGE", "PAGE_TOKENS", "ROUND", "ROUTE", "ROW", "RUN", "SEEN_ONE", "SEEN_PROMPT", "SEEN_STOP",
           "SLOT", "TILE", "USE", "WEIGHT", "exl3_format"]

PAGE_TOKENS: Final = 64
FORMAT_EXL3: Final = 0
FORMAT_F16: Final = 1
FORMAT_BF16: Final = 2
NO_LINE: Final = 0xFFFFFFFF
MOST_STOPS: Final = 12
SEEN_PROMPT: Final = 1
SEEN_STOP: Final = 2
SEEN_ONE: Final = 4
EMIT_EDITED: Final = 6
CODEBOOKS: Final = ("3inst", "mcg", "mul1")

ROUND: Final = np.dtype([("n_rows", "<u4"), ("n_runs", "<u4"), ("rows_cap", "<u4"), ("version", "<u4")])
ROW: Final = np.dtype([(name, "<u4") for name in
                       ("slot", "run", "token", "position", "prev1", "prev2", "emit", "i_out")])
RUN: Final = np.dtype([(name, "<u4") for name in ("slot", "first_row", "n_rows", "first_position")])
SLOT: Final = np.dtype([("pages", "<u8"), ("recurrent", "<u8"), ("seed", "<u8"), ("temperature", "<f4"),
                        ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<u4"), ("pad0", "<u4"),
                        ("pad1", "<u4")])
PAGE: Final = np.dtype([("kv", "<u8"), ("index", "<u8")])
WEIGHT: Final = np.dtype([("data", "<u8"), ("suh", "<u8"), ("svh", "<u8"), ("format", "<u4"), ("pad", "<u4")])
LINEAR: Final = np.dtype([("w", WEIGHT), ("x", "<u8"), ("part", "<u8"), ("out", "<u8"), ("bias", "<u8"),
                          ("k", "<u4"), ("n", "<u4"), ("leaves", "<u4"), ("segments", "<u4"),
                          ("first_warp", "<u4"), ("n_warps", "<u4"), ("x_stride", "<u4"), ("tiled", "<u4")])
LINE: Final = np.dtype([("gate", WEIGHT), ("up", WEIGHT), ("down", WEIGHT),
                        ("width", "<u4"), ("source", "<u4"), ("pad", "<u8")])
ROUTE: Final = np.dtype([("expert", "<u4"), ("weight", "<f4")])
TILE: Final = np.dtype([("expert", "<u4"), ("first", "<u4"), ("n_rows", "<u4"), ("pad", "<u4")])
HOME: Final = np.dtype([("address", "<u8"), ("bytes", "<u4"), ("line", "<u4")])
USE: Final = np.dtype([("expert", "<u4"), ("used", "<u4")])
COUNTERS: Final = ("hits", "misses", "fills", "evictions", "filled_bytes", "in_place", "reads", "read_bytes")
CACHE: Final = np.dtype([("lines", "<u8"), ("line_bytes", "<u4"), ("n_lines", "<u4"), ("clock", "<u4"),
                         ("n_fills", "<u4"), *((name, "<u8") for name in COUNTERS)])
FILL: Final = np.dtype([("to", "<u8"), ("from", "<u8"), ("bytes", "<u4"), ("pad", "<u4")])
AHEAD: Final = np.dtype([("left", "<u4"), ("drawn", "<u4"), ("n_stops", "<u4"), ("pad", "<u4"),
                         ("stops", "<u4", (MOST_STOPS,))])
DRAWN: Final = np.dtype([("token", "<u4"), ("status", "<u4")])
EDITS: Final = np.dtype([("n_entries", "<u4"), ("counted", "<u4"), ("stops_from", "<u4"),
                         ("repetition", "<f4"), ("presence", "<f4"), ("frequency", "<f4"), ("pad0", "<u4"),
                         ("pad1", "<u4")])
EDIT: Final = np.dtype([("id", "<u4"), ("seen", "<u4"), ("bias", "<f4"), ("raw", "<f4")])


def exl3_format(bits: float, codebook: str) -> int:
    """The format word of an EXL3 weight.  bits: 1..8, 1.5, 2.5 or 3.5; codebook: one of CODEBOOKS."""
    doubled = int(bits * 2)
    if doubled != bits * 2 or not 2 <= doubled <= 16 or (doubled % 2 and (doubled > 7 or codebook != "mul1")):
        raise ValueError(f"EXL3 width {bits} with codebook {codebook} does not exist")
    return FORMAT_EXL3 | doubled << 8 | CODEBOOKS.index(codebook) << 16
