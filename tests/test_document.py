"""What a generated file says of itself, and the lengths at which it checks itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_kernels import GOLDEN, paged
from kernels import tiles
from recognising import region_of
from regions import attention, b, causal, h, kv_idx, q_idx, scaled_score
from torch import Tensor

from fusecomp.codegen.emit import emit
from fusecomp.codegen.sample import sample
from fusecomp.codegen.selfcheck import selfcheck
from fusecomp.graph.capture import label_of
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Load, text
from fusecomp.ir.region import Access
from fusecomp.planning.device import find
from fusecomp.planning.plan import plan
from fusecomp.report import Entry


def test_the_users_line_comes_first_and_no_line_is_too_long() -> None:
    region = replace(attention(scaled_score, causal), origin="model.py:9", source="  return softmax(s) @ v  ")
    head = emit(region, tiles(region)).text.splitlines()
    assert head[0].startswith('"""attention at model.py:9   b < B, h < H')
    assert head[2] == "    # return softmax(s) @ v"
    planned = plan(region, {"B": 4, "H": 16, "M": 4096, "N": 4096}, find("h200"))
    for kernel in (*GOLDEN.values(), (region, planned)):
        assert max(map(len, emit(*kernel).text.partition("import torch")[0].splitlines())) <= 120


def test_a_condition_on_where_a_key_lies_is_read_by_a_name() -> None:
    region = paged()
    number = Load("table", (b, apply("floordiv", kv_idx, Const(16))), "int32")
    place = apply("where", apply("lt", number, Const(0)), apply("add", number, Const(9)), number)
    product, v = region.products[0], region.v
    named = replace(
        region,
        products=(replace(product, k=replace(product.k, index=(place, *product.k.index[1:]))),),
        v=replace(v, index=(place, *v.index[1:])),
    )
    assert f"    place = {text(place)}\n" in str(named)
    assert str(named).count("k_pool[place, ") == str(named).count("v_pool[place, ") == 1


def test_a_file_checks_itself_at_lengths_that_its_tensors_have() -> None:
    """One query, and five heads a group side by side with the queries, of a program whose shapes were constants."""
    one = attention(scaled_score, causal)
    q, *others = one.operands
    one = replace(one, operands=(replace(q, shape=(Const(3), Const(8), Const(1), Const(16))), *others))
    assert sample(one).sizes == {"B": 2, "H": 2, "M": 1, "N": 53}
    assert sample(one).tensors[0] == "torch.randn((2, 2, 1, 16), dtype=torch.float32)"

    place = apply("add", apply("mul", h, Const(5)), q_idx)
    product = replace(one.products[0], q=Access("q", (b, place, one.products[0].d)))
    q = replace(q, shape=(Const(3), Const(10), Const(16)))
    grouped = replace(one, operands=(q, *others), products=(product,))
    assert sample(grouped).sizes == {"B": 2, "H": 2, "M": 5, "N": 53}
    assert sample(grouped).tensors[0] == "torch.randn((2, 10, 16), dtype=torch.float32)"


def test_a_file_checks_itself_where_all_keys_have_one_value() -> None:
    region = attention(scaled_score, causal)
    q, k, v = region.operands
    one = replace(region.v, index=(*region.v.index[:2], Const(0), region.v.index[3]))
    region = replace(region, operands=(q, k, replace(v, shape=(*v.shape[:2], Const(1), v.shape[3]))), v=one)
    space: dict[str, Any] = {"torch": torch}
    exec("\n".join(selfcheck(region)).partition("def main()")[0], space)
    found = sample(region)
    tensors = [eval(t, space) for t in found.tensors]
    expected = tensors[2].expand(-1, -1, found.sizes["M"], -1)
    torch.testing.assert_close(space["reference"](tensors, [found.sizes[name] for name in region.sizes]), expected)


def documents(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    same = doc[:, None, :, None] == doc[:, None, None, :]
    return torch.softmax((q @ k.mT).masked_fill(~same, float("-inf")), -1) @ v


def test_what_the_program_calls_an_input_is_told_and_changes_nothing() -> None:
    args = [torch.randn(2, 3, 37, 16) for _ in range(3)]
    region = region_of(documents, *args, torch.zeros(2, 37, dtype=torch.int64))
    (load,) = region.loads
    assert (load.name, load.label) == ("load0", "doc")
    assert "    load0      [2, 37]  int64  doc in the program\n" in emit(region, tiles(region)).text
    plain = replace(region, operands=tuple(replace(o, label="") for o in region.operands))
    assert (plain, plain.key) == (region, region.key)
    assert dict(Entry(0, "fused", region=region).rows())["reads"] == "load0 is doc"


@pytest.mark.parametrize(
    ("placeholder", "name"),
    [("L_q_", "q"), ("L_self_modules_attention_parameters_sinks_", "sinks"), ("arg0_1", ""), ("s12", "")],
)
def test_names_of_inputs(placeholder: str, name: str) -> None:
    assert label_of(placeholder) == name
