"""A plain safetensors reader for the reference: every tensor of a folder by name.

Called by tests and checks that run ref/model.py on a pack.  It is separate from model/pack.py on purpose (an
error in one reader must not hide in the other) and does only what well-formed files need: the pack reader is
where files are judged.  What must stay true: tensors are copied out of the file, for their offsets may be
odd; BF16 comes as fp32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FolderWeights"]

_TYPES: Final = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I16": "<i2", "I32": "<i4",
                 "I64": "<i8"}


class _Place(NamedTuple):
    path: Path
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


class FolderWeights(Mapping[str, NDArray[Any]]):
    """Name -> array for all `*.safetensors` of a folder, read at each access.  Raises ValueError on a name
    given twice."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._places: dict[str, _Place] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                (header_bytes,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(header_bytes))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if name in self._places:
                    first_file = self._places[name].path.name
                    raise ValueError(f"tensor {name} stands in {first_file} and in {path.name}")
                first, end = entry["data_offsets"]
                self._places[name] = _Place(path, 8 + header_bytes + first, end - first, entry["dtype"],
                                            tuple(entry["shape"]))

    def config(self) -> dict[str, Any]:
        """The folder's config.json."""
        parsed: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return parsed

    def __getitem__(self, name: str) -> NDArray[Any]:
        place = self._places[name]
        with place.path.open("rb") as file:
            file.seek(place.offset)
            raw = np.frombuffer(file.read(place.size_bytes), _TYPES[place.dtype])
        if place.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places
