"""FILE:FUNCTION on the command line: from a name to something that can be compiled and run.

    FUNCTION may be                                       it runs with
    a factory: no arguments, returns (model, args)        those args (a tuple, one tensor, or a dict of keywords)
    a function of tensors, or a model                     random tensors, of the shapes given with --arg, in order;
                                                          one --arg holds for all
    a function of no arguments                            nothing
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fusecomp.errors import TargetError
from fusecomp.planning.units import DTYPES

SHAPE = "2x4x96x64"
"""[B, H, N, D] of each tensor that a function takes, where the user gives no shapes."""


@dataclass(frozen=True)
class Target:
    """A callable and what to call it with."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """The eager result. Raises TargetError where the model itself fails, whatever fusecomp would do."""
        try:
            with torch.no_grad():
                return self.call(*self.args, **self.kwargs)
        except (Exception, SystemExit) as error:
            shapes = ", ".join(map(_shape, [*self.args, *self.kwargs.values()]))
            raise TargetError(
                f"{self.name} does not run in eager PyTorch, on inputs ({shapes}): {_said(error)}. "
                "Give other shapes with --arg, or name a factory that returns (model, args)."
            ) from error

    def learning(self) -> Target:
        """The same, trained: a model's parameters learn; of a function, what it is given."""
        if isinstance(self.call, torch.nn.Module):
            return self
        args, kwargs = tree_map(_learning, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def to(self, device: str) -> Target:
        """The same on another device."""
        try:
            call = self.call.to(device) if isinstance(self.call, torch.nn.Module) else self.call
            moved = [_moved(a, device) for a in self.args]
            return Target(self.name, call, tuple(moved), {k: _moved(v, device) for k, v in self.kwargs.items()})
        except (RuntimeError, AssertionError) as error:
            raise TargetError(f"--on {device}: {_said(error)}. Name a device that is here, such as cpu.") from error


def load(text: str, shapes: Sequence[str] = ()) -> Target:
    """The target called `text`. Raises TargetError, saying what is wrong and what is there."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise TargetError(f"{text!r} is not FILE:FUNCTION, such as model.py:attention")
    module = _load_file(Path(path))
    found = _find(module, path, name)
    if not callable(found):
        raise TargetError(f"{name} in {path} is {_a(found)}, not a function, a model or a factory")
    parameters = _parameters(found)
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in VARIED]
    if inspect.isclass(found) and wanted:
        raise TargetError(f"{name} in {path} is a class: name an object of it, or a factory of (model, args)")
    if wanted or (shapes and parameters):
        return Target(name, found, *_inputs(name, wanted, shapes))
    if shapes:
        raise TargetError(f"{name} in {path} takes no inputs, so --arg has no meaning")
    return _from_factory(name, path, found)


def _load_file(path: Path) -> ModuleType:
    """The file as a module; its own folder can be imported from, as when it is run."""
    if path.is_dir():
        raise TargetError(f"{path} is a folder, not a Python file")
    if not path.is_file():
        raise TargetError(f"no file {path}{_near(path.name, [p.name for p in path.parent.glob('*.py')])}")
    spec = importlib.util.spec_from_file_location(f"fusecomp_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TargetError(f"{path} cannot be imported: {_said(error)}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _find(module: ModuleType, path: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    there = f"It defines {', '.join(own)}." if own else "It defines no function."
    raise TargetError(f"no {name!r} in {path}{_near(name, own)}. {there}")


VARIED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """What can be given; nothing where Python does not know."""
    called = call.forward if isinstance(call, torch.nn.Module) else call
    try:
        return list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return []


def _inputs(
    name: str, wanted: Sequence[inspect.Parameter], shapes: Sequence[str]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Random tensors, one for each shape or required argument: those by position, then those by keyword only."""
    given = list(shapes) if len(shapes) > 1 else list(shapes or [SHAPE]) * (len(wanted) or len(shapes))
    if len(given) < len(wanted):
        names = ", ".join(p.name for p in wanted)
        raise TargetError(f"{name} takes {names}: give --arg once for all, or {len(wanted)} times, not {len(given)}")
    generator = torch.Generator().manual_seed(0)
    tensors = [_tensor(text, generator) for text in given]
    keywords = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY]
    first = len(tensors) - len(keywords)
    return tuple(tensors[:first]), dict(zip(keywords, tensors[first:], strict=True))


def _tensor(text: str, generator: torch.Generator) -> Tensor:
    """ "2x4x96x64:bfloat16" as a tensor: normal floats, integers below 16, random truth values."""
    shape, _, dtype_name = text.partition(":")
    if not all(n.isdecimal() for n in shape.split("x")):
        raise TargetError(f"--arg {text!r} is not SHAPE or SHAPE:DTYPE, such as {SHAPE}:bfloat16")
    dtype = getattr(torch, DTYPES.get(dtype_name, dtype_name or "float32"), None)
    if not isinstance(dtype, torch.dtype):
        raise TargetError(f"--arg {text!r}: PyTorch has no dtype {dtype_name!r}{_near(dtype_name, list(DTYPES))}")
    sizes = [int(n) for n in shape.split("x")]
    try:
        if dtype.is_floating_point:
            return torch.randn(sizes, generator=generator).to(dtype)
        return torch.randint(0, 2 if dtype == torch.bool else 16, sizes, generator=generator).to(dtype)
    except (RuntimeError, TypeError) as error:  # TypeError: a length that no machine word holds
        raise TargetError(f"--arg {text!r} cannot be made: {_said(error)}. Give another shape or dtype.") from error


def _from_factory(name: str, path: str, call: Callable[..., Any]) -> Target:
    """What a factory returns; a function that returns something else is itself the target."""
    try:
        made = call()
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{name} in {path} raised when called without inputs: {_said(error)}. "
            "Give it inputs with --arg, or name a factory that returns (model, args)."
        ) from error
    match made:
        case (model, args, Mapping() as kwargs) if callable(model):
            return Target(name, model, _tuple(args), kwargs)
        case (model, Mapping() as kwargs) if callable(model):
            return Target(name, model, (), kwargs)
        case (model, args) if callable(model):
            return Target(name, model, _tuple(args))
        case _ if callable(made):
            raise TargetError(f"{name} in {path} returns a model without inputs: return (model, args)")
        case _:
            return Target(name, call)


def _tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, list | tuple) else (args,)


def _learning(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floats else value


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _shape(value: Any) -> str:
    return f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _said(error: BaseException) -> str:
    """The error in one line, and the line of the user's that raised it."""
    lines, own = str(error).strip().splitlines(), (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")
    places = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"{said} (at {Path(places[-1].filename).name}:{places[-1].lineno})" if places else said


def _a(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
