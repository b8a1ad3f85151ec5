"""Gradients where a mask is data: dQ visits the tiles of keys, dK and dV those of queries, that it shows in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import agree, qkv, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels import Interpreter, tiles
from regions import B, H, M, N, attention, b, causal, dropout, filled, grouped, h, kv_idx, load, q_idx, scaled_score
from test_codegen import normal
from test_visits import KEEP, SIZES, adds, keeps
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.logsumexp import saved
from fusecomp.graph.capture import placeholder_values
from fusecomp.ir.algebra import apply
from fusecomp.ir.region import AttentionRegion
from fusecomp.pipeline import compile_graph
from fusecomp.planning.backward import BackwardPlan, backward_plan, by_table
from fusecomp.running import lower
from fusecomp.settings import Options

INF = float("inf")
i, j = torch.arange(37)[:, None], torch.arange(53)[None, :]


def listed(region: AttentionRegion, learned: Sequence[str] = (), block_m: int = 16, block_n: int = 16) -> BackwardPlan:
    plan = by_table(small(region, block_m, block_n), region, frozenset(learned), "table")
    assert plan.queries.visits == plan.keys.visits == "table"
    return plan


def held(interpreter: Interpreter, region: AttentionRegion, args: list[Tensor], **more: Any) -> None:
    """Both kernels, of unlike tiles, against autograd."""
    learn = more.get("learn", ())
    plan = listed(region, learn)
    plan = replace(plan, keys=replace(plan.keys, block_m=16, block_n=32))
    agree(interpreter, region, args, {**SIZES, **more.pop("sizes", {})}, plan, **more)


@pytest.mark.parametrize("name", KEEP)
def test_boolean_masks(interpreter: Interpreter, name: str) -> None:
    """V has no gradient in eager where a row sees no key: NaN."""
    dead = bool((~KEEP[name]).all(1).any())
    held(interpreter, keeps(q_idx, kv_idx), [*qkv(16, m=37, n=53), KEEP[name]], wanted=("q", "k") + ("v",) * (not dead))


def test_added_masks(interpreter: Interpreter) -> None:
    """0 and -inf in blocks, other numbers elsewhere: each of the two sequences has its own."""
    kinds = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    kinds = kinds.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :37, :53]
    mask = normal(2, 1, 37, 53).where(kinds < 0.6, 0.0).masked_fill(kinds < 0.3, -INF)
    mask[..., 52] = 1.0
    held(interpreter, adds(b, 0, q_idx, kv_idx, shape=(B, 1, M, N)), [*qkv(16, m=37, n=53), mask])


def test_heads_that_share_keys_and_differ_in_masks(interpreter: Interpreter) -> None:
    region = keeps(b, h, q_idx, kv_idx, shape=(B, H, M, N), **grouped(3, 2))
    keep = torch.stack([KEEP[x] for x in ("causal", "window", "documents", "holes", "all", "left_padding")])
    keep = torch.stack([keep, keep.flip(0)]) | (j == 7)
    held(interpreter, region, [*qkv(16, m=37, n=53, heads=6, kv=2), keep], sizes={"H": 6})


def test_a_bound_and_slopes_that_learn_beside_a_mask(interpreter: Interpreter) -> None:
    s = apply("add", scaled_score, apply("mul", apply("sub", kv_idx, q_idx), load(1, h)))
    region = attention(s, causal, load(0, q_idx, kv_idx, dtype="bool"), loads=[((M, N), "bool"), ((H,), "float32")])
    args = [*qkv(16, m=37, n=53), KEEP["window"] | (j == 0), normal(3) / 8]
    held(interpreter, region, args, learn=("load1",))


def test_rows_that_average_over_every_key(interpreter: Interpreter) -> None:
    seen = load(0, b, q_idx, kv_idx, dtype="bool")
    region = attention(scaled_score, seen, loads=[((B, M, N), "bool")], **filled(-1e9, seen))
    keep = torch.stack([KEEP["causal"] & (i != 20), KEEP["padding"] & (i // 16 != 1)])
    held(interpreter, region, [*qkv(16, m=37, n=53), keep])


def test_dropped_weights(interpreter: Interpreter) -> None:
    region = dropout(keeps(q_idx, kv_idx), 0.3)
    held(interpreter, region, [*qkv(16, m=37, n=53), KEEP["holes"], torch.tensor(12345)])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31), st.integers(1, 50), st.integers(1, 80), st.sampled_from([1, 7, 16, 40]))
def test_any_mask(interpreter: Interpreter, seed: int, m: int, n: int, block: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    keep = torch.rand(1 + m // block, 1 + n // block, generator=draw) < torch.rand((), generator=draw)
    keep = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:m, :n].clone()
    keep[:, n // 2] = True
    held(interpreter, keeps(q_idx, kv_idx), [*qkv(16, m=m, n=n), keep], sizes={"M": m, "N": n})


def test_what_no_query_sees_is_not_read(interpreter: Interpreter) -> None:
    """NaN in K and V where whole tiles are hidden reaches no gradient."""
    region, (q, k, v) = keeps(q_idx, kv_idx), qkv(16, m=32, n=53)
    k[:, :, 16:32], v[:, :, 16:32] = torch.nan, torch.nan
    inputs, lengths = [q, k, v, KEEP["two_runs"][:32]], [{**SIZES, "M": 32}[s] for s in region.sizes]
    out, lse = torch.empty(2, 3, 32, 16), torch.empty(2, 3, 32, *saved(region))
    forward = emit(region, replace(tiles(region, 16, 16), visits="table"), saves_lse=True)
    out, *_, lse = interpreter.launch(forward, out, inputs, lengths, lse)
    grads = [*(torch.full_like(x, 123.0) for x in (q, k, v)), None]
    source = emit_backward(region, listed(region))
    found, *_ = interpreter.launch(source, grads, out, normal(2, 3, 32, 16), lse, inputs, lengths)
    assert found[0].isfinite().all()
    assert not found[1][:, :, 16:32].any()
    assert not found[2][:, :, 16:32].any()


def test_a_mask_that_learns_is_not_looked_through() -> None:
    region = adds(q_idx, kv_idx)
    plan = small(region)
    assert by_table(plan, region, frozenset({"load0"}), "table") == plan
    assert by_table(plan, region, frozenset({"load1"}), "table") != plan


@pytest.mark.parametrize("kernel", ["query_gradient", "key_gradients", "tile_states", "list_query_tiles"])
def test_every_kernel_compiles(kernel: str) -> None:
    region = keeps(b, 0, q_idx, kv_idx, shape=(B, 1, M, N), d=64)
    dtypes = {"pv_dtype": "bfloat16", "out_dtype": "bfloat16"}
    operands = tuple(replace(o, dtype="bool" if o.dtype == "bool" else "bfloat16") for o in region.operands)
    products = (replace(region.products[0], dtype="bfloat16"),)
    region = replace(region, operands=operands, products=products, **dtypes)
    source = emit_backward(region, by_table(backward_plan(region), region, frozenset(), "table"))
    assert cross_compile(source, 90, kernel).spills in (0, None)


@pytest.mark.parametrize("learns", [False, True])
def test_the_forward_pass_decides(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its mask is looked through, the gradients' is too, unless it learns."""
    monkeypatch.setattr("fusecomp.planning.visits.SHARE", INF)
    planned: list[BackwardPlan] = []
    monkeypatch.setattr(lower, "emit_backward", lambda *a: planned.append(a[1]) or emit_backward(*a))

    def look(gm: GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
        options = Options(lowering="triton", verify=False, strict=True)
        assert compile_graph(gm, placeholder_values(gm), options).fused
        return gm.forward

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return functional.softmax(q @ k.mT * 0.25 + mask, -1) @ v

    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, 53, 16, requires_grad=True) for _ in range(3))
    torch.compile(fn, backend=look)(q, k, v, torch.zeros(53, 53, requires_grad=learns))
    assert [plan.keys.visits for plan in planned] == ["bounds" if learns else "table"]
