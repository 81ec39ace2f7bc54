"""Declarations of the attn family: query and key preparation, block choice, sparse attention in parts, and
the merge.

Kernel sources: cuda_src/attn.  Keys and values live in pages of 64 tokens that a sequence's slot lists; a
kernel reads pages that an earlier launch of the round wrote.  What must stay true: a row's bytes do not
depend on the other rows, on how its sequence was cut into rounds, or on which pages hold its tokens.

Case dims.  rows: "sequence:position" for each row, commas between; neighbours of one sequence with rising
positions form a run.  pages: how logical pages map to memory ("plain", "reversed", "permuted", "shared":
few, reused).
"""

from __future__ import annotations

from typing import Final

from . import planted_attn as planted
from . import planted_attn_deep as planted_deep
from .limits import limits_of
from .spec import F32, PTR, U32, U64, Arg, Case, KernelSpec

__all__ = ["INDEX_SCORE", "INDEX_SCORE_DEEP", "INDEX_SELECT", "KERNELS", "QSA_ATTN", "QSA_DEEP", "QSA_MERGE",
           "QSA_PREP",
           "SCORE_ROWS", "score_grid"]

SCORE_ROWS: Final = 64      # rows of a block of index_score_deep

_ROUND: Final = Arg("round", PTR, "FnRound", "r")
_RUNS: Final = Arg("runs", PTR, "FnRun[rows_cap]", "r")
_ROWS: Final = Arg("rows", PTR, "FnRow[rows_cap]", "r")
_SLOTS: Final = Arg("slots", PTR, "FnSlot[], by a row's slot; pages are reached through it", "r")
_KV_OFFSET: Final = Arg("kv_offset", U64, "bytes from page.kv to the layer's K f16 (64, n_kv, 256), then V")
_INDEX_OFFSET: Final = Arg("index_offset", U64,
                           "bytes from page.index to raw keys f16 (64, 128), then pooled (16, 128)")
_N_Q: Final = Arg("n_q", U32, "query heads; n_q / n_kv is 1..16")
_N_KV: Final = Arg("n_kv", U32, "key and value heads")
_BUDGET: Final = Arg("budget", U32, "blocks of 4 tokens a row may choose")
_FIRST_ROW: Final = Arg("first_row", U32, "the row that row 0 of score belongs to")
_MAX_BLOCKS: Final = Arg("max_blocks", U32, "stride of score: at least the blocks any row sees")
_MAX_PARTS: Final = Arg("max_parts", U32, "stride of the parts: at least ceil(attended / 64) of any row")


