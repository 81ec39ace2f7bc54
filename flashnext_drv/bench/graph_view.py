"""A captured graph as a listing, as Graphviz text, as a drawing, and what two listings differ in.

Called by cli/trace.py; bench/trace.py uses Labels for launches that were not captured.  What must stay true:
a listing holds no address, so that the same graph of another process has the same listing; text and drawing
are functions of the listing alone and need no program.

Listing (JSON): {"format": FORMAT, "name", "identity": {field: value}, "nodes": [...], "edges": [[a, b]]};
node: {"id", "kind"}, of kernels also name, grid, block, layer, part, args (pointers as "span" or
"span+offset"), reads ("FnRow rows": device tables that its declaration lets it read).
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

from ..drv.graph import Graph
from ..drv.memory import Span
from ..errors import UsageError
from ..kernels import catalog
from ..kernels.spec import F32, I32, PTR, KernelSpec

__all__ = ["FORMAT", "Label", "Labels", "Listing", "declared", "diff_listings", "dot_of",
           "graph_listing", "read_listing", "svg_of"]

FORMAT: Final = "flashnext-drv graph 1"
Listing = dict[str, Any]

_STEM: Final = re.compile(r"(L\d+|mixer|head|embed)(?:\.([a-z_]+)|$)")
_PARTS: Final = {"router": "moe", "lines": "moe", "homes": "moe", "uses": "moe", "cache": "moe",
                 "ngram": "ple", "attn_site": "site", "mlp_site": "site", "gdn_in": "gdn", "gdn_out": "gdn",
                 "qsa_in": "qsa", "qsa_out": "qsa"}
_KERNELS: Final = {"draw_rows": "draw", "rope_rows": "embed"}
_FAMILIES: Final = {"attn": "qsa", "gdn": "gdn", "moe": "moe", "moe_gemv": "moe", "moe_deep": "moe"}
_COLOURS: Final = {"embed": "#e8e8e8", "site": "#dbe9f6", "gdn": "#dff0d8", "qsa": "#fbe5d0",
                   "moe": "#eadcf4", "ple": "#fdf3c7",
                   "mixer": "#d5efef", "head": "#f7d9d9", "draw": "#f3d3e7"}

_BOX: Final = (236, 56)     # of a node
_CELL: Final = (260, 78)    # with the space around it


@dataclass(frozen=True)
class Label:
    """What one launch is, for people.  layer: "L3" or "".  part: of the model, such as "gdn"."""

    args: Mapping[str, str | int | float]
    reads: tuple[str, ...]
    layer: str
    part: str


class Labels:
    """Names what launches point into.  spans: by the names of model/steps.py.

    Launches are labelled in the order of their stream: one whose arguments name no layer belongs where the
    one before it did.
    """

    def __init__(self, spans: Mapping[str, Span]) -> None:
        self._spans = sorted((s.size_bytes, s.address, name) for name, s in spans.items())
        self._starts: dict[int, list[str]] = {}
        for _, address, name in self._spans:
            self._starts.setdefault(address, []).append(name)
        self._inside: dict[int, str] = {}
        self._place = ("", "")

    def launch(self, kernel: str, values: Sequence[bytes]) -> Label:
        """values: the bytes of each argument as declared; none of a kernel that nothing declares."""
        spec = declared().get(kernel)
        if spec is None or len(values) != len(spec.args):
            self._place = (self._place[0], _KERNELS.get(kernel, self._place[1]))
            return Label({}, (), *self._place)
        args: dict[str, str | int | float] = {}
        reads = []
        for arg, raw in zip(spec.args, values, strict=True):
            args[arg.name] = self._pointer(arg.name, raw) if arg.kind == PTR else _number(arg.kind, raw)
            if arg.kind == PTR and "r" in arg.rights and arg.doc.startswith("Fn"):
                table = re.match(r"Fn\w+", arg.doc)
                reads.append(f"{table[0] if table else ''} {args[arg.name]}")
        self._place = self._find_place(spec, args)
        return Label(args, tuple(reads), *self._place)

    def _find_place(self, spec: KernelSpec, args: Mapping[str, str | int | float]) -> tuple[str, str]:
        named = [found for value in args.values() if isinstance(value, str)
                 and (found := _STEM.match(value)) is not None]
        if named:
            stem, part = named[0][1], named[0][2] or ""
            return (stem, _PARTS.get(part, part)) if stem.startswith("L") else ("", stem)
        if spec.name in _KERNELS:
            return "", _KERNELS[spec.name]
        family = _FAMILIES.get(_families()[spec.name], "")
        return self._place[0], family or self._place[1]

    def _pointer(self, arg: str, raw: bytes) -> str:
        address = int.from_bytes(raw, "little")
        names = self._starts.get(address)
        if names:
            return next((name for name in (arg, f"d_{arg}") if name in names), names[0])
        if not address:
            return "null"
        if address not in self._inside:
            self._inside[address] = next((f"{name}+{address - start}" for size, start, name in self._spans
                                          if start < address < start + size), "elsewhere")
        return self._inside[address]


def graph_listing(graph: Graph, identity: object, spans: Mapping[str, Span]) -> Listing:
    """The listing of a captured graph.  identity: of engine/graphs.py, a dataclass or a tuple that begins
    with path and rows."""
    sizes = {name: [size for _, size in spec.offsets()] for name, spec in declared().items()}
    labels = Labels(spans)
    nodes: list[dict[str, Any]] = []
    for node, values in zip(graph.nodes(), graph.arguments(sizes), strict=True):
        row: dict[str, Any] = {"id": node.i_node, "kind": node.kind}
        if node.kind == "kernel":
            label = labels.launch(node.name, values)
            row |= {"name": node.name, "grid": list(node.grid), "block": list(node.block),
                    "layer": label.layer, "part": label.part, "args": dict(label.args),
                    "reads": list(label.reads)}
        nodes.append(row)
    return {"format": FORMAT, "name": graph.name, "identity": _identity(identity), "nodes": nodes,
            "edges": [list(edge) for edge in sorted(graph.edges())]}


def read_listing(path: str | Path) -> Listing:
    """A listing from its file.  Raises UsageError on a file that cannot be read or is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("a graph listing cannot be read", file=str(path),
                         because=getattr(error, "strerror", None) or str(error)) from error
    wrong = _wrong(found)
    if wrong:
        raise UsageError("a file is no graph listing", file=str(path), because=wrong,
                         do="give graph-....json of flashnext-drv trace")
    return dict(found)


