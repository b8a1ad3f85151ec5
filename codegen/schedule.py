"""How decoding is cut into programs: shares of about equal length, whatever the lengths of the requests.

    request   the axes that the range of keys depends on: (b), (b, query tile), or none, which is one request
    free      the others: each request has a program for each of them and for each of its shares

    tiles_r = ceil((k_end_r - k_begin_r) / BLOCK_N),   share = ceil(units sum_r tiles_r / programs)
    request r is cut in ceil(tiles_r / share) equal parts

Lengths are read on the device and the grid is fixed, so that nothing waits for the host: units (programs + requests)
programs are enough, since sum_r ceil(tiles_r / share) <= programs / units + requests. A share that is a constant makes
the parts of a request depend on its own length alone.
"""

from __future__ import annotations

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.launcher import launched_tiles, parameters
from fusecomp.codegen.memory import fixed_loads
from fusecomp.codegen.program import factor, key_range, tile_count
from fusecomp.codegen.skeletons import BALANCED, SCHEDULE, fill
from fusecomp.codegen.source import names_read, tidy
from fusecomp.ir.expr import Var, variables

Lines = list[str]


def bound_names(frame: Frame) -> frozenset[str]:
    """What the range of keys varies with."""
    bounds = (*frame.reach.lower, *frame.reach.upper)
    sloped = {frame.q_idx.name} if any(x.slope for x in bounds) else set()
    return frozenset().union(sloped, *(variables(x.edge) for x in bounds))


def tiles_are_requests(frame: Frame) -> bool:
    return frame.q_idx.name in bound_names(frame)


def decoded(frame: Frame) -> Lines:
    """(request, free) -> the batch axes and the query tile."""
    return [tile_count(frame), *_split_up(frame, "request"), *_split_up(frame, "free")]


def _split_up(frame: Frame, name: str) -> Lines:
    """Either number as its axes, the last one fastest."""
    lines, left = [], name
    if tiles_are_requests(frame) == (name == "request"):
        lines.append(f"q_start = {left} % q_tiles * {frame.rows_per_tile_name}")
        left = f"{left} // q_tiles"
    for place, v in reversed(list(enumerate(axes_of(frame, name)))):
        index = f"{left} % {factor(v.size, frame)}" if place else left
        lines.append(f"{v.name} = tl.cast({index}, tl.int64)")
        left = f"{left} // {factor(v.size, frame)}"
    return lines


def axes_of(frame: Frame, name: str) -> tuple[Var, ...]:
    """The batch axes that the range of keys depends on ("request"), or the others ("free")."""
    varies = bound_names(frame)
    return tuple(v for v in frame.batch if (v.name in varies) == (name == "request"))


def count(frame: Frame, name: str) -> str:
    """How many there are of either, on the host."""
    sizes = [factor(v.size, frame) for v in axes_of(frame, name)]
    if tiles_are_requests(frame) == (name == "request"):
        sizes.append(launched_tiles(frame))
    return " * ".join(sizes) or "1"


def schedule(frame: Frame) -> tuple[str, str]:
    """(the functions that find a program's share, what they take beside their own: ", lengths_ptr, N")."""
    body = {
        "request": [tile_count(frame), *_split_up(frame, "request")],
        "fixed": fixed_loads(frame),
        "key_range": key_range(frame),
    }
    bare = fill(SCHEDULE, {**body, "range": "", "signature": "key_range()", "many": "key_range()"})
    taken = "".join(f", {p}" for p in parameters(frame, names_read(_functions(bare)[0])))
    calls = {"signature": reach_of("request", frame, taken), "many": reach_of(CLIPPED, frame, taken)}
    rest = "" if frame.plan.share else f"\n\n{fill(BALANCED, {'range': taken})}"
    return "\n\n\n".join(_functions(fill(SCHEDULE, {**body, **calls, "range": taken}) + rest)), taken


CLIPPED = "tl.minimum(request, requests - 1)"


def reach_of(request: str, frame: Frame, taken: str) -> str:
    """The call that gives the range of a request's keys; without the request where all have one range."""
    varies = tiles_are_requests(frame) or axes_of(frame, "request")
    return f"key_range({request}{taken})" if varies else f"key_range({taken.removeprefix(', ')})"


def _functions(text: str) -> Lines:
    """Each function without what it does not use."""
    return [tidy(f).rstrip() for f in text.strip().split("\n\n\n")]


def share(frame: Frame, taken: str) -> str:
    """Tiles of a share."""
    return "SHARE" if frame.plan.share else f"share_of(requests, units, programs{taken})"