def score_grid(window: int, max_blocks: int) -> tuple[int, int]:
    """Grid of index_score_deep for a window of rows.

    Blocks that share a tile of rows each read its queries, so there are no more of them than fill a device.
    """
    tiles = -(-window // SCORE_ROWS)
    return min(-(-max_blocks // 256), max(8, -(-528 // tiles))), tiles


def _span(first: int, last: int, sequence: int = 0) -> str:
    return ",".join(f"{sequence}:{position}" for position in range(first, last + 1))


def _each(*positions: int) -> str:
    """One row a sequence, at the given positions."""
    return ",".join(f"{sequence}:{position}" for sequence, position in enumerate(positions))


def _case(name: str, rows: str, n_q: int = 4, n_kv: int = 2, budget: int = 8, pages: str = "permuted",
          **dims: int | float | str) -> Case:
    special = str(dims.get("special", ""))
    shows = ("nonfinite",) if special in ("nan", "inf", "many_nan", "long_nan", "flag") else ()
    all_dims = {"rows": rows, "n_q": n_q, "n_kv": n_kv, "budget": budget, "pages": pages, **dims}
    return Case(name, all_dims, shows)


def _deep(name: str, rows: str, n_q: int = 4, n_kv: int = 2, budget: int = 8, pages: str = "permuted",
          dtype: str = "exl3", tiled: int = 1, **dims: int | float | str) -> Case:
    return _case(name, rows, n_q, n_kv, budget, pages, dtype=dtype, tiled=tiled, **dims)


QSA_PREP: Final = KernelSpec(
    name="qsa_prep", source="attn/qsa_prep.cu", order="qsa_prep_v1",
    args=(_ROUND, _RUNS, _ROWS, _SLOTS, Arg("q", PTR, "(rows_cap, n_q, 512) f32: query, gate", "r"),
          Arg("k", PTR, "(rows_cap, n_kv, 256) f32", "r"), Arg("v", PTR, "(rows_cap, n_kv, 256) f32", "r"),
          Arg("idx", PTR, "(rows_cap, 5, 128) f32: 4 index queries, raw index key", "r"),
          Arg("rope", PTR, "(rows_cap, 32, 2) f32: cos, sin at the row's position", "r"),
          Arg("rope_block", PTR, "(rows_cap, 32, 2) f32: the same at 4 (position / 4)", "r"),
          Arg("q_norm", PTR, "(256) f32", "r"), Arg("k_norm", PTR, "(256) f32", "r"),
          Arg("iq_norm", PTR, "(128) f32", "r"), Arg("ik_norm", PTR, "(128) f32", "r"), _KV_OFFSET,
          _INDEX_OFFSET,
          Arg("q16", PTR, "(rows_cap, n_q, 256) f16", "w"), Arg("iq16", PTR, "(rows_cap, 4, 128) f16", "w"),
          _N_Q, _N_KV, Arg("rope_dim", U32, "64, or 0: no rotation"), Arg("eps", F32, "1e-7..1e-4")),
    grid="ceil((n_q + 2 n_kv + 5) / 4), rows_cap", block=128,
    programmatic=True,
    constants=("q_norm", "k_norm", "iq_norm", "ik_norm"),
    settled=("round", "runs", "rows", "slots"),
    limits=limits_of("qsa_prep"),
    reference="attn.SparseAttention",
    rows=dict.fromkeys(("rows", "q", "k", "v", "idx", "rope", "rope_block", "q16", "iq16"), 0),
    exempt={"order": "the only kernel of its order",
            "integers": "passes through a root: integers have no exact answer"},
    controls=planted.QSA_PREP,
    bound="From the f32 inputs: the sum of squares N/32 + 6 roundings of 2^-24, 1/rms half of that + 2.5, "
          "three products and the rotation 3 more: 12 2^-24 of (|a cos| + |b sin|); then half an f16 ulp "
          "(2^-11 relative, 2^-25 absolute). Pooled keys start from the mean of the stored raw keys, whose "
          "sum has 3 roundings. v, raw: exact. Bits: the order's oracle.",
    cases=(_case("first_token", _each(0)), _case("block_ends", _each(3)), _case("four_rows", _span(0, 3)),
           _case("over_a_page", _span(61, 67)),
           _case("window_across_blocks", _span(126, 132), pages="reversed"),
           _case("several_sequences", "0:5,0:6,0:7,1:63,2:0,2:1,3:131", pages="permuted"),
           _case("runs_of_a_prompt", ",".join((_span(2, 9), _span(58, 68, 2), _span(0, 4, 1)))),
           _case("decode_sixteen", _each(*range(50, 66))), _case("grouped_12", _each(7, 64), n_q=24),
           _case("one_kv_head", _span(2, 4), n_q=16, n_kv=1), _case("no_groups", _span(6, 8), n_q=2),
           _case("far", _span(262140, 262143), pages="shared"),
           _case("far_apart", "0:262011,1:262004", n_q=24, pages="shared"),
           _case("nonfinite", _span(60, 67), special="nonfinite"),
           _case("midpoints", _each(5, 6), special="midpoints"),
           _case("zeros", _span(0, 3), special="zeros")))

INDEX_SCORE: Final = KernelSpec(
    name="index_score", source="attn/index_score.cu", order="index_score_v1",
    args=(_ROUND, _ROWS, _SLOTS, Arg("iq16", PTR, "(rows_cap, 4, 128) f16", "r"), _INDEX_OFFSET,
          Arg("score", PTR, "(rows_cap, max_blocks) f32, blocks seen only, and only beyond the budget", "w"),
          _MAX_BLOCKS, _BUDGET),
    programmatic=True,
    settled=("round", "rows", "slots"),
    grid="any, rows_cap", block=128, limits=limits_of("index_score"),
    reference="attn.block_scores", rows=dict.fromkeys(("rows", "iq16", "score"), 0),
    exempt={"midpoints": "outputs are f32: nothing is rounded to f16",
            "order": "index_score_deep, of the same order, is compared with it"},
    controls=planted.INDEX_SCORE,
    bound="A head's dot is a chain of 8 mma steps (cases_attn_qsa.mma_bound: each step cuts 17 terms below "
          "2^-25 of the largest and its result below 2^-23; or twice 9 terms below 2^-24); three additions "
          "and a product: 4 2^-24 of the sum of heads.",
    cases=(_case("within_budget", _each(31, 34, 2)), _case("one_beyond", _each(35)),
           _case("edges", _each(31, 35, 36, 38, 63, 67, 71)), _case("one_page", _each(63), budget=2),
           _case("run", _span(62, 68), pages="reversed"),
           _case("sixteen", _each(*range(100, 116)), grid=2),
           _case("mixed_budget_16", _each(63, 66, 67, 130, 200), budget=16),
           _case("real_budget", _each(2047, 2049, 2050, 2051, 2060), budget=512, pages="shared"),
           _case("far", _each(262143), budget=512, pages="shared", grid=3),
           _case("zero_queries", _each(100), special="zeros"),
           _case("integers", _each(100, 131), special="integers"),
           _case("nonfinite", _each(100, 131), special="nonfinite")))

INDEX_SCORE_DEEP: Final = KernelSpec(
    name="index_score_deep", source="attn/index_score_deep.cu", order="index_score_v1",
    args=(_ROUND, _ROWS, _RUNS, _SLOTS, Arg("iq16", PTR, "(rows_cap, 4, 128) f16", "r"), _INDEX_OFFSET,
          Arg("score", PTR, "(window, max_blocks) f32, blocks seen only, and only beyond the budget", "w"),
          _MAX_BLOCKS, _BUDGET, _FIRST_ROW),
    grid="any, ceil(window / 64); score_grid", block=256, shared_bytes=65792, blocks_per_sm=2,
    limits=limits_of("index_score_deep"),
    reference="attn.block_scores", rows=dict.fromkeys(("rows", "iq16", "score"), 0),
    exempt={"midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted_deep.INDEX_SCORE_DEEP, replaces="index_score", bound=INDEX_SCORE.bound,
    cases=(_case("within_budget", _each(31, 34, 2)), _case("one_beyond", _each(35)),
           _case("edges", _each(31, 35, 36, 38, 63, 67, 71)), _case("one_page", _each(63), budget=2),
           _case("over_the_budget", _span(28, 44), pages="reversed"),
           _case("odd_runs", ",".join((_span(36, 38), _span(131, 135, 1), _span(60, 67, 2)))),
           _case("two_tiles", ",".join((_span(40, 98), _span(46, 55, 1)))),
           _case("tile_ends_with_a_run", ",".join((_span(36, 99), _span(40, 41, 1)))),
           _case("sixteen", _each(*range(100, 116)), grid=2),
           _case("many_pages", _each(2100, 1040, 517), grid=2, pages="shared"),
           _case("window", _span(36, 109), budget=4, first_row=5, window=64),
           _case("last_window", ",".join((_span(36, 50), _span(70, 75, 1))), first_row=9, window=64),
           _case("mixed_budget_16", _each(63, 66, 67, 130, 200), budget=16),
           _case("far", "0:262142,0:262143", budget=512, pages="shared", grid=8),
           _case("zero_queries", _each(100), special="zeros"),
           _case("integers", _each(100, 131), special="integers"),
           _case("nonfinite", _each(100, 131), special="nonfinite")))

INDEX_SELECT: Final = KernelSpec(
    name="index_select", source="attn/index_select.cu", order="index_pick_v1",
    args=(_ROUND, _ROWS, Arg("score", PTR, "(grid rows, max_blocks) f32", "r"),
          Arg("sel", PTR, "(rows_cap, budget) u32, rising block ids, only beyond the budget", "w"),
          Arg("flag", PTR, "(rows_cap) u32: 1 when a score is NaN", "w"), _MAX_BLOCKS, _BUDGET, _FIRST_ROW),
    grid="rows_cap", block=512, shared_bytes=41104, blocks_per_sm=2,
    programmatic=True,
    settled=("round", "rows"),
    limits=limits_of("index_select"),
    reference="attn.choose_blocks", bound="Exact.", rows=dict.fromkeys(("rows", "score", "sel", "flag"), 0),
    exempt={"order": "the only kernel of its order", "midpoints": "outputs are integers",
            "integers": "chooses by integer keys: every case has one right answer"},
    controls=planted.INDEX_SELECT,
    cases=(_case("within_budget", _each(0, 3, 31, 34)), _case("one_beyond", _each(35)),
           _case("edges", _each(31, 35, 36, 38, 63, 67, 71)), _case("run", _span(62, 68)),
           _case("sixteen", _each(*range(100, 116))),
           _case("window", _each(100, 50, 203, 34, 77, 120), first_row=2, window=3),
           _case("last_window", _each(100, 50, 203, 77, 120), first_row=3, window=3),
           _case("budget_16", _each(63, 66, 67, 130, 200), budget=16),
           _case("real_budget", _each(2047, 2049, 2050, 2051, 2060), budget=512),
           _case("zeros_at_the_cut", _each(100, 203, 2100), special="relu"),
           _case("all_equal", _each(100, 2060, 35), special="equal"),
           _case("signed_zeros", _each(100, 203), special="signed"),
           _case("near_ties", _each(4099), special="near"),
           _case("nan", _each(100, 100, 203, 34), special="nan"),
           _case("inf", _each(100, 203), special="inf"), _case("many_nan", _each(203), special="many_nan"),
           _case("far", _each(262143), budget=512, special="relu"),
           _case("large_budget", _each(262003), budget=2048),
           _case("whole_list", _each(6200, 8191), budget=64),
           _case("long_rows", _each(8195, 8199, 9000, 12345, 33333), budget=64),
           _case("long_equal", _each(20000, 9001), special="equal"),
           _case("long_nan", _each(20000), special="nan"),
           _case("long_many_nan", _each(30001), special="many_nan"),
           _case("long_zeros", _each(9000), budget=1500, special="relu"),
           _case("budget_beyond_the_list", _each(16000), budget=3000),
           _case("beyond_the_bitmap", _each(262180), budget=512)))

QSA_ATTN: Final = KernelSpec(
    name="qsa_attn", source="attn/qsa_attn.cu", order="qsa_attn_v1",
    blocks_per_sm=4,
    args=(_ROUND, _ROWS, _SLOTS, Arg("q16", PTR, "(rows_cap, n_q, 256) f16", "r"),
          Arg("sel", PTR, "(rows_cap, budget) u32, read beyond the budget only", "r"), _KV_OFFSET,
          Arg("part_m", PTR, "(rows_cap, n_q, max_parts) f32", "w"),
          Arg("part_l", PTR, "(rows_cap, n_q, max_parts) f32", "w"),
          Arg("part_o", PTR, "(rows_cap, n_q, max_parts, 256) f32", "w"), _N_Q, _N_KV, _BUDGET, _MAX_PARTS),
    grid="max_parts, n_kv, rows_cap", block=128, shared_bytes=15616,
    programmatic=True,
    settled=("round", "rows", "slots"),
    limits=limits_of("qsa_attn"),
    reference="attn.attend",
    rows=dict.fromkeys(("rows", "q16", "sel", "part_m", "part_l", "part_o"), 0),
    exempt={"order": "qsa_deep is compared with it and qsa_merge",
            "midpoints": "what is rounded has passed through an exponential: no input gives an exact tie"},
    controls=planted.QSA_ATTN,
    bound="From q, K, V as stored. s: chain of 16 mma steps (mma_bound), times 1/16: ds. m within ds. e "
          "relative: 2 ds + 2^-22 (exp) + 2^-24 |s - m|. l: that plus 6 2^-24. o: sum of |v| times (that + "
          "2^-11 e + 2^-25), plus a chain of 4 mma steps.",
    cases=(_case("one", _each(0)), _case("short", _each(2, 3, 4)),
           _case("part_ends", _each(62, 63, 64), budget=64),
           _case("two_parts", _each(126, 127, 128, 129), budget=64),
           _case("grouped_12", _each(63, 70), n_q=24, budget=16),
           _case("one_kv_head", _each(65, 40), n_q=16, n_kv=1), _case("no_groups", _each(15, 130), n_q=2),
           _case("group_9", _each(50), n_q=9, n_kv=1), _case("run", _span(34, 40)),
           _case("budget_edges", _each(30, 31, 34, 35, 36, 37, 38)),
           _case("budget_16", _each(62, 63, 66, 67, 68, 69, 70, 200), budget=16, pages="reversed"),
           _case("sixteen", _each(*range(28, 44)), n_q=2, n_kv=1),
           _case("real_budget", _each(2050, 2051, 2060), n_q=2, n_kv=1, budget=512, pages="shared"),
           _case("real_heads", _each(2047), n_q=24, budget=512, pages="shared"),
           _case("far", "0:262003,1:262142", budget=16, pages="shared"),
           _case("nonfinite", _each(70, 20, 33), special="nonfinite"),
           _case("nonfinite_last", _each(20), special="nonfinite_last"),
           _case("integers", _each(70, 66), budget=64, special="integers"),
           _case("equal_scores", _each(70), special="equal"), _case("large", _each(70), special="large")))

QSA_MERGE: Final = KernelSpec(
    name="qsa_merge", source="attn/qsa_merge.cu", order="qsa_attn_v1",
    args=(_ROUND, _ROWS, Arg("q", PTR, "(rows_cap, n_q, 512) f32: query, gate", "r"),
          Arg("part_m", PTR, "(rows_cap, n_q, max_parts) f32", "r"),
          Arg("part_l", PTR, "(rows_cap, n_q, max_parts) f32", "r"),
          Arg("part_o", PTR, "(rows_cap, n_q, max_parts, 256) f32", "r"),
          Arg("flag", PTR, "(rows_cap) u32: not 0 makes the row NaN", "r"),
          Arg("linear", PTR, "FnLinear: o_proj (k = 256 n_q); its x is written", "r"), _N_Q, _BUDGET,
          _MAX_PARTS),
    grid="n_q, rows_cap", block=128, shared_bytes=2048, blocks_per_sm=2,
    programmatic=True,
    constants=("linear",),
    settled=("round", "rows"),
    limits=limits_of("qsa_merge"),
    reference="attn.attend",
    rows=dict.fromkeys(("rows", "q", "part_m", "part_l", "part_o", "flag", "x"), 0),
    exempt={"order": "qsa_deep is compared with qsa_attn and it"},
    controls=planted.QSA_MERGE,
    bound="From the parts: each merge 2 roundings and two exponentials (1.1 ulp and |m - M| 2^-24 each) on "
          "weights that are not negative: (10 parts + 4 (max m - min m)) 2^-24 of sum w |o| / l; division, "
          "sigmoid 2.5 ulp, product; EXL3: product with suh, 8 roundings of the rotation on the block's "
          "magnitudes; then half an f16 ulp.",
    cases=(_case("one_part", _each(0, 62), dtype="exl3"),
           _case("plain_f16", _each(63, 64, 127), dtype="f16"), _case("bf16", _each(40), dtype="bf16"),
           _case("budget_8", _each(35, 200), dtype="exl3"),
           _case("grouped_12", _each(70, 130), n_q=24, budget=16, dtype="exl3"),
           _case("real_budget", _each(2047, 2050), n_q=2, n_kv=1, budget=512, dtype="exl3"),
           _case("large_budget", _each(6000), n_q=2, n_kv=1, budget=1024, dtype="exl3"),
           _case("sixteen", _each(*range(56, 72)), n_q=2, n_kv=1, budget=64, dtype="f16"),
           _case("midpoints", _each(20, 30), dtype="f16", special="midpoints"),
           _case("integers", _each(255, 20), budget=64, dtype="f16", special="integers"),
           _case("flagged", _each(100, 200, 300), dtype="exl3", special="flag"),
           _case("nonfinite", _each(200, 200, 20), budget=64, dtype="f16", special="nonfinite"),
           _case("far_maxima", _each(255, 254), budget=64, dtype="exl3", special="spread")))

QSA_DEEP: Final = KernelSpec(
    name="qsa_deep", source="attn/qsa_deep.cu", order="qsa_attn_v1",
    args=(_ROUND, _ROWS, _SLOTS, Arg("q", PTR, "(rows_cap, n_q, 512) f32: query, gate", "r"),
          Arg("q16", PTR, "(rows_cap, n_q, 256) f16", "r"),
          Arg("sel", PTR, "(rows_cap, budget) u32, read beyond the budget only", "r"),
          Arg("flag", PTR, "(rows_cap) u32: not 0 makes the row NaN", "r"), _KV_OFFSET,
          Arg("linear", PTR, "FnLinear: o_proj (k = 256 n_q); its x is written", "r"), _N_Q, _N_KV, _BUDGET),
    grid="n_kv, rows_cap", block=128, shared_bytes=83904, blocks_per_sm=2,
    limits=limits_of("qsa_deep"),
    reference="attn.attend", rows=dict.fromkeys(("rows", "q", "q16", "sel", "flag", "x"), 0),
    controls=planted_deep.QSA_DEEP, replaces="qsa_merge",
    bound="From q, K, V as stored. A weight: its score's chain (mma_bound, times 1/16) ds, 2^-24 |s - m| and "
          "2^-22 of the exponential, relative; for its product with v 2^-11 of it and 2^-25 of the part "
          "more, and the part's chain of 4 mma steps. Joins: (10 parts + 4 (max m - min m)) 2^-24 of "
          "sum w |v| / l, as in qsa_merge; l: 6 2^-24 more. Division, sigmoid, product: 8 2^-24. Then the "
          "linear's input rule and half an f16 ulp.",
    cases=(_deep("one", _each(0)), _deep("short", _each(2, 3, 4), dtype="f16"),
           _deep("part_ends", _each(62, 63, 64), budget=64),
           _deep("two_parts", _each(126, 127, 128, 129), budget=64, dtype="bf16"),
           _deep("five_parts", _each(300), n_q=2, n_kv=1, budget=128),
           _deep("grouped_12", _each(63, 70), n_q=24, budget=16),
           _deep("one_kv_head", _each(65, 40), n_q=16, n_kv=1), _deep("no_groups", _each(15, 130), n_q=2),
           _deep("group_9", _each(50, 90), n_q=9, n_kv=1, budget=32), _deep("run", _span(34, 40)),
           _deep("runs", ",".join((_span(60, 66), _span(130, 133, 1))), n_q=2, n_kv=1, budget=16),
           _deep("budget_edges", _each(30, 31, 34, 35, 36, 37, 38)),
           _deep("budget_16", _each(62, 63, 66, 67, 68, 69, 70, 200), budget=16, pages="reversed"),
           _deep("twenty", _each(*range(28, 48)), n_q=2, n_kv=1, dtype="f16"),
           _deep("rows_of_fragments", _each(40, 70), tiled=0),
           _deep("real_heads", _each(140), n_q=24, budget=32),
           _deep("real_budget", _each(2050), n_q=2, n_kv=1, budget=512, pages="shared"),
           _deep("far", "0:262003,1:262142", budget=16, pages="shared"),
           _deep("nonfinite", _each(70, 20, 33), special="nonfinite", dtype="f16"),
           _deep("nonfinite_last", _each(20), special="nonfinite_last", dtype="f16"),
           _deep("nonfinite_later", _each(84), budget=64, special="nonfinite_last", dtype="f16"),
           _deep("flagged", _each(40, 70, 20), special="flag"),
           _deep("midpoints", _each(1, 1), special="midpoints", dtype="f16"),
           _deep("integers", _each(63, 127), budget=64, special="integers", dtype="f16"),
           _deep("equal_scores", _each(70, 130), budget=64, special="equal"),
           _deep("large", _each(70, 130), budget=64, special="large")))

KERNELS: Final = (QSA_PREP, INDEX_SCORE, INDEX_SCORE_DEEP, INDEX_SELECT, QSA_ATTN, QSA_MERGE, QSA_DEEP)
