"""A linear layer in a pack: its tensor group, format, width and codebook.

Called by pack (`linear()`).  What must stay true: width and codebook come from the linear's own tensors,
never from config.json; a group that is incomplete, ambiguous or impossible is refused by name.

Source: exl3.md sections 2 and 3 of the format notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy.typing as npt

from ..errors import CheckpointError
from ..kernels.tables import FORMAT_BF16, FORMAT_F16, exl3_format
from .header import Tensor

__all__ = ["MARKERS", "VECTOR_DTYPES", "LinearInfo", "Source", "find_linear", "wrong_tensor"]

MARKERS: Final[Mapping[str, int]] = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
VECTOR_DTYPES: Final = ("F16", "BF16", "F32")
_WIDTHS: Final = frozenset((2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))  # twice the bits of a weight


@dataclass(frozen=True, slots=True)
class LinearInfo:
    """One linear layer y[n] = x[k] W.

    format: word of kernels.tables (exl3_format, FORMAT_F16, FORMAT_BF16).  bits: of a weight (16.0 when
    plain). codebook: "3inst", "mcg", "mul1", or "" when plain.  parts: part -> tensor name; EXL3 has
    trellis, suh or su, svh or sv, plain has weight ([n, k]); bias where there is one.
    """

    prefix: str
    format: int
    bits: float
    codebook: str
    k: int
    n: int
    parts: Mapping[str, str]

    @property
    def is_exl3(self) -> bool:
        return bool(self.codebook)


class Source(Protocol):
    """What a pack offers here."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def where(self) -> str: ...
    def read(self, name: str) -> npt.NDArray[Any]: ...


def find_linear(pack: Source, prefix: str) -> LinearInfo:
    """The linear `prefix`.  Raises CheckpointError naming the tensor at fault."""
    trellis = pack.tensors.get(f"{prefix}.trellis")
    return _plain(pack, prefix) if trellis is None else _exl3(pack, prefix, trellis)


def _plain(pack: Source, prefix: str) -> LinearInfo:
    name = f"{prefix}.weight"
    if name not in pack.tensors:
        raise CheckpointError(
            "linear is missing",
            tensor=f"{prefix}.trellis",
            folder=pack.where,
            because=f"neither it nor {name} is in the pack",
            do="fetch every *.safetensors file of the pack, also those outside the index",
        )
    tensor = pack.tensors[name]
    if tensor.dtype not in ("F16", "BF16") or len(tensor.shape) != 2:
        raise wrong_tensor(tensor, "a plain linear is F16 or BF16 [outputs, inputs]")
    n, k = tensor.shape
    if not n or not k or k % 16:
        raise wrong_tensor(tensor, "its inputs must be a multiple of 16")
    parts = {"weight": name} | _bias(pack, prefix, n)
    return LinearInfo(prefix, FORMAT_F16 if tensor.dtype == "F16" else FORMAT_BF16, 16.0, "", k, n, parts)


def _exl3(pack: Source, prefix: str, trellis: Tensor) -> LinearInfo:
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        raise wrong_tensor(trellis, "a trellis is I16 [inputs / 16, outputs / 16, 16 * bits]")
    rows, columns, words = trellis.shape
    k, n, doubled = 16 * rows, 16 * columns, words // 8
    if words % 8 or doubled not in _WIDTHS:
        raise CheckpointError(
            "EXL3 linear has an impossible width",
            file=str(trellis.file),
            tensor=trellis.name,
            bits=words / 16,
            because="widths are 1..8 bits, and 1.5, 2.5, 3.5 with mul1",
            do="fetch the file again",
        )
    if not k or not n or k % 128 or n % 128:
        raise CheckpointError(
            "EXL3 linear has unsupported dims",
            file=str(trellis.file),
            tensor=trellis.name,
            k=k,
            n=n,
            because="inputs and outputs must be multiples of 128",
            do="fetch the file again",
        )
    if f"{prefix}.weight" in pack.tensors:
        raise CheckpointError(
            "linear is stored twice",
            file=str(trellis.file),
            tensor=trellis.name,
            other=f"{prefix}.weight",
            do="keep one of the two",
        )
    parts = {"trellis": trellis.name}
    parts |= (
        _scale_part(pack, prefix, "suh", k) | _scale_part(pack, prefix, "svh", n) | _bias(pack, prefix, n)
    )
    codebook = _codebook(pack, prefix, trellis)
    if doubled % 2 and codebook != "mul1":
        raise CheckpointError(
            "EXL3 linear has an impossible width",
            file=str(trellis.file),
            tensor=trellis.name,
            bits=doubled / 2,
            codebook=codebook,
            because="half widths exist with mul1 only",
            do="fetch the file again",
        )
    return LinearInfo(prefix, exl3_format(doubled / 2, codebook), doubled / 2, codebook, k, n, parts)


def _scale_part(pack: Source, prefix: str, part: str, size: int) -> dict[str, str]:
    name, legacy = f"{prefix}.{part}", f"{prefix}.{part[:-1]}"
    tensor = pack.tensors.get(name)
    if tensor is not None:
        if tensor.dtype != "F16" or tensor.shape != (size,):
            raise wrong_tensor(tensor, f"expected F16 [{size}]")
        return {part: name}
    tensor = pack.tensors.get(legacy)
    if tensor is None:
        raise CheckpointError(
            "tensor is missing",
            tensor=name,
            file=str(pack.tensors[f"{prefix}.trellis"].file),
            because=f"an EXL3 linear needs it or {legacy}",
            do="fetch the file again",
        )
    if tensor.dtype != "I16" or tensor.shape != (size // 16,):
        raise wrong_tensor(tensor, f"expected I16 [{size // 16}]")
    return {part[:-1]: legacy}


def _bias(pack: Source, prefix: str, n: int) -> dict[str, str]:
    tensor = pack.tensors.get(f"{prefix}.bias")
    if tensor is None:
        return {}
    if tensor.dtype not in VECTOR_DTYPES or tensor.shape != (n,):
        raise wrong_tensor(tensor, f"expected F16 [{n}]")
    return {"bias": tensor.name}


def _codebook(pack: Source, prefix: str, trellis: Tensor) -> str:
    found = [key for key in MARKERS if f"{prefix}.{key}" in pack.tensors]
    if len(found) == 2:
        raise CheckpointError(
            "EXL3 linear has both codebook markers",
            file=str(trellis.file),
            tensor=f"{prefix}.mcg",
            other=f"{prefix}.mul1",
            do="fetch the file again",
        )
    if not found:
        return "3inst"
    marker = pack.tensors[f"{prefix}.{found[0]}"]
    if marker.dtype not in ("I32", "U32") or marker.size != 4:
        raise wrong_tensor(marker, "a codebook marker is one I32")
    value = int(pack.read(marker.name).view("<u4").reshape(-1)[0])
    if value != MARKERS[found[0]]:
        raise CheckpointError(
            "codebook marker has a wrong value",
            file=str(marker.file),
            tensor=marker.name,
            value=f"0x{value:08X}",
            because=f"expected 0x{MARKERS[found[0]]:08X}",
            do="fetch the file again",
        )
    return found[0]


def wrong_tensor(tensor: Tensor, because: str) -> CheckpointError:
    """The error for a tensor whose dtype or shape the engine cannot use."""
    return CheckpointError(
        "tensor has a wrong dtype or shape",
        file=str(tensor.file),
        tensor=tensor.name,
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        because=because,
        do="use a pack whose files belong together",
    )
