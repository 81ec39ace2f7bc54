"""Single rows of a pack's n-gram table, read as they are asked for: the table itself is in no memory of ours.

Used by state/ngram.py where Limits.ngram is "mapped".  What must stay true: a row's bytes are those that
`read_into` gives at its place; nothing stays open between calls; a file that went away or shrank gives a
CheckpointError, which a mapping of it could not (touching lost pages of a mapping kills the process).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .fill import FillRule, table_words
from .layout import Layout, aligned
from .ngram import NgramInfo
from .pack import PackBase

__all__ = ["FileRows", "RowReader", "RuleRows", "ngram_staging_bytes", "row_reader"]

_AHEAD: Final = 1024  # rows that the system is told of before the first of them is read


class RowReader(ABC):
    """Rows of one table, numbered over all its sources.  Free of locks."""

    def __init__(self, info: NgramInfo) -> None:
        self.row_bytes = info.row_bytes
        self._firsts = np.array([first for _, first, _ in info.sources], np.int64)

    @abstractmethod
    def read(self, rows: npt.NDArray[np.int64], dest: npt.NDArray[np.uint8]) -> None:
        """Bytes of table row rows[i] (n,) into dest[i], (n, row_bytes) u8, contiguous, host.

        Raises CheckpointError, with `dest` in any state, when a file cannot be read or lost them.
        """

    def _source(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which source holds each row."""
        found: npt.NDArray[np.int64] = np.searchsorted(self._firsts, rows, side="right") - 1
        return found


class FileRows(RowReader):
    """Of a pack on disk: one read of the system a row, all rows of a block announced before."""

    def __init__(self, info: NgramInfo, pack: PackBase) -> None:
        super().__init__(info)
        tensors = [pack.tensor(name) for name, _, _ in info.sources]
        self._names = [tensor.name for tensor in tensors]
        self._starts = np.array([tensor.offset for tensor in tensors], np.int64)
        self._files = sorted({tensor.file for tensor in tensors})
        numbers = {file: i for i, file in enumerate(self._files)}
        self._i_files = np.array([numbers[tensor.file] for tensor in tensors], np.int64)

    def read(self, rows: npt.NDArray[np.int64], dest: npt.NDArray[np.uint8]) -> None:
        source = self._source(rows)
        at = self._starts[source] + (rows - self._firsts[source]) * self.row_bytes
        i_file = self._i_files[source]
        for i in set(i_file.tolist()):
            here = np.flatnonzero(i_file == i)
            name = self._names[int(source[here[0]])]
            try:
                handle = os.open(self._files[i], os.O_RDONLY)
                try:
                    for first in range(0, len(here), _AHEAD):
                        part = here[first : first + _AHEAD]
                        dest[part] = self._block(handle, at[part].tolist(), self._files[i], name)
                finally:
                    os.close(handle)
            except OSError as error:
                raise CheckpointError(
                    "file cannot be read",
                    file=str(self._files[i]),
                    tensor=name,
                    because=str(error.strerror),
                    do="leave the pack alone while it is in use",
                ) from error

    def _block(self, handle: int, at: list[int], file: Path, name: str) -> npt.NDArray[np.uint8]:
        size = self.row_bytes
        for offset in at:
            os.posix_fadvise(handle, offset, size, os.POSIX_FADV_WILLNEED)
        data = b"".join([os.pread(handle, size, offset) for offset in at])
        if len(data) != len(at) * size:
            raise CheckpointError(
                "file lost bytes since it was opened",
                file=str(file),
                tensor=name,
                wanted_bytes=max(at) + size,
                size_bytes=os.fstat(handle).st_size,
                do="leave the pack alone while it is in use",
            )
        return np.frombuffer(data, np.uint8).reshape(len(at), size)


class RuleRows(RowReader):
    """Of a synthetic pack: made by rules that differ in their keys, one a source."""

    def __init__(self, info: NgramInfo, rules: list[FillRule]) -> None:
        super().__init__(info)
        self._rule = rules[0]
        self._keys = np.array([rule.key for rule in rules], np.uint64)

    def read(self, rows: npt.NDArray[np.int64], dest: npt.NDArray[np.uint8]) -> None:
        source = self._source(rows)
        dest[:] = table_words(self._rule, rows - self._firsts[source], self._keys[source]).view(np.uint8)


def row_reader(pack: PackBase, info: NgramInfo) -> RowReader:
    """The reader of `pack`'s table `info`."""
    rules = [pack.fill_plan(name) for name, _, _ in info.sources]
    made = [rule for rule in rules if rule is not None]
    return RuleRows(info, made) if len(made) == len(rules) else FileRows(info, pack)


def ngram_staging_bytes(layout: Layout, pack: PackBase, rows: int, times: int = 1) -> int:
    """Pinned bytes that `rows` tokens' table rows of every PLE layer take, each layer's `times`."""
    n_heads = layout.config.n_ngram_heads
    sizes = [pack.ngram(i).row_bytes * n_heads * rows for i in range(len(layout.config.ple_layers))]
    return times * sum(aligned(size) for size in sizes)
