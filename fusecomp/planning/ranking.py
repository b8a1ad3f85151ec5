"""The tiles that were considered for one kernel, as a person reads them: the taken one, and why each other lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import KERNELS, backward_plan, costed, inputs, predicted
from fusecomp.planning.backward_resources import smem
from fusecomp.planning.candidate import Launch
from fusecomp.planning.cost_backward import BACKWARD
from fusecomp.planning.cost_hopper import HOPPER
from fusecomp.planning.device import Device
from fusecomp.planning.facts import facts
from fusecomp.planning.hopper import hopper_inputs, hopper_tile
from fusecomp.planning.plan import TIE, Row, cost_of, rows
from fusecomp.planning.tile import Cost, Tile, TilePlan
from fusecomp.planning.units import held

Quantities = Callable[[Tile], Mapping[str, float]]
HOPPER_FORWARD = "hopper forward"
"""The forward kernel for Hopper's tensor cores."""
PIPES = {"mma_s": "products", "element_s": "exp, FMA", "smem_s": "shared memory"}
WAITS, SEEN = "waits", 1 / 3
"""What a slower tile may have more of, in a word or two, and the part of the time from which on a pipe is seen."""


@dataclass(frozen=True)
class Line:
    """One tile of a ranking."""

    tile: Tile
    cost: Cost | None
    """None where nothing predicts it."""
    smem_bytes: int
    """Shared memory of one program."""
    taken: bool
    fits: bool
    why: str
    """Why it was taken, or lost, in a few words."""
    reason: str = ""
    """Why it lost, in the planner's words, at the lengths that it planned for."""

    def to_dict(self) -> dict[str, Any]:
        """Tile and cost side by side, in plain numbers."""
        cost = asdict(self.cost) if self.cost else {"smem_bytes": self.smem_bytes}
        said = {"taken": self.taken, "fits": self.fits, "why": self.why, "reason": self.reason}
        return {**asdict(self.tile), **cost, **said}


@dataclass(frozen=True)
class Ranking:
    """The tiles of one kernel: the taken one first, then by time, then those that do not fit."""

    kernel: str
    """ "forward", "decode", "hopper forward", "query gradient", "key gradients"."""
    lines: tuple[Line, ...]
    shares: int = 1
    """Parts of the keys that are walked side by side and then combined (split-KV)."""

    @property
    def taken(self) -> Line:
        return self.lines[0]


def rank(
    region: AttentionRegion,
    sizes: Mapping[str, int],
    device: Device,
    ranked: Sequence[Row],
    budget: int,
    but: str = "a tie to the planner",
) -> Ranking:
    """Rows of `plan.rows`, the first of which is taken, explained; `budget` in B of shared memory. `but`: why one that
    is faster is not taken."""
    kind = ranked[0].skeleton
    launch = Launch(region, sizes, device, kind == "decode")
    return explained("decode" if kind == "decode" else "forward", ranked, launch.quantities, device, budget, but)


def explained(
    kernel: str, ranked: Sequence[Row], quantities: Quantities, device: Device, budget: int, but: str
) -> Ranking:
    """Rows of any kernel, whose equations give `quantities` of a tile."""
    first, *others = ranked
    best = quantities(first.tile)
    taken = Line(first.tile, first.cost, first.cost.smem_bytes, True, True, f"taken: bound by {first.cost.bound}")
    lines = []
    for row in others:
        fits = not row.reason.startswith("needs")
        why = _slower(quantities(row.tile), best, but) if fits else _too_large(row.cost, device, budget)
        lines.append(Line(row.tile, row.cost, row.cost.smem_bytes, False, fits, why, row.reason))
    return Ranking(kernel, (taken, *lines), int(best.get("splits", 1)))


def rank_hopper(plan: TilePlan) -> Ranking:
    """The one tile of a plan with `consumers`."""
    assert plan.cost is not None
    bound = f"taken: bound by {plan.cost.bound}"
    return Ranking(HOPPER_FORWARD, (Line(hopper_tile(plan), plan.cost, plan.cost.smem_bytes, True, True, bound),))


def rank_plan(region: AttentionRegion, sizes: Mapping[str, int], device: Device, plan: TilePlan) -> Ranking | None:
    """The ranking behind a plan, at the lengths of one call; None where other kernels would be planned for those, and
    for a kernel of one tile.

    A plan is chosen at those lengths rounded up, or timed, so that another tile may be a little faster here."""
    describable = "descriptor" in {plan.loads, *(r.loads for r in plan.rejected)}
    ranked = rows(region, sizes, device, describable=describable)
    kind = "decode" if plan.decodes else plan.skeleton
    if plan.cost is None or plan.consumers or ranked[0].skeleton != kind:
        return None
    own = Tile(plan.block_m, plan.block_n, plan.warps, plan.stages, plan.pack, plan.loads, asked(plan))
    taken = next((row for row in ranked if row.tile == own), Row(own, kind, plan.cost, ""))
    others = [row for row in ranked if row.tile != own]
    return rank(region, sizes, device, [taken, *others], device.smem_bytes, "not at rounded lengths")


