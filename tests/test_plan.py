"""The choice of tiles: always one, the same for neighbours, of the kind that measurement favours, with reasons."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import attention, kv_idx, q_idx, score

from fusecomp.errors import PlanError
from fusecomp.ir.algebra import apply
from fusecomp.planning import device
from fusecomp.planning import plan as planning
from fusecomp.planning.backward import backward_plan
from fusecomp.planning.devices import DEVICES
from fusecomp.planning.tile import TilePlan
from fusecomp.planning.workload import Workload

H200 = device.find("h200")


def plan_of(workload: Workload, name: str = "h200", budget: int | None = None) -> TilePlan:
    return planning.plan(workload.region, workload.sizes, device.find(name), budget)


def shape(p: TilePlan) -> tuple[object, ...]:
    return p.skeleton, p.block_m, p.block_n, p.warps, p.stages, p.pack, p.d_chunks, p.dv_chunks


workloads = st.builds(
    Workload,
    n=st.integers(1, 40_000),
    d=st.integers(8, 256),
    dv=st.none() | st.integers(8, 256),
    dtype=st.sampled_from(["bf16", "fp16", "fp32", "tf32"]),
    causal=st.booleans(),
    heads=st.sampled_from([1, 4, 8, 32]),
    kv_heads=st.sampled_from([None, 1]),
    batch=st.integers(1, 64),
    m=st.none() | st.integers(1, 300),
    window=st.none() | st.integers(1, 4096),
    softcap=st.none() | st.just(30.0),
    bias=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(workloads, st.sampled_from(sorted(DEVICES)), st.none() | st.integers(60_000, 300_000))
def test_there_is_always_a_plan_that_fits(workload: Workload, name: str, budget: int | None) -> None:
    p = plan_of(workload, name, budget)
    assert p.cost is not None
    assert p.cost.smem_bytes <= min(budget or 10**9, DEVICES[name].smem_bytes)
    assert p.block_m >= 16
    assert p.block_n >= 16
    assert p.warps in ((2, 4) if p.decodes else (4, 8))
    assert sum(p.dv_chunks) >= (workload.dv or workload.d)
    assert sum(p.d_chunks[0]) >= workload.d
    assert all(r.reason for r in p.rejected)
    assert p.cost.seconds > 0
    assert p.cost.programs >= 1


def test_a_tight_budget_shrinks_the_tile() -> None:
    budgets = (232_448, 100_000, 50_000, 20_000)
    plans = [plan_of(Workload(4096), budget=b) for b in budgets]
    taken = [p.cost.smem_bytes for p in plans if p.cost]
    areas = [p.block_m * p.block_n * p.stages for p in plans]
    assert taken == sorted(taken, reverse=True)
    assert all(t <= b for t, b in zip(taken, budgets, strict=True))
    assert areas[0] > areas[-1]


def test_an_impossible_budget_says_what_the_least_is() -> None:
    with pytest.raises(PlanError, match=r"nothing fits in 8192 B .*: the smallest tile, 16x16 in 1 stage, needs \d+ B"):
        plan_of(Workload(4096, 256), budget=8192)
    with pytest.raises(PlanError, match="must be positive"):
        plan_of(Workload(4096), budget=0)


@settings(max_examples=8, deadline=None)
@given(st.integers(1025, 2048), st.integers(5, 8), st.integers(9, 16))
def test_neighbouring_lengths_share_a_plan(n: int, batch: int, heads: int) -> None:
    assert shape(plan_of(Workload(n, batch=batch, heads=heads, causal=True))) == shape(
        plan_of(Workload(2048, batch=8, heads=16, causal=True))
    )


def test_the_cost_is_that_of_the_lengths_asked_for() -> None:
    near, far = plan_of(Workload(1100, heads=16)), plan_of(Workload(2048, heads=16))
    assert near.cost
    assert far.cost
    assert near.cost.hbm_bytes < 0.6 * far.cost.hbm_bytes


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 512), (13, 40)])
def test_a_mask_that_hides_every_key_has_a_plan(m: int, n: int) -> None:
    """Gradients too: where nothing is visited, times were shares of nothing."""
    hidden = attention(score, apply("lt", kv_idx, q_idx), apply("ge", kv_idx, q_idx), d=64, dtype="bfloat16")
    sizes = {"B": 2, "H": 4, "M": m, "N": n}
    assert planning.plan(hidden, sizes, device.find("h200")).cost
    assert backward_plan(hidden, device.find("h200"), sizes).keys.block_m


def test_identical_layers_get_identical_plans() -> None:
    assert plan_of(Workload(2048, causal=True)) == plan_of(Workload(2048, causal=True))


@pytest.mark.parametrize(
    ("workload", "kinds"),
    [
        (Workload(4096, 128, heads=16, batch=4), {(64, 64, 4, 3, "descriptor"), (128, 128, 8, 3, "descriptor")}),
        (Workload(4096, 128, heads=16, batch=4, causal=True), {(64, 64, 4, 3, "descriptor")}),
        (
            Workload(18_000, 128, heads=8, causal=True),
            {(128, 128, 8, 3, "descriptor"), (64, 64, 4, 3, "descriptor")},
        ),
        (Workload(4096, 64, heads=16, batch=4), {(64, 128, 4, 2, "descriptor"), (128, 128, 4, 3, "descriptor")}),
        (Workload(4096, 256, heads=8, batch=2), {(128, 64, 8, 2, "descriptor")}),
        (Workload(1024, 64, heads=16, batch=8), {(64, 64, 4, 3, "pointer"), (128, 64, 8, 3, "pointer")}),
    ],
)
def test_hopper_choices_are_those_that_measured_fastest(workload: Workload, kinds: set[tuple[object, ...]]) -> None:
    p = plan_of(workload)
    assert (p.block_m, p.block_n, p.warps, p.stages, p.loads) in kinds


@pytest.mark.parametrize(
    ("workload", "name", "describable"),
    [
        (Workload(4096), "h200", False),
        (Workload(4096), "a100", True),
        (Workload(4096, dtype="tf32"), "h200", True),
        (Workload(4096, 100), "h200", True),  # rows of 200 B: no whole number of 16 B
        (Workload(65536, m=1), "h200", True),
    ],
)
def test_pointers_where_descriptors_cannot_be(workload: Workload, name: str, describable: bool) -> None:
    p = planning.plan(workload.region, workload.sizes, device.find(name), describable=describable)
    assert p.loads == "pointer"
    assert {r.loads for r in p.rejected} == {"pointer"}


@pytest.mark.parametrize(("d", "kinds"), [(64, {(128, 64, 4, 3)}), (128, {(128, 32, 4, 3), (128, 64, 8, 3)})])
def test_ampere_choices_are_those_that_libraries_settled_on(d: int, kinds: set[tuple[int, ...]]) -> None:
    """But for D 128, where four warps of 128 x 64 would spill 66 registers as Triton compiles them."""
    p = plan_of(Workload(4096, d, heads=16, batch=4), "a100")
    assert (p.block_m, p.block_n, p.warps, p.stages) in kinds


@pytest.mark.parametrize(
    ("workload", "skeleton", "pack"),
    [
        (Workload(65536, m=1, heads=32, kv_heads=8), "decode", 4),
        (Workload(4096, m=1, heads=32, kv_heads=8, batch=8), "decode", 4),
        (Workload(4096, m=1, heads=32, kv_heads=8, batch=64), "prefill", 4),  # enough programs without splitting
        (Workload(8192, m=1, heads=32), "decode", 1),
        (Workload(8192, m=1, heads=28, kv_heads=4), "decode", 7),
        (Workload(8192, m=1, heads=64, kv_heads=1), "decode", 64),
        (Workload(8192, m=1, heads=192, kv_heads=1), "decode", 64),  # of 96, O leaves no registers
        (Workload(8192, 576, dv=512, m=1, heads=128, kv_heads=1), "decode", 64),  # by eight warps
        (Workload(8192, 576, dv=512, m=1, heads=16, kv_heads=1), "decode", 16),
        (Workload(128, m=1, heads=32), "prefill", 1),
        (Workload(8192, m=512, heads=32, kv_heads=8), "prefill", 1),
    ],
)
def test_skeletons(workload: Workload, skeleton: str, pack: int) -> None:
    p = plan_of(workload)
    assert (p.skeleton, p.pack) == (skeleton, pack)
    assert p.block_m >= p.pack


def test_decode_is_bound_by_memory_and_near_its_floor() -> None:
    """K and V read once at 4.4 TB/s; dense decoding kernels measured 245 us here."""
    w = Workload(4096, m=1, heads=32, kv_heads=8, batch=64)
    c = plan_of(w).cost
    assert c is not None
    assert c.bound == "memory"
    assert c.seconds == pytest.approx(245e-6, rel=0.1)


def test_reasons_hold_numbers() -> None:
    reasons = [r.reason for r in plan_of(Workload(4096, 128)).rejected]
    assert any("B of shared memory, 232448 usable" in r for r in reasons)
    assert any("slower" in r and "against" in r for r in reasons)
    assert any("registers a thread, 255 there are" in r for r in reasons)


def test_registers_that_there_are_not_are_said_to_spill() -> None:
    rows = planning.tiles(Workload(4096, 64, causal=True, softcap=30.0), device.find("a100-80"))
    costs = [row.cost for row in rows]
    assert max(c.registers for c in costs) == device.find("a100-80").registers_per_thread
    assert all(c.registers == 255 for c in costs if c.spilled)
    assert any(c.a_thread.endswith(f"255 registers a thread and {c.spilled} spilled") for c in costs if c.spilled)
    assert any(c.a_thread == f"{c.registers} registers a thread" for c in costs if not c.spilled)


def test_rows_are_ranked_and_print() -> None:
    ranked = planning.tiles(Workload(18_000, 128, causal=True), H200)
    fitting = [r for r in ranked if not r.reason.startswith("needs")]
    assert ranked[0].reason == ""
    assert all(r.reason for r in ranked[1:])
    times = [r.cost.seconds for r in fitting[1:]]
    assert times == sorted(times)
    assert {"block_m", "smem_bytes", "hbm_bytes", "unfused_hbm_bytes", "seconds", "bound", "reason"} <= set(
        planning.table(ranked)[0]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"n": 8, "heads": -1}, "heads must be"),
        ({"n": 8, "dtype": "int8"}, "unknown dtype"),
        ({"n": 8.0}, "n must be a whole number, not 8.0"),
        ({"n": 8, "m": "8"}, "m must be a whole number, not '8'"),
        ({"n": 1 << 40}, "n must be at most 16777216"),
        ({"n": 8, "heads": 6, "kv_heads": 4}, "multiple of kv_heads"),
    ],
)
def test_wrong_workloads_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Workload(**fields)  # type: ignore[arg-type]


def test_choosing_is_fast() -> None:
    """A few milliseconds of processor time, a fraction of one where a neighbour was planned before."""
    plan_of(Workload(4096))
    region, sizes = Workload(4096, 112, causal=True).region, Workload(4096).sizes
    start = time.process_time()
    planning.plan(region, sizes, H200)
    first = time.process_time()
    planning.plan(region, {**sizes, "N": 3000}, H200)
    assert first - start < 0.05
    assert time.process_time() - first < 0.01
