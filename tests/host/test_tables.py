"""Numbers that kernels and host must agree on: weight formats, page size, page order."""

from __future__ import annotations

import re

import pytest

from flashnext_drv.kernels import catalog
from flashnext_drv.kernels import tables as t
from flashnext_drv.state import kv

pytestmark = pytest.mark.host


def test_defines_of_the_kernels_are_those_of_the_host() -> None:
    text = "".join((catalog.source_root() / path).read_text(encoding="utf-8")
                   for path in ("tables.cuh", "token/ahead.cuh", "token/edits.cuh"))
    found = {name: int(value, 0) for name, value in re.findall(r"#define FN_(\w+) (\w+)u\n", text)}
    assert found == {"FORMAT_EXL3": t.FORMAT_EXL3, "FORMAT_F16": t.FORMAT_F16, "FORMAT_BF16": t.FORMAT_BF16,
                     "PAGE_TOKENS": t.PAGE_TOKENS, "NO_LINE": t.NO_LINE, "MOST_STOPS": t.MOST_STOPS,
                     "SEEN_PROMPT": t.SEEN_PROMPT, "SEEN_STOP": t.SEEN_STOP, "SEEN_ONE": t.SEEN_ONE,
                     "EMIT_EDITED": t.EMIT_EDITED}
    assert found == {"FORMAT_EXL3": 0, "FORMAT_F16": 1, "FORMAT_BF16": 2, "PAGE_TOKENS": 64,
                     "NO_LINE": 2**32 - 1, "MOST_STOPS": 12, "SEEN_PROMPT": 1, "SEEN_STOP": 2,
                     "SEEN_ONE": 4, "EMIT_EDITED": 6}


@pytest.mark.parametrize("codebook", t.CODEBOOKS)
def test_format_words_of_every_width(codebook: str) -> None:
    halves = {1.5, 2.5, 3.5} if codebook == "mul1" else set()
    for doubled in range(-1, 20):
        bits = doubled / 2
        if bits in halves or (doubled % 2 == 0 and 1 <= bits <= 8):
            number = t.CODEBOOKS.index(codebook)
            assert t.exl3_format(bits, codebook) == doubled << 8 | number << 16
        else:
            with pytest.raises(ValueError, match="does not exist"):
                t.exl3_format(bits, codebook)
    with pytest.raises(ValueError, match="does not exist"):
        t.exl3_format(2.25, codebook)


def test_page_orders_are_the_same_on_every_host() -> None:
    assert kv._page_order(4, "forward") == [3, 2, 1, 0]
    assert kv._page_order(4, "reversed") == [0, 1, 2, 3]
    pages = list(range(12))
    state = 5
    for i in range(11, 0, -1):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        j = (state >> 33) % (i + 1)
        pages[i], pages[j] = pages[j], pages[i]
    assert kv._page_order(12, "shuffled:5") == pages != sorted(pages)
    assert sorted(kv._page_order(12, "shuffled:6")) == sorted(pages) != kv._page_order(12, "shuffled:6")
