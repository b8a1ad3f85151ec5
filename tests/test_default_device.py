"""Under torch.set_default_device another device than the tensors' is the default: here one that holds no numbers."""

from __future__ import annotations

import pytest
import torch
from regions import Variant
from torch.fx.experimental.proxy_tensor import make_fx
from variants import VARIANTS

import fusecomp
from fusecomp.ir.reference import evaluate
from fusecomp.paged import PagedKVCache
from fusecomp.planning.holes import filled
from fusecomp.running.backward import gradients


@pytest.fixture(autouse=True)
def fresh(own_cache: object) -> None:
    """Nothing is known, so that all is planned and verified."""


@pytest.mark.parametrize("variant", VARIANTS[1::3], ids=lambda v: v.name)
def test_a_graph_that_is_fused(variant: Variant) -> None:
    args = variant.make_args()
    graph, wanted = make_fx(variant.fn, pre_dispatch=True)(*args), variant.fn(*args)
    with torch.device("meta"):
        got = fusecomp.fuse(graph, args, strict=True)(*args)
    assert fusecomp.counters()["fused"] == 1
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2, equal_nan=True)


def test_planning_and_recomputing() -> None:
    for variant in VARIANTS:
        args = variant.make_args()
        sizes, grad = variant.sizes(args), torch.ones_like(variant.fn(*args))
        with torch.device("meta"):
            assert 0 < filled(variant.region, sizes) <= 1
            evaluate(variant.region, args, sizes, rows=slice(0, None, 2))
            gradients(variant.region, grad, args, [sizes[n] for n in variant.region.sizes], [0])


def test_a_paged_cache() -> None:
    with torch.device("meta"):
        cache = PagedKVCache(layers=1, kv_heads=2, head_dim=8, num_blocks=16, max_seqs=4, max_len=64, block_size=4)
        one = cache.add([1, 2, 3, 4, 5])
        cache.append(one, [1, 2, 3, 4, 5])
        step = cache.step([one])
        cache.write(0, *(torch.ones(5, 2, 8, device="cpu") for _ in range(2)), step)
        two = cache.fork(one)
        cache.append(two, [6])
        assert cache.step([two], rows=2, columns=1).seq_lens.tolist() == [6, 0]
        cache.swap_out(one)
        cache.swap_in(one)
        assert cache.keys[0][list(cache.table(one))].sum() == 5 * 2 * 8
