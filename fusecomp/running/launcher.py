"""What Triton's launcher of a compiled kernel hands to its C function, worked out once.

    launcher(x, y, z, stream, function, ..., *args)  ->  c(x, y, z, stream, ..., *[tensor map, *shape, *strides, ...])

Of a kernel with tensor descriptors it encodes each of them at every launch, which takes longer than the launch. Where
tensors lie alike the tensor map of a descriptor is a function of the address.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor

KNOWN = "triton.backends.nvidia.driver"


class TensorMap(NamedTuple):
    """Stands for what a descriptor becomes, and makes it for a tensor that lies as `base`."""

    base: Tensor
    encoded: Callable[[Tensor], Any]


class Opened(NamedTuple):
    """A launch as the C function takes it: c(*grid, stream, *before, *args)."""

    c: Callable[..., None]
    before: tuple[Any, ...]
    args: tuple[Any, ...]
    """Those of the kernel: tensors and TensorMaps, and numbers."""


def opened(compiled: Any, args: Sequence[Any]) -> Opened | None:
    """A launch of a compiled kernel; None where its launcher is another one, and takes descriptors.

    All of it is private to Triton: whatever another version does otherwise, the kernel is launched as Triton does."""
    try:
        return _opened(compiled, args)
    except Exception:  # noqa: BLE001 - of any kind: the kernel is there
        return None


def _opened(compiled: Any, args: Sequence[Any]) -> Opened | None:
    launcher, kernel = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    described = any(map(describes, args))
    if type(launcher).__module__ != KNOWN:
        return None if described else Opened(launcher, kernel, tuple(args))
    inside = inspect.getclosurevars(launcher.launch).nonlocals if described else {"launcher": launcher.launch}
    spread = expanded(args, inside.get("tensordesc_meta") or (), maker(sys.modules[KNOWN]))
    if spread is None or (c := inside.get("launcher")) is None:
        return None
    given = handed(launcher, kernel, spread)
    if same(given[len(given) - len(spread) :], spread):
        return Opened(c, given[4 : len(given) - len(spread)], spread)
    if not isinstance(given[-1], tuple) or not same(given[-1], spread):
        return None
    head = len(given) - 1
    return Opened(lambda *all: c(*all[:head], all[head:]), given[4:head], spread)


def describes(x: object) -> bool:
    """Whether it is a tensor descriptor."""
    return hasattr(x, "base") and not isinstance(x, Tensor)


def same(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether they hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def handed(launcher: Any, kernel: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """What the C function would be given at the end of a call of the launcher."""
    found: list[tuple[Any, ...]] = []
    stand_in = copy(launcher)
    stand_in.launch = lambda *given: found.append(given)
    stand_in(1, 1, 1, 0, *kernel, *args)
    return found[0]


def maker(driver: Any) -> Callable[[Any, Any], Sequence[Any]]:
    """What a descriptor becomes, encoded in a way. From Triton 3.8 on it is told of the launch too."""
    make = driver.make_tensordesc_arg
    unread = (None,) * (len(inspect.signature(make).parameters) - 2)
    return lambda descriptor, way: make(descriptor, way, *unread)


def expanded(
    args: Sequence[Any], ways: Sequence[Any], make: Callable[[Any, Any], Sequence[Any]]
) -> tuple[Any, ...] | None:
    """The arguments, each descriptor by what it becomes; None where one becomes no tensor map."""
    found, left = list[Any](), iter(ways)
    for x in args:
        way = next(left, None) if describes(x) else None
        if way is not None:
            found += [TensorMap(x.base, encoder(x, way, make)), *make(x, way)[1:]]
        elif describes(x):
            return None
        else:
            found.append(x)
    return tuple(found)


def encoder(descriptor: Any, way: Any, make: Callable[[Any, Any], Sequence[Any]]) -> Callable[[Tensor], Any]:
    """tensor -> its tensor map, as `descriptor` has it of another one. No tensor is kept."""
    cls, fields = type(descriptor), {**vars(descriptor), "base": None}

    def encoded(tensor: Tensor) -> Any:
        new = object.__new__(cls)
        vars(new).update(fields, base=tensor)
        return make(new, way)[0]

    return encoded
