"""The check's own machinery: each stage must report what it is there for, on operands spoilt on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flashnext_drv.check import accumulate, mates, stages
from flashnext_drv.check.contract import CheckDevice, Operands, Ran, Start, build_operands, launch_case
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import STAGES, Case, KernelSpec

Give = Callable[[str], CheckDevice]


def find(kernel: str, case: str) -> tuple[KernelSpec, Case]:
    spec = catalog.spec(kernel)
    return spec, next(one for one in spec.cases if one.name == case)


def whole(device: CheckDevice, kernel: str, case: str) -> tuple[KernelSpec, Operands, Ran]:
    spec, one = find(kernel, case)
    given = build_operands(kernel, one)
    return spec, given, launch_case(device, spec, given)


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("glue", "stream_add"),
        ("gdn", "gdn_conv"),
        ("token", "ple_mix"),
        ("moe", "moe_sum"),
        ("probe", "barrier_turns"),
    ],
)
def test_every_stage_is_shown_or_exempt_with_a_reason(check_device: Give, family: str, kernel: str) -> None:
    results = list(stages.check_kernel(lambda: check_device(family), catalog.spec(kernel)))
    assert [one for one in results if not one.ok] == []
    assert {one.stage for one in results} == set(STAGES)
    assert all(one.text for one in results if one.exempt)


def test_kernel_without_a_stage_or_a_reason_fails(check_device: Give) -> None:
    bare = replace(catalog.spec("stream_add"), exempt={}, cases=catalog.spec("stream_add").cases[:1])
    failed = {one.stage for one in stages.check_kernel(lambda: check_device("glue"), bare) if not one.ok}
    assert failed == {"order", "mates", "integers", "midpoints", "nonfinite"}


def sabotaged(device: CheckDevice, kernel: str, **scalars: int) -> Start:
    """A launch with another scalar than given."""

    def start(grid: tuple[int, int, int], args: dict) -> object:
        return device.kernels.launch(kernel, grid, **{**args, **scalars})

    return start  # type: ignore[return-value]


def test_an_output_element_that_is_not_written_is_reported(check_device: Give) -> None:
    device = check_device("move")
    spec, case = find("synth_fill", "words")
    given = build_operands("synth_fill", case)
    start = sabotaged(device, "synth_fill", count=4095)
    ran = launch_case(device, spec, given, start)
    other, masks = stages.poisoned_otherwise(spec, case, given)
    with pytest.raises(AssertionError):
        stages.written(device, spec, other, ran, masks, start)


def test_a_launch_that_writes_more_the_second_time_is_reported(check_device: Give) -> None:
    device = check_device("move")
    spec, case = find("synth_fill", "words_short")
    given = build_operands("synth_fill", case)
    ran = launch_case(device, spec, given)
    _, masks = stages.poisoned_otherwise(spec, case, given)
    stages.repeats(device, spec, given, ran, masks)
    with pytest.raises(AssertionError, match="differ between two runs"):
        stages.repeats(device, spec, given, ran, masks, sabotaged(device, "synth_fill", count=10))


def test_poison_of_outputs_is_told_from_data_of_the_same_bytes() -> None:
    """The state of ple_mix is bytes, some of them 0xff by chance: only true poison may be replaced."""
    spec, case = find("ple_mix", "three_runs")
    given = build_operands("ple_mix", case)
    _, masks = stages.poisoned_otherwise(spec, case, given)
    state = np.asarray(given.arrays["state"])
    assert (state == 0xFF).any() and not masks["state"].any()
    assert masks["streams"].any() and not masks["streams"].all()


def test_a_row_that_depends_on_its_neighbours_is_reported(check_device: Give) -> None:
    device = check_device("glue")
    spec, given, ran = whole(device, "stream_add", "all_rows")
    assert mates.check_mates(device, spec, given, ran) == 3

    def start(grid: tuple[int, int, int], args: dict) -> object:
        return device.kernels.launch("stream_add", grid, **{**args, "hidden": 128 if grid[1] == 1 else 256})

    with pytest.raises(AssertionError, match="the last alone"):
        mates.check_mates(device, spec, given, ran, start)  # type: ignore[arg-type]


def test_a_run_is_cut_into_tokens_and_its_state_handed_on(check_device: Give) -> None:
    device = check_device("gdn")
    spec, given, ran = whole(device, "gdn_step", "mixed_runs")
    assert mates.longest_run(spec, given) == 3
    assert mates.check_cuts(device, spec, given, ran) == 3
    ran.found["state"].reshape(-1).view(np.uint8)[1000] ^= 1
    with pytest.raises(AssertionError, match="state"):
        mates.check_cuts(device, spec, given, ran)


def test_selection_moves_rows_and_tables_together() -> None:
    spec, case = find("gdn_conv", "mixed_runs")
    given = build_operands("gdn_conv", case)
    part = mates.select(spec, given, [3, 0], shrink=True)
    assert part.order == (6, 7, 8, 9, 10, 11, 12, 0, 1, 2)
    runs = part.operands.arrays["runs"]
    assert runs["n_rows"].tolist()[:2] == [7, 3] and runs["first_row"].tolist()[:2] == [0, 7]
    assert part.operands.arrays["part0"].shape[1] == 10 == part.operands.grid[2]
    assert (part.operands.arrays["part0"] == given.arrays["part0"][:, list(part.order)]).all()


def test_every_kernel_claims_fp32_sums_or_says_why_not() -> None:
    named = set(accumulate.SUMS) | set(accumulate.NO_SUMS)
    assert {spec.name for spec in catalog.specs() if not spec.broken} == named
    assert all(len(one.shapes) >= 6 for name, one in accumulate.SUMS.items() if "gemv" in name)


@pytest.mark.parametrize("kernel", sorted(accumulate.SUMS))
def test_coarser_sums_miss_the_bound(kernel: str) -> None:
    found = list(accumulate.factors(kernel))
    assert len(found) == 6 and all(one.ok for one in found), [one.text for one in found]


def test_simulated_sums_are_what_they_say() -> None:
    x = np.array([[2048.0, 1.0, 1.0, 1.0]])
    assert accumulate.simulate(x, "fp16", "sequential")[0] == 2048.0  # each 1 is half an ulp and lost
    assert accumulate.simulate(x, "fp16", "pairwise")[0] == 2050.0
    assert accumulate.simulate(x / 8, "bf16", "sequential")[0] == 256.0
    lanes = np.ones((1, 64)) * 3
    assert accumulate.simulate(lanes, "bf16", "32 lanes")[0] == 192.0
