"""A generated kernel: its skeleton filled, and a signature of what the filled body reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.launcher import declared, unspecialised, wrapped
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.source import names_read, tidy

Holes = Mapping[str, str | Sequence[str]]
Taken = Callable[[frozenset[str]], list[str]]
"""The parameters of a kernel, in order, of the names that its body reads."""
DEF, BODY = "):\n", "def kernel():\n"


def function(frame: Frame, skeleton: str, name: str, holes: Holes, taken: Taken) -> tuple[str, list[str]]:
    """(text, parameters) of the skeleton filled, which takes no parameter that it does not read."""
    head, _, body = skeleton.partition(DEF)
    body = tidy(BODY + fill(body, holes))
    params = taken(names_read(body))
    sizes, listed = quoted(unspecialised(frame, params)), wrapped(declared(params), 4)
    return fill(head, {"sizes": sizes, "name": name, "parameters": listed}) + DEF + body.removeprefix(BODY), params


def quoted(names: Sequence[str]) -> str:
    """["M", "N"], as source."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
