"""Work of a prompt chunk counted by hand for the micro pack, and the charts of the benchmark."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashnext_drv.bench.chart import Panel, chart_svg
from flashnext_drv.bench.prefill_floor import CLASSES, Rates, Work, WorkOf, kernel_class
from flashnext_drv.errors import UsageError
from flashnext_drv.model.deep_layout import DeepLayout
from flashnext_drv.model.deep_steps import deep_steps
from flashnext_drv.model.layout import Layout, Limits
from flashnext_drv.model.pack import Pack, PackBase
from flashnext_drv.model.steps import Step
from flashnext_drv.model.synth import SynthPack

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
ROWS = 100


def walk(pack: PackBase, rows: int, first: int = 0) -> tuple[list[Step], WorkOf]:
    limits = Limits(context_tokens=1000)
    deep = DeepLayout(Layout(pack.config, limits), 256)
    bits = {i: pack.ngram(j).bits for j, i in enumerate(pack.config.ple_layers)}
    return deep_steps(deep, 256, True, bits), WorkOf(deep, pack, first, rows)


@pytest.fixture(scope="module")
def micro() -> PackBase:
    return Pack.open(MICRO)


def test_every_step_of_a_walk_has_a_floor_and_a_class(micro: PackBase) -> None:
    steps, work_of = walk(micro, ROWS)
    classes = {kernel_class(step) for step in steps}
    assert classes == set(CLASSES)
    works = {step.kernel: work_of(step) for step in steps}
    for name, work in works.items():
        short = name in ("index_score_deep", "index_select") and ROWS // 4 <= 8
        assert work.bytes > 0 or short, name
        assert (work.flop > 0) == (name in ("deep_linear", "deep_site_up", "index_score_deep", "qsa_deep",
                                            "moe_deep_gu", "moe_deep_down")), name
    assert sum((work_of(step) for step in steps), Work()).seconds(Rates()) > 0


def test_work_counted_by_hand(micro: PackBase) -> None:
    """hidden 128, 4 streams, low rank 32, 4 of 16 experts of 128 and a shared one, 3 value heads, budget 8
    blocks of 4 tokens, 4 query heads of 256 on 2, an indexer of 4 heads of 128."""
    steps, work_of = walk(micro, ROWS)
    by_name = {step.kernel: step for step in reversed(steps)}
    c = micro.config
    gu = work_of(by_name["moe_deep_gu"])
    assert gu.flop == ROWS * (4 * 4 * 128 * c.moe_width + 4 * 128 * c.shared_width)
    assert work_of(by_name["moe_deep_down"]).flop == gu.flop / 2
    assert work_of(by_name["gdn_scan"]).vector == 4 * ROWS * 3 * 128 * 128
    down = next(s for s in steps if s.kernel == "deep_linear" and s.scope.endswith("site.down"))
    assert work_of(down).flop == 2 * ROWS * 512 * (32 + 4)
    weights = 2 * 512 * (32 + 4)  # f16
    assert work_of(down).bytes == weights + ROWS * (2 * 512 + 4 * (32 + 4))
    attended = sum(min(t + 1, 35) for t in range(ROWS))
    assert work_of(by_name["qsa_deep"]).flop == 4 * 4 * 256 * attended
    scored = sum((t + 1) // 4 for t in range(ROWS) if (t + 1) // 4 > 8)
    assert work_of(by_name["index_score_deep"]).flop == 2 * 4 * 128 * scored
    assert work_of(by_name["site_norm"]).bytes == ROWS * (6 * 512 + 16)  # the first adds nothing


def test_later_rows_cost_the_indexer_and_nobody_else(micro: PackBase) -> None:
    steps, early = walk(micro, ROWS, 200)
    _, late = walk(micro, ROWS, 600)
    more = {step.kernel for step in steps if late(step) != early(step)}
    assert more == {"index_score_deep", "index_select", "qsa_deep"}  # the last: a longer cache
    assert all(late(step).flop == early(step).flop for step in steps if step.kernel == "qsa_deep")


def test_the_published_model_at_16384_rows() -> None:
    """The products alone allow 60,000 to 85,000 tokens a second, the walk's launches 35,000 to 50,000."""
    pack = SynthPack("full", 1, ngram_rows=4_000_000)
    deep = DeepLayout(Layout(pack.config, Limits(context_tokens=16400)), 16384)
    bits = {i: pack.ngram(j).bits for j, i in enumerate(pack.config.ple_layers)}
    work_of = WorkOf(deep, pack, 0, 16384)
    works = [work_of(step) for step in deep_steps(deep, 16384, True, bits)]
    assert 60_000 < 16384 / (sum(work.flop for work in works) / Rates.flop_s) < 85_000
    assert 35_000 < 16384 / sum(work.seconds(Rates()) for work in works) < 50_000


def test_a_kernel_without_a_floor_is_named(micro: PackBase) -> None:
    _, work_of = walk(micro, ROWS)
    with pytest.raises(UsageError, match="kernel=no_such"):
        work_of(Step("no_such", (1,), {}))


def test_a_floor_is_the_largest_of_three_times() -> None:
    rates = Rates(flop_s=10.0, vector_s=5.0, bytes_s=2.0)
    assert [Work(20, 5, 2).seconds(rates), Work(10, 15, 2).seconds(rates), Work(10, 5, 8).seconds(rates)] == [
        2.0, 3.0, 4.0]


def test_charts_are_well_formed_and_keep_their_points() -> None:
    points = [(2048.0, 90.0), (4096.0, 180.0), (65536.0, 3000.0)]
    text = chart_svg([Panel("a < b", "tokens", "ms", {"whole": points, "indexer": [(2048.0, 0.0)]}),
                      Panel("none", "x", "y", {})])
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert [len(line) for line in lines] == [3, 1]
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 3
    assert "a < b" in [each.text for each in root.iter(f"{space}text")]
    assert text == chart_svg([Panel("a < b", "tokens", "ms", {"whole": points, "indexer": [(2048.0, 0.0)]}),
                              Panel("none", "x", "y", {})])
