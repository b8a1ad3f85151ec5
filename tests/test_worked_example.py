"""One query by hand: q = [1, 0], four keys, no scaling. Every part of fusecomp gives [4.49786861, 5.49786861]."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from online_softmax import online_softmax_trace
from regions import attention
from torch import Tensor

from fusecomp.ir.reference import evaluate

Q = torch.tensor([1.0, 0.0])
K = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 1.0], [-1.0, 1.0]])
V = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
EXPECTED = torch.tensor([4.49786861, 5.49786861], dtype=torch.float64)

TABLE = """\
keys  scores   m  c         p               l        acc
0..1  [1, 0]   1  0         [1, 0.367879]   1.36788  [2.10364, 3.47152]
2..3  [3, -1]  3  0.135335  [1, 0.0183156]  1.20344  [5.41291, 6.61634]
O = acc / l = [4.49786861, 5.49786861]"""


def close(actual: Tensor, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(actual.double(), EXPECTED, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tile", [1, 2, 3, 4, 5])
def test_the_tile_does_not_change_the_result(tile: int) -> None:
    close(torch.tensor(online_softmax_trace(Q, K, V, tile).output, dtype=torch.float64))


def test_two_tiles_of_two() -> None:
    first, second = online_softmax_trace(Q, K, V, 2).tiles
    assert (first.row_max, second.row_max) == (1.0, 3.0)
    assert first.row_sum == pytest.approx(1.3679, abs=5e-5)
    assert second.row_sum == pytest.approx(1.20344, abs=5e-6)
    assert (first.rescale, second.rescale) == (0.0, pytest.approx(0.13534, abs=5e-6))


def test_one_tile_of_four_ends_with_the_same_sums() -> None:
    (only,) = online_softmax_trace(Q, K, V, 4).tiles
    last = online_softmax_trace(Q, K, V, 2).tiles[-1]
    assert (only.row_max, only.row_sum) == (last.row_max, pytest.approx(last.row_sum, rel=1e-15))
    assert only.acc == pytest.approx(last.acc, rel=1e-15)


def test_the_trace_is_a_table() -> None:
    assert str(online_softmax_trace(Q, K, V, 2)) == TABLE


def test_a_tile_holds_a_key() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        online_softmax_trace(Q, K, V, 0)


def test_the_reference() -> None:
    close(evaluate(attention(batch=(), d=2), [Q[None], K, V], {"M": 1, "N": 4})[0])


KERNEL = """
import sys
from pathlib import Path
import torch
from online_softmax import online_softmax_trace
from regions import attention
from test_worked_example import EXPECTED, K, Q, V
from fusecomp.codegen.emit import emit
from fusecomp.planning.tile import TilePlan
from fusecomp.running.loader import load

plan = TilePlan("prefill", 16, 16, ((16,),), (16,), 4, 1)
module = load(emit(attention(batch=(), d=2), plan), Path(sys.argv[1]))
low = torch.full((14, 2), -200.0)  # fourteen keys far below the others part the two halves: two tiles, the same value
wide = [torch.cat([x[:2], filler, x[2:], filler[:9]]) for x, filler in ((K, low), (V, torch.zeros(14, 2)))]
for k, v in ((K, V), wide):
    out = torch.empty(1, 2)
    module.launch(out, [Q[None], k.contiguous(), v.contiguous()], [1, len(k)])
    torch.testing.assert_close(out[0].double(), EXPECTED, rtol=0, atol=1e-6)
    print(len(k))
"""


def test_a_generated_kernel_in_one_tile_and_in_two(tmp_path: Path) -> None:
    """Four keys fill a masked part of the smallest tile; spread over 27 positions they meet in two."""
    here = str(Path(__file__).parent)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(  # the interpreter is chosen when Triton is imported
        [sys.executable, "-c", KERNEL, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["4", "27"]
