"""Options, markers and fixtures of all tests.

--device sim|cuda chooses where everything but tests/host runs (default: FLASHNEXT_DRV_DEVICE, else sim).
Choosing cuda without a device ends the run with an error.  --slow adds the tests that take minutes; --golden
DIR names larger golden data than tests/data holds; --seed changes the seed of the kernel cases.
"""

from __future__ import annotations

import os

# Before numpy comes: tests run on as many workers as there are cores, and threads of a product that wait for
# each other take the cores from them.
# measured: 103 s of processor for four files of references, 36 s so; 2 cores, numpy 2.4 with OpenBLAS
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashnext_drv.check.contract import CheckDevice
from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context, devices
from flashnext_drv.drv.stream import Stream
from flashnext_drv.errors import FlashNextError
from flashnext_drv.ledger import Ledger
from flashnext_drv.sim import control

TESTS = Path(__file__).resolve().parent
DEVICE_FOLDERS = ("contracts", "drv", "engine", "faults", "server")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashnext_drv")
    group.addoption("--device", choices=("sim", "cuda"),
                    default=os.environ.get("FLASHNEXT_DRV_DEVICE", "sim"),
                    help="where the tests run (default: FLASHNEXT_DRV_DEVICE, else sim)")
    group.addoption("--slow", action="store_true", help="also the tests that take minutes")
    group.addoption("--golden", default="", help="folder with larger golden data")
    group.addoption("--seed", type=int, default=0, help="seed of the kernel cases")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device not in ("sim", "cuda"):
        pytest.exit(f"FLASHNEXT_DRV_DEVICE={device}: tests run on sim or cuda", returncode=2)
    if device == "cuda":
        try:
            api.ensure("cuda")
        except FlashNextError as error:
            pytest.exit(f"--device cuda: {error}", returncode=3)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device, slow = config.getoption("--device"), config.getoption("--slow")
    n_devices = len(devices()) if device == "cuda" else 0
    kept, dropped = [], []
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder == "host":
            item.add_marker("host")
        elif folder in DEVICE_FOLDERS:
            item.add_marker("sim")
        elif folder == "gpu":
            item.add_marker("gpu")
        need = 2 if item.get_closest_marker("gpu2") else 1 if item.get_closest_marker("gpu") else 0
        wanted = (slow or not item.get_closest_marker("slow")) and (not need or device == "cuda")
        if wanted and need > n_devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} GPUs, found {n_devices}"))
        (kept if wanted else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line of counts, and every skipped test by its own name with the reason."""
    stats = terminalreporter.stats
    counts = {kind: len(stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped", "xfailed",
                                                          "xpassed", "deselected")}
    for report in sorted(stats.get("skipped", ()), key=lambda r: str(r.nodeid)):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"SKIP {report.nodeid}: {why.removeprefix('Skipped: ')}")
    terminalreporter.write_line(f"COUNTS device={config.getoption('--device')} "
                                + " ".join(f"{kind}={n}" for kind, n in counts.items()))


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    """"sim" or "cuda", loaded and initialised."""
    return api.ensure(request.config.getoption("--device"))


InAnyOrder = Callable[[int, Callable[[], str]], None]


@pytest.fixture
def in_any_order(device_name: str) -> InAnyOrder:
    """Holds a digest to be the same under so many orders of lanes, warps and blocks."""
    if device_name != "sim":
        pytest.skip("a GPU runs in its own order")

    def check(n_orders: int, digest: Callable[[], str]) -> None:
        found = set()
        try:
            for seed in range(n_orders):
                control.set_seed(seed)
                found.add(digest())
        finally:
            control.set_seed(0)
        assert len(found) == 1, f"{len(found)} digests in {n_orders} orders"

    return check


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """The folder given by --golden; a test that needs it is skipped without."""
    given = request.config.getoption("--golden")
    if not given:
        pytest.skip("needs --golden DIR")
    return Path(given)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """tests/data."""
    return TESTS / "data"


@pytest.fixture(scope="session")
def case_seed(request: pytest.FixtureRequest) -> int:
    """The seed given by --seed."""
    seed: int = request.config.getoption("--seed")
    return seed


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger that must be empty at the end."""
    made = Ledger()
    yield made
    made.require_empty()


@pytest.fixture
def ctx(device_name: str, ledger: Ledger) -> Iterator[Context]:
    """A context on device 0."""
    with Context(0, ledger=ledger) as made:
        yield made


@pytest.fixture
def stream(ctx: Context) -> Iterator[Stream]:
    """A stream of `ctx`."""
    with Stream(ctx, "test.stream") as made:
        yield made


@pytest.fixture(scope="session")
def check_device(device_name: str) -> Iterator[Callable[[str], CheckDevice]]:
    """check_device(family) gives an open CheckDevice with that family's kernels, one per session; a broken
    one is replaced."""
    made: dict[str, CheckDevice] = {}

    def give(family: str) -> CheckDevice:
        found = made.get(family)
        if found is not None and found.ctx.broken:
            found.close()
            found = None
        if found is None:
            found = made[family] = CheckDevice(device_name, families=(family,))
        return found

    yield give
    for device in made.values():
        device.close()
