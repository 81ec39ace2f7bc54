"""Contract cases of the token family, and what they leave out: golden rows, run cuts, draws, controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import cases_token, draw_model
from flashnext_drv.check.contract import CheckDevice, Operands, build_operands, poison, run_case
from flashnext_drv.check.draw_model import Sampling
from flashnext_drv.check.operands import FRAGMENT, from_fragment, round_table, run_table, same_bits
from flashnext_drv.errors import ContractError
from flashnext_drv.kernels import token
from flashnext_drv.kernels.spec import Case, KernelSpec
from flashnext_drv.kernels.tables import ROW
from flashnext_drv.ref.exl3 import ngram_rows
from flashnext_drv.sim import control

pytestmark = pytest.mark.sim

DATA = Path(__file__).parents[1] / "data" / "exl3_vectors"
CASES = [pytest.param(spec, case, id=f"{spec.name}-{case.name}")
         for spec in token.KERNELS for case in spec.cases]
# SHA-256 of the outputs: rotary rows reach keys that are stored, so their bytes may not move between builds.
ROPE_HASHES = {
    "low": "39ef73db4732a720976a2cb82610db0686539f88de3f3ec9ef253422237dfdba",
    "high": "133b2c4274d80efde899dbe18cb5a1854c12e5569093644057173e731f36a230",
    "last": "ea581abde1bbd73789a3e5eb09cc9f64cb719e3da0fe67057bbfc42c543e9221",
    "other_base": "65c70ed7a9e59e2085cd07a73d135bd9b11285d5bcf273fe523d4c5c3fcfca09",
}


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[CheckDevice]:
    with CheckDevice(request.config.getoption("--device", default="sim"), families=("token",)) as opened:
        yield opened


def one_case(spec: KernelSpec, name: str) -> Case:
    return next(case for case in spec.cases if case.name == name)


@pytest.mark.parametrize(("spec", "case"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_case_meets_its_contract(device: CheckDevice, spec: KernelSpec, case: Case, seed: int) -> None:
    run_case(device, spec.name, case, seed)


@pytest.mark.parametrize("name", sorted(ROPE_HASHES))
def test_rotary_bytes_are_pinned(device: CheckDevice, name: str) -> None:
    assert run_case(device, "rope_rows", one_case(token.ROPE_ROWS, name)).sha256 == ROPE_HASHES[name]


def test_schedule_does_not_reach_the_bytes(request: pytest.FixtureRequest) -> None:
    """Shuffled lanes, warps and blocks: list order and atomics of draw_rows, double buffer of ple_mix."""
    if request.config.getoption("--device", default="sim") != "sim":
        pytest.skip("the order is the simulator's to choose")
    picked = [(token.DRAW_ROWS, "sampled_512"), (token.DRAW_ROWS, "flat_4096"), (token.PLE_MIX, "three_runs"),
              (token.NGRAM_ROWS, "bits5_dim160")]
    hashes = []
    try:
        for seed in (0, 1, 77):
            control.set_seed(seed)
            with CheckDevice("sim", families=("token",)) as shuffled:
                hashes.append([run_case(shuffled, spec.name, one_case(spec, name)).sha256
                               for spec, name in picked])
    finally:
        control.set_seed(0)
    assert hashes[0] == hashes[1] == hashes[2]


# --- n-gram rows against the published format's vectors -----------------------------------------------------

def ngram_operands(ids: np.ndarray, table: np.ndarray, *, width: int, dim: int, sizes: list[int],
                   multipliers: list[int], eos: int, bias: np.ndarray | None) -> Operands:
    """ids (3, n): token and the two before it."""
    n, heads = ids.shape[1], len(sizes)
    rows = poison((n,), ROW)
    rows["token"], rows["prev1"], rows["prev2"] = ids
    arrays: dict[str, Any] = {
        "round": round_table(n, n), "rows": rows, "table": table, "head_offsets": np.zeros(heads, np.int64),
        "head_sizes": np.array(sizes, np.int64), "multipliers": np.array(multipliers, np.int64),
        "emb": poison((n, heads * dim), np.dtype(np.float16))}
    scalars: dict[str, int | float] = {"bits": width, "eos": eos, "n_heads": heads, "row_dim": dim,
                                       "tiled": 0, "gathered": 0}
    if bias is None:
        scalars["head_bias"] = 0
    else:
        arrays["head_bias"] = bias
    return Operands(arrays, scalars, (heads, n, 1), [], ("emb",), lambda out: None)


@pytest.mark.parametrize("width", range(1, 9))
def test_golden_rows_of_every_codec(device: CheckDevice, width: int) -> None:
    """Token t picks packed row t for all heads; the head that the vector names is compared."""
    golden = np.load(DATA / "ngram_rows.npz")
    packed, heads, value = (golden[f"K{width}.{part}"] for part in ("packed", "head", "value_fp16"))
    n, dim = len(packed), value.shape[1]
    ids = np.stack((np.arange(n), np.zeros(n, int), np.zeros(n, int)))
    given = ngram_operands(ids, packed.view(np.uint16), width=width, dim=dim, sizes=[n] * 16,
                           multipliers=[1, 0, 0], eos=9, bias=golden["head_bias"])
    emb = run_case(device, "ngram_rows", Case(f"golden{width}", {}), operands=given).outputs["emb"]
    got = from_fragment(emb).reshape(n, 16, dim)[np.arange(n), heads]
    same_bits(f"{width} bits", got, value)
    same_bits("reference", ngram_rows(packed, golden["head_bias"][heads])[1], value)


@pytest.mark.parametrize("first", [0, 48])
def test_golden_hash_at_real_sizes(device: CheckDevice, first: int) -> None:
    """Heads of 20 million rows over one table whose row i holds a hash of i: the row tells its number."""
    golden = np.load(DATA / "ngram_hash.npz")
    eos, sizes = int(golden["eos"]), golden["head_vocab_sizes"]
    past = np.concatenate(([eos, eos], golden["ids"]))[first:]
    ids = np.stack((past[2:], past[1:-1], past[:-2]))
    if first:
        np.testing.assert_array_equal(golden["rows"][first:], golden["rows_from_48"])
    number = np.arange(int(sizes.max()), dtype=np.uint32)
    table = np.empty((len(number), 2), np.uint16)
    mixed = number * np.uint32(2654435761)
    table[:, 0], table[:, 1] = 0x2000 | mixed >> 22, mixed & 0xFFFF
    given = ngram_operands(ids, table, width=1, dim=16, sizes=[int(s) for s in sizes],
                           multipliers=[int(m) for m in golden["layer_multipliers"]], eos=eos, bias=None)
    emb = run_case(device, "ngram_rows", Case("golden_hash", {}), operands=given).outputs["emb"]
    want = golden["rows"][first:] - golden["head_offsets"]
    decoded = ngram_rows(table.view(np.int16)[want.reshape(-1)], np.zeros((want.size, 16), np.float16))[1]
    same_bits("rows", from_fragment(emb).reshape(-1, 16), decoded)


# --- ple_mix: how rows are cut into runs does not matter ----------------------------------------------------

def test_a_run_equals_launches_of_one_row(device: CheckDevice) -> None:
    case = Case("cut", {"cap": 12, "hidden": 256, "runs": "12"})
    whole = build_operands("ple_mix", case)
    whole.expect = lambda out: None
    together = run_case(device, "ple_mix", case, operands=whole).outputs
    state = whole.arrays["state"]
    for row in range(12):
        single = build_operands("ple_mix", case)
        single.expect = lambda out: None
        single.arrays["state"] = state
        single.arrays["round"] = round_table(1, 12, 1)
        for name in ("key", "value", "streams"):
            single.arrays[name] = np.roll(whole.arrays[name], -row, axis=0)
        single.arrays["runs"] = run_table([1], [0], 12)
        out = run_case(device, "ple_mix", case, operands=single).outputs
        same_bits(f"row {row}", out["streams"][0], together["streams"][row])
        state = out["state"]
    assert state.tobytes() == together["state"].tobytes()


def test_a_row_does_not_see_other_runs(device: CheckDevice) -> None:
    case = Case("others", {"cap": 8, "hidden": 256, "runs": "3 1 2"})
    together = run_case(device, "ple_mix", case).outputs["streams"]
    alone = build_operands("ple_mix", case)
    alone.expect = lambda out: None
    alone.arrays["round"] = round_table(1, 8, 1)
    alone.arrays["runs"] = run_table([1], [1], 8)                # the second run, now the only one
    for name in ("key", "value", "streams"):
        alone.arrays[name] = np.roll(alone.arrays[name], -3, axis=0)
    same_bits("streams", run_case(device, "ple_mix", case, operands=alone).outputs["streams"][0], together[3])


# --- draw_rows ----------------------------------------------------------------------------------------------

def draw_operands(logits: np.ndarray, samplings: list[Sampling], positions: list[int]) -> Operands:
    n, vocab = logits.shape
    rows = poison((n,), ROW)
    rows["slot"], rows["position"], rows["emit"] = np.arange(n), positions, 3
    u32 = np.dtype(np.uint32)
    arrays = {"round": round_table(n, n), "rows": rows, "slots": cases_token.slot_table(samplings),
              "logits": logits, "tokens": poison((n,), u32), "status": poison((n,), u32)}
    return Operands(arrays, {"vocab": vocab}, (n, 1, 1), [], ("tokens", "status"), lambda out: None)


def drawn(device: CheckDevice, logits: np.ndarray, samplings: list[Sampling],
          positions: list[int]) -> list[int]:
    given = draw_operands(logits, samplings, positions)
    out = run_case(device, "draw_rows", Case("own", {}), operands=given).outputs
    assert not out["status"].any()
    return [int(t) for t in out["tokens"]]


def test_a_row_draws_the_same_alone_and_among_others(device: CheckDevice) -> None:
    logits = cases_token.logits_rows(3, 6, 512, "sampled")
    samplings = [Sampling(5, 1.0), Sampling(6, 0.8, 20, 0.95), Sampling(7, 1.0, 0, 0.7), Sampling(5, 1.0),
                 Sampling(), Sampling(8, 1.5, 3)]
    positions = [10, 200_000, 3, 11, 4, 9]
    together = drawn(device, logits, samplings, positions)
    order = [4, 2, 0, 5, 1, 3]
    permuted = drawn(device, logits[order], [samplings[i] for i in order], [positions[i] for i in order])
    assert permuted == [together[i] for i in order]
    for i in range(6):
        assert drawn(device, logits[i:i + 1], samplings[i:i + 1], positions[i:i + 1]) == [together[i]]


def test_seed_and_position_are_the_only_key(device: CheckDevice) -> None:
    flat = np.zeros((1, 1024), np.float32)
    tokens = {(seed, position): drawn(device, flat, [Sampling(seed, 1.0)], [position])[0]
              for seed in (0, 1, 1 << 63) for position in (0, 1, 262_143)}
    assert len(set(tokens.values())) >= 8                        # nine keys, 1,024 equally likely tokens
    assert tokens[0, 1] == drawn(device, flat, [Sampling(0, 1.0)], [1])[0]


def test_frequencies_follow_the_softmax(device: CheckDevice) -> None:
    """512 draws of 8 likely tokens among 64 (the others at weight 2^-40 or less).  99.9 % quantile of
    chi-square with 7 degrees of freedom: 24.3; the keys are fixed, so the value is too."""
    weight = np.array([30, 20, 15, 12, 9, 7, 5, 2], np.float64) / 100
    logits = np.full((512, 64), -40.0, np.float32)
    logits[:, 8:16] = np.log(weight).astype(np.float32)
    tokens = np.array(drawn(device, logits, [Sampling(42, 1.0)] * 512, list(range(512)))) - 8
    assert tokens.min() >= 0 and tokens.max() < 8
    seen = np.bincount(tokens, minlength=8)
    assert float(((seen - 512 * weight) ** 2 / (512 * weight)).sum()) < 24.3


def test_top_p_cuts_exactly_at_the_integer_sum(device: CheckDevice) -> None:
    """Four tokens of weight 2^40 each: top_p 0.5 keeps two, the next fp32 above it three."""
    logits = np.full((64, 512), -100.0, np.float32)
    logits[:, [400, 7, 90, 33]] = 1.0
    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    positions = list(range(64))
    assert set(drawn(device, logits, [Sampling(1, 1.0, 0, 0.5)] * 64, positions)) == {7, 33}
    assert set(drawn(device, logits, [Sampling(1, 1.0, 0, above)] * 64, positions)) == {7, 33, 90}
    assert set(drawn(device, logits, [Sampling(1, 1.0, 3, above)] * 64, positions)) == {7, 33}
    assert set(drawn(device, logits, [Sampling(1, 1.0, 1, 1.0)] * 64, positions)) == {7}


def test_model_functions_are_near_the_real_ones() -> None:
    """exp and log of the model within 1.1 and 0.8 ulp (their stated errors), the noise always finite."""
    x = np.linspace(-80, 0, 20_001).astype(np.float32)
    error = np.abs(draw_model.exp32(x).astype(np.float64) - np.exp(x.astype(np.float64)))
    assert (error <= 1.1 * np.spacing(np.exp(x.astype(np.float64)).astype(np.float32))).all()
    u = ((np.array([0, 1, 12345, 2**22, 2**23 - 1]) + 0.5) * 2.0**-23).astype(np.float32)
    exact = np.log(u.astype(np.float64))
    assert (np.abs(draw_model.log32(u) - exact) <= 0.8 * np.spacing(np.abs(exact).astype(np.float32))).all()
    assert np.isfinite(draw_model.gumbel(7, 7, np.arange(100_000))).all()


# --- planted controls: each wrong output must be reported ---------------------------------------------------

def _rope_without_fp32_angle(out: dict[str, np.ndarray]) -> None:
    t = np.array([262_140, 262_141, 262_142, 262_143])[:, None]
    angle = t * 1e7 ** (-2 * np.arange(32) / 64)
    out["rope"][:4] = np.stack((np.cos(angle), np.sin(angle)), axis=-1)


def _ngram_natural_order(out: dict[str, np.ndarray]) -> None:
    out["emb"][:4] = from_fragment(out["emb"][:4])


def _ngram_one_ulp(out: dict[str, np.ndarray]) -> None:
    out["emb"].view(np.uint16)[0, 77] ^= 1


def _ple_tail_not_shifted(out: dict[str, np.ndarray]) -> None:
    state = out["state"].reshape(2, -1)
    state[0, 512:] = np.roll(state[0, 512:], 2 * 4 * 256)


def _ple_without_conv_rounding(out: dict[str, np.ndarray]) -> None:
    out["streams"][0] += np.float32(2**-12) * np.abs(out["streams"][0])


def _draw_runner_up(out: dict[str, np.ndarray]) -> None:
    out["tokens"][5] += 1


def _draw_status(out: dict[str, np.ndarray]) -> None:
    out["status"][1] = 0


@pytest.mark.parametrize(("spec", "case", "spoil"), [
    (token.ROPE_ROWS, "last", _rope_without_fp32_angle),
    (token.NGRAM_ROWS, "bits4_dim160", _ngram_natural_order),
    (token.NGRAM_ROWS, "bits1_dim160", _ngram_one_ulp),
    (token.PLE_MIX, "one_row", _ple_tail_not_shifted),
    (token.PLE_MIX, "one_row", _ple_without_conv_rounding),
    (token.DRAW_ROWS, "sampled_512", _draw_runner_up),
    (token.DRAW_ROWS, "nan", _draw_status)], ids=lambda value: getattr(value, "__name__", None))
def test_planted_fault_is_reported(device: CheckDevice, spec: KernelSpec, case: str,
                                   spoil: Callable[[dict[str, np.ndarray]], None]) -> None:
    given = build_operands(spec.name, one_case(spec, case))
    check = given.expect

    def spoiled(out: dict[str, np.ndarray]) -> None:
        spoil(out)
        check(out)

    given.expect = spoiled
    with pytest.raises(ContractError, match=spec.name):
        run_case(device, spec.name, one_case(spec, case), operands=given)


def test_fragment_order_is_the_contract() -> None:
    assert FRAGMENT.tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
