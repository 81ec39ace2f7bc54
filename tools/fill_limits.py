"""Writes flashnext_drv/kernels/limits.py: what every kernel may use on every architecture, from what it uses.

    python build_kernels.py && python tools/fill_limits.py [--kernel NAME ...]

To be run when a kernel is meant to need more or less than before; `flashnext-drv records` then holds it to
that.  Registers get up to 8 more, rounded up to 8 (the unit in which they are given out); spill bytes up to
16 more, rounded up to 16, and none where there are none; blocks per SM are what they are.  --kernel changes
these kernels alone, and the others keep what they have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnext_drv.check import resources  # noqa: E402
from flashnext_drv.check.resources import Record, Resources  # noqa: E402
from flashnext_drv.errors import UsageError  # noqa: E402
from flashnext_drv.kernels import catalog, limits  # noqa: E402

__all__ = ["PATH", "limit_of", "main", "text"]

PATH = ROOT / "flashnext_drv" / "kernels" / "limits.py"
BEGIN = "_ROWS: Final[Mapping[str, tuple[tuple[int, int, int], ...]]] = {\n"


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="fill_limits.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", action="append", default=[], help="only this one; may be repeated")
    given = parser.parse_args(argv)
    for name in given.kernel:
        catalog.spec(name)
    PATH.write_text(text(PATH.read_text(encoding="utf-8"), resources.measure(), tuple(given.kernel)),
                    encoding="utf-8")
    return 0


def text(before: str, measured: Record, only: tuple[str, ...] = ()) -> str:
    """The file `before` with the rows of all kernels, or of `only`, made anew.

    Raises UsageError when an architecture was not measured.
    """
    start = before.index(BEGIN) + len(BEGIN)
    end = before.index("}\n", start)
    rows = []
    for name, entry in measured.kernels.items():
        old = limits.rows_of(name)
        if only and name not in only and old:
            row = old
        else:
            lacking = [arch for arch in catalog.ARCHS if arch not in entry.archs]
            if lacking:
                raise UsageError("limits need every architecture", because=f"not built: {', '.join(lacking)}",
                                 do="run python build_kernels.py")
            row = tuple(limit_of(entry.archs[arch]) for arch in catalog.ARCHS)
        rows.append(f"    {name!r}: ({', '.join(str(one) for one in row)}),\n".replace("'", '"'))
    return before[:start] + "".join(rows) + before[end:]


def limit_of(made: Resources) -> tuple[int, int, int]:
    """(registers, spill bytes, blocks per SM) that a kernel which needs `made` may have."""
    spilled = max(made.spill_store_bytes, made.spill_load_bytes)
    return (min(-(-made.regs // 8) * 8 + (8 if made.regs % 8 == 0 else 0), 255),
            -(-spilled // 16) * 16 + 16 if spilled else 0, made.blocks_per_sm)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
