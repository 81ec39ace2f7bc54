"""What the simulator says about kernels that break the rules of warps and blocks, and about seeded orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashnext_drv.sim import control

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        (1, 719, "deadlock"),
        (2, 719, "collective"),
        (3, 719, "block barrier"),
        (4, 719, "another collective"),
        (5, 719, "past its 32 bytes of shared memory"),
        (8, 716, "misaligned access of 8 bytes"),
        (10, 719, "integer division by zero"),
    ],
)
def test_broken_rule_is_a_launch_failure_with_kernel_block_and_thread(
    sim: Any, mode: int, code: int, words: str, seed: int
) -> None:
    control.set_seed(seed)
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    sim.launch("fault", x=x, y=y, mode=mode, index=3)
    assert sim.sync() == code
    text = control.last_finding()
    assert text.startswith("kernel fault block (0,0,0)") and words in text, text
    assert sim.sync() == code, "the error stays"
    assert sim.launch("fault", x=x, y=y, mode=0, index=0)[0] == code


def test_another_context_goes_on_after_a_failure(sim: Any) -> None:
    x, y = sim.upload(np.arange(128, dtype=np.uint32)), sim.device(512)
    sim.launch("fault", x=x, y=y, mode=3, index=0)
    assert sim.sync() == 719
    other = sim.ok("cuCtxCreate", None, 0, 0)
    stream = sim.ok("cuStreamCreate", 1)
    function = sim.ok("cuModuleGetFunction", sim.ok("cuModuleLoadData", sim.image()), b"fault")
    x, y = sim.upload(np.arange(128, dtype=np.uint32)), sim.device(512)
    sim.ok(
        "cuLaunchKernel",
        function,
        1,
        1,
        1,
        128,
        1,
        1,
        0,
        stream,
        sim.params("fault", x=x, y=y, mode=0, index=0),
        0,
    )
    sim.ok("cuStreamSynchronize", stream)
    assert sim.download(y, 128).tolist() == list(range(128))
    sim.ok("cuCtxDestroy", other)


def turned(sim: Any, kernel: str, n_blocks: int = 4) -> bytes:
    x, y = sim.upload(np.arange(256 * n_blocks, dtype=np.uint32)), sim.device(1024 * n_blocks)
    assert sim.launch(kernel, n_blocks, x=x, y=y, turns=5)[0] == 0
    assert sim.sync() == 0
    out = sim.download(y, 256 * n_blocks).tobytes()
    sim.ok("cuMemFree", x)
    sim.ok("cuMemFree", y)
    return out


def test_missing_barrier_changes_bytes_under_some_order(sim: Any) -> None:
    whole, broken = set(), []
    for seed in range(6):
        control.set_seed(seed)
        whole.add(turned(sim, "barrier_turns"))
        broken.append(turned(sim, "barrier_turns_broken"))
    assert len(whole) == 1
    assert len({*broken, *whole}) > 1


def test_workers_share_blocks_without_changing_bytes(sim: Any) -> None:
    alone = turned(sim, "barrier_turns", 33)
    control.set_workers(3)
    assert turned(sim, "barrier_turns", 33) == alone
    control.set_seed(5)
    assert turned(sim, "barrier_turns", 33) == alone


def test_failure_in_one_of_many_blocks_is_reported_with_workers_too(sim: Any) -> None:
    control.set_workers(2)
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    sim.launch("fault", 16, x=x, y=y, mode=4, index=0)
    assert sim.sync() == 719
    assert "another collective" in control.last_finding()


def missing_wait(sim: Any, wait: bool) -> list[int]:
    """Producer on one stream, consumer on another, the host waits for the consumer alone."""
    one, two = sim.ok("cuStreamCreate", 1), sim.ok("cuStreamCreate", 1)
    event = sim.ok("cuEventCreate", 2)
    x, y, z = (
        sim.upload(np.arange(128, dtype=np.uint32)),
        sim.upload(np.zeros(128, np.uint32)),
        sim.device(512),
    )
    sim.launch("fault", x=x, y=y, mode=0, index=0, stream=one)
    sim.ok("cuEventRecord", event, one)
    if wait:
        sim.ok("cuStreamWaitEvent", two, event, 0)
    sim.launch("fault", x=y, y=z, mode=0, index=0, stream=two)
    assert sim.sync(two) == 0
    out: list[int] = sim.download(z, 128).tolist()
    assert sim.sync(one) == 0
    for stream in (one, two):
        sim.ok("cuStreamDestroy", stream)
    return out


def test_missing_event_wait_changes_bytes(sim: Any) -> None:
    assert missing_wait(sim, wait=True) == list(range(128))
    assert missing_wait(sim, wait=False) == [0] * 128
    with_wait, without = set(), set()
    for seed in range(1, 9):
        control.set_seed(seed)
        with_wait.add(tuple(missing_wait(sim, wait=True)))
        without.add(tuple(missing_wait(sim, wait=False)))
    assert with_wait == {tuple(range(128))}
    assert len(without) == 2, "other orders run the producer first"


def test_query_runs_one_item_so_polling_ends(sim: Any) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    before = control.counter("launches")
    for _ in range(3):
        sim.launch("fault", x=x, y=y, mode=0, index=0)
    event = sim.ok("cuEventCreate", 2)
    sim.ok("cuEventRecord", event, sim.stream)
    assert control.counter("launches") == before, "nothing runs before it must"
    codes = [sim.call("cuStreamQuery", sim.stream)[0] for _ in range(2)]
    assert codes == [600, 600] and control.counter("launches") == before + 2
    assert [sim.call("cuEventQuery", event)[0] for _ in range(2)] == [600, 0]
    assert sim.call("cuStreamQuery", sim.stream)[0] == 0


@pytest.mark.parametrize("bf16", [0, 1])
def test_generations_have_their_own_mma_bits(sim: Any, bf16: int) -> None:
    from flashnext_drv.check import mma_model

    kernel = ("mma_tiles_f16", "mma_tiles_bf16")[bf16]
    a, b, c = mma_model.operands("normal", bool(bf16), 16, 3)
    found = {}
    for generation in ("sm_90", "sm_80"):
        control.set_generation(generation)
        d = sim.device(c.nbytes)
        sim.launch(kernel, 4, a=sim.upload(a), b=sim.upload(b), c=sim.upload(c), d=d, n=16)
        assert sim.sync() == 0
        found[generation] = sim.download(d, c.size)
    for generation, model in (("sm_90", mma_model.SM90), ("sm_80", mma_model.SM80)):
        wanted = mma_model.mma(a, b, c, bool(bf16), model).view(np.uint32).reshape(-1)
        assert (found[generation] == wanted).all()
    assert (found["sm_90"] != found["sm_80"]).any()
    assert sim.ok("cuDeviceGetAttribute", sim.d.CUdevice_attribute(75), 0) == 8
