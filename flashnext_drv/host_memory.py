"""How much host memory this process may still take: what the kernel reports available, and what the control
groups that it lives in leave of their limits.

Called by engine/rank.py before it pins anything, by drv/memory.py when a pin was refused, and by the
commands `plan` and `doctor`.  Reads files of the kernel only, and none of them while the module is imported.
What must stay true: a file that is absent or holds something else than expected counts as no limit, never as
an error.

    available = min(MemAvailable, each group's limit - its usage + page cache that it can drop)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import bytes_text

__all__ = ["HostMemory", "host_memory"]

_UNLIMITED: Final = 1 << 60  # version 1 writes "no limit" as the largest whole number of pages
_CAP_IPC_LOCK: Final = 14  # linux/capability.h: may lock memory beyond the limit


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this machine as one process sees them; None where nothing tells.

    available: what may be taken, the least of what binds.  binding: which file says so, in words.  reported:
    MemAvailable.  memlock: most bytes that may be locked by mlock, None for no limit; drivers that pin on
    the process's behalf need not keep to it.  nodes: of the machine's memory (NUMA) that may be allocated on.
    """

    total_bytes: int | None
    reported_bytes: int | None
    available_bytes: int | None
    binding: str
    memlock_bytes: int | None
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.available_bytes is None:
            return "host memory is not told by this system"
        lock = "no limit" if self.memlock_bytes is None else bytes_text(self.memlock_bytes)
        return f"{bytes_text(self.available_bytes)} available by {self.binding}, mlock limit {lock}"


@dataclass(frozen=True)
class _Form:
    """The files of a control group's memory controller, and the words of its `memory.stat`."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    busy: tuple[str, ...]


_V2: Final = _Form(
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    ("file_dirty", "file_writeback"),
)
_V1: Final = _Form(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
)


def host_memory(root: Path | str = "/") -> HostMemory:
    """What this process may take now.  root: the folder that holds `proc` and `sys`, for tests."""
    root = Path(root)
    facts = _table(root / "proc/meminfo")
    total, reported = (facts.get(name) for name in ("MemTotal:", "MemAvailable:"))
    known = [(size * 1024, "MemAvailable") for size in (reported,) if size is not None]
    known += list(_groups(root))
    available, binding = min(known, default=(None, ""))
    return HostMemory(
        None if total is None else total * 1024,
        None if reported is None else reported * 1024,
        available,
        binding,
        _memlock(root),
        _nodes(root),
    )


def _groups(root: Path) -> Iterator[tuple[int, str]]:
    """(bytes left, name) of every control group with a limit around this process, of both versions."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _ancestors(root / mount, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _ancestors(root / "sys/fs/cgroup/memory", path, _V1)


def _ancestors(mount: Path, path: str, form: _Form) -> Iterator[tuple[int, str]]:
    """A group and all above it.  The path may be the host's and lie outside what a container sees: what is
    absent is passed over."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for n_parts in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:n_parts])
        usage = _number(folder / form.usage)
        limits = [limit for name in form.limits if (limit := _number(folder / name)) is not None]
        if usage is None or not limits or min(limits) >= _UNLIMITED:
            continue
        stat = _table(folder / "memory.stat")
        cache = sum(stat.get(name, 0) for name in form.cache) - sum(stat.get(name, 0) for name in form.busy)
        left = min(limits) - usage + min(max(cache, 0), usage)
        name = "/" + "/".join(parts[:n_parts])
        yield max(left, 0), f"cgroup {name} with a limit of {bytes_text(min(limits))}"


def _memlock(root: Path) -> int | None:
    """The soft limit of locked memory; None without one, or with the right to lock beyond it."""
    for line in _lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "CapEff":
            try:
                if int(value, 16) >> _CAP_IPC_LOCK & 1:
                    return None
            except ValueError:
                break
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max locked memory"):
            words = line.removeprefix("Max locked memory").split()
            return int(words[0]) if words and words[0].isdecimal() else None
    return None


def _nodes(root: Path) -> tuple[int, ...]:
    """Numbers of "Mems_allowed_list: 0-1,3"; none where it is not told in this form."""
    for line in _lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            ends = [part.split("-") for part in value.strip().split(",")]
            if all(1 <= len(pair) <= 2 and all(map(str.isdecimal, pair)) for pair in ends):
                return tuple(node for pair in ends for node in range(int(pair[0]), int(pair[-1]) + 1))
    return ()


def _table(file: Path) -> dict[str, int]:
    """Lines of "name number ..." as a table; other lines are passed over."""
    found: dict[str, int] = {}
    for line in _lines(file):
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
