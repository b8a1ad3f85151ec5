"""Inductor has patterns of attention of its own, which ask neither over which axis a softmax goes, nor how K lies, nor
what a mask holds. What is left of a graph is not theirs to replace:

    p = exp(s)     is     p = apart(exp(s))     while they are looked for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from fusecomp.running.operator import operator

operator("apart", "(Tensor x) -> Tensor", torch.clone, torch.empty_like)
APART = torch.ops.fusecomp.apart.default
SOFTMAX = (torch.ops.aten.exp.default, torch.ops.aten._softmax.default)
"""What every such pattern holds."""


def put_apart(graph: Graph) -> None:
    """Put `apart` behind each exponential."""
    for target in SOFTMAX:
        for node in graph.find_nodes(op="call_function", target=target):
            with graph.inserting_after(node):
                apart = graph.call_function(APART, (node,))
            node.replace_all_uses_with(apart, delete_user_cb=lambda user, own=apart: user is not own)
            apart.meta = dict(node.meta)


def put_together(graph: Graph) -> None:
    """Take every `apart` away."""
    for node in graph.find_nodes(op="call_function", target=APART):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


class Pass(CustomGraphPass):
    """A pass of Inductor's, beside those that the user has set; cached by what they do."""

    def __init__(self, own: Callable[[Graph], None], others: Any) -> None:
        self.own = own
        self.others = others if isinstance(others, Sequence) else [others] if others is not None else []

    def __call__(self, graph: Graph) -> None:
        for each in (*self.others, self.own):
            each(graph)

    def uuid(self) -> Any:
        theirs = [x.uuid() if isinstance(x, CustomGraphPass) else None for x in self.others]
        return None if None in theirs else (get_hash_for_files((__file__,)), self.own.__name__, *theirs)


def patches() -> dict[str, Any]:
    """What of Inductor's configuration is set while a graph is compiled."""
    return {
        "joint_custom_pre_pass": Pass(put_apart, config.joint_custom_pre_pass),
        "joint_custom_post_pass": Pass(put_together, config.joint_custom_post_pass),
    }
