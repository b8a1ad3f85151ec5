"""K and V of a paged program are read where they lie: no copy is fetched, cast, scaled or put together before."""

from __future__ import annotations

from typing import Any

import pytest
from corpus import paged, paged_fetched, paged_masked, paged_more, paged_written
from recognising import candidates
from torch.fx import Node

from fusecomp.graph.facts import storage
from fusecomp.patterns.build import Match

NEW = {"blended", "put_out_of_place", "rolled", "pools_returned"}
"""Programs that make a new cache, and return it."""
CASES = [
    pytest.param(c, id=c.name)
    for table in (paged, paged_fetched, paged_masked, paged_more, paged_written)
    for c in table.CASES
    if c.expect == "fuse" and c.name not in NEW
]


def copies(match: Match) -> set[Node]:
    """The keys and values of a match that lie in no input of its graph."""
    region = match.region
    held = {storage(n) for n in match.output.graph.find_nodes(op="placeholder")}
    nodes = dict(zip((o.name for o in region.operands), match.inputs, strict=True))
    read = {nodes[a.operand] for a in (*(p.k for p in region.products), region.v)}
    return {n for n in read if storage(n) not in held}


@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_are_read_where_they_lie(case: Any) -> None:
    found = [m for m in candidates(case.fn, *case.make_args(case.dtypes[0])) if isinstance(m, Match)]
    assert found
    assert not set().union(*map(copies, found))
