"""The prompts that the tests of segments share, and a short way to ask for the deep pass."""

from __future__ import annotations

from typing import Any

from flashnext_drv.engine.engine import Prefill

EOS = 7
# over the budget of 32 tokens, a page's border and a block of 128 rows; with the end of sequence in it
IDS = [EOS if i in (5, 6, 40, 64) else (37 * i + 11) % 512 for i in range(83)]
LONG = [(91 * i + 5) % 512 for i in range(140)]
N_NEW = 9  # two blocks of the index, each of four tokens, and one more
SERIAL = Prefill(serial=True)


def deep(**fields: Any) -> Prefill:
    return Prefill(**{"deep_rows": 1, **fields})
