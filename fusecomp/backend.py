"""The torch.compile backend, `fuse` for people who hold a graph, and `explain`.

    torch.compile(model, backend="fusecomp")                        the rest of the graph goes to Inductor
    torch.compile(model, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch.fx import GraphModule

from fusecomp.graph.capture import HIGHER_ORDER, placeholder_values
from fusecomp.graph.facts import copy_of
from fusecomp.graph.modes import Modes, in_their_modes
from fusecomp.pipeline import Compilation, compile_graph, unread
from fusecomp.planning.device import current, live
from fusecomp.report import Report
from fusecomp.running.direct import direct
from fusecomp.running.inductor import call_functions
from fusecomp.settings import Options

log = logging.getLogger(__name__)

_counts: Counter[str] = Counter()
_listeners: list[list[Compilation]] = []


def fusecomp(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph: attention to fused kernels, the rest to the inner backend.

    Raises OptionError for an option that does not exist; anything else only under `strict`.
    """
    chosen = Options.parse(options, mode)
    with unheard():
        module = rewritten(gm, placeholder_values(gm), chosen)
    others = any(map(named_otherwise, example_inputs))
    if module is not gm and not others and as_ever(chosen) and (run := direct(module)) is not None:
        return run
    compiled = inner_backend(chosen)
    if module is gm or not others:
        return compiled(module, example_inputs)
    run = compiled(module, [*map(plain, example_inputs)])
    return lambda *inputs: run(*map(plain, inputs))


def as_ever(options: Options) -> bool:
    """Whether Inductor takes the rest, and is asked for nothing that it would do to any graph."""
    from torch._inductor import config

    return options.inner == "inductor" and options.mode is None and not config.triton.cudagraphs


def named_otherwise(x: object) -> bool:
    """Whether it is a tensor of a class that changes no operator: PyTorch hands such tensors to its own alone."""
    if not isinstance(x, torch.Tensor) or type(x) in (torch.Tensor, torch.nn.Parameter):
        return False
    return x.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined, no-any-return]


def plain(x: Any) -> Any:
    """The same tensor as a torch.Tensor, where it is of such a class."""
    return x.as_subclass(torch.Tensor) if named_otherwise(x) else x


