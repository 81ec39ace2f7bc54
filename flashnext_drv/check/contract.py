"""Runs a kernel's declared cases: operands up, launch, outputs down, compared with the reference and hashed.

Called by `flashnext-drv check`, tests/contracts and the GPU receipts; the operands come from
check/cases_<family>.py. What must stay true: the same case and seed give the same operand bytes on every
machine (integer hashes, no library maths), and outputs hash alike in the simulator and on a GPU (NaNs made
one first).

Every array of a case lies in one guarded arena filled with poison, so bytes written behind an array are
found; arrays that a kernel declares read-only are compared with what was sent.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..drv import api
from ..drv.context import Context
from ..drv.memory import GUARD_BYTES, DeviceArena, Span, copy_to_device, copy_to_host
from ..drv.module import Launch
from ..drv.stream import Stream
from ..errors import ContractError, UsageError
from ..kernels import catalog
from ..kernels.bind import Kernels
from ..kernels.spec import PTR, Case, KernelSpec
from ..ledger import Ledger
from ..lifetime import Owner

__all__ = ["CaseResult", "CheckDevice", "Operands", "Ran", "Start", "bits", "build_operands",
           "canonical_bytes", "family_of", "hash_outputs", "inputs_kept", "launch_case", "main", "poison",
           "poison_byte", "poisoned_with", "repeat_command", "run_case"]

Arrays = dict[str, NDArray[Any]]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_TIMEOUT_S: Final = 600.0
_poison_byte = 0xFF
# Makes a launch of what is under test from a grid and arguments by name.
Start = Callable[[tuple[int, int, int], dict[str, Any]], Launch]


@dataclass
class Operands:
    """What one case launches.

    arrays: one per pointer argument, plus others that tables point to; their initial bytes.  scalars: every
    other argument.  relocations: (array, byte offset, target array, target byte offset): the target's device
    address is written there as u64.  outputs: arrays to hash, in order.  expect: raises AssertionError; gets
    all arrays as they are after the run.  by_row: arrays with one entry a row beside those that the
    declaration names.
    """

    arrays: Arrays
    scalars: dict[str, int | float]
    grid: tuple[int, int, int]
    relocations: list[tuple[str, int, str, int]]
    outputs: tuple[str, ...]
    expect: Callable[[Arrays], None]
    by_row: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaseResult:
    """Outputs of one case after the run, and their SHA-256 with every NaN made canonical."""

    kernel: str
    case: str
    seed: int
    outputs: Arrays
    sha256: str


@dataclass(frozen=True)
class Ran:
    """One launch of a case: all arrays as sent and as found afterwards, and the names of the outputs."""

    sent: Arrays
    found: Arrays
    names: tuple[str, ...]

    @property
    def outputs(self) -> Arrays:
        return {name: self.found[name] for name in self.names}


class CheckDevice(Owner):
    """Owns a context, a stream and the kernels, for checks.

    device: "cuda", "sim" or "auto".  families: by default all.  `close` ends with an empty ledger.
    """

    def __init__(self, device: str = "auto", ordinal: int = 0,
                 families: tuple[str, ...] | None = None) -> None:
        super().__init__("check")
        api.ensure(device)
        self.ledger = Ledger()
        with ExitStack() as undo:
            self.ctx = undo.enter_context(Context(ordinal, ledger=self.ledger, name="check.context"))
            self.stream = undo.enter_context(Stream(self.ctx, "check.stream"))
            self.kernels = undo.enter_context(Kernels(self.ctx, families, "check.kernels"))
            self._undo = undo.pop_all()

    def _release(self) -> None:
        self._undo.close()
        self.ledger.require_empty()


def bits(seed: int, name: str, shape: tuple[int, ...] | int) -> NDArray[np.uint32]:
    """`shape` uint32: element i is an integer hash of (seed, name, i), the same on every machine.

    The upper half of splitmix64's output at position i of the stream that SHA-256 of seed and name starts.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    start = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    z = np.arange(1, int(np.prod(shape, dtype=np.int64)) + 1, dtype=np.uint64) * _GOLDEN + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32).reshape(shape)


def poison(shape: tuple[int, ...] | int, dtype: DTypeLike) -> NDArray[Any]:
    """An array of 0xff bytes: NaN in every float format, the largest value of every unsigned one; or of the
    byte that `poisoned_with` names."""
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8)[:] = _poison_byte
    return out


def poison_byte() -> int:
    """The byte that `poison` fills with now."""
    return _poison_byte


@contextmanager
def poisoned_with(byte: int) -> Iterator[None]:
    """Cases that are built, run and compared inside use another poison: what was not written then differs."""
    global _poison_byte
    before, _poison_byte = _poison_byte, byte
    try:
        yield
    finally:
        _poison_byte = before


def canonical_bytes(array: NDArray[Any]) -> bytes:
    """The array's bytes with every NaN of a float dtype as its positive all-ones pattern."""
    packed = np.ascontiguousarray(array)
    if packed.dtype.kind == "f":
        word = np.dtype(f"u{packed.dtype.itemsize}")
        words = packed.view(word).copy()
        words[np.isnan(packed)] = np.iinfo(word).max >> 1
        return words.tobytes()
    return packed.tobytes()


def hash_outputs(outputs: Arrays) -> str:
    """SHA-256, hex, over name, dtype, shape and canonical bytes of each array, in order."""
    digest = hashlib.sha256()
    for name, array in outputs.items():
        kind = array.dtype.str if array.dtype.names is None else "struct"
        digest.update(f"{name} {kind} {array.shape}\n".encode())
        digest.update(canonical_bytes(array))
    return digest.hexdigest()


