"""Kernels: the images of every family on one context, and launches made from declarations.

Made once per context by `engine/rank.py` and by the contract runner.  What must stay true: no image runs that
was built from other sources or lays its parameters out otherwise than declared; a launch's arguments are
checked by name and kind when it is made, never again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..drv.context import Context, DeviceFacts, DriverOwner
from ..drv.memory import Span
from ..drv.module import Launch, Module, pack
from ..errors import BuildError, ContractError, UsageError
from ..lifetime import Undo
from . import catalog
from .spec import F32, I32, PTR, U32, U64, Arg, KernelSpec

__all__ = ["Kernels", "Value", "make_launch", "simulator_image", "spread_bytes"]

Value = Span | int | float | np.integer[Any] | np.floating[Any]
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    PTR: (0, 2**64 - 1), U64: (0, 2**64 - 1), U32: (0, 2**32 - 1), I32: (-2**31, 2**31 - 1)}
_SCALARS: Final[Mapping[str, Any]] = {PTR: np.uint64, U64: np.uint64, U32: np.uint32, I32: np.int32}
_F32_LIMIT: Final = 2.0**128 * (1 - 2.0**-25)    # from here on rounding gives an infinity
_RESERVED: Final = 1024    # bytes of shared memory that the driver takes of every block, from sm_80 on
_GRID_LIMIT: Final = (2**31 - 1, 65535, 65535)


class Kernels(DriverOwner):
    """Owns one module per kernel family on `ctx`.

    families: by default all.  On a GPU the cubins of its architecture, in the simulator its own build of the
    sources. warning: "" or what whoever opens the device must be told.
    Raises BuildError when there is no image for this GPU, or it is stale or broken; ContractError when an
    image differs from the declaration.
    """

    def __init__(self, ctx: Context, families: tuple[str, ...] | None = None, name: str = "kernels") -> None:
        super().__init__(name, holds=(ctx,))
        self.ctx = ctx
        self.arch = _arch(ctx)
        self.warning = _warning(ctx)
        self._modules: dict[str, Module] = {}
        self._specs: dict[str, tuple[KernelSpec, str]] = {}
        with Undo() as undo:
            for family in families or catalog.families():
                image, digest = _image(ctx, self.arch, family)
                self._modules[family] = undo.enter_context(Module(ctx, f"{name}.{family}", image, digest))
                for spec in catalog.specs(family):
                    self._specs[spec.name] = (spec, family)
            self._undo = undo.pop_all()

    def names(self) -> tuple[str, ...]:
        """Every kernel that can be launched."""
        return tuple(self._specs)

    def arguments(self, kernel: str) -> tuple[str, ...]:
        """The declared names of a kernel's arguments, in order."""
        return tuple(arg.name for arg in self._specs[kernel][0].args)

    def module(self, family: str) -> Module:
        """The module of a family."""
        return self._modules[family]

    def launch(self, kernel: str, grid: int | tuple[int, ...], **args: Value) -> Launch:
        """A launch of `kernel`, every argument given by its declared name.

        grid: blocks in x, or (x, y), or (x, y, z).  Pointers: a Span, or a device address as int (0 where the
        declaration allows none).  Raises ContractError on a missing, unknown or unfitting argument.
        """
        self.require_open()
        if kernel not in self._specs:
            raise ContractError(f"no kernel is called {kernel!r}", do="see kernels/catalog.py")
        spec, family = self._specs[kernel]
        return make_launch(self._modules[family], spec, grid, args)

    def may_lead(self, kernel: str) -> bool:
        """Whether launches of `kernel` may be made programmatic here: it is declared so, and the device is of
        compute capability 9.0 or later."""
        return self._specs[kernel][0].programmatic and self.ctx.facts.cc >= (9, 0)

    def strides(self, kernel: str) -> bool:
        """Whether a launch's blocks stride over the grid that it was asked for."""
        return self._specs[kernel][0].strides

    def _check_close(self) -> None:
        super()._check_close()
        used = sorted({name for module in self._modules.values() for name in module.borrowers()})
        if used:
            raise UsageError(f"Kernels {self.name} cannot be closed", because=f"used by {', '.join(used)}",
                             do="close those first")

    def _release(self) -> None:
        self._modules.clear()
        self._undo.close()


def make_launch(module: Module, spec: KernelSpec, grid: int | tuple[int, ...],
                args: Mapping[str, Value]) -> Launch:
    """A launch of the kernel that `spec` declares, out of any module that holds it.

    Raises ContractError on a missing, unknown or unfitting argument.
    """
    _names_fit(spec, args)
    values = [_value(spec, arg, args[arg.name]) for arg in spec.args]
    arenas = {id(v.arena): v.arena for v in args.values() if isinstance(v, Span)}
    function = module.function(spec.name)
    blocks, arch = _grid(spec, grid), _arch(module.ctx)
    if spec.strides:
        blocks = (min(blocks[0], module.ctx.facts.n_sms), *blocks[1:])
    dynamic_bytes = spec.dynamic_on(arch) or spread_bytes(module.ctx.facts, spec, arch, blocks)
    if dynamic_bytes:
        function.allow_shared(dynamic_bytes)
    return Launch(function, blocks, spec.block, dynamic_bytes, pack(spec.offsets(), values),
                  holds=tuple(arenas.values()), names=tuple(arg.name for arg in spec.args))


