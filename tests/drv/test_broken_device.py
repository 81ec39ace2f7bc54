"""A kernel that touches memory it must not: typed error, host-only close, empty ledger.  In a process of its
own, because a real device may refuse everything afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import sys
from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import DeviceArena, fill_bytes
from flashnext_drv.drv.stream import Stream
from flashnext_drv.errors import ContextLost
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.kernels.tables import ROUND
from flashnext_drv.drv.memory import copy_to_device
from flashnext_drv.ledger import Ledger
import numpy as np

api.ensure(sys.argv[1])
ledger = Ledger()
try:
    with Context(0, ledger=ledger) as ctx, Stream(ctx, "s") as stream, Kernels(ctx, ("glue",)) as kernels, \\
            DeviceArena(ctx, "a", 1 << 16) as arena:
        table = arena.span("round", ROUND.itemsize)
        copy_to_device(stream, table, np.array([(1, 1, 1, 1)], ROUND))
        nowhere = dict(streams=4096, y=4096, inject=4096)
        kernels.launch("stream_add", (1, 1), round=table, hidden=128, **nowhere).run(stream)
        stream.synchronize()
        print("no error")
except ContextLost as error:
    print("lost", error.call, error.code, ctx.broken != "", ctx.closed, arena.closed)
    print(error)
ledger.require_empty()
print("empty", sorted(e.owner for e in ledger.lost()), int(api.cuCtxGetCurrent()))
"""


def test_a_kernel_that_reaches_outside_breaks_the_context_and_everything_closes(device_name: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, device_name], cwd=ROOT, capture_output=True,
                          text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("lost ") and lines[0].endswith("True True True"), done.stdout
    assert lines[-1] == "empty ['a', 'context.service', 'kernels.glue', 's'] 0"
    if device_name == "sim":
        assert "stream_add" in lines[1], "the simulator must say which kernel"