def family_of(kernel: str) -> str:
    """The family that declares `kernel`.  Raises UsageError when none does."""
    for family in catalog.families():
        if any(spec.name == kernel for spec in catalog.specs(family)):
            return family
    raise UsageError(f"no kernel is called {kernel!r}")


def build_operands(kernel: str, case: Case, seed: int = 0) -> Operands:
    """The operands of one case, from check/cases_<family>.py."""
    module = importlib.import_module(f"{__package__}.cases_{family_of(kernel)}")
    made: Operands = module.build(kernel, case, seed)
    return made


def run_case(device: CheckDevice, kernel: str, case: Case, seed: int = 0,
             operands: Operands | None = None) -> CaseResult:
    """Run one case and check it.  operands: instead of the declared case's own, e.g. with rows permuted.

    Raises ContractError naming case, seed and the command that repeats it when the outputs miss the
    reference, bytes outside the arrays changed, or an array declared read-only did.
    """
    given = operands or build_operands(kernel, case, seed)
    spec = catalog.spec(kernel)
    ran = launch_case(device, spec, given)
    try:
        inputs_kept(spec, ran.sent, ran.found)
        given.expect(ran.found)
    except AssertionError as error:
        raise ContractError(f"kernel {kernel} misses its contract", case=case.name, seed=seed,
                            because=str(error),
                            do=f"repeat with {repeat_command(kernel, case, seed)}") from error
    return CaseResult(kernel, case.name, seed, ran.outputs, hash_outputs(ran.outputs))


def launch_case(device: CheckDevice, spec: KernelSpec, given: Operands, start: Start | None = None) -> Ran:
    """Upload the operands, launch once, read everything back; nothing is compared but the guard zones.

    start: makes the launch (by default of the device's kernel that `spec` declares).  Raises ContractError
    when arrays are missing or a guard zone changed.
    """
    sent = {name: np.ascontiguousarray(array) for name, array in given.arrays.items()}
    _arguments_fit(spec, given)
    size = sum(-(-array.nbytes // GUARD_BYTES) * GUARD_BYTES + 2 * GUARD_BYTES for array in sent.values())
    with DeviceArena(device.ctx, f"check.{spec.name}", max(size, GUARD_BYTES), guard=True) as arena:
        spans = {name: arena.span(name, array.nbytes) for name, array in sent.items()}
        sent = _relocated(sent, spans, given.relocations)
        for name, array in sent.items():
            copy_to_device(device.stream, spans[name], array)
        args: dict[str, Any] = {a.name: spans[a.name] for a in spec.args if a.kind == PTR and a.name in spans}
        args.update((a.name, given.scalars[a.name]) for a in spec.args if a.name in given.scalars)
        make = start or (lambda grid, named: device.kernels.launch(spec.name, grid, **named))
        make(given.grid, args).run(device.stream)
        device.stream.synchronize(_TIMEOUT_S)
        found = {name: np.empty_like(array) for name, array in sent.items()}
        for name, array in found.items():
            copy_to_host(device.stream, array, spans[name])
        arena.check_guards()
    return Ran(sent, found, given.outputs)


def repeat_command(kernel: str, case: Case, seed: int) -> str:
    """The shortest command that runs one case again."""
    return f"python -m flashnext_drv.check.contract {api.loaded() or 'auto'} {kernel} {case.name} {seed}"


def main(argv: list[str]) -> int:
    """`python -m flashnext_drv.check.contract DEVICE KERNEL [CASE [SEED]]`: run one case, or all of a
    kernel, and print their hashes.  Raises ContractError on the first that fails."""
    if not 2 <= len(argv) <= 4:
        raise UsageError("a device and a kernel are needed", do="DEVICE KERNEL [CASE [SEED]]")
    device, kernel, wanted, seed = (*argv, *("", "0")[len(argv) - 2:])
    cases = [case for case in catalog.spec(kernel).cases if wanted in ("", case.name)]
    if not cases:
        raise UsageError(f"kernel {kernel} has no case {wanted!r}")
    with CheckDevice(device, families=(family_of(kernel),)) as check:
        for case in cases:
            print(f"{run_case(check, kernel, case, int(seed)).sha256} {kernel}/{case.name}/{int(seed)}")
    return 0


def _arguments_fit(spec: KernelSpec, given: Operands) -> None:
    pointers = {arg.name for arg in spec.args if arg.kind == PTR}
    missing = sorted(pointers - set(given.arrays) - set(given.scalars))
    if missing:
        raise ContractError(f"a case of kernel {spec.name} lacks arrays", because=", ".join(missing))


def _relocated(sent: Arrays, spans: dict[str, Span], relocations: list[tuple[str, int, str, int]]) -> Arrays:
    out = {name: array.copy() for name, array in sent.items()}
    for name, offset, target, target_offset in relocations:
        address = np.array([spans[target].address + target_offset], "<u8")
        out[name].reshape(-1).view(np.uint8)[offset:offset + 8] = address.view(np.uint8)
    return out


def inputs_kept(spec: KernelSpec, sent: Arrays, found: Arrays) -> None:
    """Raises AssertionError when an array that is declared read-only changed."""
    for arg in spec.args:
        if arg.kind == PTR and arg.rights == "r" and arg.name in sent:
            same = sent[arg.name].tobytes() == found[arg.name].tobytes()
            assert same, f"array {arg.name} is declared read-only and was written"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
