"""All state bytes of a sequence as plain arrays: what two ways of running the same tokens must agree on.

Called by engine/engine.py and tests.  Keys, with {l} the layer index and T the position, as in ref/state.py:
    L{l}.k, L{l}.v     (T, n_kv, head_dim) f16        sparse layers
    L{l}.raw           (T, d_i) f16                   raw index keys
    L{l}.pooled        (T // ratio, d_i) f16          pooled index keys of the complete blocks
    L{l}.recurrent     (n_v, d_k, d_v) f32            DeltaNet layers
    L{l}.conv          (taps - 1, channels) f16       oldest first
    L{l}.ple_conv      ((taps - 1) * N, S * H) f16    PLE layers, oldest first
What must stay true: nothing beyond T is in it, so bytes left by an earlier owner of a page do not show.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..drv.memory import copy_to_host
from ..drv.stream import Stream
from ..kernels.tables import PAGE_TOKENS
from ..model.layout import Layout
from .recurrent import SlotPool
from .tables import DeviceTables

__all__ = ["read_state"]

Arrays = dict[str, npt.NDArray[np.generic]]


def read_state(
    stream: Stream, layout: Layout, tables: DeviceTables, slots: SlotPool, i_slot: int, position: int
) -> Arrays:
    """The arrays above of the sequence in slot i_slot after its first `position` tokens.

    Waits for the stream.  Every page is copied once, whole.
    """
    return _paged(stream, layout, tables, i_slot, position) | _recurrent(stream, layout, slots, i_slot)


def _paged(stream: Stream, layout: Layout, tables: DeviceTables, i_slot: int, position: int) -> Arrays:
    c, geometry = layout.config, layout.pages
    n_pages = -(-position // PAGE_TOKENS)
    kv = np.empty((n_pages, geometry.kv_bytes), np.uint8)
    index = np.empty((n_pages, geometry.index_bytes), np.uint8)
    for i_page in range(n_pages):
        page = tables.pages[i_slot][i_page]
        copy_to_host(stream, kv[i_page], int(page["kv"]))
        copy_to_host(stream, index[i_page], int(page["index"]))

    def rows(
        pages: npt.NDArray[np.uint8], at: int, per_page: int, shape: tuple[int, ...], n: int
    ) -> npt.NDArray[np.float16]:
        size = per_page * int(np.prod(shape)) * 2
        whole = np.ascontiguousarray(pages[:, at : at + size]).view(np.float16)
        return whole.reshape(n_pages * per_page, *shape)[:n]

    out: Arrays = {}
    blocks = PAGE_TOKENS // c.index_ratio
    heads, key = (c.n_kv_heads, c.head_dim), (c.index_dim,)
    for i_layer, at in geometry.kv.items():
        values = at + PAGE_TOKENS * c.kv_width * 2
        raw = geometry.index[i_layer]
        pooled = raw + PAGE_TOKENS * c.index_dim * 2
        out[f"L{i_layer}.k"] = rows(kv, at, PAGE_TOKENS, heads, position)
        out[f"L{i_layer}.v"] = rows(kv, values, PAGE_TOKENS, heads, position)
        out[f"L{i_layer}.raw"] = rows(index, raw, PAGE_TOKENS, key, position)
        out[f"L{i_layer}.pooled"] = rows(index, pooled, blocks, key, position // c.index_ratio)
    return out


def _recurrent(stream: Stream, layout: Layout, slots: SlotPool, i_slot: int) -> Arrays:
    c, geometry = layout.config, layout.recurrent
    slot = np.empty(geometry.size_bytes, np.uint8)
    copy_to_host(stream, slot, slots.span(i_slot))
    out: Arrays = {}
    for i_layer, at in geometry.state.items():
        state = slot[at : at + c.gdn_value_heads * 128 * 128 * 4].view(np.float32)
        out[f"L{i_layer}.recurrent"] = state.reshape(c.gdn_value_heads, 128, 128).transpose(0, 2, 1)
    for i_layer, at in geometry.tail.items():
        tail = slot[at : at + 3 * c.gdn_channels * 2].view(np.float16)
        out[f"L{i_layer}.conv"] = tail.reshape(3, c.gdn_channels)
    past = (c.ple_taps - 1) * c.ngram_size
    for i_layer, at in geometry.ple_tail.items():
        width = c.n_streams * c.hidden
        out[f"L{i_layer}.ple_conv"] = slot[at : at + past * width * 2].view(np.float16).reshape(past, width)
    return out
