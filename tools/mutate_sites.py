"""Finds the places where one small edit must be noticed by a test: the mutants of tools/mutate.py.

Reads kernel sources (cuda_src, its simulator and probes left out) and the package (the test-side parts check,
ref, sim, bench, cli and server left out).  What must stay true: the list depends on the sources alone; an
id names the same edit as long as its own line does not change, so a list of excused ids stays true.

kinds    barrier     a block or warp barrier dropped
         guard       an early return, a refusal or a row bound dropped
         comparison  < <= > >= == != to its neighbour
         bound       + 1, - 1 or a loop's first index off by one
         event       an event record, wait or synchronise dropped
         publish     a table write to the device dropped
         reference   a hold, a borrower or the return of a slot or page dropped
         close       a close step dropped
         ledger      a ledger entry not made, not measured or not removed
         constant    a number of the table and offset code one larger
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KINDS", "Mutant", "find_all", "find_cpp", "find_python", "sources"]

KINDS = ("barrier", "guard", "comparison", "bound", "event", "publish", "reference", "close", "ledger",
         "constant")
PACKAGE_PARTS = ("drv", "engine", "kernels", "model", "state")
PACKAGE_FILES = ("ledger.py", "lifetime.py")
NOT_KERNELS = ("sim", "probe", "retired", "delay.cuh")    # delay.cuh: for planted controls alone
# Declarations (checked against sources and images when they load) and what only the build reads.
NOT_MUTATED = frozenset({"flashnext_drv/kernels/" + name for name in (
    "attn.py", "exl3.py", "gdn.py", "glue.py", "moe.py", "moe_gemv.py", "move.py", "probe.py",
    "token.py", "limits.py")})
CONSTANT_FILES = ("cuda_src/tables.cuh", "cuda_src/token/ahead.cuh", "cuda_src/token/edits.cuh",
                  "cuda_src/attn/pages.cuh",
                  "flashnext_drv/kernels/tables.py",
                  "flashnext_drv/model/layout.py", "flashnext_drv/state/")
FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
EVENTS = frozenset({"record", "wait", "synchronize", "cuEventRecord", "cuStreamWaitEvent",
                    "cuEventSynchronize", "cuStreamSynchronize", "finish"})
PUBLISHES = frozenset({"publish", "touch_pages"})
CLOSES = frozenset({"callback", "close", "release", "give_back", "close_sequence", "discard", "_let_go",
                    "_release", "clear"})
REFERENCES = frozenset({"_hold", "note"})
LEDGER = frozenset({"remove", "measured", "lose"})


@dataclass(frozen=True)
class Mutant:
    """One edit: bytes start .. end of the file's text become `new`.  path: from the tree's root."""

    id: str
    kind: str
    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        if text[self.start : self.end] != self.old:
            raise ValueError(f"{self.path} changed since {self.id} was found")
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        old, new = (" ".join(part.split())[:60] for part in (self.old, self.new))
        return f"{self.id} {self.path}:{self.line} `{old}` -> `{new}`"


@dataclass(frozen=True)
class _Edit:
    kind: str
    start: int
    end: int
    new: str


def sources(root: Path) -> list[Path]:
    """The files that are mutated, sorted."""
    kernels = [p for p in (root / "cuda_src").rglob("*.cu*")
               if p.relative_to(root / "cuda_src").parts[0] not in NOT_KERNELS]
    package = root / "flashnext_drv"
    host = [p for part in PACKAGE_PARTS for p in (package / part).glob("*.py")]
    host += [package / name for name in PACKAGE_FILES]
    found = [p for p in kernels + host if p.relative_to(root).as_posix() not in NOT_MUTATED
             and not p.name.startswith("plant")]
    return sorted(p for p in found if p.is_file())


def find_all(root: Path) -> list[Mutant]:
    """Every mutant of the tree, by file and place."""
    out: list[Mutant] = []
    for path in sources(root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        out += (find_python if path.suffix == ".py" else find_cpp)(name, text)
    return out


def find_cpp(path: str, text: str) -> list[Mutant]:
    """The mutants of a kernel source or header."""
    return _named(path, text, _cpp_edits(path, _code_only(text)))


def find_python(path: str, text: str) -> list[Mutant]:
    """The mutants of a module."""
    return _named(path, text, _Python(path, text).edits())


def _named(path: str, text: str, edits: Iterator[_Edit] | list[_Edit]) -> list[Mutant]:
    out: list[Mutant] = []
    seen: Counter[str] = Counter()
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end, e.kind)):
        first = text.rfind("\n", 0, edit.start) + 1
        last = text.find("\n", edit.end)
        around = text[first : last if last >= 0 else len(text)]
        column = edit.start - first - (len(around) - len(around.lstrip()))
        key = "\0".join((path, edit.kind, around.strip(), str(column), edit.new))
        seen[key] += 1
        digest = hashlib.sha256(f"{key}\0{seen[key]}".encode()).hexdigest()[:8]
        out.append(Mutant(f"{edit.kind}-{digest}", edit.kind, path, text.count("\n", 0, edit.start) + 1,
                          edit.start, edit.end, text[edit.start : edit.end], edit.new))
    return out


# ---- kernels ----
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_BARRIER = re.compile(r"__sync(?:threads|warp)\(\);")
_JUMP = re.compile(r"\b(return|continue|break)\b[^;{}\n]*;")
_COMPARE = re.compile(r"(?<= )(?:<=|>=|==|!=|<|>)(?= )")
_ONE = re.compile(r"(?<= )[+-] 1(?=u?\b(?!\.))")
_FIRST = re.compile(r"(?<=\bfor \()(?:u32|i32|u64|int) \w+ = 0(?=u?;)")
_CONSTANT = re.compile(r"(?:const u32 \w+ = |#define \w+ )(\d+)(?=u?\s*(?:;|$))", re.MULTILINE)


def _code_only(text: str) -> str:
    """The text with comments, strings and what no simulator compiles blanked, at the same offsets."""
    code = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    taken: list[bool] = []          # of the conditions around: whether the simulator takes this branch
    undecided: list[bool] = []      # ... or a name decides that is not the machine's
    lines = []
    for line in code.splitlines(keepends=True):
        words = line.replace("#", "# ", 1).split()
        if words[:2] in (["#", "ifdef"], ["#", "ifndef"]):
            known = {"FN_SIM": True, "FN_HOPPER": False}.get(words[2])
            taken.append(True if known is None else known == (words[1] == "ifdef"))
            undecided.append(known is None)
        elif words[:2] == ["#", "if"]:
            taken.append(True)
            undecided.append(True)
        elif words[:2] == ["#", "else"]:
            taken[-1] = undecided[-1] or not taken[-1]
        elif words[:2] == ["#", "endif"]:
            taken.pop()
            undecided.pop()
        lines.append(line if all(taken) else re.sub(r"[^\n]", " ", line))
    return "".join(lines)


def _cpp_edits(path: str, code: str) -> Iterator[_Edit]:
    for m in _BARRIER.finditer(code):
        yield _Edit("barrier", m.start(), m.end(), ";")
    for start, end, inner in _conditions(code):
        jump = _JUMP.match(code, end + 1)
        if jump is not None:
            yield _Edit("guard", start, jump.end(), ";")
        elif re.search(r" <=? ", inner) and "&&" not in inner and "||" not in inner:
            opening = code.index("(", start)
            yield _Edit("guard", opening, end, "(true)")
    for m in _COMPARE.finditer(code):
        if not _compile_time(code, m.start()):
            new = "+ 1 <" if m.group() == "<" and _unrolled(code, m.start()) else FLIPS[m.group()]
            yield _Edit("comparison", m.start(), m.end(), new)
    for m in _ONE.finditer(code):
        if not _compile_time(code, m.start()):
            yield _Edit("bound", m.start(), m.end(), f"{m.group()[0]} 0")
    for m in _FIRST.finditer(code):
        yield _Edit("bound", m.start(), m.end(), m.group()[:-1] + "1")
    if path.startswith(CONSTANT_FILES):
        for m in _CONSTANT.finditer(code):
            yield _Edit("constant", m.start(1), m.end(1), str(int(m.group(1)) + 1))


def _conditions(code: str) -> Iterator[tuple[int, int, str]]:
    """(start of `if`, end of its closing bracket, what is between) of every plain if."""
    for m in re.finditer(r"\bif \(", code):
        depth, at = 0, m.end() - 1
        for at in range(m.end() - 1, len(code)):
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            if not depth:
                break
        yield m.start(), at + 1, code[m.end() : at]


def _unrolled(code: str, at: int) -> bool:
    """In the head of an unrolled loop, which walks local arrays: a turn more than they have is no program of
    the language and compilers take it for the same one, so one turn is left out instead."""
    head = code.rfind("\n", 0, at) + 1
    above = code[code.rfind("\n", 0, head - 1) + 1 : head].strip() if head else ""
    return code[head:at].lstrip().startswith("for (") and above == "#pragma unroll"


def _compile_time(code: str, at: int) -> bool:
    """Preprocessor lines and static assertions decide nothing at run time."""
    line = code[code.rfind("\n", 0, at) + 1 : at].lstrip()
    return line.startswith("#") or "static_assert" in line or "template <" in line


# ---- host code ----
class _Python(ast.NodeVisitor):
    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()
        self.found: list[_Edit] = []
        self.constants = path.startswith(CONSTANT_FILES)

    def edits(self) -> list[_Edit]:
        self.visit(ast.parse(self.text))
        return self.found

    def add(self, kind: str, node: ast.AST, new: str) -> None:
        self.found.append(_Edit(kind, *self.range(node), new))

    def range(self, node: ast.AST) -> tuple[int, int]:
        return (self.place(node.lineno, node.col_offset),  # type: ignore[attr-defined]
                self.place(node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]

    def place(self, line: int, column: int) -> int:
        """columns of ast are bytes; ours are characters"""
        row = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(row)

    def source(self, node: ast.AST) -> str:
        start, end = self.range(node)
        return self.text[start:end]

    # texts, annotations, assertions and error messages decide nothing
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__", "table", "message"):
            for part in node.body:
                self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        test = self.source(node.test)
        jumps = isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue | ast.Break)
        if jumps and not node.orelse and test != "TYPE_CHECKING":
            self.add("guard", node.test, "False")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for right in node.comparators:
            start, end = self.range(left)[1], self.range(right)[0]
            m = re.search(r"<=|>=|==|!=|<|>", self.text[start:end])
            if m is not None and m.group() in FLIPS:
                self.found.append(_Edit("comparison", start + m.start(), start + m.end(), FLIPS[m.group()]))
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        right = node.right
        if isinstance(node.op, ast.Add | ast.Sub) and isinstance(right, ast.Constant) and right.value == 1:
            self.add("bound", right, "0")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self.constants and type(node.value) is int and node.value > 1:
            self.add("constant", node, str(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            kind = self.statement_kind(node.value)
            if kind:
                self.add(kind, node, "pass")
        self.generic_visit(node)

    def statement_kind(self, call: ast.Call) -> str:
        """What goes missing when this statement does; "" when that is none of ours."""
        func = call.func
        if isinstance(func, ast.Name):
            copies = func.id in ("copy_async", "copy_to_device")
            return "publish" if copies and self.path.endswith("state/tables.py") else ""
        if not isinstance(func, ast.Attribute):
            return ""
        name, owner = func.attr, self.source(func.value)
        if name == "require_open":
            return "guard"
        if name in REFERENCES or (name in ("append", "extend") and owner.endswith(("_borrowers", "_free"))):
            return "reference"
        if name in LEDGER and re.search(r"entry|ledger", owner):
            return "ledger"
        for kind, names in (("event", EVENTS), ("publish", PUBLISHES), ("close", CLOSES)):
            if name in names:
                return kind
        return ""

    def visit_Call(self, node: ast.Call) -> None:
        func = node.func
        if isinstance(func, ast.Attribute):
            owner = self.source(func.value)
            if func.attr == "enter_context":
                self.add("close", node, self.source(node.args[0]))
            if func.attr == "add" and owner.endswith("ledger"):
                self.add("ledger", func.value, f"type({owner})()")
        for keyword in node.keywords:
            if keyword.arg == "holds" and self.source(keyword.value) != "()":
                self.add("reference", keyword.value, "()")
        self.generic_visit(node)
