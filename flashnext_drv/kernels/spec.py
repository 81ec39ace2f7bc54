"""What a kernel declares about itself, as plain data.

Read by build_kernels.py (sources, macros, parameter layout), kernels/bind.py (launcher), sim/build.py
(thunks), check/contract.py (cases) and the tables.  Stdlib only: the build imports it in an isolated
environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ARCHS", "CONTROL_KINDS", "F32", "HOPPER", "I32", "PTR", "SHARED_LIMITS", "STAGES",
           "STATIC_SHARED_BYTES", "U32", "U64", "Arg", "Case", "Control", "Edit", "KernelSpec", "Limit"]

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120", "sm_121")
HOPPER = "sm_90a"
# Most shared bytes a block may have on each of ARCHS when the launch asks for them, and most that a kernel
# may hold without asking.  Source: CUDA programming guide, "technical specifications per compute capability".
SHARED_LIMITS: Mapping[str, int] = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10,
                                    "sm_90a": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10}
STATIC_SHARED_BYTES = 48 << 10
# What `flashnext-drv check` shows of every kernel (check/stages.py says how); a kernel to which one cannot
# apply says why in `exempt`.
STAGES = ("fp64", "guards", "written", "repeat", "order", "mates", "integers", "midpoints", "nonfinite")
_DATA_STAGES = ("integers", "midpoints", "nonfinite")
CONTROL_KINDS = {
    "order": "a sum in another order", "leaf": "a part of a sum dropped", "rounding": "one rounding more",
    "barrier": "a barrier missing", "tail": "off by one at an end", "tie": "a tie decided the other way",
    "scale": "a factor left out or wrong", "contraction": "an fma split, or a product and a sum contracted",
    "stale": "a table row read that takes no part, or an old one", "nan": "a NaN lost",
    "layout": "values in another place", "index": "another element read",
}

PTR = "ptr"
U32 = "u32"
I32 = "i32"
U64 = "u64"
F32 = "f32"
_SIZES = {PTR: 8, U64: 8, U32: 4, I32: 4, F32: 4}
_C_TYPES = {U32: "u32", I32: "i32", U64: "u64", F32: "float"}


@dataclass(frozen=True)
class Arg:
    """One kernel parameter.

    kind: PTR, U32, I32, U64 or F32.  doc: shape and dtype, or unit and range.
    rights: for pointers "r", "w" or "rw": what the kernel does with the bytes it points to (not with what a
    table there points to in turn).
    """

    name: str
    kind: str
    doc: str
    rights: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _SIZES:
            raise ValueError(f"argument {self.name}: unknown kind {self.kind!r}; use one of {sorted(_SIZES)}")
        if (self.kind == PTR) != (self.rights in ("r", "w", "rw")):
            raise ValueError(f"argument {self.name}: rights {self.rights!r} do not fit kind {self.kind!r}")

    @property
    def size_bytes(self) -> int:
        return _SIZES[self.kind]


@dataclass(frozen=True)
class Limit:
    """Resources a kernel may use on one architecture; spill and stack are bytes a thread."""

    regs: int
    spill_bytes: int = 0
    blocks_per_sm: int = 1


@dataclass(frozen=True)
class Case:
    """One named set of dimensions under which a kernel is checked; `dims` is read by the family's case
    builder.  shows: the stages ("integers", "midpoints", "nonfinite") that this case's data are made for;
    where dims["special"] or dims["data"] is one of these words, or begins with it, it need not be said
    again."""

    name: str
    dims: Mapping[str, int | float | str]
    shows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        words = (str(self.dims.get("special", "")), str(self.dims.get("data", "")))
        said = tuple(stage for stage in _DATA_STAGES if stage not in self.shows
                     and any(word.startswith(stage) for word in words))
        object.__setattr__(self, "shows", (*self.shows, *said))

    def __getitem__(self, key: str) -> int | float | str:
        return self.dims[key]

    def int(self, key: str) -> int:
        value = self.dims[key]
        if not isinstance(value, int):
            raise TypeError(f"case {self.name}: {key} is {value!r}, not an int")
        return value


@dataclass(frozen=True)
class Edit:
    """One textual change: `old` stands exactly once in `file` (a path below cuda_src) and becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Control:
    """A wrong variant of a kernel, made by edits of its real text, which the check must report.

    kind: one of CONTROL_KINDS.  cases: names of the kernel's cases to run, in order (default: all).
    racecheck: why the fault cannot be brought to light by running it on a GPU; there it is left to the race
    checker, and counted apart.  The simulator runs it all the same.  hopper: its text stands in images for
    sm_90a alone; every other device, the simulator too, leaves it to one of those, and counts it apart.
    """

    name: str
    kind: str
    edits: tuple[Edit, ...]
    cases: tuple[str, ...] = ()
    racecheck: str = ""
    hopper: bool = False

    def __post_init__(self) -> None:
        if self.kind not in CONTROL_KINDS or not self.edits:
            raise ValueError(f"control {self.name}: kind {self.kind!r} is unknown, or it edits nothing")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: source, arithmetic order, parameters, launch shape, resources, reference and cases.

    source: path below cuda_src.  order: name in ARITHMETIC.md ("" for kernels without a sum).
    grid: words, one line.  block: threads, a multiple of 32.  shared_bytes: sizeof of the FN_SHARED struct,
    else 0; hopper_shared_bytes: the same in sm_90a images, where the struct differs (#ifdef FN_HOPPER), 0
    where it does not.  Above STATIC_SHARED_BYTES the memory is dynamic and the launcher asks for it;
    SHARED_LIMITS are the most.  defines: macros set before the source is included, besides FN_NAME,
    FN_NAMESPACE, FN_THREADS, FN_BLOCKS_PER_SM, FN_SHARED_BYTES and FN_SHARED_KIND.  reference:
    "<module>.<function>" below flashnext_drv.ref.  programmatic: it calls fn_let_next and fn_wait_prior
    (prelude.cuh) and may be launched ahead of the end of the launches before it.  constants: its pointer
    arguments whose bytes no launch and no copy changes while rounds run, with what they point to in turn
    left out: they may be read before fn_wait_prior.  fence: it calls fn_let_next behind fn_wait_prior, so
    launches behind it begin when all before it are done; so is the first launch of a path, which waits for
    all before it to end.  settled: pointer arguments last written by launches before the fence that stands
    before this kernel: they may be read before fn_wait_prior too.  The name of an offset (U64) stands for
    what lies there in the state of a slot, of which this kernel is the only writer.  spread: launches whose
    blocks fit on the device at once are spread evenly over its SMs.  strides: blocks stride in x over the
    grid that is asked for, and a launch has no more than the device has SMs.  bound: words, with the
    derivation of the tolerance against FP64.  limits: of each of ARCHS.  rows: axis of the launch's rows in
    each array of a case, by name (with * and ?).  exempt: stage -> why it cannot apply.  controls: wrong
    variants that the check must report.  broken: why the kernel breaks rules on purpose; it then has no
    contract and is never checked.
    """

    name: str
    source: str
    order: str
    args: tuple[Arg, ...]
    grid: str
    block: int
    shared_bytes: int = 0
    hopper_shared_bytes: int = 0
    blocks_per_sm: int = 1
    programmatic: bool = False
    constants: tuple[str, ...] = ()
    fence: bool = False
    settled: tuple[str, ...] = ()
    spread: bool = False
    strides: bool = False
    defines: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    reference: str = ""
    bound: str = ""
    replaces: str = ""
    cases: tuple[Case, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    controls: tuple[Control, ...] = ()
    broken: str = ""

    def __post_init__(self) -> None:
        if self.block % 32 or not 32 <= self.block <= 1024:
            raise ValueError(f"kernel {self.name}: block {self.block} is not a multiple of 32 in 32..1024")
        for arch in ARCHS:
            if not 0 <= self.shared_on(arch) <= SHARED_LIMITS[arch]:
                raise ValueError(f"kernel {self.name}: {self.shared_on(arch)} shared bytes on {arch}, "
                                 f"outside 0..{SHARED_LIMITS[arch]}")
        names = [a.name for a in self.args]
        if len(set(names)) != len(names):
            raise ValueError(f"kernel {self.name}: an argument name occurs twice in {names}")
        early = (*self.constants, *self.settled)
        odd = set(early) - {a.name for a in self.args if a.kind == PTR and a.rights == "r"}
        odd -= {a.name for a in self.args if a.kind == U64 and a.name in self.settled}
        if odd or ((early or self.fence) and not self.programmatic):
            raise ValueError(f"kernel {self.name}: what a programmatic kernel reads early, {early}, are "
                             f"pointers that it only reads")

    def offsets(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) in bytes of every parameter, natural alignment: what the cubin must say."""
        out, at = [], 0
        for arg in self.args:
            size = arg.size_bytes
            at = (at + size - 1) // size * size
            out.append((at, size))
            at += size
        return tuple(out)

    def shared_on(self, arch: str) -> int:
        """Shared bytes a block in the image for `arch`, one of ARCHS or "simulator"."""
        return (self.hopper_shared_bytes if arch == HOPPER else 0) or self.shared_bytes

    def dynamic_on(self, arch: str) -> int:
        """How many of `shared_on` a launch must ask for: all or none."""
        bytes_ = self.shared_on(arch)
        return bytes_ if bytes_ > STATIC_SHARED_BYTES else 0

    def static_on(self, arch: str) -> int:
        """The rest of `shared_on`: what the image itself holds."""
        return self.shared_on(arch) - self.dynamic_on(arch)

    def macros(self, arch: str = "simulator") -> tuple[tuple[str, str], ...]:
        """Every macro the source is compiled under for `arch`, in order."""
        return (("FN_NAME", self.name), ("FN_NAMESPACE", f"ns_{self.name}"), ("FN_THREADS", str(self.block)),
                ("FN_BLOCKS_PER_SM", str(self.blocks_per_sm)),
                ("FN_SHARED_BYTES", str(self.shared_on(arch))),
                ("FN_SHARED_KIND", "DYNAMIC" if self.dynamic_on(arch) else "STATIC"), *self.defines)

    def all_macros(self) -> tuple[tuple[str, str], ...]:
        """What `macros` says for any architecture: for digests."""
        return tuple(dict.fromkeys((*self.macros(), *self.macros(HOPPER))))
