"""For tools/mutate.py, in a process of its own: loads a simulator of few kernel families, so a changed header
costs their compilation alone; as a pytest plugin, or to run the stages of `flashnext-drv check`.

    python -m pytest -p mutate_load ...         with MUTATE_FAMILIES=exl3,probe
    python tools/mutate_load.py KERNEL...       prints FAILED check::KERNEL::STAGE - words, exit status 1
"""

from __future__ import annotations

import os
import sys
import warnings

from flashnext_drv.sim import load

FAMILIES = tuple(os.environ["MUTATE_FAMILIES"].split(","))
load.load(families=FAMILIES)


def main(kernels: list[str]) -> int:
    from flashnext_drv.check import stages
    from flashnext_drv.check.contract import CheckDevice
    from flashnext_drv.kernels import catalog
    warnings.simplefilter("ignore", RuntimeWarning)
    for name in kernels:
        with CheckDevice("sim", families=FAMILIES) as device:
            for one in stages.check_kernel(lambda device=device: device, catalog.spec(name)):
                if not one.ok:
                    print(f"FAILED check::{name}::{one.stage} - {one.text}")
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
