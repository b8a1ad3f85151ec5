"""Decoding in shares: any number of requests, of any lengths, each in its own programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_kernels import paged
from kernels import Interpreter, agree, tiles
from recognising import candidates
from torch import Tensor

from fusecomp.codegen.emit import emit
from fusecomp.patterns.build import Match
from fusecomp.planning import plan as planning
from fusecomp.planning.device import find
from fusecomp.planning.plan import alone, fixed_share
from fusecomp.planning.tile import TilePlan
from fusecomp.running import lower
from fusecomp.running.subgraph import seen

REGION = paged("float32", d=16)
WILD = 1_000_000_007


def requests(*lengths: int, m: int = 1, page: int = 16) -> list[Tensor]:
    """Pages in random order. What lies past a length is NaN, and its entries in the table are no pages."""
    held = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(held) + 3, dtype=torch.int32)
    table, first = torch.full((len(lengths), 8), WILD, dtype=torch.int32), 0
    pools = [torch.full((sum(held) + 3, page, 2, 16), float("nan")) for _ in range(2)]
    for row, n, pages in zip(table, lengths, held, strict=True):
        row[:pages] = order[first : first + pages]
        first += pages
        for pool in pools:
            flat = pool[row[:pages].long()].flatten(0, 1)
            flat[:n] = torch.randn(n, 2, 16)
            pool[row[:pages].long()] = flat.view(pages, page, 2, 16)
    return [torch.randn(len(lengths), 8, m, 16), *pools, table, torch.tensor(lengths, dtype=torch.int32)]


def sizes(args: list[Tensor]) -> dict[str, int]:
    return {"B": len(args[3]), "H": 8, "M": args[0].shape[2], "N": 128}


def plan(share: int | None = 0) -> TilePlan:
    """In shares of so many tiles, or as long as the lengths ask for (0); None: not split."""
    if share is None:
        return replace(tiles(REGION, 16, 16, "prefill", pack=4), resident=0)
    return replace(tiles(REGION, 16, 16, "decode", pack=4), share=share)


LENGTHS = {
    "one": (77,),
    "ragged": (128, 1, 2, 16, 0, 17, 128, 5),
    "more than are looked through at a time": tuple(int(n) for n in torch.randint(0, 129, (71,))),
    "all empty": (0, 0, 0),
}


@pytest.mark.parametrize("share", [0, 2, None])
@pytest.mark.parametrize("name", LENGTHS)
def test_requests_of_any_length(interpreter: Interpreter, name: str, share: int | None) -> None:
    """Pages past a length are never read; a request without keys gives NaN, as softmax over nothing does."""
    args = requests(*LENGTHS[name])
    agree(interpreter, REGION, args, sizes(args), plan(share))


@pytest.mark.parametrize(("splits", "looks"), [(4, 64), (64, 128)])
def test_more_shares_or_fewer_than_are_combined_at_a_time(interpreter: Interpreter, splits: int, looks: int) -> None:
    args = requests(128, 1, 70, 16)
    agree(interpreter, REGION, args, sizes(args), replace(plan(share=1), splits=splits, looks=looks))


def test_as_many_at_a_time_as_are_predicted() -> None:
    """One long request has many shares; many requests have few, and are looked through at once. Neighbours share it."""
    found = {}
    for b, n in ((1, 16384), (1, 16000), (64, 4096), (200, 1024)):
        made = planning.plan(REGION, {"B": b, "H": 8, "M": 1, "N": n}, find("h200"))
        found[b, n] = made.splits, made.looks
    assert found[1, 16384] == found[1, 16000]
    assert found[1, 16384][0] >= 16
    assert found[64, 4096][1] == 64
    assert found[200, 1024] == (4, 256)


def test_many_requests_of_few_keys_are_not_split() -> None:
    """A program for each walks all of its keys, and writes the result itself. Of many keys one may have most."""
    shapes = (200, 256), (200, 4096), (1, 256)
    few, many, single = (planning.plan(REGION, {"B": b, "H": 8, "M": 1, "N": n}, find("h200")) for b, n in shapes)
    assert (few.skeleton, few.resident, few.pack, few.decodes) == ("prefill", 0, 4, True)
    assert "combine" not in emit(REGION, few).text
    assert many.skeleton == single.skeleton == "decode"


@pytest.mark.parametrize(("dynamic", "skeleton"), [(False, "prefill"), (True, "decode")])
def test_requests_that_are_counted_at_run_time_are_split(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool, skeleton: str
) -> None:
    """There may be few of them, one program for each of which would leave the device empty."""
    monkeypatch.setattr(planning, "current", lambda: find("h200"))
    monkeypatch.setattr(lower, "current", lambda: find("h200"))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 4).softmax(-1) @ v

    args = [torch.randn(64, 8, n, 16) for n in (1, 512, 512)]
    (match,) = candidates(fn, *args, dynamic=dynamic)
    assert isinstance(match, Match)
    made = lower.planned(match, {name: seen(source) for name, source in match.sizes.items()})
    assert (made.skeleton, made.decodes) == (skeleton, True)


@pytest.mark.parametrize("page", [1, 8, 12, 32, 128])
def test_pages_of_any_size(interpreter: Interpreter, page: int) -> None:
    """Pages that divide a tile of 16 keys, whose places are worked out once, and others."""
    region, n = paged("float32", page, d=16), min(8 * page, 128)
    args = requests(n, 1, n // 2, 0, page=page)
    source = agree(interpreter, region, args, {**sizes(args), "N": 8 * page}, plan())
    assert (f"kv % {page} " in source.text) == (page not in (1, 8))


def test_several_queries_in_several_tiles(interpreter: Interpreter) -> None:
    args = requests(100, 3, 64, m=6)
    agree(interpreter, REGION, args, sizes(args), plan())


def test_an_empty_request_gives_zero_when_asked(interpreter: Interpreter) -> None:
    args = requests(30, 0)
    out = run(interpreter, args, plan(), replace(REGION, empty_row="zero"))
    assert out.isfinite().all()
    assert not out[1].any()


def test_a_request_does_not_depend_on_its_neighbours(interpreter: Interpreter) -> None:
    """With a fixed share: bit by bit."""
    args = requests(128, 40, 97, 3)
    together = run(interpreter, args, plan(share=2))
    for i in range(4):
        alone = [args[0][i : i + 1], args[1], args[2], args[3][i : i + 1], args[4][i : i + 1]]
        assert torch.equal(run(interpreter, alone, plan(share=2))[0], together[i])


def run(interpreter: Interpreter, args: list[Tensor], tile: TilePlan, region: object = REGION) -> Tensor:
    source = emit(region, tile)  # type: ignore[arg-type]
    found = sizes(args)
    return interpreter.run(source, torch.full_like(args[0], 9.0), args, [found[s] for s in REGION.sizes])


def test_plans_that_no_other_request_decides() -> None:
    """The same tile and share for one short request and for many long ones."""
    plans = set()
    for b, m, n in ((1, 1, 112), (64, 1, 4096), (7, 3, 100_000)):
        tile = fixed_share(planning.plan(REGION, alone(REGION, {"B": b, "H": 8, "M": m, "N": n}), find("h200")))
        plans.add(replace(tile, cost=None, rejected=()))
    (only,) = plans
    assert only.skeleton == "decode"
    assert only.share * only.block_n == 512