def diff_listings(a: Listing, b: Listing) -> list[str]:
    """What differs, a line each: "-" only in a, "+" only in b, "~" in both; empty when nothing does.

    Nodes are paired in order by kind, name, layer and part; edges are compared between pairs, so those of a
    node that stands in one listing alone are told with it.
    """
    left, right = a["nodes"], b["nodes"]
    matcher = SequenceMatcher(None, [_key(n) for n in left], [_key(n) for n in right], autojunk=False)
    pairs = {left[i + k]["id"]: right[j + k] for i, j, n in matcher.get_matching_blocks() for k in range(n)}
    paired = {node["id"] for node in pairs.values()}
    lines = []
    for node in left:
        if node["id"] not in pairs:
            lines.append(f"- {_title(node)}{_beside(a, node['id'])}")
            continue
        changes = _changes(node, pairs[node["id"]])
        if changes:
            lines.append(f"~ {_title(node)}: {'; '.join(changes)}")
    lines += [f"+ {_title(node)}{_beside(b, node['id'])}" for node in right if node["id"] not in paired]
    back = {node["id"]: i for i, node in pairs.items()}
    ours = {(x, y) for x, y in a["edges"] if x in pairs and y in pairs}
    theirs = {(back[x], back[y]) for x, y in b["edges"] if x in back and y in back}
    lines += [f"- edge {x} -> {y}" for x, y in sorted(ours - theirs)]
    return lines + [f"+ edge {x} -> {y} (as numbered in the first)" for x, y in sorted(theirs - ours)]


