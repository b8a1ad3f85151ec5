"""The modes that a graph switches as it runs: whether gradients are recorded, and autocast.

Graphs switch them by calls among their nodes, and by higher-order operators whose body runs in another mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.fx import Graph, Node


@dataclass(frozen=True)
class Modes:
    """What is in force where a node runs."""

    grad: bool
    autocast: tuple[tuple[Any, ...], ...] = ()
    """Arguments of the autocasts entered, outermost first."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for how in self.autocast:
                stack.enter_context(autocast_mode.autocast(*how))
            yield

    def inside(self, node: Node) -> Modes:
        """The modes in the body of a higher-order operator."""
        match getattr(node.target, "__name__", ""), node.args:
            case "wrap_with_set_grad_enabled", (grad, *_):
                return replace(self, grad=bool(grad))
            case "wrap_with_autocast", (device, dtype, enabled, cached, *_):
                return replace(self, autocast=(*self.autocast, (device, dtype, enabled, cached)))
        return self


def in_their_modes(graph: Graph) -> Iterator[tuple[Node, Modes]]:
    """The nodes in order, each with the modes in which it runs. The graph starts in those of the caller."""
    now = Modes(torch.is_grad_enabled())
    before: dict[Any, Modes] = {}
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            now = replace(now, grad=bool(node.args[0]))
        elif node.target is autocast_mode._enter_autocast:
            before[node], now = now, replace(now, autocast=(*now.autocast, node.args))
        elif node.target is autocast_mode._exit_autocast:
            now = replace(now, autocast=before[node.args[0]].autocast)
        elif node.target is grad_mode._enter_inference_mode:
            before[node], now = now, replace(now, grad=now.grad and not node.args[0])
        elif node.target is grad_mode._exit_inference_mode:
            now = replace(now, grad=before[node.args[0]].grad)
        yield node, now
