"""Where the kernel for Hopper's tensor cores runs a match: it is chosen (codegen/hopper_choice.py), this Triton can
compile it, and the tensors lie as it wants them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from fusecomp.codegen import hopper_backward
from fusecomp.codegen.copied import copied
from fusecomp.codegen.descriptors import in_steps
from fusecomp.codegen.hopper_choice import planned as chosen
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.planning.device import Device, current
from fusecomp.planning.tile import TilePlan
from fusecomp.running.layout import examples
from fusecomp.settings import Options


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
    asked = match.device.type == "cuda" and options.verify and not options.batch_invariant
    trained = bool(match.learned) and trains(match)
    return planned(match.region, sizes, current(), trained) if asked and laid_out(match) else None


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


def planned(
    region: AttentionRegion, sizes: Mapping[str, int], device: Device, trained: bool = False
) -> TilePlan | None:
    """Its plan of the region at these lengths, where it runs on the device."""
    return chosen(region, sizes, device, trained) if available() else None


def laid_out(match: Match) -> bool:
    """Whether what comes in blocks lies as descriptors want it, so that nothing is copied."""
    read = {a.operand for a in (match.region.products[0].q, match.region.products[0].k, match.region.v)}
    read |= {x.tensor for x in copied(match.region)}
    given = zip(match.region.operands, examples(match), strict=True)
    strides = [(o.dtype, strides) for o, (_, strides, _) in given if o.name in read]
    return all(in_steps(dtype, s) and all(s) for dtype, s in strides)
