"""Launch records: what every kernel became on every architecture, compared with limits and with a record.

Called by `flashnext-drv records`, tests/host/test_records.py and tools/fill_limits.py.  What must stay true:
figures come from the cubins (spill bytes from the build's manifest, because no cubin holds them), never from
a declaration (dynamic shared memory apart); images of other sources than lie here are refused, not measured;
a record is stale as soon as a kernel's sources, figures or instructions differ from it, whatever the
difference.

Blocks per SM are computed, so that they are known for GPUs that are not there:

    warps     = threads / 32
    by warps  = (threads an SM holds / 32) // warps
    by regs   = (65536 // (32 * (regs rounded up to 8)), rounded down to 4) // warps
    by shared = shared bytes an SM holds // ((shared + 1024 the system reserves) rounded up to 128)
    blocks    = the least of these and of the blocks an SM holds

Source: CUDA programming guide, table "technical specifications per compute capability" (threads, blocks,
registers, shared memory); allocation units and the reserved KiB: the CUDA occupancy calculator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import BuildError
from ..kernels import catalog
from ..kernels.bind import Kernels
from ..kernels.cubin import CubinKernel, read_cubin
from ..kernels.spec import KernelSpec

__all__ = ["SM_LIMITS", "Finding", "KernelEntry", "Record", "Resources", "SmLimits", "blocks_per_sm",
           "changed_encodings", "compare", "device_differences", "dump", "load", "measure", "over_limits",
           "stale_sources"]

_FORMAT: Final = 1
_KIB: Final = 1024
_REGISTERS: Final = 65536
_RESERVED_SHARED_BYTES: Final = 1024


@dataclass(frozen=True)
class SmLimits:
    """What one multiprocessor holds at a time; shared memory with the largest carve-out."""

    threads: int
    blocks: int
    shared_bytes: int


SM_LIMITS: Final[Mapping[str, SmLimits]] = {
    "sm_80": SmLimits(2048, 32, 164 * _KIB),
    "sm_86": SmLimits(1536, 16, 100 * _KIB),
    "sm_89": SmLimits(1536, 24, 100 * _KIB),
    "sm_90a": SmLimits(2048, 32, 228 * _KIB),
    "sm_120": SmLimits(1536, 24, 100 * _KIB),
    "sm_121": SmLimits(1536, 24, 100 * _KIB),
}


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture.  Bytes a thread: stack, spills; bytes a block: shared (in the image)
    and dynamic (what a launch asks for: no image holds it, so it comes from the declaration).

    text_sha256: SHA-256, hex, of its instructions.
    """

    regs: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    blocks_per_sm: int
    text_sha256: str
    dynamic_bytes: int = 0


@dataclass(frozen=True)
class KernelEntry:
    """One kernel.  source_sha256: of all it is built from.  params: (offset, size) in bytes of each."""

    family: str
    source_sha256: str
    block: int
    params: tuple[tuple[int, int], ...]
    archs: Mapping[str, Resources]


