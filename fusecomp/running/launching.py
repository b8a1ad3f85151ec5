"""Launching a generated kernel again without what Triton works out anew at every call.

    attention[(programs,)](q_ptr, ..., q_stride_0, ..., M, N, num_warps=4)

Triton compiles a kernel for the dtypes of its pointers, for whether they are aligned, and for the values of its strides
(1, multiples of 16); lengths are only told apart by their width. To find the kernel again it looks at every argument
and compares every constant of the file with what it was. Here the last kernels are kept by

    (device, dtypes, strides, options)     aligned pointers, lengths below 2^31

and launched as Triton's tutorials launch a compiled kernel, `compiled[grid](*args)`. All else is left to Triton.

Kernels of one attention are compiled beside each other, in threads: Triton's passes and the assembler hold no lock.
"""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial, reduce
from operator import attrgetter, itemgetter, methodcaller, or_
from types import ModuleType
from typing import Any, NamedTuple

import torch

ALIGNED = 16
"""B: what Triton asks of a pointer that it calls aligned."""
WIDE = 1 << 31
MOST = 128
"""Kernels kept of one function. Strides that change at every call keep none of them long."""
_pointer, _dtype = methodcaller("data_ptr"), attrgetter("dtype")


class Launched(NamedTuple):
    """A launch of a compiled kernel."""

    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    """All that the kernel takes, constants too."""


class _Thread(threading.local):
    """Of this thread, while its launches are collected: what compiles each kernel instead of launching it; or each
    launch, None where Triton made it."""

    wanted: list[Callable[[], object]] | None = None
    launches: list[Launched | None] | None = None


_thread = _Thread()


@contextmanager
def listening() -> Iterator[list[Launched | None]]:
    """The launches of this thread."""
    outer, _thread.launches = _thread.launches, []
    try:
        yield _thread.launches
    finally:
        _thread.launches = outer


@contextmanager
def compiling(calls: Iterable[Callable[[], object]], device: torch.device) -> Iterator[None]:
    """Every kernel that the calls launch is compiled meanwhile, and none launched. What does not compile says so when
    it is run."""
    wanted = _thread.wanted = []
    try:
        for call in calls:
            call()
    finally:
        _thread.wanted = None
    with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:
        for compiled in wanted:
            pool.submit(_attempt, device, compiled)
        yield


def ahead() -> None:
    """Begin what takes time and will be needed where a graph with tensors on a GPU is compiled."""
    if torch.cuda.is_initialized():
        driver()


@cache
def driver() -> threading.Thread:
    """What compiles Triton's driver, as its first use would."""
    thread = threading.Thread(target=_driver, daemon=True)
    thread.start()
    return thread


def _driver() -> None:
    with suppress(Exception):  # who launches a kernel is told
        import triton

        triton.runtime.driver.active.get_current_target()


def _attempt(device: torch.device, compiled: Callable[[], object]) -> None:
    driver().join()
    with suppress(Exception), torch.cuda.device(device):
        compiled()


def quickened(module: ModuleType, text: str) -> ModuleType:
    """The module of a generated file whose host functions launch its kernels so."""
    for name in launched(text):
        kernel = getattr(module, name)
        if hasattr(kernel, "params"):  # a kernel that is compiled: the interpreter's has none
            setattr(module, name, Launches(kernel))
    describes = getattr(module, "described", None)
    if describes is not None and not isinstance(describes, Descriptors):
        module.described = Descriptors(describes)  # type: ignore[attr-defined]
    return module


@lru_cache(maxsize=64)
def launched(text: str) -> frozenset[str]:
    """The names that a file launches: f in f[grid](...)."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                found.add(name)
    return frozenset(found)


class Launches:
    """f[grid](...) of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.known: dict[Any, Any] = {}
        names = [p.name for p in kernel.params if not p.is_constexpr]
        self.constants = [p.name for p in kernel.params if p.is_constexpr]
        lengths = {p.name for p in kernel.params if p.do_not_specialize}
        pointers, described = ({n for n in names if n.endswith(end)} for end in ("_ptr", "_desc"))
        self._pointers, self._described, self._lengths = (_picked(names, s) for s in (pointers, described, lengths))
        self._strides = _picked(names, set(names) - pointers - described - lengths)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Through Triton the first time, then as it was compiled."""
        if _thread.wanted is not None:
            _thread.wanted.append(self._compiling(grid, args, options))
            return
        tensors = self._pointers(args)
        if reduce(or_, map(_pointer, tensors), 0) % ALIGNED or max(self._lengths(args), default=0) >= WIDE:
            if _thread.launches is not None:
                _thread.launches.append(None)
            self.kernel[grid](*args, **options)
            return
        described = [d.base.dtype for d in self._described(args)]
        key = (torch.cuda.current_device(), *map(_dtype, tensors), *described, self._strides(args), *options.items())
        compiled, made = self.known.get(key), (*grid, 1, 1)[:3]
        given = (*args, *[options[name] for name in self.constants])
        if compiled is None:
            compiled = self.kernel[grid](*args, **options)
            self._keep(key, compiled)
        else:
            compiled[made](*given)
        if _thread.launches is not None:
            _thread.launches.append(Launched(compiled, made, given) if key in self.known else None)

    def _compiling(self, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]) -> Callable[[], object]:
        """What compiles the kernel of a call and loads it."""
        _ = self.kernel.cache_key  # of the functions that it calls too, which other kernels may share
        return lambda: self.kernel.warmup(*args, grid=grid, **options)[(1, 1, 1)]

    def _keep(self, key: Any, compiled: Any) -> None:
        if len(self.known) >= MOST:
            self.known.clear()
        if hasattr(compiled, "__getitem__"):
            self.known[key] = compiled


def _picked(names: Sequence[str], wanted: set[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """args -> those of some names."""
    places = [i for i, name in enumerate(names) if name in wanted]
    if len(places) == 1:
        return lambda args: (args[places[0]],)
    return itemgetter(*places) if places else lambda _: ()


class Descriptors:
    """described(x, block, rows) of a generated file: tensors that lie alike have descriptors that differ in x alone.

    Only how they lie is kept, never a tensor: a new one may stand where another was."""

    def __init__(self, described: Callable[..., Any]) -> None:
        self.described = described
        self.known: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def __call__(self, x: Any, block: list[int], rows: int) -> Any:
        key = (x.shape, x.stride(), x.dtype, rows, *block)
        found = self.known.get(key)
        if found is None:
            made = self.described(x, block, rows)
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[key] = type(made), {**vars(made), "base": None}
            return made
        made = object.__new__(found[0])
        vars(made).update(found[1], base=x)
        return made
