"""What files a pack consists of: bytes and SHA-256 of each, one SHA-256 over the list, and a cache of
digests.

Called by pack (`digest`), inspect and receipts.  What must stay true: a digest taken from the cache belongs
to the bytes that are there.  An entry is keyed by device, inode, size, mtime and ctime.  The kernel sets
ctime at every write and every change of mtime, and no call sets it back, but its clock is coarse: a rewrite
inside the tick in which the file was hashed leaves the same stamps.  So an entry counts only when the file
had rested for RACY_NS before hashing began; until then the file is hashed again each time.

# assumes: the file system's clock runs within RACY_NS of this machine's, and nobody sets the clock back.
# Writes through a shared mapping to a page that is already dirty show up in ctime only at write-back, or not
# at all on tmpfs; `verify(use_cache=False)` reads every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError

__all__ = ["MANIFEST_NAME", "RACY_NS", "FileEntry", "Manifest", "digest_cache_path"]

MANIFEST_NAME: Final = "manifest.json"
# The coarsest stamps in use are those of FAT (2 s); Linux file systems of today stamp every 1 to 10 ms.
RACY_NS: Final = 2_000_000_000
_FORMAT: Final = 1
_CHUNK_BYTES: Final = 1 << 22
_CACHE_LIMIT: Final = 4096
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, order=True)
class FileEntry:
    """One file.  name: inside the folder.  size: bytes.  sha256: of its bytes, hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a pack, by name.  Hidden files, folders and manifest.json itself do not count."""

    files: tuple[FileEntry, ...]

    @property
    def digest(self) -> str:
        """SHA-256, hex, over the lines "sha256 size name" in name order."""
        lines = "".join(f"{f.sha256} {f.size} {f.name}\n" for f in self.files)
        # names of files may hold bytes that are no UTF-8: lone surrogates in Python
        return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)

    @classmethod
    def of(
        cls,
        folder: str | Path,
        *,
        cache: Path | None = None,
        use_cache: bool = True,
        progress: Progress | None = None,
    ) -> Manifest:
        """Hash the files of `folder`.

        cache: file of the digest cache, by default the user's.  use_cache: whether its entries may stand for
        reading.  progress: called with (file name, files done, files).  Raises CheckpointError.
        """
        folder = Path(folder)
        paths = _files(folder)
        store = _DigestCache(cache or digest_cache_path())
        done = 0
        out = []
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for path, (size, sha256) in zip(
                paths, pool.map(lambda p: store.hash_file(p, use_cache), paths), strict=True
            ):
                done += 1
                out.append(FileEntry(path.name, size, sha256))
                if progress is not None:
                    progress(path.name, done, len(paths))
        store.save()
        return cls(tuple(sorted(out)))

    @classmethod
    def load(cls, file: str | Path) -> Manifest:
        """Read the JSON form.  Raises CheckpointError when it is malformed or its digest does not fit its
        list."""
        file = Path(file)
        try:
            raw: Any = json.loads(file.read_bytes())
            if raw["format"] != _FORMAT:
                raise ValueError(f"format {raw['format']!r}")
            files = tuple(
                sorted(FileEntry(str(f["name"]), int(f["size"]), str(f["sha256"])) for f in raw["files"])
            )
            digest = str(raw["digest"])
        except OSError as error:
            raise CheckpointError(
                "manifest cannot be read", file=str(file), because=str(error.strerror), do="check the path"
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                "manifest is malformed",
                file=str(file),
                because=f"{type(error).__name__}: {error}",
                do="make it anew",
            ) from error
        made = cls(files)
        if made.digest != digest:
            raise CheckpointError(
                "manifest contradicts itself",
                file=str(file),
                digest=digest,
                because=f"its list has digest {made.digest}",
                do="make it anew",
            )
        return made

    def save(self, file: str | Path) -> None:
        """Write the JSON form."""
        raw = {
            "format": _FORMAT,
            "digest": self.digest,
            "bytes": self.size,
            "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in self.files],
        }
        _write_whole(Path(file), json.dumps(raw, indent=1) + "\n")

    def verify(
        self,
        folder: str | Path,
        *,
        cache: Path | None = None,
        use_cache: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Compare with what is in `folder`; by default every byte is read.

        Raises CheckpointError whose fields changed, added, dropped (names) and renamed ((old, new)) tell all
        differences.
        """
        self.compare(Manifest.of(folder, cache=cache, use_cache=use_cache, progress=progress), str(folder))

    def compare(self, other: Manifest, folder: str) -> None:
        """Raise as verify() does when `other`, made from `folder`, is not equal."""
        there = {f.name: f for f in other.files}
        here = {f.name: f for f in self.files}
        dropped = [name for name in here if name not in there]
        added = [name for name in there if name not in here]
        renamed: list[tuple[str, str]] = []
        for old in list(dropped):
            twin = next((new for new in added if there[new].sha256 == here[old].sha256), None)
            if twin is not None:
                renamed.append((old, twin))
                dropped.remove(old)
                added.remove(twin)
        changed = [name for name, f in here.items() if name in there and there[name] != f]
        found: dict[str, Any] = {
            key: value
            for key, value in (
                ("changed", changed),
                ("added", added),
                ("dropped", dropped),
                ("renamed", renamed),
            )
            if value
        }
        if found:
            raise CheckpointError(
                "pack differs from its manifest",
                folder=folder,
                **found,
                do="fetch the pack again, or make a new manifest if the change is wanted",
            )


