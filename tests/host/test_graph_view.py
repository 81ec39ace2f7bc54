"""Listings of graphs: drawings that show all of them, differences that miss nothing, bad files refused."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.bench import graph_view as view
from flashnext_drv.cli import report
from flashnext_drv.drv.memory import Span
from flashnext_drv.engine.graphs import Identity
from flashnext_drv.errors import UsageError
from flashnext_drv.kernels import catalog

SVG = "{http://www.w3.org/2000/svg}"


def kernel(i: int, name: str = "site_norm", **more: Any) -> dict[str, Any]:
    return {"id": i, "kind": "kernel", "name": name, "grid": [4, 1, 1], "block": [256, 1, 1], "layer": "L0",
            "part": "site", "args": {"w": "L0.attn_site.norm", "hidden": 128},
            "reads": ["FnRound round"], **more}


def listing(nodes: list[dict[str, Any]], edges: list[tuple[int, int]]) -> view.Listing:
    return {"format": view.FORMAT, "name": "a<b>&\"c", "identity": {"path": "body", "rows": 1},
            "nodes": nodes, "edges": [list(edge) for edge in edges]}


def chain(n: int) -> view.Listing:
    return listing([kernel(i, f"k{i}") for i in range(n)], [(i, i + 1) for i in range(n - 1)])


DIAMOND = listing([kernel(0, "top"), {"id": 1, "kind": "memcpy"}, kernel(2, "right"), kernel(3, "foot")],
                  [(0, 1), (0, 2), (1, 3), (2, 3)])


def test_a_listing_does_not_depend_on_addresses() -> None:
    class Bare:
        name, nodes, edges = "g", list, list

        def arguments(self, sizes: Any) -> list[Any]:
            return []

    one = Identity("body", 1, (1,), 2048, "4x64", -1, (0, 1), fingerprint=7)
    bare: Any = Bare()
    listings = [view.graph_listing(bare, each, {}) for each in (one, replace(one, fingerprint=8))]
    assert listings[0] == listings[1] and listings[0]["identity"]["pattern"] == [1]


@pytest.mark.parametrize("graph", [chain(1), chain(120), DIAMOND, listing([], [])])
def test_a_drawing_shows_every_node_and_edge_apart(graph: view.Listing) -> None:
    root = ET.fromstring(view.svg_of(graph))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    places = []
    for box in boxes:
        assert box is not None
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
        assert all(abs(x - a) >= w or abs(y - b) >= h for a, b in places), "two nodes in one place"
        places.append((x, y))
    assert len(boxes) == len(graph["nodes"])
    arrows = [path for path in root.iter(f"{SVG}path") if "marker-end" in path.attrib]
    assert len(arrows) == len(graph["edges"])
    said = "".join(root.itertext())
    for node in graph["nodes"]:
        assert f"{node['id']} {node.get('name', node['kind'])}" in said
    if len(graph["nodes"]) == 120:
        assert len({x for x, _ in places}) > 3 and width < 2.5 * height     # folded


def test_an_edge_goes_from_the_foot_of_a_box_to_the_head_of_another() -> None:
    root = ET.fromstring(view.svg_of(DIAMOND))
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        box, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert box is not None and text is not None and text.text is not None
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        boxes[int(text.text.split()[0])] = ((x + w / 2, y + h), (x + w / 2, y))
    drawn = set()
    for path in root.iter(f"{SVG}path"):
        if "marker-end" in path.attrib:
            numbers = [float(n) for n in re.findall(r"[\d.]+", path.attrib["d"])]
            ends = (tuple(numbers[:2]), tuple(numbers[-2:]))
            drawn.add(next((a, b) for a in boxes for b in boxes if ends == (boxes[a][0], boxes[b][1])))
    assert drawn == {tuple(edge) for edge in DIAMOND["edges"]}


def test_a_cycle_is_refused() -> None:
    with pytest.raises(UsageError, match="cycle"):
        view.svg_of(listing([kernel(0), kernel(1), kernel(2)], [(0, 1), (1, 2), (2, 1)]))


def test_graphviz_text_has_names_grids_tables_and_clusters() -> None:
    text = view.dot_of(listing([kernel(0, layer=""), kernel(1), kernel(2, layer="L1")], [(0, 1), (1, 2)]))
    assert text.startswith('digraph "a<b>&\\"c" {') and text.count("{") == text.count("}") == 3
    assert text.count("->") == 2 and "n0 -> n1;" in text and "n1 -> n2;" in text
    assert "subgraph cluster_L0" in text and "subgraph cluster_L1" in text
    assert text.count("grid 4 x 1 x 1, block 256") == 3 and text.count("reads FnRound") == 3


# Differences.


def test_a_listing_equals_itself_and_its_copy_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for graph in (chain(30), DIAMOND, listing([], [])):
        path.write_text(json.dumps(graph))
        assert view.diff_listings(graph, view.read_listing(path)) == []


@pytest.mark.parametrize(("field", "value", "said"), [
    ("grid", [4, 8, 1], "grid [4, 1, 1] -> [4, 8, 1]"),
    ("block", [128, 1, 1], "block [256, 1, 1] -> [128, 1, 1]"),
    ("reads", ["FnRow rows"], "reads ['FnRound round'] -> ['FnRow rows']"),
    ("args", {"w": "L0.attn_site.norm", "hidden": 256}, "hidden 128 -> 256"),
    ("args", {"w": "L1.attn_site.norm", "hidden": 128}, "w L0.attn_site.norm -> L1.attn_site.norm"),
    ("args", {"w": "L0.attn_site.norm"}, "hidden 128 -> none"),
    ("args", {"w": "L0.attn_site.norm", "hidden": 128, "eps": 0.5}, "eps none -> 0.5")])
def test_one_changed_field_is_one_line(field: str, value: Any, said: str) -> None:
    a = chain(9)
    b = copy.deepcopy(a)
    b["nodes"][4][field] = value
    assert view.diff_listings(a, b) == [f"~ node 4 k4 (L0 site): {said}"]
    assert len(view.diff_listings(b, a)) == 1


@pytest.mark.parametrize(("field", "value"), [("name", "other"), ("layer", "L7"), ("part", "gdn")])
def test_another_kernel_or_place_is_another_node(field: str, value: str) -> None:
    a = chain(5)
    b = copy.deepcopy(a)
    b["nodes"][2][field] = value
    lines = view.diff_listings(a, b)
    assert len(lines) == 2 and lines[0].startswith("- node 2 k2 (L0 site), after 1, before 3")
    assert lines[1].startswith("+ node 2 ") and lines[1].endswith(", after 1, before 3")


def test_a_node_put_between_leaves_the_others_paired() -> None:
    a, b = chain(6), chain(7)
    for i, node in enumerate(b["nodes"]):
        node["name"] = "new" if i == 3 else f"k{i - (i > 3)}"
    assert view.diff_listings(a, b) == ["+ node 3 new (L0 site), after 2, before 4", "- edge 2 -> 3"]
    assert view.diff_listings(b, a) == ["- node 3 new (L0 site), after 2, before 4",
                                        "+ edge 2 -> 4 (as numbered in the first)"]


def test_edges_alone_may_differ() -> None:
    b = copy.deepcopy(DIAMOND)
    b["edges"][1] = [1, 2]
    assert view.diff_listings(DIAMOND, b) == ["- edge 0 -> 2", "+ edge 1 -> 2 (as numbered in the first)"]


def test_diff_says_so_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(chain(3)))
    b.write_text(json.dumps(chain(4)))
    assert main(["trace", "--diff", str(a), str(a)]) == report.GOOD
    assert capsys.readouterr().out.endswith("\nequal\n")
    assert main(["trace", "--diff", str(a), str(b)]) == report.FAILED
    assert "+ node 3 k3 (L0 site), after 2, before none" in capsys.readouterr().out
    assert main(["trace", "--diff", str(a), str(b), "--json"]) == report.FAILED
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 1


BROKEN: list[tuple[str, Any]] = [
    ("no JSON", "{"), ("deep", "[" * 100_000), ("no object", "[]"), ("no format", "{}"),
    ("other format", {**chain(2), "format": "x"}), ("no name", {**chain(2), "name": 1}),
    ("no edges", {**chain(2), "edges": None}), ("node twice", listing([kernel(0), kernel(0)], [])),
    ("node without id", listing([{"kind": "memcpy"}], [])),
    ("edge to nowhere", listing([kernel(0)], [(0, 1)])),
    ("edge of three", {**chain(2), "edges": [[0, 1, 1]]}),
    ("true is no id", {**chain(2), "edges": [[0, True]]}),
    ("kernel without grid", listing([{"id": 0, "kind": "kernel", "name": "k"}], []))]


@pytest.mark.parametrize(("what", "content"), BROKEN, ids=[what for what, _ in BROKEN])
def test_files_that_are_no_listing_are_refused(what: str, content: Any, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    path, good = tmp_path / "broken.json", tmp_path / "good.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    good.write_text(json.dumps(chain(2)))
    with pytest.raises(UsageError):
        view.read_listing(path)
    assert main(["trace", "--diff", str(good), str(path)]) == report.USAGE
    out, err = capsys.readouterr()
    assert out == "" and "broken.json" in err and err.count("\n") == 1
    assert main(["trace", "--diff", str(good), str(tmp_path / "none.json")]) == report.USAGE


@pytest.mark.parametrize(("argv", "message"), [
    (["trace", "p", "--out", "o"], "needs a prompt"),
    (["trace", "p", "--prompt-ids", "1", "--ids-file", "f", "--out", "o"], "needs a prompt"),
    (["trace", "p", "--prompt-ids", "1,x", "--out", "o"], "something else than integers"),
    (["trace", "p", "--prompt-ids", "1", "--max-new", "0", "--out", "o"], "--max-new is 1 or more"),
    (["trace", "p", "--prompt-ids", "1"], "--out FOLDER"),
    (["trace", "p", "--prompt-ids", "1", "--out", "/nonexistent/x"], "--out is a folder"),
    (["trace", "p", "--prompt-ids", "1", "--out", "/dev/null"], "--out is a folder"),
    (["trace", "p", "--prompt-ids", "1", "--expert-lines", "-1", "--out", "o"], "expert_lines is outside"),
    (["trace", "--prompt-ids", "1", "--out", "o"], "no pack was named"),
    (["trace", "--diff", "a", "b", "--out", "o"], "two listings and nothing else")])
def test_bad_values_exit_with_2_and_one_line(argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FLASHNEXT_DRV_PACK", raising=False)
    monkeypatch.delenv("FLASHNEXT_DRV_DEVICE", raising=False)
    assert main(argv) == report.USAGE
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
    assert not Path("o").exists()


# Labels.


def spans(**places: tuple[int, int]) -> dict[str, Span]:
    return {name.replace("__", "."): Span(start, size, name, None)  # type: ignore[arg-type]
            for name, (start, size) in places.items()}


def values(name: str, **given: int) -> list[bytes]:
    """The bytes of a launch's arguments; 0 where none is given."""
    return [given.get(arg.name, 0).to_bytes(size, "little")
            for arg, (_, size) in zip(catalog_spec(name).args, catalog_spec(name).offsets(), strict=True)]


