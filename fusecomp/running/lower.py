"""A region made runnable on its device: a generated Triton kernel, or PyTorch operators on the CPU.

For training the forward kernel saves the log-sum-exp of each row, and backward kernels are generated beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.fx import Node

from fusecomp.codegen import hopper_backward
from fusecomp.codegen.backward import BackwardSource, emit_backward
from fusecomp.codegen.backward_exact import Fixed
from fusecomp.codegen.descriptors import choose
from fusecomp.codegen.emit import emit
from fusecomp.codegen.source import KernelSource
from fusecomp.errors import CacheError, KernelError, PlanError
from fusecomp.ir.expr import Size, parts
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.patterns.masks import hiding
from fusecomp.planning.backward import backward_plan, by_table
from fusecomp.planning.device import Device, current
from fusecomp.planning.plan import alone, fixed_share, plan, split
from fusecomp.planning.tile import TilePlan
from fusecomp.planning.visits import gradients_visit
from fusecomp.running import cache, cpu, hopper, layout
from fusecomp.running.launching import quickened
from fusecomp.running.loader import load
from fusecomp.running.operator import Gradients, Launch
from fusecomp.running.subgraph import known
from fusecomp.running.tune import tuned
from fusecomp.running.verify import example, log_sums, machine
from fusecomp.running.visits import launcher
from fusecomp.settings import Options


@dataclass(frozen=True)
class Lowered:
    """A region made runnable."""

    key: str
    launch: Launch
    lowering: str
    """"triton" or "cpu"."""
    plan: TilePlan | None = None
    source: KernelSource | None = None
    backward: Gradients | None = None
    """What writes the gradients; None where they are recomputed."""
    backward_source: KernelSource | None = None
    why_no_backward: str = ""

    @property
    def portable(self) -> bool:
        return self.plan is None or not self.plan.consumers

    @property
    def text(self) -> str:
        """What the verdict depends on."""
        sources = [s.text for s in (self.source, self.backward_source) if s is not None]
        return "\n".join(sources) or self.lowering


def lower(
    match: Match, sizes: Mapping[str, int], device: torch.device, options: Options, portable: bool = False
) -> Lowered:
    """What runs the region of `match`; `portable`: nothing that only one kind of device has a kernel for."""
    region = match.region
    if on_cpu(device, options):
        tiles = None
        with contextlib.suppress(PlanError):
            tiles = plan(region, sizes)
        return Lowered(f"{region.key}-cpu", cpu.lower(region), "cpu", tiles)
    tiles = planned(match, sizes, options.batch_invariant)
    own = None if portable else hopper.takes(match, sizes, options)
    special = [own] if own is not None else []
    if options.tune > 1 and device.type == "cuda" and not options.batch_invariant:
        with real_tensors():
            run = trial(match, sizes, device)
            tiles = tuned(region, sizes, options.tune, run, machine(device), described(match, tiles), special)
    else:
        tiles = next(iter(special), tiles)
    if not match.learned:
        source, launch = generate(looked_through(match, tiles), tiles)
        return Lowered(key_of(source), launch, "triton", source.plan, source)
    try:
        return for_training(match, tiles, sizes, options)
    except (KernelError, PlanError) as error:
        source, launch = generate(match, tiles)
        return Lowered(key_of(source), launch, "triton", source.plan, source, why_no_backward=str(error))


def looked_through(match: Match, tiles: TilePlan) -> Match:
    """What is added to the scores as a mask, where tiles are visited by what the masks hold. Nothing learns: a kernel
    that reads tensors as masks has no backward. A list for Hopper leaves out what is -inf alone."""
    hides = tiles.visits != "bounds" and not (tiles.consumers and tiles.visits == "table")
    return replace(match, region=hiding(match.region)) if hides else match


def planned(match: Match, sizes: Mapping[str, int], batch_invariant: bool = False) -> TilePlan:
    """The plan of a region whose K and V lie as they do in the graph."""
    if batch_invariant:
        sizes = alone(match.region, sizes)
    tiles = plan(match.region, sizes)
    if tiles.loads == "descriptor" and not described(match, tiles):
        tiles = plan(match.region, sizes, describable=False)
    if not (tiles.resident or counted(match)):
        tiles = split(tiles, match.region, sizes)
    return fixed_share(tiles) if batch_invariant else tiles


def counted(match: Match) -> bool:
    """Whether the graph is compiled for one number of requests and heads."""
    names = {x.name for v in match.region.batch for x in parts(v.size) if isinstance(x, Size)}
    return all(known(match.sizes[name]) for name in names)


def described(match: Match, tiles: TilePlan) -> bool:
    """Whether tensor descriptors can hold K and V of these strides on this device."""
    strides = [strides for _, strides, _ in layout.examples(match)]
    pointers = replace(tiles, loads="pointer")
    return choose(match.region, pointers, current().arch, strides).loads == "descriptor"


def on_cpu(device: torch.device, options: Options) -> bool:
    """Whether PyTorch operators on the CPU run it, and no kernel is needed."""
    if options.lowering != "auto":
        return options.lowering == "cpu"
    return device.type == "cpu" and not triton_interprets()


def for_training(match: Match, tiles: TilePlan, sizes: Mapping[str, int], options: Options) -> Lowered:
    """A forward kernel that saves the log-sum-exp, and its backward. KernelError or PlanError where there is none."""
    region = match.region
    source, launch = generate(match, tiles, saves_lse=True)
    backward = gradients_of(region, tiles, sizes, match.learned, current(), hopper.in_order(options), fixed(match))
    module = runnable(backward)
    return Lowered(f"{key_of(source)}-{key_of(backward)[-8:]}", launch, "triton", source.plan, source,
                   module.launch, backward)  # fmt: skip


def gradients_of(
    region: AttentionRegion, tiles: TilePlan, sizes: Mapping[str, int], learned: frozenset[str], device: Device,
    in_order: bool = True, fixed: Fixed = (),
) -> BackwardSource:  # fmt: skip
    """The backward kernels beside a forward kernel of these tiles. KernelError or PlanError where there are none."""
    others = learned - products_of(region)
    plans = backward_plan(region, device, sizes)
    if tiles.visits != "bounds" and tiles.cost is not None and gradients_visit(tiles.cost.seconds):
        plans = by_table(plans, region, others, tiles.visits)
    if tiles.consumers and hopper_backward.expresses(region, learned):
        plans = hopper_backward.specialised(region, tiles, in_order)
    return emit_backward(region, plans, others, fixed)


def fixed(match: Match) -> tuple[tuple[str, int], ...]:
    """The lengths that every call of this graph has."""
    found = []
    for name, source in match.sizes.items():
        node, axis = source if isinstance(source, tuple) else (source, None)
        n = node.meta["val"] if isinstance(node, Node) else node
        n = n if axis is None else n.shape[axis]
        found += [(name, n)] if isinstance(n, int) else []
    return tuple(found)


def products_of(region: AttentionRegion) -> frozenset[str]:
    """The operands that are Q, K or V."""
    return frozenset({a.operand for p in region.products for a in (p.q, p.k)} | {region.v.operand})


def key_of(source: KernelSource) -> str:
    return f"{source.name}-{cache.digest(source.text)[:8]}"


def generate(match: Match, tiles: TilePlan, saves_lse: bool = False) -> tuple[KernelSource, Launch]:
    """The kernel of a plan, and what launches it."""
    source = emit(match.region, tiles, saves_lse or match.region.lse)
    return source, launcher(runnable(source), source)


def runnable(source: KernelSource) -> ModuleType:
    """The module of a generated file; from a temporary folder where the cache takes no more."""
    try:
        module = load(source, cache.directory("kernels"))
    except CacheError as error:
        module = load(source, cache.instead("kernels", error))
    return quickened(module, source.text)


def trial(match: Match, sizes: Mapping[str, int], device: torch.device) -> Callable[[TilePlan], Callable[[], object]]:
    """Plan -> a launch of its kernel on random inputs of the graph's shapes."""
    tensors, out, lengths = example(match, sizes, device)
    more = [log_sums(match, sizes, device)] if match.region.lse else []

    def run(tiles: TilePlan) -> Callable[[], object]:
        _, launch = generate(match, tiles)
        return lambda: launch(out, tensors, lengths, *more)

    return run


def triton_interprets() -> bool:
    """Whether Triton runs kernels on CPU tensors in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def real_tensors() -> Any:
    """Leave whatever fake-tensor or tracing mode the caller is in."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()
