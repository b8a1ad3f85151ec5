"""Biases whose heads lie innermost are copied, once, so that keys lie beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.table import scores
from torch import Tensor
from torch.fx import GraphModule

from fusecomp.graph.capture import placeholder_values
from fusecomp.graph.facts import op_name
from fusecomp.pipeline import compile_graph
from fusecomp.settings import Options

Program = Callable[..., Tensor]
TABLE = (41, 3)
"""Of distances and heads."""


def relative(table: Tensor, n: int) -> Tensor:
    """[1, H, N, N] of a table [distances, H], as T5 makes it: a tensor in memory where the table learns."""
    i = torch.arange(n)
    return table[i - i[:, None] + n - 1].permute(2, 0, 1)[None]


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias).softmax(-1) @ v


def once(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return biased(q, k, v, relative(table, k.shape[-2]))


def twice(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Two layers share the bias."""
    bias = relative(table, k.shape[-2])
    return biased(biased(q, k, v, bias), k, v, bias)


def written_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The second layer's bias is another, in the same memory."""
    o = biased(q, k, v, bias.permute(2, 0, 1))
    bias.add_(1.0)
    return biased(o, k, v, bias.permute(2, 0, 1))


def innermost(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return biased(q, k, v, bias.permute(2, 0, 1))


def of_the_longest(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The first rows and columns of a table that is larger."""
    return biased(q, k, v, bias[: q.shape[-2], : k.shape[-2]].permute(2, 0, 1))


def of_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return biased(q, k, v, bias.mT[:, None])


def expanded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return biased(q, k, v, bias[:, :, None].expand(-1, -1, 3).permute(2, 0, 1))


def made(fn: Program, m: int, *shape: int, dynamic: bool = False) -> tuple[list[tuple[Any, ...]], int]:
    """(the strides of the bias of each attention, as a kernel is given it; copies)."""
    graphs: list[GraphModule] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        options = Options(lowering="triton", verify=False, strict=True)
        graphs.append(compile_graph(gm, placeholder_values(gm), options).module)
        return gm.forward

    torch._dynamo.reset()
    args = [torch.randn(2, 3, n, 16, requires_grad=True) for n in (m, 21, 21)]
    torch.compile(fn, backend=look, dynamic=dynamic)(*args, torch.randn(shape, requires_grad=shape == TABLE))
    nodes = list(graphs[-1].graph.nodes)
    calls = [n for n in nodes if "attention" in op_name(n)]
    return [n.args[0][-1].meta["val"].stride() for n in calls], sum(op_name(n) == "clone" for n in nodes)


def test_heads_that_lie_innermost() -> None:
    """[M, N, H] in the order of [H, M, N]."""
    assert made(once, 21, *TABLE) == ([(21, 1, 441)], 1)
    assert made(innermost, 21, 21, 21, 3) == ([(21, 1, 441)], 1)


def test_lengths_that_change() -> None:
    ((q, kv, h),), copies = made(once, 21, *TABLE, dynamic=True)
    assert (kv, copies) == (1, 1)
    assert int(h) == 21 * int(q)


def test_layers_share_the_copy() -> None:
    assert made(twice, 21, *TABLE) == ([(21, 1, 441)] * 2, 1)


def test_no_copy_is_shared_across_a_write() -> None:
    assert made(written_between, 21, 21, 21, 3) == ([(21, 1, 441)] * 2, 2)


@pytest.mark.parametrize(
    ("fn", "m", "shape", "strides"),
    [
        (biased, 21, (3, 21, 21), (441, 21, 1)),
        (innermost, 1, (1, 21, 3), (63, 3, 1)),
        (of_keys, 21, (21, 3), (3, 1)),
        (expanded, 21, (21, 21), None),
        (of_the_longest, 21, (64, 64, 3), None),
    ],
    ids=["keys innermost", "one query", "of keys alone", "expanded heads", "a larger table"],
)
def test_these_stay(fn: Program, m: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    found, copies = made(fn, m, *shape)
    assert copies == 0
    assert strides is None or found == [strides]


END_TO_END = """
import torch
import fusecomp
from test_layout import TABLE, innermost, once, twice, written_between

for fn, shape in ((once, TABLE), (twice, TABLE), (innermost, (21, 21, 3)), (written_between, (21, 21, 3))):
    torch.manual_seed(0)
    args = [torch.randn(2, 3, 21, 16, requires_grad=True) for _ in range(3)]
    args.append(torch.randn(shape, requires_grad=fn is not written_between))
    given = [x for x in args if x.requires_grad]
    def run(f):
        o = f(*[x if x.requires_grad else x.clone() for x in args])
        return [o, *torch.autograd.grad(o.cumsum(-1).sum(), given)]
    fusecomp.reset()
    options = {"inner": "aot_eager", "strict": True}
    for a, b in zip(run(fn), run(torch.compile(fn, backend="fusecomp", options=options)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert fusecomp.counters()["fused"] == 1 + (fn in (twice, written_between)), fusecomp.counters()
print("agrees")
"""


def test_values_and_gradients_in_the_interpreter() -> None:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", END_TO_END], env=env, capture_output=True, text=True, check=False)
    assert "agrees" in done.stdout, done.stderr[-3000:]
