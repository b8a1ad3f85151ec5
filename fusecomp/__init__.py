"""fusecomp: a torch.compile backend that finds attention in plain PyTorch and compiles it to flash kernels.

    torch.compile(model, backend="fusecomp")     everything; needs no import
    fusecomp.explain(model, *args)               what was found, planned, generated and verified
    fusecomp.fuse(graph_module, example_inputs)  the rewrite alone, on an FX graph
    fusecomp.counters(), fusecomp.reset()        how many attentions run fused
    fusecomp.tiles, fusecomp.io, fusecomp.kv     the cost model by itself: tiles, traffic, cache memory from numbers

The folders are floors, and imports point down only:
ir (0), graph (1), patterns (2), planning (3), codegen (4), running (5), pipeline and backend (6), cli (7).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusecomp.backend import counters, explain, fuse, reset
    from fusecomp.calculator import io, kv, tiles
    from fusecomp.report import Report
    from fusecomp.settings import Options

__all__ = ["Options", "Report", "counters", "explain", "fuse", "io", "kv", "reset", "tiles"]

HOMES = {
    "counters": "fusecomp.backend",
    "explain": "fusecomp.backend",
    "fuse": "fusecomp.backend",
    "reset": "fusecomp.backend",
    "io": "fusecomp.calculator",
    "kv": "fusecomp.calculator",
    "tiles": "fusecomp.calculator",
    "Report": "fusecomp.report",
    "Options": "fusecomp.settings",
}
"""Where each public name lives; loaded when first used, so that `import fusecomp` costs nothing."""

try:
    __version__ = version("fusecomp")
except PackageNotFoundError:
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'fusecomp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
