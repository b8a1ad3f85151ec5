"""`fusecomp show` and `fusecomp env`: what a stage made, and what this machine has."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from fusecomp.codegen import hopper_backward
from fusecomp.errors import CacheError, KernelError, PlanError
from fusecomp.graph.facts import label
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.device import Device, current, live
from fusecomp.planning.ranking import rank_backward, rank_plan
from fusecomp.planning.tile import TilePlan
from fusecomp.planning.units import size
from fusecomp.report import Report, cost_text, plan_text
from fusecomp.running import hopper
from fusecomp.settings import cache_dir, environment
from fusecomp.tables import considered, printed
from fusecomp.target import Target

if TYPE_CHECKING:
    from fusecomp.codegen.source import KernelSource

STAGES = ("graph", "region", "plan", "kernel", "ptx")
ROWS = 12
"""Tiles that are listed of a plan."""
PACKAGES = ("fusecomp", "torch", "triton", "numpy", "sympy", "networkx", "transformers")


def graphs(target: Target) -> Iterator[str]:
    """Each graph of Dynamo in the vocabulary that recognition reads, with the user's source lines."""
    from fusecomp.graph.capture import capture, placeholder_values

    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        found.append(_named(capture(graph, placeholder_values(graph))))
        return graph

    with torch.no_grad():
        torch.compile(target.call, backend=keep)(*target.args, **target.kwargs)
    yield from (str(graph.print_readable(print_output=False)) for graph in found)


def _named(captured: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph, its inputs called as the user called them."""
    for node in captured.graph.find_nodes(op="placeholder"):
        node._rename(label(node) or node.name)
        node.target = node.name
    return captured


def stage(report: Report, until: str, device: Device, backward: bool = False) -> Iterator[str]:
    """What each attention is after the stage `until`, planned for `device`; a decline says why at every stage.
    `backward`: of the kernels of the gradients."""
    comment = "//" if until == "ptx" else "#"
    if not report.entries:
        yield f"{comment} {report.nothing}"
    for group in report.groups():
        entry = group[0]
        alike = f", {len(group)} alike" if len(group) > 1 else ""
        yield f"{comment} {entry.where}{alike}: {entry.source.strip()}"
        if entry.region is None:
            advice = f"\n{comment} advice: {entry.advice}" if entry.advice else ""
            yield f"{comment} {entry.status}: {entry.reason}{advice}\n"
        elif backward and not entry.learned:
            yield f"{comment} nothing that it reads is trained: let an input or a parameter require a gradient\n"
        else:
            learned = frozenset(entry.learned if backward else ())
            yield f"{_made(entry.region, entry.sizes, until, device, learned)}\n"


def _made(
    region: AttentionRegion, sizes: Mapping[str, int], until: str, device: Device, learned: frozenset[str]
) -> str:
    """Region, plan, kernel, machine code: each from the one before. Of the gradients, where something is learned."""
    from fusecomp.planning.plan import plan

    if until == "region":
        return str(region)
    tiles = plan(region, sizes, device)
    if until == "plan":
        return "\n".join(_plan(region, tiles, sizes, device, bool(learned)))
    source = _source(region, tiles, sizes, device, learned)
    if isinstance(source, str):
        return source
    if until == "kernel":
        return source.text
    return _machine_code(source, device)


def _source(
    region: AttentionRegion, tiles: TilePlan, sizes: Mapping[str, int], device: Device, learned: frozenset[str]
) -> KernelSource | str:
    """The file, or why there is none."""
    from fusecomp.codegen.emit import emit
    from fusecomp.running.lower import gradients_of

    own = hopper.planned(region, sizes, device, hopper_backward.expresses(region, learned)) or tiles
    if not learned:
        return emit(region, own)
    try:
        return gradients_of(region, own, sizes, learned, device, fixed=tuple(sizes.items()))
    except (KernelError, PlanError) as error:
        return f"# no kernels of the gradients, which are recomputed a block of rows at a time: {error}"


def _machine_code(source: KernelSource, device: Device) -> str:
    """Every kernel of the file, compiled for `device`: what it takes, and its assembly. No GPU is needed."""
    from fusecomp.codegen.compiled import cross_compile

    kernels = re.findall(r"^@(?:triton|gluon)\.jit\(.*\ndef (\w+)\(", source.text, re.MULTILINE)
    made = {name: cross_compile(source, device.capability or device.arch, name) for name in kernels}
    return "\n".join(
        f"// {source.name}: {name} for {device.arch}: {m.shared} B of shared memory, "
        f"{_known(m.registers)} registers, {_known(m.spills)} B spilled\n{m.ptx}"
        for name, m in made.items()
    )


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _plan(
    region: AttentionRegion, plan: TilePlan, sizes: Mapping[str, int], device: Device, backward: bool
) -> Iterator[str]:
    yield f"on {plan.device}, {', '.join(f'{name} = {length}' for name, length in sizes.items())}"
    yield plan_text(plan)
    if plan.cost is not None:
        yield cost_text(plan.cost)
    if (own := hopper.planned(region, sizes, device)) is not None and own.cost is not None:
        yield f"Runs in the kernel for Hopper's tensor cores: {plan_text(own)}\n{cost_text(own.cost)}"
    if (ranking := rank_plan(region, sizes, device, plan)) is not None:
        yield f"\n{printed(considered(ranking, ROWS))}"
    for gradients in rank_backward(region, sizes, device, device.smem_bytes) if backward else ():
        yield f"\n{gradients.kernel}\n\n{printed(considered(gradients, ROWS))}"


def facts() -> Iterator[tuple[str, str]]:
    """(what, how it is) of this machine, for `fusecomp env` and bug reports."""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in PACKAGES:
        yield name, installed(name)
    yield "device", device()
    yield "interpreter", "on: kernels run on CPU tensors" if os.environ.get("TRITON_INTERPRET") == "1" else "off"
    yield "cache", cache()
    for name, value in environment().items():
        yield name, "not set" if value is None else value


def installed(name: str) -> str:
    """Its version, or "missing"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def device() -> str:
    """The GPU, or what stands in for it."""
    if (gpu := live()) is not None:
        return f"{gpu.name} ({gpu.arch}), {gpu.sms} multiprocessors, {gpu.smem_bytes} B of shared memory a program"
    return f"no GPU: plans are made for {current().name}; attention on the CPU runs as PyTorch operators"


def cache() -> str:
    """Where it is, what it holds, whether it can be written."""
    try:
        folder = cache_dir()
    except CacheError as error:
        return str(error)
    if not folder.exists():
        parent = next(p for p in folder.parents if p.exists())
        made = os.access(parent, os.W_OK) and parent.is_dir()
        return f"{folder}, empty" if made else f"{folder}, cannot be made: {parent} is not a writable folder"
    files = [p for p in folder.rglob("*") if p.is_file()] if folder.is_dir() else []
    held = f"{folder}, {len(files)} files, {size(sum(p.stat().st_size for p in files))}"
    return held if folder.is_dir() and os.access(folder, os.W_OK) else f"{folder}, not a writable folder"
