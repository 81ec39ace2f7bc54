"""tools/mutate.py: what it finds, what its edits do, and that its list of excused mutants is a true one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutate  # noqa: E402
import mutate_sites  # noqa: E402
from mutate_sites import KINDS, Mutant  # noqa: E402

KERNEL = '''// i < n in a comment
FN_KERNEL((const u32* x, u32 n)) {
    if (blockIdx.x >= n) return;
    for (u32 i = 0; i < n; i++) {
        if (i + 1u < n) x[i] = 1;
#pragma unroll
        for (u32 j = 1; j < 4; j++) x[j] = j;
        if (x[i] && i < n) continue;
    }
    static_assert(sizeof(u32) == 4, "no < here");
    __syncthreads();
    __syncwarp();
    const u32 STEP = 4;
    u32 y = reinterpret_cast<const u32*>(x)[n - 1u];
}
'''
MODULE = '''
def work(self, ctx, ledger, stream, undo, n):
    """n < 3 in a text"""
    if n <= 0:
        raise ValueError(f"{n < 1}")
    assert n != 7
    super().__init__("x", holds=(ctx,))
    self._hold(ctx)
    entry = ctx.ledger.add("x", "device", 2)
    stream.record(self.event)
    self.event.synchronize()
    self.tables.publish(stream)
    copy_async(stream, 1, 2, 3)
    made = undo.enter_context(Thing(n - 1))
    undo.callback(made.close)
    entry.remove()
    self._free.append(n)
    self.require_open()
    return 4 * n + 1
'''


def found(mutants: list[Mutant]) -> list[tuple[str, int, str, str]]:
    return sorted((m.kind, m.line, m.old, m.new) for m in mutants)


def test_sites_of_a_kernel() -> None:
    assert found(mutate_sites.find_cpp("cuda_src/attn/pages.cuh", KERNEL)) == [
        ("barrier", 11, "__syncthreads();", ";"), ("barrier", 12, "__syncwarp();", ";"),
        ("bound", 4, "u32 i = 0", "u32 i = 1"), ("bound", 5, "+ 1", "+ 0"), ("bound", 14, "- 1", "- 0"),
        ("comparison", 3, ">=", ">"), ("comparison", 4, "<", "<="), ("comparison", 5, "<", "<="),
        ("comparison", 7, "<", "+ 1 <"), ("comparison", 8, "<", "<="),
        ("constant", 13, "4", "5"),
        ("guard", 3, "if (blockIdx.x >= n) return;", ";"), ("guard", 5, "(i + 1u < n)", "(true)"),
        ("guard", 8, "if (x[i] && i < n) continue;", ";")]


def test_nothing_is_found_where_the_simulator_does_not_look() -> None:
    """A mutant in a form for GPUs alone would be missed by every test here."""
    text = ("#ifdef FN_HOPPER\nbool a = x < 1;\n#else\nbool b = x < 2;\n#endif\n"
            "#ifdef FN_SIM\nbool c = x < 3;\n#ifndef FN_HOPPER\nbool d = x < 4;\n#endif\n#else\n"
            "#if OTHER\nbool e = x < 5;\n#endif\n#endif\n"
            "#ifdef OTHER\nbool f = x < 6;\n#else\nbool g = x < 7;\n#endif\n")
    lines = text.splitlines()
    seen = {lines[m.line - 1][5] for m in mutate_sites.find_cpp("cuda_src/a.cu", text)}
    assert seen == set("bcdfg")


def test_sites_of_a_module() -> None:
    assert found(mutate_sites.find_python("flashnext_drv/state/tables.py", MODULE)) == [
        ("bound", 14, "1", "0"), ("bound", 19, "1", "0"),
        ("close", 14, "undo.enter_context(Thing(n - 1))", "Thing(n - 1)"),
        ("close", 15, "undo.callback(made.close)", "pass"),
        ("comparison", 4, "<=", "<"),
        ("constant", 9, "2", "3"), ("constant", 13, "2", "3"), ("constant", 13, "3", "4"),
        ("constant", 19, "4", "5"),
        ("event", 10, "stream.record(self.event)", "pass"), ("event", 11, "self.event.synchronize()", "pass"),
        ("guard", 4, "n <= 0", "False"), ("guard", 18, "self.require_open()", "pass"),
        ("ledger", 9, "ctx.ledger", "type(ctx.ledger)()"), ("ledger", 16, "entry.remove()", "pass"),
        ("publish", 12, "self.tables.publish(stream)", "pass"),
        ("publish", 13, "copy_async(stream, 1, 2, 3)", "pass"),
        ("reference", 7, "(ctx,)", "()"), ("reference", 8, "self._hold(ctx)", "pass"),
        ("reference", 17, "self._free.append(n)", "pass")]


def test_every_mutant_of_the_host_code_compiles_and_changes_one_place() -> None:
    texts: dict[str, str] = {}
    for mutant in mutate_sites.find_all(ROOT)[::7]:
        text = texts.setdefault(mutant.path, (ROOT / mutant.path).read_text(encoding="utf-8"))
        changed = mutant.apply(text)
        assert changed != text and len(changed) - len(text) == len(mutant.new) - len(mutant.old), mutant
        if mutant.path.endswith(".py"):
            compile(changed, mutant.path, "exec")
    assert len(texts) > 40


def test_an_edit_of_another_text_is_refused() -> None:
    mutant = mutate_sites.find_cpp("cuda_src/a.cu", KERNEL)[0]
    with pytest.raises(ValueError, match="changed since"):
        mutant.apply("x" + KERNEL)


def test_ids_are_unique_and_do_not_move_with_lines_above() -> None:
    mutants = mutate_sites.find_all(ROOT)
    assert len({m.id for m in mutants}) == len(mutants) > 1000
    before = {m.id for m in mutate_sites.find_cpp("cuda_src/a.cu", KERNEL)}
    assert {m.id for m in mutate_sites.find_cpp("cuda_src/a.cu", "// more\n" + KERNEL)} == before


def test_a_sample_is_seeded_and_holds_every_kind() -> None:
    mutants = mutate_sites.find_all(ROOT)
    chosen, spare = mutate.sample(mutants, 120, 3)
    assert {m.kind for m in chosen} == set(KINDS) and len(chosen) == len({m.id for m in chosen}) == 120
    assert not {m.id for m in chosen} & {m.id for m in spare}
    assert mutate.sample(mutants, 120, 3)[0] == chosen != mutate.sample(mutants, 120, 4)[0]


def test_every_file_has_tests_that_exist() -> None:
    for mutant in {m.path: m for m in mutate_sites.find_all(ROOT)}.values():
        for stage in mutate.stages(mutant):
            files = [word.split("::")[0] for word in stage.arguments if word.startswith("tests/")]
            assert bool(files) != bool(stage.check), (mutant.path, stage)
            assert all((ROOT / name).exists() for name in files), (mutant.path, stage)


def test_excused_mutants_are_in_the_tree_and_say_why() -> None:
    there = {m.id for m in mutate_sites.find_all(ROOT)}
    for mutant_id, reason in mutate.equivalents().items():
        assert mutant_id in there, f"{mutant_id} is excused and no mutant of the tree"
        assert len(reason.split()) >= 5, f"{mutant_id}: {reason!r} is no reason"


def test_table_counts_by_kind_and_outcome() -> None:
    rows = [mutate.Result("a", "guard", "x:1", "caught", "t", 1.0),
            mutate.Result("b", "guard", "x:2", "missed", "", 1.0),
            mutate.Result("c", "event", "x:3", "hang", "t", 1.0),
            mutate.Result("d", "event", "x:4", "invalid", "", 1.0)]
    lines = {line.split()[0]: line.split()[1:] for line in mutate.table(rows).splitlines()}
    assert lines["kind"] == ["run", "caught", "hang", "missed", "crash", "red", "invalid"]
    assert lines["guard"] == ["2", "1", "0", "1", "0", "0", "0"]
    assert lines["event"] == ["1", "0", "1", "0", "0", "0", "1"]
    assert lines["all"] == ["3", "1", "1", "1", "0", "0", "1"]
