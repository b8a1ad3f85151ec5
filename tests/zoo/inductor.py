"""Inductor as the peer: how many cores its own attention patterns replace.

It stops after its joint-graph passes, where those patterns run, and the graph is executed as it is then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from zoo.survey import Backend

applied: list[str] = []
"""Attention patterns replaced in this process, by name."""


def compile_graph(gm: Any, inputs: Any) -> Callable[..., Any]:
    """Inductor up to its joint-graph passes."""
    from torch._inductor import compile_fx, config
    from torch._inductor.fx_passes.joint_graph import lazy_init
    from torch._inductor.pattern_matcher import ReplacementPatternEntry

    replace = ReplacementPatternEntry.apply

    def recorded(entry: Any, match: Any, graph: Any, node: Any) -> Any:
        if (entry.pattern_name or "").startswith("_sfdp"):
            applied.append(entry.pattern_name)
        return replace(entry, match, graph, node)

    lazy_init(torch.device("cpu"))
    with ExitStack() as during:
        during.enter_context(patch.object(ReplacementPatternEntry, "apply", recorded))
        during.enter_context(config.patch(force_disable_caches=True))
        return compile_fx.compile_fx(gm, inputs, inner_compile=as_it_is)  # type: ignore[no-any-return]


def as_it_is(gm: Any, *_: Any, **__: Any) -> Any:
    """Run a graph without generating code; views of what the passes left discontiguous copy."""
    from functorch.compile import make_boxed_func

    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return make_boxed_func(torch.fx.GraphModule(gm, gm.graph).forward)


INDUCTOR = Backend(compile_graph, lambda: len(applied))