def unheard() -> AbstractContextManager[object]:
    """The caller may be told what autograd saves, as inside an activation checkpoint: not of what compiling saves."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return nullcontext() if top is None else torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def inner_backend(options: Options) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """The backend for the rest of the graph; Inductor gets the mode."""
    if options.inner == "inductor":
        return _inductor(options.mode)
    return torch._dynamo.lookup_backend(options.inner)  # type: ignore[no-any-return]


def _inductor(mode: str | None) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from fusecomp.running.unmatched import patches

    call_functions()
    own = dict(list_mode_options(mode)) if mode else {}
    return lambda gm, inputs: compile_fx(gm, list(inputs), config_patches=own | patches())


def rewritten(gm: GraphModule, values: Sequence[Any], options: Options) -> GraphModule:
    """`gm` with its attentions fused, those in the bodies of higher-order operators too."""
    gm = with_bodies(gm, options)
    try:
        done = compile_graph(gm, values, options)
    except Exception as error:
        if options.strict:
            raise
        log.warning("fusecomp: a graph is compiled without fused attention; "
                    "options={'strict': True} raises the error", exc_info=True)  # fmt: skip
        done = unread(gm, error)
    tell(done)
    return done.module


def with_bodies(gm: GraphModule, options: Options) -> GraphModule:
    """`gm`, or a copy with attention fused inside activation checkpoints, conditionals and the like: their bodies are
    graphs of their own."""
    fused: dict[str, GraphModule] = {}
    for name, modes in bodies(gm).items():
        body = getattr(gm, name)
        values = placeholder_values(body)
        if len(modes) == 1 and all(v is not None for v in values):
            with modes.pop().entered():
                fused[name] = rewritten(body, values, options)
    if all(new is getattr(gm, name) for name, new in fused.items()):
        return gm
    copy = copy_of(gm)
    for name, new in fused.items():
        setattr(copy, name, new)
    return copy


def bodies(gm: GraphModule) -> dict[str, set[Modes]]:
    """The graphs that operators of `gm` run, and the modes that each is run in."""
    found: dict[str, set[Modes]] = defaultdict(set)
    for node, modes in in_their_modes(gm.graph):
        for argument in node.all_input_nodes if isinstance(node.target, HIGHER_ORDER) else ():
            held = argument.op == "get_attr" and getattr(gm, str(argument.target), None)
            if isinstance(held, GraphModule):
                found[str(argument.target)].add(modes.inside(node))
    return found


def tell(done: Compilation) -> None:
    """Count what happened, and give it to whoever is explaining."""
    for entry in done.entries:
        _counts["candidates"] += 1
        _counts["fallbacks" if entry.status == "fallback" else entry.status] += 1
        log.info("%s at %s %s", entry.status, entry.where, entry.reason)
    for listener in _listeners:
        listener.append(done)


def fuse(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> GraphModule:
    """Fuse the attentions of an FX graph, such as `torch.export.export(...).module()`.

    `example_inputs` are tensors or numbers of the graph's inputs; lengths are fixed to theirs, unless the graph carries
    symbolic ones. `options` are the backend's; the rest of the graph is left as it is. Returns a new GraphModule, or
    `gm` itself where nothing was fused. TypeError for what is no graph, or for too few inputs of one that does not know
    their shapes; OptionError for an unknown option; VerificationError under strict=True.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    if not isinstance(gm, GraphModule):
        raise TypeError(f"fuse takes a torch.fx.GraphModule, such as torch.export.export(...).module(), not {type(gm)}")
    values, names = placeholder_values(gm), [n.name for n in gm.graph.find_nodes(op="placeholder") if not n.args]
    if any(v is None for v in values) and len(example_inputs) < len(names):
        raise TypeError(f"fuse: the graph takes {', '.join(names)}; {len(example_inputs)} inputs were given")
    if any(v is None for v in values) or len({v.fake_mode for v in values if isinstance(v, FakeTensor)}) > 1:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        values = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in example_inputs]
    seen = zip_longest(values, example_inputs[: len(values)])  # a trace need not record what learns
    values = [v.detach().requires_grad_() if getattr(x, "requires_grad", False) else v for v, x in seen]
    return rewritten(gm, values, Options.parse(options))


def explain(fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Run `fn(*args, **kwargs)` once through fusecomp and tell what became of each attention.

    `options` are the backend's; the rest of the graph runs eagerly unless they name an inner backend. Each entry of the
    report has `status` ("fused", "declined", "fallback"), `where`, `reason`, `advice`, `region`, `plan`, `kernel_text`
    and `verdict`. Everything that Dynamo has compiled in this process is forgotten, before and after. OptionError for
    an unknown option; VerificationError under strict=True; what `fn` itself raises.
    """
    heard: list[Compilation] = []
    _listeners.append(heard)
    try:
        torch._dynamo.reset()
        chosen = {"inner": "eager", **(options or {})}
        torch.compile(fn, backend=fusecomp, options=chosen)(*args, **kwargs)
    finally:
        _listeners.remove(heard)
        torch._dynamo.reset()
    entries = tuple(e for done in heard for e in done.entries)
    title = getattr(fn, "__name__", type(fn).__name__)
    device = current().name if live() else f"{current().name} (no GPU here)"
    return Report(entries, title=title, device=device, graphs=len(heard))


def counters() -> dict[str, int]:
    """Attentions in the graphs compiled since the last reset: candidates, fused, declined, fallbacks."""
    return {name: _counts[name] for name in ("candidates", "fused", "declined", "fallbacks")}


def reset() -> None:
    """Clear the counters and forget what this process has loaded; functions compiled before go on running."""
    from fusecomp.running.operator import retire

    _counts.clear()
    retire()
