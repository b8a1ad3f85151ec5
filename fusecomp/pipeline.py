"""The story on one page: from a captured graph to one in which attention runs as fused kernels.

    capture     Dynamo's graph in a small ATen vocabulary            graph/capture.py
    recognise   softmax(f(Q K^T)) V, as mathematics                  patterns/attention.py
    plan        tiles and schedule within the SRAM budget            planning/plan.py
    emit        a specialised kernel, as readable text               codegen/emit.py
    load        from a private, content-addressed file               running/loader.py
    verify      against the graph's own nodes in float64             running/verify.py
    substitute  the kernel's operator for the nodes                  running/substitute.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fusecomp.codegen.descriptors import choose
from fusecomp.codegen.emit import emit
from fusecomp.codegen.source import KernelSource
from fusecomp.errors import FusecompError, VerificationError
from fusecomp.graph.capture import capture, may_hold_attention, uses_functorch
from fusecomp.graph.facts import Place, place
from fusecomp.patterns.attention import Declined, recognise
from fusecomp.patterns.build import Match
from fusecomp.patterns.sdpa import PLAIN, plain_calls, put_back, write_out
from fusecomp.planning.device import current
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan
from fusecomp.report import Entry
from fusecomp.running import cache, cpu
from fusecomp.running.inputs import example_of
from fusecomp.running.loader import load
from fusecomp.running.operator import Kernel, Launch, register
from fusecomp.running.subgraph import seen
from fusecomp.running.substitute import substitute
from fusecomp.running.tune import tuned
from fusecomp.running.verify import Verdict, example, machine, verify
from fusecomp.settings import Options

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lowered:
    """A region made runnable."""

    key: str
    launch: Launch
    lowering: str
    """"triton" or "cpu"."""
    plan: TilePlan | None = None
    source: KernelSource | None = None

    @property
    def text(self) -> str:
        """What the verdict depends on."""
        return self.source.text if self.source else self.lowering


@dataclass(frozen=True)
class Compilation:
    """One graph, compiled: what is handed on, and what is told about it."""

    module: GraphModule
    entries: tuple[Entry, ...] = ()

    @property
    def fused(self) -> int:
        return sum(e.status == "fused" for e in self.entries)


def compile_graph(gm: GraphModule, values: Sequence[Any], options: Options) -> Compilation:
    """`gm` with each recognised attention replaced. `values` are the fake tensors and numbers of its inputs.

    Where nothing is replaced, the module handed on is `gm` itself, untouched.
    """
    if not may_hold_attention(gm):
        return Compilation(gm)
    if uses_functorch(gm):
        return Compilation(gm, tuple(untraceable(gm)))
    captured = capture(gm, values)
    written = write_out(captured)
    entries = list(plain_sdpa(captured))
    taken = set()
    learns = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
    for found in recognise(captured):
        entry = declined(found) if isinstance(found, Declined) else compile_match(captured, found, options, learns)
        if entry.status == "fused" and isinstance(found, Match):
            taken.add(found.output)
        entries.append(entry)
    put_back(written, taken)
    captured.graph.eliminate_dead_code()
    captured.recompile()
    entries = [replace(e, index=i) for i, e in enumerate(entries)]
    return Compilation(captured if taken else gm, tuple(entries))


def compile_match(module: GraphModule, match: Match, options: Options, learns: bool = False) -> Entry:
    """Plan, emit, load, verify and substitute one attention. What goes wrong leaves eager in place.

    `learns` says that gradients will be asked for.
    """
    region, sizes = match.region, seen_sizes(match)
    base = Entry(0, "fallback", region.origin, region.source, region, sizes)
    if options.lowering == "off":
        return replace(base, status="declined", reason="the option lowering is off")
    if learns and options.lowering == "auto" and not worth_recomputing(match, sizes):
        return replace(base, status="declined", reason=TRAINING, advice=TRAINING_ADVICE)
    if options.empty_rows == "zero":
        region = replace(region, empty_row="zero")
        match = replace(match, region=region)
    device = match.inputs[0].meta["val"].device
    try:
        lowered = lower(match, sizes, device, options)
        base = described(base, lowered)
        verdict = checked(match, lowered, sizes, device, options)
    except FusecompError as error:
        return fallen_back(base, f"{type(error).__name__}: {error}", options)
    except Exception as error:  # a compiler error of any kind must not cost the user's result
        log.debug("fusecomp failed at %s", region.origin, exc_info=True)
        return fallen_back(base, f"{type(error).__name__}: {error}", options)
    base = replace(base, verdict=str(verdict) if verdict else "not verified: the option verify is off")
    if verdict is not None and not verdict.passed:
        return fallen_back(base, f"the kernel {verdict}", options)
    register(lowered.key, Kernel(region, lowered.launch))
    substitute(module, match, lowered.key)
    return replace(base, status="fused")


TRAINING = "its gradient has no generated kernel yet, and recomputing it block by block is slower than eager's"
TRAINING_ADVICE = "for inference, call the model under torch.no_grad(); lowering='triton' fuses all the same"
EAGER_SHARE = 0.25
"""Where eager would keep more than this share of the GPU's memory for one attention, recomputing is worth its time."""


