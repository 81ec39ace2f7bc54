"""Planted controls in the simulator: red ones are reported by a stage, a harmless edit by none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}

# In a process of its own: a simulator is loaded once a process.  Prints "kernel control red stage" a line.
SCRIPT = """
from dataclasses import replace
from flashnext_drv.check import controls
from flashnext_drv.check.contract import CheckDevice
from flashnext_drv.kernels import catalog, planted_exl3
from flashnext_drv.kernels.spec import Control, Edit
from flashnext_drv.sim import load

def with_control(kernel, *given):
    return replace(catalog.spec(kernel), controls=given)

GLUE = "glue/stream_add.cu"
specs = [
    with_control("stream_add",
        Control("harmless", "order", (Edit(GLUE, "float v = fn_ld(", "float v  =  fn_ld("),)),
        Control("swapped", "index", (Edit(GLUE, "fn_fma(p.x, v, a)", "fn_fma(v, p.x, a)"),)),
        Control("late", "barrier", (Edit(GLUE, "float a = fn_ld(s)", "fn_delay(); float a = fn_ld(s)"),)),
        Control("elsewhere", "index", (Edit(GLUE, "fn_fma(p.x, v, a)", "fn_fma(v, p.x, a)"),), hopper=True),
        Control("split", "contraction", (Edit(GLUE, "fn_fma(p.x, v, a)", "fn_add(fn_mul(p.x, v), a)"),)),
        Control("fault", "index", (Edit(GLUE, "s[0] = fn_fma(p.x, v, a);",
                                        "*reinterpret_cast<float*>(16) = fn_fma(p.x, v, a);"),)),
        Control("after_the_fault", "tail", (Edit(GLUE, "|| i >= hidden)", "|| i + 1u >= hidden)"),))),
    with_control("linear_gemv_n8",
        Control("narrow_alone", "order", (planted_exl3._NARROW,),
                ("leaves2", "leaves4", "segments2", "f16_80x1", "bf16_512x1", "one_step"))),
]
load.load(built=controls.build_simulator(specs))
box = []

def give():
    if box and box[0].ctx.broken:
        box.pop().close()
    if not box:
        box.append(CheckDevice("sim"))
    return box[0]

for spec in specs:
    for one in spec.controls:
        found = controls.judge(give, spec, one)
        print(spec.name, one.name, found.red, found.stage or "-")
give().close()
"""


@pytest.fixture(autouse=True)
def in_the_simulator(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "sim":
        pytest.skip("links its own controls into the simulator")


def test_a_harmless_edit_is_missed_and_a_fault_stops_no_other() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=ENV, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "stream_add harmless False -",
        "stream_add swapped False -",
        "stream_add late False -",
        "stream_add elsewhere False hopper",
        "stream_add split True fp64",
        "stream_add fault True guards",
        "stream_add after_the_fault True fp64",
        "linear_gemv_n8 narrow_alone False -",
    ]


def test_the_command_counts_controls() -> None:
    command = [sys.executable, "-m", "flashnext_drv", "check", "--device", "sim", "--processes", "1"]
    done = subprocess.run(
        [*command, "--kernel", "barrier_turns", "--kernel", "stream_add"],
        capture_output=True,
        text=True,
        env=ENV,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == (
        "SUMMARY 2 kernels: 2 pass, 0 fail, 0 known; 7 controls: 7 red, 0 missed"
    )
