"""House rules that no other tool holds: lengths of files, what kernel sources may use, what runs without
cuda-python, and what a test run prints.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "cuda_src"
MOST_LINES = 500
REASON = "Over 500 lines: "       # in the docstring or the head comment, with the reason behind it

# The only files that may speak to the hardware: everything else calls their fn_ functions.
PTX_FILES = {"prelude.cuh", "warp.cuh", "mma.cuh", "async.cuh", "hopper.cuh"}
KEYWORDS = {"__syncthreads", "__syncwarp"}
LIBM = ("exp", "exp2", "exp10", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh",
        "sincos", "sqrt", "rsqrt", "pow", "fma", "fmod", "erf", "rint", "floor", "ceil", "round", "trunc",
        "fabs", "fmin", "fmax", "isnan", "isinf", "ldexp", "frexp")


def files(*suffixes: str) -> list[Path]:
    """Sources of the project with these suffixes, made and built folders left out."""
    out = []
    for top in ("flashnext_drv", "cuda_src", "tests", "tools"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in suffixes and not {"_cuda_src", "_cubin", "__pycache__"} & set(path.parts):
                out.append(path)
    return [*out, *(p for p in [ROOT / "build_kernels.py"] if p.suffix in suffixes)]


def kernel_files() -> list[Path]:
    """What the GPU compiler sees: not sim/."""
    found = [p for p in files(".cu", ".cuh")
             if SOURCES in p.parents and "sim" not in p.relative_to(SOURCES).parts]
    assert len(found) > 20
    return found


def code_of(text: str) -> str:
    """C++ text without comments; strings stay.  Line numbers are kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def found_in(pattern: str, path: Path) -> list[str]:
    """Places "file:line: text" where the code of `path` matches."""
    lines = code_of(path.read_text(encoding="utf-8")).splitlines()
    name = path.relative_to(ROOT)
    return [f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if re.search(pattern, line)]


