"""Writes flashnext_drv/COVERAGE.md from the registry: kernels, orders, cases, architectures, receipts.

    python tools/coverage_table.py [--write]

Without --write it compares and exits 1 when the file is not current; tests/host/test_coverage.py does the
same.  What must stay true: everything in the file comes from the declarations and from tests/receipts,
nothing is typed by hand, and it does not depend on what was built on this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnext_drv.kernels import catalog  # noqa: E402
from flashnext_drv.kernels.spec import KernelSpec  # noqa: E402

__all__ = ["PATH", "main", "text"]

PATH = ROOT / "flashnext_drv" / "COVERAGE.md"
RECEIPTS = ROOT / "tests" / "receipts"
COMMAND = "python tools/coverage_table.py --write"


def main(argv: list[str]) -> int:
    """The command.  Exit 0 when the file is current or was written, else 1."""
    if "--write" in argv:
        PATH.write_text(text(), encoding="utf-8")
        return 0
    current = PATH.is_file() and PATH.read_text(encoding="utf-8") == text()
    print(f"{PATH.relative_to(ROOT)} is {'current' if current else f'not current; run {COMMAND}'}")
    return 0 if current else 1


def text() -> str:
    """The whole file."""
    return "\n".join([*_head(), *_orders(), *_kernels(), *_archs(), *_devices(), *_gaps()]) + "\n"


def _checked() -> list[KernelSpec]:
    """Every kernel but the probes, which are planted faults and measuring aids of the simulator's tests."""
    return [spec for family in catalog.families() if family != "probe" for spec in catalog.specs(family)]


def _controls(spec: KernelSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec, "controls", ()))


def _head() -> Iterator[str]:
    specs = _checked()
    yield "# Coverage\n"
    yield f"Made from the declarations by `{COMMAND}`; a test holds it current.\n"
    n_controls = sum(len(_controls(spec)) for spec in specs)
    yield (f"{len(specs)} kernels in {len(catalog.families()) - 1} families, "
           f"{sum(len(spec.cases) for spec in specs)} cases, {n_controls} planted controls, "
           f"{len(catalog.ARCHS)} architectures. Every case runs in the simulator in each test run "
           "(tests/contracts); on a GPU with `flashnext-drv check --device cuda`.")


def _orders() -> Iterator[str]:
    yield "\n## Arithmetic orders\n\n| order | kernels |\n| --- | --- |"
    orders: dict[str, list[str]] = {}
    for spec in _checked():
        for order in (one.strip() for one in spec.order.split(",")):
            orders.setdefault(order or "(no sum)", []).append(spec.name)
    for order, names in sorted(orders.items()):
        yield f"| {order} | {', '.join(names)} |"


def _kernels() -> Iterator[str]:
    for family in catalog.families():
        yield f"\n## Family {family}\n"
        yield "| kernel | reference | replaces | cases | controls |\n| --- | --- | --- | --- | --- |"
        for spec in catalog.specs(family):
            names = ", ".join(case.name for case in spec.cases)
            cases = f"{len(spec.cases)}: {names}" if names else "none"
            controls = ", ".join(str(c.name) for c in _controls(spec)) or "none"
            yield (f"| {spec.name} | {spec.reference or 'none'} | {spec.replaces or 'first'} | {cases} "
                   f"| {controls} |")


def _archs() -> Iterator[str]:
    yield "\n## Architectures\n"
    yield "| architecture | kernels built | with a limit | compared byte for byte on one |"
    yield "| --- | --- | --- | --- |"
    every = catalog.specs()
    for arch in catalog.ARCHS:
        yield (f"| {arch} | {len(every)} | {sum(arch in spec.limits for spec in every)} | "
               f"{'yes' if _generation(arch) in catalog.QUALIFIED else 'no'} |")


def _devices() -> Iterator[str]:
    yield "\n## Devices with receipts\n"
    paths = sorted(RECEIPTS.glob("*.json"))
    if not paths:
        yield "None."
        return
    yield "| receipt | device | compute | date | kernel sources | holds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for path in paths:
        raw = json.loads(path.read_text(encoding="utf-8"))
        device, kernels = raw.get("device"), raw.get("kernels")
        device = device if isinstance(device, dict) else {"name": device}
        kernels = kernels if isinstance(kernels, dict) else {}
        cc = device.get("cc")
        own = {"client_digest", "command", "date", "device", "form", "kernels", "package_digest",
               "source_digest", "tree", "versions"}
        yield (f"| {path.name} | {device.get('name', '?')} | {'.'.join(map(str, cc)) if cc else '?'} | "
               f"{raw.get('date', '?')} | {str(kernels.get('source_digest', '?'))[:12]} | "
               f"{', '.join(sorted(set(raw) - own)) or '-'} |")


def _gaps() -> Iterator[str]:
    yield "\n## Not covered\n"
    specs = _checked()
    bare = [spec.name for spec in specs if not _controls(spec)]
    unmeasured = [arch for arch in catalog.ARCHS if _generation(arch) not in catalog.QUALIFIED]
    yield f"- No planted control: {', '.join(bare) or 'none'}."
    yield f"- Architectures whose images were never compared on a GPU: {', '.join(unmeasured) or 'none'}."
    for spec in specs:
        for stage, why in sorted(getattr(spec, "exempt", {}).items()):
            yield f"- {spec.name}, {stage}: {why}"
    yield ("- Planted faults and measuring aids (family probe) have no case; they test the simulator and the "
           "driver layer.")


def _generation(arch: str) -> str:
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return f"{number // 10}.{number % 10}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