def digest_cache_path() -> Path:
    """The digest cache in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flashnext_drv" / "digests.json"


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(
            (
                p
                for p in folder.iterdir()
                if p.is_file() and not p.name.startswith(".") and p.name != MANIFEST_NAME
            ),
            key=lambda p: p.name,
        )
    except OSError as error:
        raise CheckpointError(
            "pack folder cannot be read",
            folder=str(folder),
            because=str(error.strerror),
            do="check the path and its permissions",
        ) from error


class _DigestCache:
    """Digests by the stamps of files.  A broken or missing cache file is an empty cache."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._new: dict[str, dict[str, object]] = {}
        self._known = self._load()

    def hash_file(self, path: Path, use_cache: bool) -> tuple[int, str]:
        """(bytes, SHA-256 hex) of `path`.  Raises CheckpointError when it cannot be read or changes
        meanwhile."""
        try:
            with open(path, "rb", buffering=0) as stream:
                before = os.fstat(stream.fileno())
                key = _key(before)
                entry = self._known.get(key)
                if use_cache and entry is not None:
                    return before.st_size, str(entry["sha256"])
                begun_ns = time.time_ns()
                hasher = hashlib.sha256()
                chunk = bytearray(_CHUNK_BYTES)
                view = memoryview(chunk)
                while got := stream.readinto(chunk):
                    hasher.update(view[:got])
                after = os.fstat(stream.fileno())
        except OSError as error:
            raise CheckpointError(
                "file cannot be read", file=str(path), because=str(error.strerror), do="check its permissions"
            ) from error
        if _key(after) != key:
            raise CheckpointError(
                "file changed while it was hashed", file=str(path), do="leave the pack alone and try again"
            )
        if begun_ns - max(before.st_ctime_ns, before.st_mtime_ns) > RACY_NS:
            self._new[key] = {"sha256": hasher.hexdigest(), "recorded_ns": begun_ns}
        return before.st_size, hasher.hexdigest()

    def save(self) -> None:
        """Add what was hashed to the file, which other processes may have written meanwhile."""
        if not self._new:
            return
        entries = self._load() | self._new
        newest = sorted(entries.items(), key=lambda item: int(str(item[1]["recorded_ns"])))[-_CACHE_LIMIT:]
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(self.file, json.dumps({"format": _FORMAT, "entries": dict(newest)}))
        except OSError:
            return  # a cache that cannot be kept costs time only

    def _load(self) -> dict[str, Mapping[str, object]]:
        try:
            raw = json.loads(self.file.read_bytes())
            if raw["format"] != _FORMAT:
                return {}
            return {
                str(key): entry
                for key, entry in raw["entries"].items()
                if isinstance(entry["sha256"], str)
                and _SHA256.fullmatch(entry["sha256"])
                and type(entry["recorded_ns"]) is int
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _write_whole(file: Path, text: str) -> None:
    """Write through a temporary name, so that readers see the old file or the new one."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, file)