def dot_of(listing: Listing) -> str:
    """Graphviz text, a cluster for each layer."""
    lines = [f"digraph {json.dumps(listing['name'])} {{", '  node [shape=box, fontname="sans-serif"];']
    layers: dict[str, list[str]] = {}
    for node in listing["nodes"]:
        text = json.dumps("\n".join(_text(node)))
        colour = _COLOURS.get(node.get("part", ""), "#ffffff")
        line = f'n{node["id"]} [label={text}, style=filled, fillcolor="{colour}"];'
        layers.setdefault(node.get("layer", ""), []).append(line)
    lines += [f"  {line}" for line in layers.pop("", [])]
    for layer, inside in layers.items():
        lines += [f"  subgraph cluster_{layer} {{", f"    label={json.dumps(layer)};",
                  *(f"    {line}" for line in inside), "  }"]
    lines += [f"  n{a} -> n{b};" for a, b in listing["edges"]]
    return "\n".join([*lines, "}"]) + "\n"


def svg_of(listing: Listing) -> str:
    """A drawing: one row a level (longest way from a node without predecessor), folded into columns."""
    levels = _levels(listing)
    most = max(8, round((len(levels) * 1.6 * _CELL[0] / _CELL[1]) ** 0.5))
    places: dict[int, tuple[float, float]] = {}
    x = 12.0
    for first in range(0, len(levels), most):
        column = levels[first:first + most]
        for i_level, level in enumerate(column):
            for i, node in enumerate(level):
                places[node] = (x + i * _CELL[0], 40.0 + i_level * _CELL[1])
        x += _CELL[0] * max(len(level) for level in column)
    height = 40 + _CELL[1] * min(most, len(levels))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:.0f}" height="{height}" '
           f'viewBox="0 0 {x:.0f} {height}" font-family="sans-serif" font-size="10">',
           '<defs><marker id="arrow" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
           '<path d="M0 0L6 3L0 6z" fill="#555555"/></marker></defs>',
           f'<rect width="{x:.0f}" height="{height}" fill="white"/>',
           f'<text x="12" y="20" font-size="14">{escape(listing["name"])}: {len(listing["nodes"])} nodes, '
           f'{len(listing["edges"])} edges</text>']
    out += [_edge(places[a], places[b]) for a, b in listing["edges"]]
    out += [_box(node, *places[node["id"]]) for node in listing["nodes"]]
    return "\n".join([*out, "</svg>"]) + "\n"


@cache
def declared() -> dict[str, KernelSpec]:
    """Every declaration by the kernel's name."""
    return {spec.name: spec for spec in catalog.specs()}


@cache
def _families() -> dict[str, str]:
    return {spec.name: family for family in catalog.families() for spec in catalog.specs(family)}


def _number(kind: str, raw: bytes) -> int | float:
    if kind == F32:
        return float(f"{struct.unpack('<f', raw)[0]:.9g}")
    return int.from_bytes(raw, "little", signed=kind == I32)