def relative(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


# Files.


def test_long_files_say_why() -> None:
    silent = []
    for path in files(".py", ".cu", ".cuh", ".cpp", ".h"):
        text = path.read_text(encoding="utf-8")
        head = (ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py"
                else "\n".join(line for line in text.splitlines()[:40] if line.startswith("//")))
        if text.count("\n") > MOST_LINES and not re.search(re.escape(REASON) + r"\S", head):
            silent.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
    assert not silent, f"above {MOST_LINES} lines without {REASON!r} in the docstring: {silent}"


def test_every_module_has_a_docstring() -> None:
    bare = [str(p.relative_to(ROOT)) for p in files(".py")
            if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert not bare


def test_work_left_over_has_an_issue_number() -> None:
    word = "TO" + "DO"
    left = [place for path in files(".py", ".cu", ".cuh", ".cpp", ".h")
            for place in re.findall(rf"\b(?:{word}|FIX{'ME'}|X{'XX'})\b(?!\(#\d+\))[^\n]*",
                                    path.read_text(encoding="utf-8"))]
    assert not left


# Kernel sources.


def test_inline_ptx_stands_in_few_headers() -> None:
    wrong = [place for path in kernel_files() if relative(path) not in PTX_FILES
             for place in found_in(r"\basm\b|__asm", path)]
    assert not wrong


def test_intrinsics_stand_in_few_headers() -> None:
    wrong = []
    for path in kernel_files():
        if relative(path) not in PTX_FILES:
            code = code_of(path.read_text(encoding="utf-8"))
            used = set(re.findall(r"\b__[a-z]\w*", code)) - KEYWORDS
            wrong += [f"{relative(path)}: {name}" for name in sorted(used)]
    assert not wrong, f"use the fn_ functions of {', '.join(sorted(PTX_FILES))}"


def test_kernels_include_ours_alone() -> None:
    wrong = [place for path in kernel_files() for place in found_in(r"#\s*include\s*<", path)]
    assert not wrong
    known = {p.relative_to(SOURCES).as_posix() for p in SOURCES.rglob("*") if p.is_file()}
    for path in kernel_files():
        for name in re.findall(r'#\s*include\s*"([^"]+)"', code_of(path.read_text(encoding="utf-8"))):
            beside = os.path.normpath(os.path.join(os.path.dirname(relative(path)), name))
            assert name in known or beside in known, f"{relative(path)} includes {name}"


def test_no_library_maths_in_kernels() -> None:
    names = "|".join(f"{name}f?" for name in LIBM)
    wrong = [place for path in kernel_files()
             for place in found_in(rf"(?<![\w.>:])(?:std::|::)?(?:{names})\s*\(", path)]
    assert not wrong


def test_no_atomics_on_floats() -> None:
    for path in kernel_files():
        for place in found_in(r"\batomic[A-Z]\w*\s*\(|\batom\.|\bred\.", path):
            assert relative(path) == "prelude.cuh", f"{place}: use fn_atomic_*"
            assert re.search(r"FN_DEVICE u(32|64) fn_atomic_\w+_u\1\(u\1\* p, u\1 v\)", place), \
                f"{place}: an atomic on something else than u32 or u64"


def test_fences_go_by_name() -> None:
    """Order between threads comes from barriers; a fence may stand in fn_release and fn_acquire alone.

    hopper.cuh has fences of another kind: what a thread wrote to shared memory goes before the copies and
    products that run beside it, which no barrier says by itself.
    """
    for path in kernel_files():
        if relative(path).startswith("probe/"):      # planted faults reach where they must not
            continue
        for place in found_in(r"__threadfence|\bmembar\b|\bfence\.|\.acquire\b|\.release\b|"
                              r"\bvolatile\s+[uif]\d", path):
            by_name = relative(path) == "prelude.cuh" and re.search(r"\bfn_(release|acquire)\b", place)
            beside = relative(path) == "hopper.cuh" and re.search(
                r'"fence\.(mbarrier_init\.release\.cluster|proxy\.async\.shared::cta);"', place)
            assert by_name or beside or "wgmma.fence.sync" in place, place


def test_no_globals_printing_or_shared_memory_by_hand() -> None:
    for path in kernel_files():
        if relative(path) == "prelude.cuh":
            continue
        assert not found_in(r"\bprintf\b|\b__device__\b|\b__shared__\b|\bextern\b|\b__constant__\b", path)


def test_the_compiler_may_not_contract_or_approximate() -> None:
    text = (ROOT / "build_kernels.py").read_text(encoding="utf-8")
    options = re.search(r"^OPTIONS = \((.*?)\)$", text, re.DOTALL | re.MULTILINE)
    assert options is not None
    for wanted in ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"):
        assert wanted in options[1]
    assert "fast" not in options[1]
    assert "-ffp-contract=off" in (ROOT / "flashnext_drv/sim/build.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["x = a; // asm", "/* asm\n asm */ y"])
def test_comments_are_not_code(text: str) -> None:
    assert not re.search(r"\basm\b", code_of(text)) and code_of(text).count("\n") == text.count("\n")


# Without cuda-python.

REFUSE = (
    "import importlib, sys\n"
    "class Refuse:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] == 'cuda':\n"
    "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, Refuse())\n")


def without_cuda(code: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", REFUSE + code], cwd=ROOT, env=env, text=True,
                          capture_output=True, check=False, timeout=timeout_s)


def test_the_binding_is_refused_here() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("cuda.bindings.driver")


def test_every_module_imports_where_cuda_python_is_not_installed() -> None:
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
             for p in files(".py") if ROOT / "flashnext_drv" in p.parents and p.name != "__main__.py"]
    done = without_cuda(f"for name in {names!r}: importlib.import_module(name)\n"
                        "assert not any(m.split('.')[0] == 'cuda' for m in sys.modules)\n")
    assert done.returncode == 0, done.stderr[-2000:]


def test_pure_parts_pass_their_tests_where_cuda_python_is_not_installed() -> None:
    """Collected and run in a process that never had it; the others of this folder run with it refused."""
    pure = ("catalog", "config", "errors", "ledger", "lifetime", "manifest", "pack", "pack_bad", "ref_bits",
            "ref_orders", "records")
    paths = [f"tests/host/test_{name}.py" for name in pure]
    done = without_cuda(f"import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *{paths!r}]))")
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"COUNTS .*passed=\d{3,} failed=0 error=0", done.stdout)


def test_commands_without_cuda_python_end_with_a_typed_error() -> None:
    pack = str(ROOT / "tests" / "data" / "exl3_micro" / "pack")
    done = without_cuda("from flashnext_drv.__main__ import main\n"
                        f"sys.exit(main(['generate', {pack!r}, '--ids', '1', '--max-new', '1', "
                        "'--device', 'cuda']))")
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "cuda-python" in done.stderr


# What a run prints.


def test_a_run_names_its_skips_and_prints_counts(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "host").mkdir(parents=True)
    (tests / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (tests / "host" / "test_x.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_left(): pytest.skip('no moon')\n"
        "@pytest.mark.skipif(True, reason='no sun')\n"
        "@pytest.mark.parametrize('i', (1, 2))\n"
        "def test_marked(i): pass\n"
        "@pytest.mark.xfail\n"
        "def test_known(): assert False\n"
        "@pytest.mark.gpu\n"
        "def test_gpu(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n host\n sim\n gpu\n slow\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
                          cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
                          check=False)
    said = done.stdout
    counts = "passed=1 failed=1 error=0 skipped=3 xfailed=1 xpassed=0 deselected=1"
    assert f"COUNTS device=sim {counts}" in said, said
    assert "SKIP tests/host/test_x.py::test_left: no moon" in said
    assert "SKIP tests/host/test_x.py::test_marked[2]: no sun" in said