def catalog_spec(name: str) -> Any:
    return next(spec for spec in catalog.specs() if spec.name == name)


def test_pointers_are_named_by_the_smallest_span_that_holds_them() -> None:
    labels = view.Labels(spans(work=(1000, 500), out=(1100, 200), routes=(1300, 16), d_rows=(1300, 8)))
    args = labels.launch("embed_rows", values("embed_rows", round=1100, rows=1300, table=1180, streams=1499,
                                              hidden=7)).args
    assert args == {"round": "out", "rows": "d_rows", "table": "out+80", "format": 0, "streams": "work+499",
                    "hidden": 7}
    args = labels.launch("embed_rows", values("embed_rows", rows=1500, table=999)).args
    assert args["round"] == "null" and args["rows"] == args["table"] == "elsewhere"


def test_tables_that_a_launch_reads_come_from_its_declaration() -> None:
    labels = view.Labels(spans(rows=(100, 8), slots=(200, 8), logits=(300, 8), round=(400, 8)))
    label = labels.launch("draw_rows", values("draw_rows", round=400, rows=100, slots=200, logits=300))
    assert label.reads == ("FnRound round", "FnRow rows", "FnSlot slots")


def test_a_launch_that_names_no_layer_belongs_where_the_one_before_did() -> None:
    labels = view.Labels(spans(L3__qsa__q_norm=(100, 8), L3__lines=(200, 8), mixer__norm=(300, 8),
                               L4__attn_site__norm=(400, 8), embedded=(500, 8)))

    def place(name: str, **given: int) -> tuple[str, str]:
        label = labels.launch(name, values(name, **given))
        return label.layer, label.part

    assert place("embed_rows", table=500) == ("", "")
    assert place("qsa_prep", q_norm=100) == ("L3", "qsa")
    assert place("index_select") == ("L3", "qsa")
    assert place("moe_act", lines=200) == ("L3", "moe")
    assert place("stream_add") == ("L3", "moe")
    assert place("site_norm", w=400) == ("L4", "site")
    assert place("gdn_step") == ("L4", "gdn")
    assert place("site_norm", w=300) == ("", "mixer")
    assert place("draw_rows") == ("", "draw")
    unknown = labels.launch("no_such_kernel", [b"1234"])
    assert (unknown.args, unknown.reads, unknown.part) == ({}, (), "draw")


def test_numbers_are_read_as_declared() -> None:
    raw = values("rope_rows")
    at = [arg.name for arg in catalog_spec("rope_rows").args].index("theta")
    raw[at] = (0x4B189680).to_bytes(4, "little")
    assert view.Labels({}).launch("rope_rows", raw).args["theta"] == 1e7
