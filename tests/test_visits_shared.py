"""Tables of the tiles that some query sees: when they pay, and which attentions share one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from regions import B, H, M, N, attention, b, causal, h, kv_idx, load, q_idx, scaled_score
from test_visits import INF, adds, by_table, keeps
from torch import Tensor
from torch.fx import GraphModule

from fusecomp.codegen.emit import emit
from fusecomp.errors import KernelError
from fusecomp.graph.capture import placeholder_values
from fusecomp.graph.facts import op_name
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const
from fusecomp.ir.region import AttentionRegion
from fusecomp.pipeline import compile_graph
from fusecomp.planning.device import find
from fusecomp.planning.plan import plan
from fusecomp.settings import Options


def test_it_is_worth_it_for_masks_that_heads_share() -> None:
    h200 = find("h200")
    large, sizes = replace(keeps(b, 0, q_idx, kv_idx, shape=(B, 1, M, N))), {"B": 4, "H": 16, "M": 4096, "N": 4096}
    assert plan(large, sizes, h200).visits == "table"
    assert plan(large, {**sizes, "M": 512, "N": 512, "B": 1}, h200).visits == "bounds"
    assert plan(large, {**sizes, "M": 1}, h200).visits == "bounds"
    of_heads = keeps(b, h, q_idx, kv_idx, shape=(B, H, M, N), dtype="bfloat16")  # in float32 the products take longer
    assert plan(of_heads, sizes, h200).visits == "bounds"


@pytest.mark.parametrize("region", [attention(scaled_score, causal), adds(h, q_idx, kv_idx, shape=(H, M, N)),
                                    adds(b, h, 0, q_idx, shape=(B, H, 1, M))])  # fmt: skip
def test_what_hides_nothing_has_no_table(region: AttentionRegion) -> None:
    assert not data.unknown(region)
    with pytest.raises(KernelError, match="a mask that is data"):
        emit(region, by_table(region))


def test_what_is_added_before_a_function_hides_nothing() -> None:
    inside = apply("tanh", apply("add", scaled_score, load(0, q_idx, kv_idx)))
    assert not data.added(attention(inside, loads=[((M, N), "float32")]))
    halved = apply("mul", apply("add", scaled_score, load(0, q_idx, kv_idx)), Const(0.5))
    assert data.added(attention(halved, loads=[((M, N), "float32")]))
    turned = apply("mul", apply("add", scaled_score, load(0, q_idx, kv_idx)), Const(-0.5))
    assert not data.added(attention(turned, loads=[((M, N), "float32")]))


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~keep, -INF).softmax(-1) @ v


def layers(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    for _ in range(3):
        q = attend(q, k, v, keep)
    return q


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def first_and_recent(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    """A mask that is no data: the first keys and the latest, between which no bound tells."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    return attend(q, k, v, (j <= i[:, None]) & ((j < 4) | (i[:, None] - j < 20)))


def changed_between(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    q = attend(q, k, v, keep)
    keep[:, :, :, 3] = False
    return attend(q, k, v, keep)


def of_two_masks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return attend(attend(q, k, v, keep), k, v, keep.logical_or(keep.cumsum(-1) == 0))


def of_two_lengths(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return attend(q, k, v, keep).sum() + attend(q, k[:, :, :40], v[:, :, :40], keep[..., :40])


SHARED = [(layers, 3, 1), (changed_between, 2, 2), (of_two_masks, 2, 2), (of_two_lengths, 2, 2)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("fn", "attentions", "tables"), SHARED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_attentions_of_one_mask_share_its_table(
    fn: Callable[..., Tensor], attentions: int, tables: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusecomp.planning.visits.SHARE", INF)
    found: list[str] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        options = Options(lowering="triton", verify=False, strict=True)
        made = compile_graph(gm, placeholder_values(gm), options).module
        found.extend(op_name(n) for n in made.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    args = [torch.randn(2, 3, 53, 16) for _ in range(3)]
    torch.compile(fn, backend=look, dynamic=dynamic)(*args, torch.rand(2, 1, 53, 53) > 0.5)
    tabled = "tile_visits" if dynamic else "tile_visits_fixed"
    assert (found.count("attention_recomputed"), found.count(tabled)) == (attentions, tables)


END_TO_END = """
import torch
import fusecomp
from fusecomp.planning import visits
from test_visits_shared import added, changed_between, first_and_recent, layers

visits.SHARE = float("inf")


def run(fn, m, n, grad=False, **options):
    torch.manual_seed(n)
    keep = torch.rand(2, 1, m, n) > 0.5
    keep[..., : m // 2, n // 2 :] = False
    keep[..., m // 2 :, : n // 3] = True
    args = [torch.randn(2, 2, x, 16, requires_grad=grad) for x in (m, n, n)]
    if fn is added:
        keep[:, :, 7] = False
        keep = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    got, want = options["fast"](*args, keep.clone()), fn(*args, keep.clone())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    if grad:
        seed = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(got, args, seed), torch.autograd.grad(want, args, seed)):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


for fn in (layers, changed_between, added, first_and_recent):
    fast = torch.compile(fn, backend="fusecomp", options={"inner": "aot_eager", "strict": True}, dynamic=True)
    run(fn, 40, 133, fast=fast)
    if fn is layers:
        run(fn, 70, 150, fast=fast)
    if fn in (layers, added):
        run(fn, 40, 133, fast=fast, grad=True)
assert fusecomp.counters()["fallbacks"] == 0, fusecomp.counters()
print(fusecomp.counters())
"""


def test_a_model_runs_by_tables(tmp_path: Path) -> None:
    """Verified, at changing lengths, with a mask that is written to between layers, and trained."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "FUSECOMP_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", END_TO_END], env=env, capture_output=True, text=True, timeout=500,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "list_visits" in "".join(p.read_text() for p in tmp_path.rglob("*.py"))
