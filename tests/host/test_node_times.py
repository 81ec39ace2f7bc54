"""tools/node_times.py: that it still finds what it edits, and how it reads the times of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import node_times  # noqa: E402

pytestmark = pytest.mark.host


def test_the_wait_it_edits_stands_in_the_prelude() -> None:
    assert (ROOT / "cuda_src" / "prelude.cuh").read_text(encoding="utf-8").count(node_times.WAIT) == 1


def test_times_of_two_rounds_by_node() -> None:
    """A round is families a, b, a; behind it stands a head of family c.  Times are from one node to the
    next one's: 10, 20 and 5 us, then 12, 20 and 5."""
    walk, names = ["a", "b", "a"], [("norm", "site"), ("gemv", "in"), ("norm", "site")]
    moments = []
    for start, first in ((0, 10), (100_000, 12)):
        at = start
        for family, step in zip((*walk, "c"), (first, 20, 5, 0), strict=True):
            moments.append((at, at - 1000, family))
            at += step * 1000
    found = node_times.by_node(moments, walk, names)
    assert found["rounds"] == 2 and found["nodes"] == 3 and found["whole_ms"] == pytest.approx(0.036)
    gemv = found["kernels"]["gemv in"]
    assert gemv == {"nodes": 1, "us": 20.0, "early_us": 1.0, "ms": pytest.approx(0.020)}
    assert found["kernels"]["norm site"]["nodes"] == 2
    assert found["kernels"]["norm site"]["ms"] == pytest.approx((10 + 5 + 12 + 5) / 2 / 1000)


def test_times_without_a_whole_round_are_refused() -> None:
    with pytest.raises(SystemExit, match="no whole round"):
        node_times.by_node([(0, 0, "a"), (1, 0, "c")], ["a", "b"], [("x", ""), ("y", "")])