def asked(plan: TilePlan) -> int:
    """Programs of a multiprocessor that the keys are split for; 0 where they are not."""
    return plan.resident if plan.skeleton == "decode" else 0


def rank_backward(
    region: AttentionRegion, sizes: Mapping[str, int], device: Device, budget: int
) -> tuple[Ranking, Ranking]:
    """The tiles of the query gradient's kernel and of the key gradients', within `budget` B of shared memory.

    Where no equations know the kernels, sizes that are known to be good: one line each, with no time."""
    within = replace(device, smem_bytes=budget)
    plan = backward_plan(region, within, sizes)
    return _gradient(plan.queries, region, sizes, within), _gradient(plan.keys, region, sizes, within)


def worked_out(
    region: AttentionRegion, sizes: Mapping[str, int], device: Device, ranking: Ranking
) -> dict[str, float]:
    """A number for each symbol and each result of the equations behind a ranking's taken tile."""
    tile, kernel = ranking.taken.tile, ranking.kernel.replace(" ", "_")
    if ranking.kernel == HOPPER_FORWARD:
        given = hopper_inputs(region, sizes, device, tile)
        return {**given, **HOPPER.evaluate(given)}
    launch = Launch(region, sizes, device, kernel == "decode")
    if kernel in KERNELS:
        given = inputs(launch, kernel, tile)
        return {**given, **BACKWARD.evaluate(given)}
    return {**launch.inputs(tile), **launch.quantities(tile)}


def _gradient(plan: TilePlan, region: AttentionRegion, sizes: Mapping[str, int], device: Device) -> Ranking:
    name, known = plan.skeleton.replace("_", " "), facts(region)
    own = Tile(plan.block_m, plan.block_n, plan.warps, plan.stages)
    costs = dict(costed(region, sizes, device, plan.skeleton)) if predicted(region) else {}
    if own not in costs:
        held = smem(plan.skeleton, own, known, device)
        return Ranking(name, (Line(own, None, held, True, True, "taken: known to be good"),))
    ranked = [own, *sorted(costs.keys() - {own}, key=lambda t: costs[t]["seconds"])]
    full = {t: {**costs[t], "smem": smem(plan.skeleton, t, known, device)} for t in ranked}
    rows = [Row(t, plan.skeleton, cost_of(full[t]), "") for t in ranked]
    return explained(name, rows, full.__getitem__, device, device.smem_bytes, "not at rounded lengths")


def _too_large(cost: Cost, device: Device, budget: int) -> str:
    if cost.smem_bytes > budget:
        return f"too large: {held(cost.smem_bytes)} of {held(budget)}"
    return f"spills: {cost.registers + cost.spilled} registers of {device.registers_per_thread}"


def _slower(q: Mapping[str, float], best: Mapping[str, float], but: str) -> str:
    """ "8.5 % slower: shared memory +40 %": the pipe that is busy for the most seconds more."""
    share = q["seconds"] / best["seconds"] - 1
    if share <= TIE:
        return f"as fast within {TIE:.0%}" if share >= -TIE else f"{-share:.1%} faster: {but}"
    much = f"{share:.1%} slower" if share < 1 else f"{share + 1:.1f}x the time"
    return much + _blame(q, best)


def _blame(q: Mapping[str, float], best: Mapping[str, float]) -> str:
    """What there is most more of, among what takes a good part of the time; if that says little, how work overlaps."""
    ours, theirs = _busy(q), _busy(best)
    more = {k: ours[k] - theirs[k] for k in ours if k in (WAITS, "starts") or ours[k] > SEEN * q["seconds"]}
    name = max(more, key=more.__getitem__)
    if more[name] <= (q["seconds"] - best["seconds"]) / 4:
        return ": more barriers" if q["groups"] >= best["groups"] else ": less overlap"
    if q["busy"] / best["busy"] > 1.02 and ours[name] / q["busy"] <= 1.02 * theirs[name] / best["busy"]:
        return ": uneven last wave"
    return ": waits for loads" if name == WAITS else f": {name} {ours[name] / theirs[name] - 1:+.0%}"


def _busy(q: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each pipe of the busiest multiprocessor, and those that a group of warps waits."""
    pipes = {word: q[name] * q["busy"] for name, word in PIPES.items()}
    return {**pipes, "memory": q["moving_s"], "starts": q["launch_s"], WAITS: q["delay_s"] * q["busy"] / q["groups"]}