def worth_recomputing(match: Match, sizes: Mapping[str, int]) -> bool:
    """Whether training should run the fused forward: on the CPU always, on a GPU where eager's scores would fill it."""
    device = match.inputs[0].meta["val"].device
    if device.type != "cuda":
        return True
    batch = math.prod(sizes[v.name.upper()] for v in match.region.batch)
    kept = batch * sizes["M"] * sizes["N"] * 6  # float32 scores and half probabilities
    return kept > EAGER_SHARE * torch.cuda.get_device_properties(device).total_memory


def lower(match: Match, sizes: Mapping[str, int], device: torch.device, options: Options) -> Lowered:
    """A region made runnable on its device: a Triton kernel, or PyTorch operators on the CPU."""
    region = match.region
    interpreted = device.type == "cpu" and triton_interprets()
    wanted = options.lowering
    if wanted == "cpu" or (wanted == "auto" and device.type == "cpu" and not interpreted):
        return Lowered(f"{region.key}-cpu", cpu.lower(region), "cpu", plan(region, sizes))
    tiles = plan(region, sizes)
    if options.tune > 1 and device.type == "cuda":
        tiles = tuned(region, sizes, options.tune, trial(match, sizes, device), machine(device))
    source, launch = generate(match, tiles)
    tiles = source.plan
    return Lowered(f"{source.name}-{cache.digest(source.text)[:8]}", launch, "triton", tiles, source)


def generate(match: Match, tiles: TilePlan) -> tuple[KernelSource, Launch]:
    """The kernel of a plan, and what launches it; K and V through descriptors where the device and they allow it."""
    strides = [example_of(n.meta["val"])[1] for n in match.inputs]
    source = emit(match.region, choose(match.region, tiles, current().arch, strides))
    return source, load(source, cache.directory("kernels")).launch


def trial(match: Match, sizes: Mapping[str, int], device: torch.device) -> Callable[[TilePlan], Callable[[], object]]:
    """Plan -> a launch of its kernel on random inputs of the graph's shapes."""
    with real_tensors():
        tensors, out, lengths = example(match, sizes, device)

    def run(tiles: TilePlan) -> Callable[[], object]:
        _, launch = generate(match, tiles)
        return lambda: launch(out, tensors, lengths)

    return run


def triton_interprets() -> bool:
    """Whether Triton runs kernels on CPU tensors in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def checked(
    match: Match, lowered: Lowered, sizes: Mapping[str, int], device: torch.device, options: Options
) -> Verdict | None:
    """The verdict on a kernel, unless verification is off."""
    if not options.verify:
        return None
    with torch.no_grad(), torch._dispatch.python.suspend_functionalization(), real_tensors():
        return verify(match, lowered.launch, sizes, device, lowered.text)


def real_tensors() -> Any:
    """Leave whatever fake-tensor or tracing mode the caller is in."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def seen_sizes(match: Match) -> dict[str, int]:
    """The lengths of this graph, symbolic ones at the size they were seen with."""
    return {name: seen(source) for name, source in match.sizes.items()}


def described(entry: Entry, lowered: Lowered) -> Entry:
    """The entry with what is known once a kernel exists."""
    source = lowered.source
    return replace(
        entry,
        plan=lowered.plan,
        kernel=source.name if source else lowered.key,
        kernel_text=source.text if source else "",
        kernel_source=source,
        lowering=lowered.lowering,
    )


def fallen_back(entry: Entry, reason: str, options: Options) -> Entry:
    """Eager stays: one warning, or an error under strict."""
    message = f"attention at {entry.where or 'an unknown line'} runs as written: {reason}"
    if options.strict:
        raise VerificationError(message)
    log.warning("fusecomp: %s", message)
    return replace(entry, status="fallback", reason=reason, lowering="eager")


def declined(found: Declined) -> Entry:
    return Entry(0, "declined", found.place.where, found.place.source, reason=found.reason, advice=found.advice)


def plain_sdpa(module: GraphModule) -> Iterator[Entry]:
    """SDPA calls that PyTorch's own kernels run."""
    for node in plain_calls(module):
        at = place(node)
        yield Entry(0, "declined", at.where, at.source, reason=PLAIN)


def untraceable(gm: GraphModule) -> Iterator[Entry]:
    """Softmaxes under torch.vmap and its kin."""
    for node in gm.graph.nodes:
        if "softmax" in str(node.target):
            at: Place = place(node)
            yield Entry(0, "declined", at.where, at.source, reason="it lies under torch.func (vmap, grad)",
                        advice="write the batch axis out")  # fmt: skip
