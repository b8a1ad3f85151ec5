"""What is handed to the C function of Triton's launcher: the same as Triton hands to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fusecomp.running import replay
from fusecomp.running.launcher import opened
from fusecomp.running.launching import Launched
from fusecomp.running.replay import Descriptor, run_of

WAY = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [4, 16], "fp4_padded": False}
MARKS = [SimpleNamespace(), None, 1 << 40]


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of which tensor maps were made; a tensor map is all that it was made of."""
    made: list[int] = []

    def fill(address: int, *rest: Any) -> str:
        made.append(address)
        return f"map {address} {rest}"

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    return made


def compiled(given: list[Any], args: tuple[Any, ...], ways: list[Any] | None) -> Any:
    """A kernel whose launcher is Triton's but for the C function, which writes down what it is given."""
    described = [isinstance(x, TensorDescriptor) for x in args]
    signature = {i: "tensordesc<bf16[4,16]>" if is_one else "i32" for i, is_one in enumerate(described)}
    launcher = object.__new__(driver.CudaLauncher)
    sizes = {f"{name}_scratch_{what}": n for name in ("global", "profile") for what, n in (("size", 0), ("align", 1))}
    vars(launcher).update(
        sizes, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False, arg_annotations=MARKS[0],
        kernel_signature=b"s",
        launch=driver.wrap_handle_tensordesc(lambda *all: given.append(all), signature, ways),
    )  # fmt: skip
    return SimpleNamespace(run=launcher, function=71, packed_metadata=(4, 1), metadata=SimpleNamespace())


def draw(n: int = 2) -> list[Tensor]:
    return [torch.zeros(8, 16, dtype=torch.bfloat16) for _ in range(n)]


def descriptor(x: Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, [8, 16], [16, 1], [4, 16])


ARGS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "descriptors": lambda x, y: (descriptor(x), y, 3, *MARKS, descriptor(y), 0.5),
    "pointers": lambda x, y: (y, 3, x, *MARKS),
    "numbers alone at the end": lambda x, y: (descriptor(x), y, *MARKS),
}


def flat(given: Any) -> list[Any]:
    """Addresses for tensors, lists and tuples alike."""
    inside = (flat(x) if isinstance(x, list | tuple) else [x.data_ptr() if isinstance(x, Tensor) else x] for x in given)
    return list(chain.from_iterable(inside))


@pytest.mark.parametrize("name", ARGS)
def test_other_tensors_are_handed_over_as_by_triton(name: str, encoded: list[int]) -> None:
    given: list[Any] = []
    x, y = draw()
    args = ARGS[name](x, y)
    kernel = compiled(given, args, [WAY] * sum(isinstance(a, TensorDescriptor) for a in args))
    made: list[Descriptor] = []
    run = run_of(Launched(kernel, (5, 6, 7), args), [x, y], made)
    assert run is not None
    assert not given
    for new in (draw(), [y, x]):
        values: list[Any] = [*map(Tensor.data_ptr, new)]
        values += [d.encoded(new[d.of]) for d in made]
        run.c(*run.grid, 70, *run.before, *run.pick([*run.numbers, *values]))
        kernel.run(5, 6, 7, 70, kernel.function, kernel.packed_metadata, None, None, None, *ARGS[name](*new))
        ours, theirs = given[-2:]
        assert flat(ours) == flat(theirs)


def test_a_tensor_map_is_made_once_for_an_address(encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made, known, tensors = list[Descriptor](), dict[int, Any](), draw(5)
    args = (descriptor(tensors[0]),)
    run_of(Launched(compiled([], args, [WAY]), (1, 1, 1), args), tensors, made)
    monkeypatch.setattr(replay, "ADDRESSES", 3)
    for x in tensors:
        assert replay.described(x, x.data_ptr(), made[0].encoded, known).startswith(f"map {x.data_ptr()} ")
        assert len(known) <= 3


@pytest.mark.parametrize("ways", [None, [None]])
def test_a_descriptor_that_becomes_no_tensor_map(ways: list[Any] | None) -> None:
    (x,) = draw(1)
    args = (descriptor(x), 3)
    assert run_of(Launched(compiled([], args, ways), (1, 1, 1), args), [x], []) is None


def test_a_launcher_that_is_not_known() -> None:
    (x,) = draw(1)
    other = SimpleNamespace(run=print, function=71, packed_metadata=(4, 1), metadata=SimpleNamespace())
    assert opened(other, (descriptor(x), 3)) is None
    assert opened(other, (x, 3)) == (print, (71, (4, 1), None, None, None), (x, 3))


def test_what_another_triton_does_otherwise_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = draw(1)
    args = (descriptor(x), 3)
    kernel = compiled([], args, [WAY])
    monkeypatch.delattr(driver, "make_tensordesc_arg")
    assert opened(kernel, args) is None


def test_no_tensor_is_kept() -> None:
    (x,), made = draw(1), list[Descriptor]()
    args = (descriptor(x), 3)
    run = run_of(Launched(compiled([], args, [WAY]), (1, 1, 1), args), [x], made)
    gone = weakref.ref(x)
    del x, args
    gc.collect()
    assert run is not None
    assert gone() is None
