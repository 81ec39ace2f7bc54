#!/usr/bin/env python3
"""Looks in kernel images for registers that are written while a wgmma still reads them.

    python build_kernels.py && python tools/wgmma_registers.py [--nvdisasm PATH]

An A operand in registers is read while its product runs; ptxas may give the registers away before the wait
for it (cuda_src/hopper.cuh, fn_keep).  For every such HGMMA of the sm_90a images the instructions behind it
are read in order, each loop's body once more behind its own end, until a wait (WARPGROUP.DEPBAR) covers the
product's group: none of them may write one of its four registers.  nvdisasm comes with the CUDA toolkit
(the package nvidia-cuda-nvcc); nothing else of this project needs it.

Exit 1 when a register is written too early, or when there is no such product at all.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import HOPPER

__all__ = ["Product", "early_writes", "main", "products"]

_KERNEL = re.compile(r"^\.text\.(\w+):$")
_LABEL = re.compile(r"^(\.L_x_\d+):$")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"\bHGMMA\.\S+ R\d+, R(\d+)(?:\.\w+)?, gdesc")
_WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_COMMITTED = re.compile(r"\bHGMMA\b.*\bgsb0\b")
# what has no register as its first operand to write: stores, barriers, branches, waits
_NO_RESULT = re.compile(r"^(ST|RED|BAR|BRA|BRX|BSSY|BSYNC|EXIT|NOP|WARP|SYNCS|UBLKCP|MEMBAR|FENCE|CCTL"
                        r"|NANOSLEEP|RET|CALL|DEPBAR|ERRBAR|USETMAXREG)")
_OPERATION = re.compile(r"^(?:@!?U?P\w+\s+)?(\S+)\s*(.*)$")


@dataclass(frozen=True)
class Product:
    """A HGMMA with its A operand in registers: where it stands, and the first of the four."""

    kernel: str
    at: int
    register: int


def products(lines: list[str]) -> list[Product]:
    """All of a disassembly."""
    found, kernel = [], ""
    for at, line in enumerate(lines):
        if named := _KERNEL.match(line):
            kernel = named[1]
        if product := _PRODUCT.search(line):
            found.append(Product(kernel, at, int(product[1])))
    return found


def early_writes(lines: list[str]) -> list[tuple[Product, str]]:
    """(product, instruction) for each product one of whose registers is written before the wait for it."""
    labels = {named[1]: at for at, line in enumerate(lines) if (named := _LABEL.match(line))}
    found = []
    for product in products(lines):
        own = set(range(product.register, product.register + 4))
        behind = 0 if _COMMITTED.search(lines[product.at]) else -1  # groups committed behind its own
        for line in _behind(lines, labels, product.at):
            if waited := _WAIT.search(line):
                if behind >= int(waited[1], 16):
                    break
                continue
            if _COMMITTED.search(line):
                behind += 1
            elif own & _written(line):
                found.append((product, line))
                break
    return found


def _behind(lines: list[str], labels: dict[str, int], at: int) -> Iterator[str]:
    """The instructions behind line `at`; from each branch that ends a loop on the loop's body again, once,
    and then what follows."""
    followed: set[int] = set()
    at += 1
    while at < len(lines) and not _KERNEL.match(lines[at]):
        line = lines[at]
        yield line
        branch = _BRANCH.search(line)
        if branch and labels.get(branch[1], at) < at and at not in followed:
            followed.add(at)
            at = labels[branch[1]]
            continue
        at += 1


def _written(line: str) -> set[int]:
    """Registers that an instruction writes; empty for what writes none, or is none."""
    operation = _OPERATION.match(line)
    if not operation or _NO_RESULT.match(operation[1]) or operation[1].startswith(("HGMMA", "U")):
        return set()
    first = re.match(r"R(\d+)\b", operation[2])
    if not first:
        return set()
    wide = re.search(r"\.128|^LDSM", operation[1]), re.search(r"\.64|\.WIDE", operation[1])
    width = 4 if wide[0] else 2 if wide[1] else 1
    return set(range(int(first[1]), int(first[1]) + width))


def disassembly(nvdisasm: Path, image: Path) -> list[str]:
    """Instructions, labels and kernels of an image, one a line, without addresses."""
    command = [str(nvdisasm), "-c", str(image)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [re.sub(r"^/\*[0-9a-f]+\*/\s*", "", line.strip()) for line in text.splitlines()]


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvdisasm", type=Path, default=Path("nvdisasm"), help="the program")
    given = parser.parse_args(argv)
    if shutil.which(given.nvdisasm) is None:
        parser.error(f"--nvdisasm {given.nvdisasm} is no program; the package nvidia-cuda-nvcc has it")
    n_products = n_early = 0
    for family in catalog.families():
        image = catalog.cubin_root() / catalog.manifest().image(family, HOPPER).file
        lines = disassembly(given.nvdisasm, image)
        here, early = products(lines), early_writes(lines)
        n_products += len(here)
        n_early += len(early)
        for product, line in early:
            where = f"{product.kernel}, product at line {product.at}"
            print(f"{where}: R{product.register} and the three behind it are written by {line}")
    print(f"{n_products} products with weights in registers, {n_early} of them written to too early")
    return 1 if n_early or not n_products else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
