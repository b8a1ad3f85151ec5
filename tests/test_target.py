"""FILE:FUNCTION: what it may name, and what a person is told whose name is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusecomp.errors import TargetError
from fusecomp.target import load

MODEL = '''
import torch
from torch import nn
from neighbour import scale

def attention(q, k, v, scale=0.125):
    return torch.softmax(q @ k.mT * scale, -1) @ v

class Net(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x

linear = nn.Linear(4, 4)

def factory():
    return Net(), (torch.ones(2, 3, 4),)

def one_tensor():
    return Net(), torch.ones(5, 4)

def by_name():
    return attention, {"q": torch.ones(3, 4), "k": torch.ones(3, 4), "v": torch.ones(3, 4)}

def both():
    return attention, (torch.ones(3, 4), torch.ones(5, 4), torch.ones(5, 2)), {"scale": 0.5}

def plain():
    return torch.ones(2) * scale

def without_inputs():
    return Net()

def broken():
    raise RuntimeError("out of paper\\nand ink")

def fails(x):
    raise ValueError("no such axis")

def keywords(q, *, k, v=None):
    return q + k if v is None else v

def anything(*tensors):
    return tensors[1]

def optional(q=None, k=None):
    return k

class Scaled:
    def __init__(self, scale):
        self.scale = scale

def nested():
    return lambda x: x

def leaves():
    raise SystemExit(5)

number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "neighbour.py").write_text("scale = 7\n")
    (tmp_path / "syntax.py").write_text("def attention(:\n")
    (tmp_path / "needs.py").write_text("import a_package_that_is_nowhere\n")
    (tmp_path / "quits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "empty.py").write_text("")
    return lambda name: str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("factory", (2, 3, 4)), ("one_tensor", (5, 4)), ("by_name", (3, 4)), ("both", (3, 2)), ("plain", (2,))],
)
def test_factories_and_functions_without_inputs(file: Callable[[str], str], name: str, shape: tuple[int, ...]) -> None:
    assert load(file(f"model.py:{name}")).run().shape == shape


def test_a_function_of_tensors_gets_random_ones(file: Callable[[str], str]) -> None:
    target = load(file("model.py:attention"))
    assert [a.shape for a in target.args] == [(2, 4, 96, 64)] * 3
    assert not torch.equal(target.args[0], target.args[1])
    assert target.run().shape == (2, 4, 96, 64)


def test_shapes_and_dtypes_can_be_given(file: Callable[[str], str]) -> None:
    target = load(file("model.py:attention"), ["3x8:bfloat16", "5x8:bfloat16", "5x2:bfloat16"])
    assert target.run().shape == (3, 2)
    assert target.run().dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["keywords", "anything", "optional"])
def test_arguments_of_every_kind_are_given(file: Callable[[str], str], name: str) -> None:
    assert load(file(f"model.py:{name}"), ["1x5", "1x5"]).run().shape == (1, 5)


def test_one_shape_holds_for_all(file: Callable[[str], str]) -> None:
    target = load(file("model.py:attention"), ["1x2x8x4:bf16"])
    assert [(a.shape, a.dtype) for a in target.args] == [((1, 2, 8, 4), torch.bfloat16)] * 3


def test_a_model_is_a_function_of_its_forward_arguments(file: Callable[[str], str]) -> None:
    assert load(file("model.py:linear"), ["6x4"]).run().shape == (6, 4)


WRONG = {
    "'model.py' is not FILE:FUNCTION, such as model.py:attention": ("model.py", ()),
    "modle.py (did you mean 'model.py'?)": ("modle.py:attention", ()),
    "no 'atention'": ("model.py:atention", ()),
    "(did you mean 'attention'?). It defines attention, Net, factory,": ("model.py:atention", ()),
    "It defines no function.": ("empty.py:f", ()),
    "is an int, not a function, a model or a factory": ("model.py:number", ()),
    "cannot be imported: SyntaxError: invalid syntax": ("syntax.py:attention", ()),
    "cannot be imported: ModuleNotFoundError: No module named 'a_package_that_is_nowhere'": ("needs.py:f", ()),
    "cannot be imported: SystemExit: 3": ("quits.py:f", ()),
    "raised when called without inputs: RuntimeError: out of paper (at model.py:": ("model.py:broken", ()),
    "raised when called without inputs: SystemExit: 5": ("model.py:leaves", ()),
    "raised when called without inputs: IndexError: tuple index out of range": ("model.py:anything", ()),
    "returns a model without inputs: return (model, args)": ("model.py:without_inputs", ()),
    "nested in": ("model.py:nested", ()),
    "is a class: name an object of it, or a factory of (model, args)": ("model.py:Scaled", ()),
    "is a folder, not a Python file": (".:attention", ()),
    "--arg '9999999x9999999x9999' cannot be made:": ("model.py:linear", ("9999999x9999999x9999",)),
    "--arg '2x99999999999999999999' cannot be made:": ("model.py:linear", ("2x99999999999999999999",)),
    "attention takes q, k, v: give --arg once for all, or 3 times, not 2": ("model.py:attention", ("2x3", "2x3")),
    "--arg '2by3' is not SHAPE or SHAPE:DTYPE, such as 2x4x96x64:bfloat16": ("model.py:linear", ("2by3",)),
    "--arg '2x3:bf17': PyTorch has no dtype 'bf17' (did you mean 'bf16'?)": ("model.py:linear", ("2x3:bf17",)),
    "takes no inputs, so --arg has no meaning": ("model.py:factory", ("2x3",)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_targets(file: Callable[[str], str], message: str) -> None:
    name, shapes = WRONG[message]
    with pytest.raises(TargetError) as caught:
        load(file(name) if ":" in name else name, shapes)
    assert message in str(caught.value)


def test_a_model_that_does_not_run_in_eager_is_said_with_its_inputs(file: Callable[[str], str]) -> None:
    with pytest.raises(TargetError) as caught:
        load(file("model.py:fails"), ["2x3:int64"]).run()
    for part in ("fails does not run in eager PyTorch", "(int64 [2, 3])", "ValueError: no such axis", "--arg"):
        assert part in str(caught.value)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "xpu"])
def test_a_device_that_is_not_here(file: Callable[[str], str], device: str) -> None:
    with pytest.raises(TargetError, match=f"--on {device}: .*Name a device that is here, such as cpu"):
        load(file("model.py:factory")).to(device)


def test_a_failed_file_leaves_no_trace_in_the_import_path(file: Callable[[str], str]) -> None:
    before = list(sys.path)
    with pytest.raises(TargetError):
        load(file("needs.py:f"))
    assert sys.path == before