def _identity(identity: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(identity) and not isinstance(identity, type):
        found = dataclasses.asdict(identity)
        found.pop("fingerprint", None)  # of addresses: another process's is another
    else:
        found = dict(zip(("path", "rows"), identity, strict=False)) if isinstance(identity, tuple) else {}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def _wrong(found: object) -> str:
    """Why a JSON value is no listing; "" when it is one."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return f"its format is not {FORMAT!r}"
    nodes, edges = found.get("nodes"), found.get("edges")
    if not isinstance(nodes, list) or not isinstance(edges, list) or not isinstance(found.get("name"), str):
        return "it lacks name, nodes or edges"
    ids = set()
    for node in nodes:
        if not isinstance(node, dict) or type(node.get("id")) is not int \
                or not isinstance(node.get("kind"), str) or node["id"] in ids:
            return "a node lacks id or kind, or its id stands twice"
        whole = all(isinstance(node.get(field), kind) for field, kind in (
            ("name", str), ("grid", list), ("block", list), ("layer", str), ("part", str), ("args", dict),
            ("reads", list)))
        if node["kind"] == "kernel" and not whole:
            return f"kernel node {node['id']} lacks a field"
        ids.add(node["id"])
    for edge in edges:
        if not isinstance(edge, list) or len(edge) != 2 or any(type(e) is not int or e not in ids
                                                               for e in edge):
            return f"edge {edge} joins no two nodes"
    return ""


def _key(node: Mapping[str, Any]) -> tuple[str, ...]:
    return (node["kind"], *(node.get(field, "") for field in ("name", "layer", "part")))


def _title(node: Mapping[str, Any]) -> str:
    where = f"{node.get('layer', '')} {node.get('part', '')}".strip()
    return f"node {node['id']} {node.get('name') or node['kind']}{f' ({where})' if where else ''}"


def _beside(listing: Listing, i_node: int) -> str:
    before = [str(a) for a, b in listing["edges"] if b == i_node]
    after = [str(b) for a, b in listing["edges"] if a == i_node]
    return f", after {', '.join(before) or 'none'}, before {', '.join(after) or 'none'}"


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    out = [f"{field} {a.get(field)} -> {b.get(field)}" for field in ("grid", "block", "reads")
           if a.get(field) != b.get(field)]
    mine, theirs = a.get("args", {}), b.get("args", {})
    return out + [f"{name} {mine.get(name, 'none')} -> {theirs.get(name, 'none')}"
                  for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]


def _text(node: Mapping[str, Any]) -> list[str]:
    """Three lines about a node."""
    if node["kind"] != "kernel":
        return [f"{node['id']} {node['kind']}"]
    grid = " x ".join(str(n) for n in node["grid"])
    tables = ", ".join(str(read).partition(" ")[0] for read in node["reads"])
    return [f"{node['id']} {node['name']}",
            f"{node['layer']} {node['part']}  grid {grid}, block {node['block'][0]}".strip(),
            f"reads {tables}" if tables else "reads no table"]


def _levels(listing: Listing) -> list[list[int]]:
    """Node ids by length of the longest way to them.  Raises UsageError on a cycle."""
    after: dict[int, list[int]] = {node["id"]: [] for node in listing["nodes"]}
    missing = dict.fromkeys(after, 0)
    for a, b in listing["edges"]:
        after[a].append(b)
        missing[b] += 1
    level = [node for node, n in missing.items() if not n]
    levels = []
    while level:
        levels.append(level)
        following = []
        for node in level:
            for other in after[node]:
                missing[other] -= 1
                if not missing[other]:
                    following.append(other)
        level = following
    if sum(map(len, levels)) != len(after):
        raise UsageError("the graph of a listing has a cycle", name=listing["name"])
    return levels


def _box(node: Mapping[str, Any], x: float, y: float) -> str:
    colour = _COLOURS.get(node.get("part", ""), "#ffffff")
    told = "\n".join([*(f"{name} = {value}" for name, value in node.get("args", {}).items()),
                      *(f"reads {read}" for read in node.get("reads", ()))])
    text = "".join(f'<text x="{x + 6:.0f}" y="{y + 15 + 15 * i:.0f}">{escape(line)}</text>'
                   for i, line in enumerate(_text(node)))
    return (f'<g><title>{escape(told)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_BOX[0]}" '
            f'height="{_BOX[1]}" rx="4" fill="{colour}" stroke="#777777"/>{text}</g>')


def _edge(a: tuple[float, float], b: tuple[float, float]) -> str:
    x1, y1, x2, y2 = a[0] + _BOX[0] / 2, a[1] + _BOX[1], b[0] + _BOX[0] / 2, b[1]
    if y2 > y1:
        way = f"M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}"
    else:       # from the foot of one column to the head of another
        side = a[0] + _BOX[0] + (_CELL[0] - _BOX[0]) / 2
        way = f"M{x1:.0f} {y1:.0f}C{side:.0f} {y1 + 40:.0f} {side:.0f} {y2 - 40:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{way}" fill="none" stroke="#555555" marker-end="url(#arrow)"/>'
