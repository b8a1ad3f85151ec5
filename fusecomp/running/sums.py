"""The log-sum-exp that a kernel gives, in the place of the nodes that held it."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.fx import Node

from fusecomp.codegen.logsumexp import saved
from fusecomp.graph.capture import inline
from fusecomp.graph.facts import value
from fusecomp.graph.learning import carry, learns, records
from fusecomp.graph.rewriting import remember
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.patterns.logsums import LogSum


def whole(lse: Tensor, region: AttentionRegion) -> Tensor:
    """[batch axes, M] of what a kernel saved, which may be in two parts."""
    return lse.sum(-1) if saved(region) else lse


def arranged(lse: Tensor, region: AttentionRegion, like: LogSum) -> Tensor:
    """lse [batch axes, M] in the dimensions and the dtype of a node."""
    names = [*(v.name for v in region.batch), region.q_idx.name]
    kept = [names.index(a) for a in like.axes if a]
    lse = lse.permute([*kept, *(i for i in range(len(names)) if i not in kept)])
    for _ in range(len(names) - len(kept)):
        lse = lse.squeeze(-1)
    for place, axis in enumerate(like.axes):
        lse = lse if axis else lse.unsqueeze(place)
    return lse.to(value(like.node).dtype)


def scaled(lse: Tensor, s: LogSum) -> Tensor:
    """A node's value: its multiple of the natural logarithm."""
    return lse if s.factor == 1 else lse * s.factor


def in_place_of(match: Match, s: LogSum, lse: Tensor) -> Tensor:
    """The kernel's log-sum-exp for one of the graph's nodes: detached where the graph's was."""
    found = arranged(scaled(whole(lse, match.region), s), match.region, s)
    return found if learns(s.node) or not records(match.output) else found.detach()


def put_sums(match: Match, saved_lse: Node) -> None:
    """Let what reads a log-sum-exp read the kernel's."""
    for s in match.sums:
        new = inline(match.place, partial(in_place_of, match, s), [saved_lse])
        carry(s.node, new)
        remember(s.node, new)
        for reader in s.readers:
            reader.replace_input_with(s.node, new)
