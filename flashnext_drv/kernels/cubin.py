"""Reads what a cubin says of its kernels, with nothing but `struct`: no GPU, no driver, no CUDA tool.

Called by build_kernels.py for every image it makes, and by tests that compare it with the driver's
attributes. Facts: a cubin is an ELF64 file; bits 8..15 of e_flags are the SM; `.nv.info` and
`.nv.info.<kernel>` are runs of records (u8 format, u8 attribute), where format 4 has a u16 size and data and
every other format two bytes of value. From sm_90 on `.nv.shared.<kernel>` counts 1024 bytes that the system
reserves a block; they are not the kernel's. Spill bytes stand in no record: they come from the compiler's
log.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["CubinKernel", "read_cubin", "spills"]

_SIZED: Final = 4
_REGS: Final = 0x2F             # .nv.info: u32 symbol, u32 value
_FRAME: Final = 0x11
_MAX_THREADS: Final = 0x05      # .nv.info.<k>: u32 x, y, z
_PARAM: Final = 0x17            # u32 index, u16 ordinal, u16 offset, u32 with the size from bit 18 on
_BARRIERS: Final = 0x4C
_RESERVED_SHARED_BYTES: Final = 1024


@dataclass
class CubinKernel:
    """One kernel.  regs: 32-bit registers a thread; stack bytes a thread; shared bytes a block, static (what
    launches ask for stands in no cubin).

    params: (offset, size) in bytes, in order.  max_threads: 0 when the kernel has no launch bounds.
    text_sha256: SHA-256, hex, of the kernel's instructions as they stand in the file.
    """

    regs: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    max_threads: int = 0
    barriers: int = 0
    params: tuple[tuple[int, int], ...] = ()
    text_sha256: str = ""


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int


def read_cubin(data: bytes) -> tuple[int, dict[str, CubinKernel]]:
    """(SM number, kernels by name).  Raises ValueError when `data` is no cubin."""
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
        if str(error).startswith("no cubin"):
            raise
        raise ValueError(f"no cubin: {type(error).__name__}: {error}") from error


def spills(log: str) -> dict[str, tuple[int, int]]:
    """(store, load) spill bytes a thread by kernel, from the compiler's log with --ptxas-options=-v."""
    found: dict[str, tuple[int, int]] = {}
    kernel = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found.setdefault(kernel, (int(match[1]), int(match[2])))
    return found


def _read(data: bytes) -> tuple[int, dict[str, CubinKernel]]:
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise ValueError("no cubin: not a little-endian ELF64 file")
    sm = struct.unpack_from("<I", data, 48)[0] >> 8 & 0xFF
    sections = _sections(data)
    by_name = {s.name: s for s in sections}
    kernels = {s.name.removeprefix(".text."): CubinKernel() for s in sections if s.name.startswith(".text.")}
    symbols = _symbols(data, by_name[".symtab"], sections)
    for attribute, value in _records(data, by_name[".nv.info"]):
        if attribute in (_REGS, _FRAME) and len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            kernel = kernels.get(symbols[symbol])
            if kernel is not None and attribute == _REGS:
                kernel.regs = number
            elif kernel is not None:
                kernel.stack_bytes = number
    for name, kernel in kernels.items():
        text = by_name[f".text.{name}"]
        if text.offset + text.size > len(data):
            raise ValueError(f"no cubin: the instructions of {name} end behind the file")
        kernel.text_sha256 = hashlib.sha256(data[text.offset:text.offset + text.size]).hexdigest()
        shared = by_name.get(f".nv.shared.{name}")
        if shared is not None:
            kernel.shared_bytes = shared.size - (_RESERVED_SHARED_BYTES if sm >= 90 else 0)
        info = by_name.get(f".nv.info.{name}")
        if info is not None:
            _own_records(kernel, _records(data, info))
    return sm, kernels


def _own_records(kernel: CubinKernel, records: Iterator[tuple[int, bytes]]) -> None:
    params: dict[int, tuple[int, int]] = {}
    for attribute, value in records:
        if attribute == _MAX_THREADS:
            x, y, z = struct.unpack_from("<III", value)
            kernel.max_threads = x * y * z
        elif attribute == _BARRIERS:
            kernel.barriers = value[0]
        elif attribute == _PARAM:
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", value)
            params[ordinal] = (offset, packed >> 18)
    kernel.params = tuple(params[i] for i in sorted(params))


def _sections(data: bytes) -> list[_Section]:
    table = struct.unpack_from("<Q", data, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_text(data, names + r[0]), r[4], r[5], r[6]) for r in raw]


def _symbols(data: bytes, table: _Section, sections: list[_Section]) -> list[str]:
    names = sections[table.link].offset
    return [_text(data, names + struct.unpack_from("<I", data, table.offset + 24 * i)[0])
            for i in range(table.size // 24)]


def _records(data: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute = data[at], data[at + 1]
        if form == _SIZED:
            size = struct.unpack_from("<H", data, at + 2)[0]
            yield attribute, data[at + 4:at + 4 + size]
            at += 4 + size
        else:
            yield attribute, data[at + 2:at + 4]
            at += 4


def _text(data: bytes, at: int) -> str:
    return data[at:data.index(b"\0", at)].decode()
