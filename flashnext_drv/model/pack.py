"""A pack: every tensor of every safetensors file in a folder, and the EXL3 groups among them.

Called by the engine's loader, inspect, ref's tests and synth (which offers the same interface without files).
What must stay true: only what header.py has checked is read; offsets may be odd, so bytes are always copied
into aligned arrays; the index file is never read, because published packs keep tensors outside it; one name
in two files is refused.  Width and codebook of a linear come from its own tensors, never from config.json.

Source: exl3.md sections 1 to 3, 9 and 11 of the format notes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, UsageError
from .config import ModelConfig
from .fill import FillRule
from .header import FileHeader, Tensor, read_header
from .inventory import Need, mtp_needs, text_needs
from .manifest import Manifest
from .ngram import NgramInfo, ngram_info
from .weight import VECTOR_DTYPES, LinearInfo, find_linear, wrong_tensor

__all__ = ["Pack", "PackBase"]

_NUMPY: Final[Mapping[str, str]] = {
    "BOOL": "|u1",
    "U8": "|u1",
    "I8": "|i1",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
    "F8_E8M0": "|u1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}


_GAP_BYTES: Final = 4096  # between parts of one read: read too, and thrown away


class PackBase(ABC):
    """What a pack offers, on disk or synthetic.  tensors: by name.  remarks: filled by check().

    Reading is free of locks: any number of threads may read at once.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self._linears: dict[str, LinearInfo] = {}

    @abstractmethod
    def read_into(self, name: str, dest: npt.NDArray[np.uint8], first: int = 0) -> None:
        """Copy dest.size bytes of tensor `name`, from its byte `first` on, into `dest` (contiguous u8, host).

        Raises UsageError when the tensor has no such bytes, CheckpointError when the file lost them.
        """

    def read_parts(self, parts: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> None:
        """Copy the first dest.size bytes of several tensors, each (name, dest) as `read_into` does."""
        for name, dest in parts:
            self.read_into(name, dest)

    @abstractmethod
    def digest(self) -> str:
        """SHA-256, hex, that names these bytes."""

    def fill_plan(self, name: str) -> FillRule | None:
        """The rule by which kernel synth_fill makes this tensor; None where bytes must be read."""
        self.tensor(name)
        return None

    def tensor(self, name: str) -> Tensor:
        """The record of `name`.  Raises CheckpointError when the pack has none."""
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(
                "tensor is missing",
                tensor=name,
                folder=self.where,
                do="fetch every *.safetensors file of the pack, also those outside the index",
            )
        return found

    def require_range(self, name: str, dest: npt.NDArray[np.uint8], first: int) -> Tensor:
        """The record of `name`, which has dest.size bytes from byte `first` on; else UsageError.  For
        read_into."""
        tensor = self.tensor(name)
        fits = first >= 0 and first + dest.size <= tensor.size
        if not fits or dest.dtype != np.uint8 or not dest.flags.c_contiguous:
            raise UsageError(
                "read_into does not fit the tensor",
                tensor=name,
                first=first,
                dest_bytes=dest.nbytes,
                size_bytes=tensor.size,
                do="give a contiguous uint8 array inside the tensor's bytes",
            )
        return tensor

    @property
    def where(self) -> str:
        """Folder or origin, for messages."""
        return "synthetic"

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor as an aligned array of its shape; BF16 as u2 and FP8 as u1 bit patterns,
        little-endian."""
        tensor = self.tensor(name)
        out = np.empty(tensor.size, dtype=np.uint8)
        self.read_into(name, out)
        return out.view(_NUMPY[tensor.dtype]).reshape(tensor.shape)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """F16, BF16 or F32 tensor as f32 of its shape, exact.  Raises CheckpointError for other dtypes."""
        tensor = self.tensor(name)
        if tensor.dtype not in VECTOR_DTYPES:
            raise wrong_tensor(tensor, f"expected one of {', '.join(VECTOR_DTYPES)}")
        raw = self.read(name)
        if tensor.dtype == "BF16":
            return (raw.astype("<u4") << np.uint32(16)).view("<f4")
        return raw.astype(np.float32)

    def scale(self, linear: LinearInfo, part: str) -> npt.NDArray[np.float16]:
        """`part` "suh" (k,) or "svh" (n,) of an EXL3 linear as f16; legacy sign words become -1 and +1."""
        if part in linear.parts:
            return self.read(linear.parts[part])
        words = self.read(linear.parts[part[:-1]]).view("<u2")
        bits = words[:, None] >> np.arange(16, dtype=np.uint16) & np.uint16(1)
        return np.where(bits.reshape(-1) != 0, np.float16(-1), np.float16(1))

    def linear(self, prefix: str) -> LinearInfo:
        """Format, sizes and parts of the linear `prefix`.  Raises CheckpointError naming the tensor at
        fault."""
        known = self._linears.get(prefix)
        if known is None:
            known = find_linear(self, prefix)
            self._linears[prefix] = known
        return known

    def experts(self, i_layer: int) -> list[tuple[LinearInfo, LinearInfo, LinearInfo]]:
        """(gate, up, down) of every expert of a layer, by expert id; layer n_layers is the MTP layer."""
        names = self.config.names
        fused = self.tensors.get(f"{names.mlp(i_layer)}.experts.gate_up_proj")
        if fused is not None:
            raise CheckpointError(
                "experts are fused",
                file=str(fused.file),
                tensor=fused.name,
                because="one tensor holds all experts of a layer; EXL3 packs hold them apart",
                do="convert the checkpoint to EXL3",
            )
        out = []
        for i_expert in range(self.config.n_experts):
            stem = names.expert(i_layer, i_expert)
            out.append(
                (
                    self.linear(f"{stem}.gate_proj"),
                    self.linear(f"{stem}.up_proj"),
                    self.linear(f"{stem}.down_proj"),
                )
            )
        return out

    def ngram(self, i_ple: int = 0) -> NgramInfo:
        """The n-gram table of the i_ple-th PLE layer.  Raises CheckpointError."""
        return ngram_info(self, i_ple)

    @property
    def has_mtp(self) -> bool:
        """Whether every tensor of the MTP head is there."""
        return bool(self.config.n_mtp_layers) and not any(
            self._missing(need) for need in mtp_needs(self.config)
        )

    def check(self, config: ModelConfig | None = None) -> None:
        """Every tensor of the text model exists with a dtype and shape the engine can use; else
        CheckpointError.

        config: other dimensions than config.json's.  Missing MTP tensors are only told of in `remarks`.
        """
        config = config or self.config
        names = config.names
        quantized = self.tensors.get(f"{names.embed}.trellis")
        if quantized is not None:
            raise CheckpointError(
                "token embedding is quantized",
                file=str(quantized.file),
                tensor=quantized.name,
                because="only F16 and BF16 embeddings are supported",
                do="convert the pack without --embed_bits",
            )
        for i_layer in range(config.n_layers):
            if f"{names.mlp(i_layer)}.experts.gate_up_proj" in self.tensors:
                self.experts(i_layer)
        for need in text_needs(config):
            self._check_need(need)
        for i_ple in range(len(config.ple_layers)):
            self.ngram(i_ple)
        self.remarks = list(self._mtp_remarks(config))

    def _mtp_remarks(self, config: ModelConfig) -> Iterator[str]:
        needs = list(mtp_needs(config))
        missing = [need for need in needs if self._missing(need)]
        for need in needs:
            if not self._missing(need):
                self._check_need(need)
        mixer = [need for need in missing if need.name.startswith(config.names.mtp_mixer)]
        if not needs or len(missing) == len(needs):
            yield "no MTP head: drafting is not possible"
        elif missing and len(mixer) == len(missing):
            yield (
                f"the MTP head's mixer is missing ({config.names.mtp_mixer}.*): drafting is not possible; "
                "fetch mtp_hyper_connection_mixer_patch.safetensors"
            )
        elif missing:
            yield (
                f"{len(missing)} parts of the MTP head are missing, the first is {missing[0].name}: "
                "drafting is not possible; fetch every file of the pack"
            )

    def _missing(self, need: Need) -> bool:
        if need.k:
            return f"{need.name}.trellis" not in self.tensors and f"{need.name}.weight" not in self.tensors
        return need.name not in self.tensors

    def _check_need(self, need: Need) -> None:
        if not need.k:
            tensor = self.tensor(need.name)
            dtypes = ("F16", "BF16") if len(need.shape) == 2 else VECTOR_DTYPES
            if tensor.dtype not in dtypes or tensor.shape != need.shape:
                raise wrong_tensor(tensor, f"expected {' or '.join(dtypes)} {list(need.shape)}")
            return
        linear = self.linear(need.name)
        main = self.tensor(linear.parts["trellis" if linear.is_exl3 else "weight"])
        if (linear.k, linear.n) != (need.k, need.n):
            raise wrong_tensor(
                main,
                f"it has {linear.k} inputs and {linear.n} outputs, the model needs {need.k} and {need.n}",
            )
        if need.plain and linear.is_exl3:
            raise wrong_tensor(main, "the kernels want this matrix as F16 or BF16")
        if need.exl3 and not linear.is_exl3:
            raise wrong_tensor(main, "the kernels want the matrices of experts as EXL3")
        if "bias" in linear.parts:
            raise wrong_tensor(self.tensor(linear.parts["bias"]), "no linear of the text model has a bias")


class Pack(PackBase):
    """A folder of safetensors files.  folder: as given.  files: their headers, by name."""

    def __init__(self, folder: Path, config: ModelConfig, files: list[FileHeader]) -> None:
        super().__init__()
        self.folder = folder
        self.config = config
        self.files = files
        self.tensors = {}
        for header in files:
            for tensor in header.tensors:
                other = self.tensors.setdefault(tensor.name, tensor)
                if other is not tensor:
                    raise CheckpointError(
                        "tensor is stored twice",
                        tensor=tensor.name,
                        file=str(other.file),
                        second_file=str(tensor.file),
                        do="remove the file that does not belong here",
                    )

    @classmethod
    def open(cls, folder: str | Path, strict: bool = True) -> Pack:
        """Read config.json and all headers of `folder`; nothing stays open.

        strict: as ModelConfig.load.  Raises CheckpointError: no pack, unreadable, malformed, duplicate names.
        Tensors are looked at by check() and linear().
        """
        folder = Path(folder)
        try:
            names = sorted(p.name for p in folder.iterdir() if p.name.endswith(".safetensors"))
        except FileNotFoundError as error:
            raise CheckpointError(
                "pack folder does not exist", folder=str(folder), do="check the path"
            ) from error
        except NotADirectoryError as error:
            raise CheckpointError(
                "not a pack: not a folder",
                folder=str(folder),
                do="give the folder that holds config.json and the *.safetensors files",
            ) from error
        except OSError as error:
            raise CheckpointError(
                "pack folder cannot be read",
                folder=str(folder),
                because=str(error.strerror),
                do="check its permissions",
            ) from error
        config = ModelConfig.load(folder, strict=strict)
        if not names:
            raise CheckpointError(
                "not a pack: no *.safetensors file",
                folder=str(folder),
                do="give the folder that holds config.json and the *.safetensors files",
            )
        return cls(folder, config, [read_header(folder / name) for name in names])

    @property
    def where(self) -> str:
        return str(self.folder)

    def read_into(self, name: str, dest: npt.NDArray[np.uint8], first: int = 0) -> None:
        tensor = self.require_range(name, dest, first)
        view = dest.reshape(-1).data
        try:
            with open(tensor.file, "rb", buffering=0) as stream:
                stream.seek(tensor.offset + first)
                got = 0
                while got < len(view):
                    step = stream.readinto(view[got:])
                    if not step:
                        raise CheckpointError(
                            "file lost bytes since it was opened",
                            file=str(tensor.file),
                            tensor=name,
                            wanted_bytes=len(view),
                            got_bytes=got,
                            do="leave the pack alone while it is in use",
                        )
                    got += step
        except OSError as error:
            raise CheckpointError(
                "file cannot be read",
                file=str(tensor.file),
                tensor=name,
                because=str(error.strerror),
                do="check its permissions",
            ) from error

    def read_parts(self, parts: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> None:
        """As PackBase says; parts that lie side by side in a file are read by one call."""
        placed = [(self.require_range(name, dest, 0), dest) for name, dest in parts if dest.size]
        placed.sort(key=lambda each: (str(each[0].file), each[0].offset))
        run: list[tuple[Tensor, npt.NDArray[np.uint8]]] = []
        for tensor, dest in placed:
            if run and not 0 <= _gap(run[-1], tensor) <= _GAP_BYTES:
                self._read_run(run)
                run = []
            run.append((tensor, dest))
        if run:
            self._read_run(run)

    def _read_run(self, run: Sequence[tuple[Tensor, npt.NDArray[np.uint8]]]) -> None:
        first = run[0][0]
        buffers: list[Any] = []
        for i, (tensor, dest) in enumerate(run):
            if i:
                buffers.append(bytearray(_gap(run[i - 1], tensor)))
            buffers.append(dest.reshape(-1).data)
        try:
            with open(first.file, "rb", buffering=0) as stream:
                got = os.preadv(stream.fileno(), buffers, first.offset)
        except OSError:
            got = -1
        if got != sum(len(buffer) for buffer in buffers):  # too much for one call, or a file at fault
            for tensor, dest in run:
                self.read_into(tensor.name, dest)

    def manifest(self, cache: Path | None = None, *, use_cache: bool = True) -> Manifest:
        """Files, bytes and SHA-256 of the folder; hashes come from the digest cache where it may vouch for
        them."""
        return Manifest.of(self.folder, cache=cache, use_cache=use_cache)

    def digest(self) -> str:
        """SHA-256 over the manifest's list."""
        return self.manifest().digest


def _gap(before: tuple[Tensor, npt.NDArray[np.uint8]], tensor: Tensor) -> int:
    """Bytes between what is read of one tensor and the next one; -1 when they lie in different files."""
    last, dest = before
    return tensor.offset - last.offset - dest.size if tensor.file == last.file else -1
