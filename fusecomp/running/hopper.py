"""Where the kernel for Hopper's tensor cores runs an attention: it can express it, and is predicted to be faster.

Its tiles are one size (codegen/hopper.py): few queries, and masks that leave a query tile few keys, stay with the
portable kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from fusecomp.codegen import hopper, hopper_backward
from fusecomp.codegen.copied import pair_loads
from fusecomp.codegen.descriptors import in_steps
from fusecomp.codegen.frame import Frame
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.patterns.masks import hiding
from fusecomp.planning.device import Device, current
from fusecomp.planning.hopper import hopper_cost
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan
from fusecomp.running.inputs import example_of
from fusecomp.settings import Options

AT_MOST = 1.0
"""Of the time that is predicted for the portable kernel, what this one may be predicted to take."""
LEAST_BUFFERS = 2
"""Tiles in shared memory of what the score reads for each pair. With two a bias of each head (B 4, H 16, N 4096, D 64)
takes 0.78 ms where the portable kernel takes 0.99 (probes_h200.json); one is not ready when it is needed."""


BY_TABLE = False
"""Whether it runs masks whose tiles come from a table, too. Packed documents (B 4, H 16, N 4096, D 64) take as long as
with the portable kernel from a CUDA graph, 0.20 ms, and longer call by call: 0.33 ms (bench_h200.json) beside 0.21
(bench_first_h200.json)."""


@cache
def available() -> bool:
    """Whether the installed Triton has the Gluon that the kernel is written in, that of Triton 3.6 to 3.8."""
    try:
        from triton.experimental.gluon.language import shared_memory_descriptor
        from triton.experimental.gluon.language.nvidia import hopper as language
        from triton.experimental.gluon.nvidia import hopper as host
    except ImportError:
        return False
    names = ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
    known = all(hasattr(language, n) for n in names) and hasattr(host, "TensorDescriptor")
    return known and hasattr(shared_memory_descriptor, "_reinterpret")


def takes(match: Match, sizes: Mapping[str, int], options: Options) -> TilePlan | None:
    """Its plan of the match, if it runs it. Only where it is verified: the portable kernel is there if it disagrees."""
    asked = match.output.meta["val"].device.type == "cuda" and options.verify and not options.batch_invariant
    return planned(match.region, sizes, current()) if asked and _in_steps(match) else None


def trains(match: Match) -> bool:
    """Whether what learns, if anything does, gets its gradients from kernels for Hopper too."""
    return not match.learned or hopper_backward.expresses(match.region, match.learned)


def trains_faster(match: Match, options: Options) -> bool:
    """Whether plain attention is no faster by PyTorch's own kernels. A training step of cuDNN's, which adds to dQ in
    any order, takes 4 to 8 % less than one that does not (hopper_backward_h200.json)."""
    return not match.learned or (trains(match) and not in_order(options))


def in_order(options: Options) -> bool:
    """Whether nothing may be added up in an order that changes from run to run."""
    return options.deterministic or torch.are_deterministic_algorithms_enabled()


def planned(region: AttentionRegion, sizes: Mapping[str, int], device: Device) -> TilePlan | None:
    """Its plan, where it can express the region and is predicted faster at these lengths than the portable kernel."""
    if device.arch != "sm_90" or not available() or not hopper.expresses(region):
        return None
    tiles = plan(region, sizes, device)
    if tiles.skeleton != "prefill" or tiles.cost is None:
        return None
    if tiles.visits == "table" and not (BY_TABLE and hopper.expresses(hiding(region))):
        return None
    own = hopper.specialised(region, tiles)
    frame, pairs = Frame(region, own), pair_loads(region)
    if pairs and (len(frame.copied) < len(pairs) or frame.buffers < LEAST_BUFFERS):
        return None  # what it reads element by element takes longer than its products
    cost = hopper_cost(region, sizes, device, own, frame.buffers)
    return replace(own, cost=cost) if cost.seconds <= AT_MOST * tiles.cost.seconds else None


def _in_steps(match: Match) -> bool:
    """Whether what comes in blocks lies as descriptors want it, so that nothing is copied."""
    read = {a.operand for a in (match.region.products[0].q, match.region.products[0].k, match.region.v)}
    read |= {x.tensor for x in pair_loads(match.region)}
    tensors = [(o, n) for o, n in zip(match.region.operands, match.inputs, strict=True) if o.name in read]
    strides = [(o.dtype, example_of(n.meta["val"])[1]) for o, n in tensors]
    return all(in_steps(dtype, s) and all(s) for dtype, s in strides)