def spread_bytes(facts: DeviceFacts, spec: KernelSpec, arch: str, grid: tuple[int, int, int]) -> int:
    """Dynamic shared memory of a block that holds the blocks of a launch to an equal number on every SM.

    Blocks that start ahead of the end of the launch before may be given out SM by SM, and the fullest SM is
    how long the launch takes.  So a launch whose blocks are all on the device at once asks for memory, which
    it does not use, until an SM holds no more than its share.  0 where nothing is to be held.
    """
    share = -(-grid[0] * grid[1] * grid[2] // facts.n_sms)
    if not spec.spread or facts.is_simulator or facts.cc < (9, 0) or not 1 < share < spec.blocks_per_sm:
        return 0
    of_block = (facts.shared_optin_bytes + _RESERVED) // share // 128 * 128 - _RESERVED
    return max(0, of_block - spec.static_on(arch))


def simulator_image(family: str, digest: str = "") -> bytes:
    """What stands for a cubin in the simulator: it runs its own build, and refuses another digest (by default
    that of the family's sources)."""
    digest = digest or catalog.image_digest(family)
    return b"FLASHNEXT-SIM\0" + family.encode() + b"\0" + digest.encode() + b"\0"


def _arch(ctx: Context) -> str:
    if ctx.facts.is_simulator:
        return "simulator"
    return catalog.pick_arch(ctx.facts.cc, catalog.manifest().archs(), gpu=str(ctx.facts))


def _image(ctx: Context, arch: str, family: str) -> tuple[bytes, str]:
    digest = catalog.image_digest(family)
    if ctx.facts.is_simulator:
        return simulator_image(family), digest
    image = catalog.manifest().image(family, arch)
    if image.source_digest != digest:
        raise BuildError(f"the kernel image of family {family} for {arch} is stale",
                         because="it was built from other sources than lie here",
                         do="run python build_kernels.py")
    for spec in catalog.specs(family):
        record = image.kernels.get(spec.name)
        if record is None:
            raise ContractError(f"kernel {spec.name} is not in the image of family {family} for {arch}")
        if record.params != spec.offsets():
            raise ContractError(f"kernel {spec.name} takes other parameters than declared",
                                image=record.params,
                                declared=spec.offsets())
        if record.shared_bytes != spec.static_on(arch) or record.max_threads < spec.block:
            raise ContractError(f"kernel {spec.name} was built for another launch than declared",
                                shared_bytes=record.shared_bytes, declared_shared_bytes=spec.static_on(arch),
                                max_threads=record.max_threads, declared_block=spec.block)
    return image.read(), digest


def _warning(ctx: Context) -> str:
    generation = f"{ctx.facts.cc[0]}.{ctx.facts.cc[1]}"
    if ctx.facts.is_simulator or generation in catalog.QUALIFIED:
        return ""
    return (f"{ctx.facts} has no receipt: the kernels were not yet compared byte for byte on compute "
            f"capability {generation}; run flashnext-drv check before you rely on the results")


def _names_fit(spec: KernelSpec, args: Mapping[str, Value]) -> None:
    declared = {arg.name for arg in spec.args}
    missing = [arg.name for arg in spec.args if arg.name not in args]
    unknown = sorted(set(args) - declared)
    if missing or unknown:
        found = f"missing {missing}" if missing else ""
        found += f"{', ' if found else ''}unknown {unknown}" if unknown else ""
        raise ContractError(f"arguments of kernel {spec.name} do not fit", because=found)


def _value(spec: KernelSpec, arg: Arg, value: Value) -> np.generic:
    scalar: np.generic
    if arg.kind == F32:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise ContractError(f"argument {arg.name} of kernel {spec.name} is no number", given=value)
        number: Any = value
        if _F32_LIMIT <= abs(number) < float("inf"):
            raise ContractError(f"argument {arg.name} of kernel {spec.name} is outside f32", given=value)
        scalar = np.float32(value)
        return scalar
    if isinstance(value, Span):
        if arg.kind != PTR:
            raise ContractError(f"argument {arg.name} of kernel {spec.name} is {arg.kind}, not a pointer",
                                given=value.name)
        value.arena.require_open()
        value = value.address
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ContractError(f"argument {arg.name} of kernel {spec.name} is no {arg.kind}", given=value)
    low, high = _RANGES[arg.kind]
    if not low <= int(value) <= high:
        raise ContractError(f"argument {arg.name} of kernel {spec.name} is outside {arg.kind}", given=value)
    scalar = _SCALARS[arg.kind](int(value))
    return scalar


def _grid(spec: KernelSpec, grid: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = (grid,) if isinstance(grid, int) else tuple(grid)
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in given):
        raise ContractError(f"grid of kernel {spec.name} is not of integers", grid=grid)
    x, y, z = (*given, 1, 1, 1)[:3]
    if len(given) > 3 or any(not 1 <= n <= most for n, most in zip((x, y, z), _GRID_LIMIT, strict=True)):
        raise ContractError(f"grid of kernel {spec.name} is not possible", grid=grid, limit=_GRID_LIMIT)
    return int(x), int(y), int(z)
