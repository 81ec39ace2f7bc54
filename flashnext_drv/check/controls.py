"""Planted controls: wrong variants of the kernels, made by edits of their real text, which must be reported.

Owns: their images (linked into the simulator, or cubins that `python build_kernels.py --controls` made) and
the verdict on each.  Called by worker.py and cli/check.py.  What must stay true: a control goes through the
same stages as its kernel, and only a stage's own words make it red: an image that is missing or stale is an
error.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..drv.module import Launch, Module
from ..errors import BuildError, ContractError, DriverError, FlashNextError
from ..kernels.bind import make_launch, simulator_image
from ..kernels.planting import control_digest, control_image, control_root, plant, planted
from ..kernels.spec import Case, Control, KernelSpec
from ..sim.build import Variant, build
from .contract import CheckDevice, Operands, Ran, Start, build_operands, inputs_kept, launch_case
from .mates import check_cuts, check_mates, planes
from .stages import poisoned_otherwise, repeats, written

__all__ = ["Verdict", "build_simulator", "judge", "launch_control"]


@dataclass(frozen=True)
class Verdict:
    """What became of one control.  fault: its kind.  stage: which one reported it; "racecheck" or "hopper"
    when it cannot be brought to light by running it here; "" when it was missed.  text: the stage's words, or
    why.
    """

    kernel: str
    control: str
    fault: str
    red: bool
    stage: str
    case: str
    text: str


def build_simulator(specs: Sequence[KernelSpec]) -> Path:
    """The simulator with the controls of `specs` beside all real kernels; built now if the cache lacks it."""
    with tempfile.TemporaryDirectory(prefix="flashnext-controls-") as scratch:
        variants = []
        for spec in specs:
            for control in (one for one in spec.controls if not one.hopper):
                name, digest = control_image(spec, control), control_digest(spec, control)
                folder = Path(scratch) / name
                plant(spec, control, folder)
                variants.append(Variant(name, planted(spec, control), folder, digest))
        return build(variants=variants)


def judge(open_device: Callable[[], CheckDevice], spec: KernelSpec, control: Control) -> Verdict:
    """Run the control on its cases until a stage reports it.

    open_device: gives a device that works, a fresh one after a broken one.  Raises BuildError when there is
    no current image of the control, or it names a case that does not exist.
    """

    def verdict(stage: str, case: str, text: str, red: bool) -> Verdict:
        return Verdict(spec.name, control.name, control.kind, red, stage, case, " ".join(text.split())[:400])

    facts = open_device().ctx.facts
    if control.racecheck and not facts.is_simulator:
        return verdict("racecheck", "", control.racecheck, red=False)
    if control.hopper and (facts.is_simulator or facts.cc != (9, 0)):
        return verdict("hopper", "", "its text stands in images for sm_90a alone", red=False)
    cases = _cases(spec, control)
    for case in cases:
        device = open_device()
        given = build_operands(spec.name, case)
        real = launch_case(device, spec, given)
        image, digest = _image(device, spec, control)
        module = Module(device.ctx, control_image(spec, control), image, digest)

        def start(grid: tuple[int, int, int], args: dict[str, Any], module: Module = module) -> Launch:
            return make_launch(module, planted(spec, control), grid, args)

        found = _reported(device, spec, case, given, real, start)
        module.close()
        if found is not None:
            return verdict(found[0], case.name, found[1], red=True)
    return verdict("", "", f"{len(cases)} cases saw nothing", red=False)


def launch_control(device: CheckDevice, spec: KernelSpec, control: Control) -> None:
    """Launch the control once on each of its cases, judging nothing: for a checker that watches."""
    image, digest = _image(device, spec, control)
    with Module(device.ctx, control_image(spec, control), image, digest) as module:

        def start(grid: tuple[int, int, int], args: dict[str, Any]) -> Launch:
            return make_launch(module, planted(spec, control), grid, args)

        for case in _cases(spec, control):
            launch_case(device, spec, build_operands(spec.name, case), start)


def _cases(spec: KernelSpec, control: Control) -> Sequence[Case]:
    by_name = {case.name: case for case in spec.cases}
    unknown = [name for name in control.cases if name not in by_name]
    if unknown:
        raise BuildError(
            f"control {control.name} of kernel {spec.name} names no case", because=", ".join(unknown)
        )
    return [by_name[name] for name in control.cases] or list(spec.cases)


def _reported(
    device: CheckDevice, spec: KernelSpec, case: Case, given: Operands, real: Ran, start: Start
) -> tuple[str, str] | None:
    """(stage, its words) of the first stage that reports what `start` launches."""
    for stage, run in _trials(device, spec, case, given, real, start):
        try:
            run()
        except (
            AssertionError,
            ContractError,
            DriverError,
            ArithmeticError,
            LookupError,
            ValueError,
        ) as error:
            # the last three: an expectation that meets impossible values
            return stage, f"{type(error).__name__}: {error}"
        except FlashNextError as error:
            if not device.ctx.broken:
                raise
            return stage, f"{type(error).__name__}: {error}"
    return None


def _trials(
    device: CheckDevice, spec: KernelSpec, case: Case, given: Operands, real: Ran, start: Start
) -> Iterator[tuple[str, Callable[[], object]]]:
    ran: list[Ran] = []

    def guards() -> None:
        ran.append(launch_case(device, spec, given, start))
        inputs_kept(spec, ran[0].sent, ran[0].found)

    def same_bytes() -> None:
        for name, array in real.outputs.items():
            for x, y in zip(planes(array), planes(ran[0].found[name]), strict=True):
                assert (x == y).all(), (
                    f"{name}: {int((x != y).sum())} of {x.size} elements differ from the kernel's"
                )

    yield "guards", guards
    yield "fp64", lambda: given.expect(ran[0].found)
    yield "bytes", same_bytes
    other, masks = poisoned_otherwise(spec, case, given)
    yield "written", lambda: written(device, spec, other, ran[0], masks, start)
    yield "repeat", lambda: repeats(device, spec, given, ran[0], masks, start)
    yield "mates", lambda: check_mates(device, spec, given, ran[0], start)
    yield "mates", lambda: check_cuts(device, spec, given, ran[0], start)


def _image(device: CheckDevice, spec: KernelSpec, control: Control) -> tuple[bytes, str]:
    name, digest = control_image(spec, control), control_digest(spec, control)
    if device.ctx.facts.is_simulator:
        return simulator_image(name, digest), digest
    entry = _manifest().get(name)
    if entry is None or entry["digest"] != digest:
        raise BuildError(
            f"the image of {name} is {'missing' if entry is None else 'stale'}",
            do="run python build_kernels.py --controls",
        )
    try:
        return (control_root() / str(entry["file"])).read_bytes(), digest
    except OSError as error:
        raise BuildError(
            f"the image of {name} cannot be read", do="run python build_kernels.py --controls"
        ) from error


@cache
def _manifest() -> dict[str, dict[str, str]]:
    try:
        data: dict[str, dict[str, str]] = json.loads(
            (control_root() / "manifest.json").read_text(encoding="utf-8")
        )
        return data
    except (OSError, ValueError) as error:
        raise BuildError(
            "no images of planted controls were built",
            do="run python build_kernels.py --controls, or check with --no-controls",
        ) from error