@dataclass(frozen=True)
class Record:
    """All kernels, by name, and what built them."""

    tool: Mapping[str, str]
    option_digest: str
    kernels: Mapping[str, KernelEntry]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.  arch: "" where all are meant.  kind: "missing", "stale", "limit", "encoding",
    "driver" or "gone"."""

    kind: str
    kernel: str
    arch: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.kernel:<24} {self.arch or 'all':<7} {self.text}"


def blocks_per_sm(arch: str, regs: int, shared_bytes: int, threads: int) -> int:
    """Blocks that an SM of `arch` holds at once, 0 when not even one fits."""
    holds = SM_LIMITS[arch]
    warps = threads // 32
    by_regs = _REGISTERS // (32 * _up(max(regs, 1), 8)) // 4 * 4 // warps
    by_shared = holds.shared_bytes // _up(shared_bytes + _RESERVED_SHARED_BYTES, 128)
    return min(holds.threads // 32 // warps, by_regs, by_shared, holds.blocks)


def measure(manifest: catalog.Manifest | None = None, root: Path | None = None) -> Record:
    """The record of the images that were built, for the architectures that were built.

    manifest, root: by default this package's.  Raises BuildError when images are missing or stale, or a
    kernel is not in its image.
    """
    built = manifest or catalog.manifest()
    found: dict[str, KernelEntry] = {}
    for family in catalog.families():
        per_arch: dict[str, dict[str, Resources]] = {}
        for arch in built.archs():
            image = built.image(family, arch)
            if image.source_digest != catalog.source_digest(family):
                raise BuildError(f"the kernel image of family {family} for {arch} is stale",
                                 because="it was built from other sources than lie here",
                                 do="run python build_kernels.py")
            _, kernels = read_cubin(image.read(root))
            for spec in catalog.specs(family):
                if spec.name not in kernels:
                    raise BuildError(f"kernel {spec.name} is not in the image of family {family}", arch=arch,
                                     do="run python build_kernels.py --force")
                per_arch.setdefault(spec.name, {})[arch] = _resources(
                    spec, arch, kernels[spec.name], image.kernels[spec.name])
        for spec in catalog.specs(family):
            found[spec.name] = KernelEntry(family, catalog.kernel_digest(spec.name), spec.block,
                                           spec.offsets(), per_arch.get(spec.name, {}))
    return Record(dict(built.tool), built.option_digest, found)


def over_limits(measured: Record) -> Iterator[Finding]:
    """Every kernel that needs more than it declares, or declares nothing, on an architecture measured."""
    for name, entry in measured.kernels.items():
        limits = catalog.spec(name).limits
        for arch, made in entry.archs.items():
            limit = limits.get(arch)
            if limit is None:
                yield Finding("limit", name, arch, "no limit is declared")
                continue
            spilled = max(made.spill_store_bytes, made.spill_load_bytes)
            if made.regs > limit.regs:
                yield Finding("limit", name, arch, f"{made.regs} registers, limit {limit.regs}")
            if spilled > limit.spill_bytes:
                yield Finding("limit", name, arch, f"{spilled} spill bytes, limit {limit.spill_bytes}")
            if made.blocks_per_sm < limit.blocks_per_sm:
                yield Finding("limit", name, arch,
                              f"{made.blocks_per_sm} blocks per SM, at least {limit.blocks_per_sm} declared")


def compare(measured: Record, record: Record | None) -> Iterator[Finding]:
    """What `record` (None: there is none) lacks or holds otherwise than measured; all six architectures are
    due."""
    if record is None:
        yield Finding("missing", "", "", "there is no record")
        return
    if (measured.option_digest, dict(measured.tool)) != (record.option_digest, dict(record.tool)):
        yield Finding("stale", "", "",
                      f"built by {dict(measured.tool)} with options {measured.option_digest}, "
                      f"recorded {dict(record.tool)} with {record.option_digest}")
    for name, entry in measured.kernels.items():
        known = record.kernels.get(name)
        if known is None:
            yield Finding("missing", name, "", "no record of this kernel")
            continue
        yield from _compare_kernel(name, entry, known)
    for name in record.kernels:
        if name not in measured.kernels:
            yield Finding("gone", name, "", "recorded, but no kernel is called so")


def stale_sources(record: Record) -> Iterator[Finding]:
    """What can be told of `record` without images: kernels that it lacks or whose sources have changed."""
    for spec in catalog.specs():
        known = record.kernels.get(spec.name)
        if known is None:
            yield Finding("missing", spec.name, "", "no record of this kernel")
        elif known.source_sha256 != catalog.kernel_digest(spec.name):
            yield Finding("stale", spec.name, "", "its sources or declaration changed")
        for arch in catalog.ARCHS:
            if known is not None and arch not in known.archs:
                yield Finding("missing", spec.name, arch, "no record for this architecture")
    declared = {spec.name for spec in catalog.specs()}
    for name in record.kernels:
        if name not in declared:
            yield Finding("gone", name, "", "recorded, but no kernel is called so")


def changed_encodings(measured: Record, release: Record) -> Iterator[Finding]:
    """Kernels whose sources are those of `release` and whose instructions are not; both by the same tool."""
    for name, entry in measured.kernels.items():
        old = release.kernels.get(name)
        if old is None or old.source_sha256 != entry.source_sha256:
            continue
        for arch, made in entry.archs.items():
            before = old.archs.get(arch)
            if before is not None and before.text_sha256 != made.text_sha256:
                yield Finding("encoding", name, arch, "untouched since that release, other instructions: "
                              f"{before.text_sha256[:16]} became {made.text_sha256[:16]}")


def device_differences(kernels: Kernels, measured: Record) -> Iterator[Finding]:
    """Where the driver says otherwise than the cubin, on the device on which `kernels` is open.

    Compared: registers, static shared bytes, local bytes (the stack), and that a block may have the threads
    declared.
    """
    for name in kernels.names():
        entry = measured.kernels[name]
        made = entry.archs.get(kernels.arch)
        if made is None:
            yield Finding("missing", name, kernels.arch, "not measured for this device's architecture")
            continue
        said = kernels.module(entry.family).function(name).attributes()
        for what, driver, cubin in (("registers", said.regs, made.regs),
                                    ("shared bytes", said.shared_bytes, made.shared_bytes),
                                    ("local bytes", said.local_bytes, made.stack_bytes),
                                    ("threads a block", said.max_threads, entry.block)):
            if driver != cubin:
                yield Finding("driver", name, kernels.arch,
                              f"{what}: the driver says {driver}, the cubin {cubin}")


def dump(record: Record) -> str:
    """The record as JSON text, one line a kernel and architecture, sorted."""
    lines = ["{", f' "format": {_FORMAT},', f' "tool": {json.dumps(dict(record.tool), sort_keys=True)},',
             f' "option_digest": {json.dumps(record.option_digest)},', ' "kernels": {']
    blocks = []
    for name, entry in sorted(record.kernels.items()):
        archs = ",\n".join(f"   {json.dumps(arch)}: {json.dumps(_told(entry.archs[arch]))}"
                           for arch in sorted(entry.archs, key=_arch_order))
        params = json.dumps([list(p) for p in entry.params])
        blocks.append(f'  {json.dumps(name)}: {{"family": {json.dumps(entry.family)}, '
                      f'"source_sha256": {json.dumps(entry.source_sha256)},\n'
                      f'   "block": {entry.block}, "params": {params},\n   "archs": {{\n{archs}}}}}')
    return "\n".join(lines) + "\n" + ",\n".join(blocks) + "\n }\n}\n"


def load(path: Path) -> Record | None:
    """The record in `path`; None when there is no such file.  Raises BuildError when it cannot be used."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']!r}")
        return Record(dict(raw["tool"]), str(raw["option_digest"]),
                      {str(name): _entry(one) for name, one in raw["kernels"].items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BuildError("the launch record cannot be used", file=str(path),
                         because=f"{type(error).__name__}: {error}",
                         do="run flashnext-drv records --update") from error


def _compare_kernel(name: str, entry: KernelEntry, known: KernelEntry) -> Iterator[Finding]:
    if known.source_sha256 != entry.source_sha256:
        yield Finding("stale", name, "", "its sources or declaration changed")
    for what, made, recorded in (("family", entry.family, known.family), ("block", entry.block, known.block),
                                 ("parameters", entry.params, known.params)):
        if made != recorded:
            yield Finding("stale", name, "", f"{what}: built {made}, recorded {recorded}")
    for arch in catalog.ARCHS:
        made_here, recorded_here = entry.archs.get(arch), known.archs.get(arch)
        if made_here is None:
            yield Finding("missing", name, arch, "no image was built")
        elif recorded_here is None:
            yield Finding("missing", name, arch, "no record for this architecture")
        elif made_here != recorded_here:
            yield Finding("stale", name, arch, ", ".join(_differences(made_here, recorded_here)))


def _differences(made: Resources, recorded: Resources) -> Iterable[str]:
    before = asdict(recorded)
    for what, value in asdict(made).items():
        if value != before[what]:
            yield ("other instructions" if what == "text_sha256"
                   else f"{what}: built {value}, recorded {before[what]}")


def _resources(spec: KernelSpec, arch: str, kernel: CubinKernel, told: catalog.KernelRecord) -> Resources:
    dynamic_bytes = spec.dynamic_on(arch)
    fitting = blocks_per_sm(arch, kernel.regs, kernel.shared_bytes + dynamic_bytes, spec.block)
    return Resources(kernel.regs, kernel.shared_bytes, kernel.stack_bytes, told.spill_store_bytes,
                     told.spill_load_bytes, fitting, kernel.text_sha256, dynamic_bytes)


def _told(made: Resources) -> dict[str, Any]:
    """As it stands in the record: kernels without dynamic memory do not tell of it."""
    return {what: value for what, value in asdict(made).items() if what != "dynamic_bytes" or value}


def _entry(raw: Mapping[str, Any]) -> KernelEntry:
    params = tuple((int(offset), int(size)) for offset, size in raw["params"])
    return KernelEntry(raw["family"], raw["source_sha256"], raw["block"], params,
                       {arch: Resources(**one) for arch, one in raw["archs"].items()})


def _arch_order(arch: str) -> tuple[int, str]:
    return catalog.ARCHS.index(arch) if arch in catalog.ARCHS else len(catalog.ARCHS), arch


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
