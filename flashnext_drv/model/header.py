"""Headers of safetensors files: names, dtypes, shapes and byte ranges, nothing believed without a check.

Called by pack.  What must stay true: a `Tensor` that leaves here lies wholly inside its file, its byte range
fits its dtype and shape, and the ranges of one file cover its data without overlap or hole.  A header of
300,000 names takes seconds.

Source: the safetensors format (8 bytes header length, JSON, data); EXL3 files are not padded, so offsets may
be odd.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import CheckpointError

__all__ = ["DTYPE_BYTES", "FileHeader", "Tensor", "read_header"]

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_HEADER_LIMIT_BYTES: Final = 1 << 30
_MAX_AXES: Final = 32  # numpy takes no more before version 2
_MAX_SIZE: Final = (1 << 63) - 1
_AGAIN: Final = "fetch the file again"


class Tensor(NamedTuple):
    """One stored tensor.  offset: of its first byte in the file; size: bytes.  dtype: safetensors name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class FileHeader(NamedTuple):
    """One file.  size: bytes of the whole file.  header_bytes: of the JSON.  metadata: `__metadata__`."""

    file: Path
    size: int
    header_bytes: int
    metadata: dict[str, str]
    tensors: list[Tensor]


def read_header(file: Path) -> FileHeader:
    """Parse and check the header of `file`.  Raises CheckpointError with file, tensor and values."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # a pipe would wait for a writer
            raise CheckpointError(
                "file cannot be read",
                file=str(file),
                because="it is not a regular file",
                do="remove what does not belong to the pack",
            )
        with open(file, "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            if len(first) < 8:
                raise CheckpointError(
                    "safetensors file is truncated",
                    file=str(file),
                    size_bytes=size,
                    because="the header length alone takes 8 bytes",
                    do=_AGAIN,
                )
            length = int.from_bytes(first, "little")
            if not 2 <= length <= min(size - 8, _HEADER_LIMIT_BYTES):
                raise CheckpointError(
                    "safetensors header does not fit its file",
                    file=str(file),
                    header_bytes=length,
                    size_bytes=size,
                    because="the file is truncated or no safetensors file",
                    do=_AGAIN,
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            "file cannot be read", file=str(file), because=str(error.strerror), do="check its permissions"
        ) from error
    if len(raw) != length:
        raise CheckpointError(
            "safetensors file is truncated",
            file=str(file),
            size_bytes=size,
            because=f"{len(raw)} of {length} header bytes could be read",
            do=_AGAIN,
        )
    entries = _parse(file, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            "safetensors header is malformed",
            file=str(file),
            tensor="__metadata__",
            because="it must map words to words",
            do=_AGAIN,
        )
    base = 8 + length
    tensors = [_tensor(file, name, entry, base, size) for name, entry in entries.items()]
    _check_cover(file, tensors, base, size)
    return FileHeader(file, size, length, metadata, tensors)


def _parse(file: Path, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            for twice, _ in pairs:
                if twice in seen:
                    break
                seen.add(twice)
            raise CheckpointError(
                "tensor is stored twice",
                tensor=twice,
                file=str(file),
                second_file=str(file),
                do="keep one of the two",
            )
        return out

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "safetensors header is not JSON",
            file=str(file),
            header_bytes=len(raw),
            because=str(error),
            do=_AGAIN,
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(
            "safetensors header is malformed", file=str(file), because="it is no JSON object", do=_AGAIN
        )
    return entries


def _tensor(file: Path, name: str, entry: object, base: int, size: int) -> Tensor:
    """One entry, checked against the file's size.  base: file offset of the data."""
    if not isinstance(entry, dict):
        raise _lie(file, name, "entry", entry, "expected an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _lie(file, name, "dtype", dtype, f"known are {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in shape):
        raise _lie(file, name, "shape", shape, "expected a list of sizes")
    if len(shape) > _MAX_AXES:
        raise _lie(file, name, "shape", shape, f"it has {len(shape)} axes, {_MAX_AXES} are the most")
    if not isinstance(span, list) or len(span) != 2 or type(span[0]) is not int or type(span[1]) is not int:
        raise _lie(file, name, "data_offsets", span, "expected first and last byte")
    item = DTYPE_BYTES[dtype]
    first, end = span
    if not 0 <= first <= end <= size - base:
        raise _lie(
            file,
            name,
            "data_offsets",
            span,
            f"the file holds {size - base} data bytes: truncated file or lying header",
        )
    if prod(shape) * item != end - first:
        raise _lie(file, name, "data_offsets", span, f"{dtype} {shape} takes {prod(shape) * item} bytes")
    return Tensor(name, file, dtype, tuple(shape), base + first, end - first)


def _check_cover(file: Path, tensors: list[Tensor], base: int, size: int) -> None:
    """The ranges must follow each other from the first data byte to the last one of the file."""
    at, before = base, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size)):
        if tensor.offset < at:
            raise CheckpointError(
                "tensors overlap",
                file=str(file),
                tensor=tensor.name,
                other=before,
                because=f"{at - tensor.offset} bytes belong to both",
                do=_AGAIN,
            )
        if tensor.offset > at:
            raise CheckpointError(
                "safetensors file has a hole",
                file=str(file),
                tensor=tensor.name,
                other=before,
                because=f"{tensor.offset - at} bytes in between belong to no tensor",
                do=_AGAIN,
            )
        at, before = at + tensor.size, tensor.name
    if at != size:
        raise CheckpointError(
            "safetensors file is overlong",
            file=str(file),
            size_bytes=size,
            because=f"its last {size - at} bytes belong to no tensor",
            do=_AGAIN,
        )


def _lie(file: Path, name: str, field: str, value: object, because: str) -> CheckpointError:
    return CheckpointError(
        "safetensors header is malformed",
        file=str(file),
        tensor=name,
        field=field,
        value=repr(value)[:80],
        because=because,
        do=_AGAIN,
    )
