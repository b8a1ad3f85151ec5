"""How Inductor's programs call the operators: as the functions that they are, with the same results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fusecomp.running import inductor

CALLS = {False: "attend_fixed(", True: "attend("}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).tanh().softmax(-1) @ v).cos()


def compiled(dynamic: bool) -> str:
    """The program, whose result is eager's."""
    torch._dynamo.reset()
    args = [torch.randn(2, 3, 20, 16) for _ in range(3)]
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        found, (program, *_) = run_and_get_code(torch.compile(attend, backend="fusecomp", dynamic=dynamic), *args)
    torch.testing.assert_close(found, attend(*args))
    return str(program)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_is_a_function_call(dynamic: bool) -> None:
    program = compiled(dynamic)
    assert f"torch.ops.fusecomp.{CALLS[dynamic]}" in program
    assert ".default([" not in program


def test_what_is_no_call_of_inductors_is_left_alone() -> None:
    other = SimpleNamespace(python_kernel_name="its own", inputs=[])
    for result in (3, SimpleNamespace(data=SimpleNamespace(data=other))):
        assert inductor.called(lambda x: x, "another")(result) is result
    assert other.python_kernel_name == "its own"
