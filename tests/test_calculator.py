"""Tiles, traffic and cache memory from numbers alone: as Python functions, and as a person types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import golden_cli
import pytest
import sympy

import fusecomp
from fusecomp import cli
from fusecomp.equations import Bounds
from fusecomp.errors import FusecompError
from fusecomp.planning import page, textbook, units

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `fusecomp ...` in this process: (exit status, stdout, stderr)."""

    def run(command: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fusecomp", *command.split()])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        shown = capsys.readouterr()
        return int(caught.value.code or 0), shown.out, shown.err

    return run


@pytest.mark.parametrize("name", golden_cli.COMMANDS)
def test_what_is_printed(name: str) -> None:
    """If this changed on purpose: python tests/golden_cli.py, and look at the diff."""
    text = golden_cli.printed(golden_cli.COMMANDS[name])
    assert text == (golden_cli.FOLDER / f"{name}.txt").read_text()
    assert max(map(len, text.splitlines())) <= 100


def test_every_golden_has_its_command() -> None:
    assert {p.stem for p in golden_cli.FOLDER.glob("*.txt")} == set(golden_cli.COMMANDS)


# The chapter's figures, as the functions give them


def test_traffic_of_the_chapter() -> None:
    found = fusecomp.io(n=1024, d=64, sram=25000).to_dict()
    assert found["standard_elements"] == 1_114_112
    assert round(found["tiled_elements"]) == 171_799
    assert found["saved"] == pytest.approx(6.5, abs=0.02)
    assert found["tiled_elements_at_half"] == 2 * found["tiled_elements"]
    assert (found["tile"], found["tile_at_half"]) == ((128, 64), (64, 64))
    document = fusecomp.io(n=18000, d=128).to_dict()
    assert (document["score_elements"], document["score_bytes"]) == (324_000_000, 1_296_000_000)


def test_on_chip_memory_is_elements_or_bytes_with_a_unit() -> None:
    assert fusecomp.io(1024, sram="100KB").to_dict()["on_chip_elements"] == 25_600
    assert fusecomp.io(1024, sram="100KB", dtype="bf16").to_dict()["on_chip_elements"] == 51_200
    assert fusecomp.io(1024, sram=25_600).to_dict()["on_chip_elements"] == 25_600


def test_cache_of_the_chapter() -> None:
    found = fusecomp.kv(layers=40, hidden=5120, tokens=90, memory="24GB").to_dict()
    assert found["token_bytes"] == 819_200
    assert found["reserved_bytes"] == 1600 * 2**20
    assert (found["blocks"], found["slots"], found["paged_bytes"]) == (6, 96, 75 * 2**20)
    shares = found["reserved_utilisation"], found["paged_utilisation"], found["waste"]
    assert shares == pytest.approx((0.044, 0.938, 0.062), abs=6e-4)
    assert found["saved"] == pytest.approx(21.3, abs=0.1)
    assert (found["reserved_requests"], found["paged_requests"]) == (15, 327)


# Tiles


def test_tiles_are_ranked_with_reasons() -> None:
    found = fusecomp.tiles(4096, 128, device="l4", budget="64KB", heads=8)
    assert found.best.taken
    assert found.best.cost is not None
    assert found.best.cost.smem_bytes <= found.budget == 65_536
    first, *others = found.to_dict()["tiles"]
    assert first["why"].startswith("taken: bound by")
    assert not any(t["taken"] for t in others)
    assert first["reason"] == ""
    assert any("65536 usable" in t["reason"] for t in others)
    fits = [t for t in others if t["fits"]]
    assert [t["seconds"] for t in fits] == sorted(t["seconds"] for t in fits)
    assert all("slower" in t["why"] or "x the time" in t["why"] or "as fast" in t["why"] for t in fits)
    assert {t["why"].split(":")[0] for t in others if not t["fits"]} == {"too large", "spills"}


@pytest.mark.parametrize(("changed", "blame"), [({"stages": 2}, "waits for loads"), ({"block_m": 16}, "memory")])
def test_reasons_name_what_a_tile_has_more_of(changed: dict[str, int], blame: str) -> None:
    taken, *others = fusecomp.tiles(4096, 128, device="h200").to_dict()["tiles"]
    assert not changed.items() <= taken.items()
    loads = "pointer" if "block_m" in changed else taken["loads"]
    alike = {**{k: taken[k] for k in ("block_m", "block_n", "warps")}, "loads": loads, **changed}
    why = [t["why"] for t in others if alike.items() <= t.items() and t["fits"]]
    assert why
    assert all(blame in w for w in why)


def test_a_decode_step() -> None:
    found = fusecomp.tiles(65536, decode=True, heads=32, kv_heads=8, device="h200")
    ranking = found.rankings[0]
    assert (ranking.kernel, found.workload.sizes["M"], ranking.taken.tile.pack) == ("decode", 1, 4)
    assert ranking.shares >= 32
    assert "split-KV" in str(found)
    short = fusecomp.tiles(100, decode=True, device="h200")
    assert short.rankings[0].kernel == "forward"
    assert "not split" in str(short)


def test_pages_are_looked_up_and_no_descriptor_fetches_them() -> None:
    paged, dense = (fusecomp.tiles(4096, device="h200", page_size=p) for p in (16, None))
    assert "block_table[b, kv_idx // 16]" in str(paged)
    assert {line.tile.loads for line in paged.rankings[0].lines} == {"pointer"}
    assert "descriptor" in {line.tile.loads for line in dense.rankings[0].lines}


def test_the_backward_kernels_have_tiles_of_their_own() -> None:
    found = fusecomp.tiles(4096, 128, causal=True, device="h200", backward=True)
    assert [r.kernel for r in found.rankings] == ["forward", "hopper forward", "query gradient", "key gradients"]
    assert all(r.taken.smem_bytes <= found.budget for r in found.rankings)
    assert list(found.to_dict()["backward"]) == ["query_gradient", "key_gradients"]
    for gradient in found.rankings[2:]:
        times = [line.cost.seconds for line in gradient.lines[1:] if line.cost]
        assert len(times) > 10
        assert times == sorted(times)
    unknown = fusecomp.tiles(4096, 128, "fp32", device="h200", backward=True)
    assert [len(r.lines) for r in unknown.rankings[1:]] == [1, 1]
    tight = fusecomp.tiles(4096, 128, causal=True, device="h200", backward=True, budget="64KB")
    for roomy, small in zip(found.rankings[2:], tight.rankings[1:], strict=True):
        assert small.taken.smem_bytes <= 65_536 < roomy.taken.smem_bytes


def test_a_window_is_two_sided_unless_causal() -> None:
    both, past = (fusecomp.tiles(4096, window=256, causal=c, device="h200") for c in (False, True))
    assert "kv_idx - q_idx < 256" in str(both)
    assert "kv_idx - q_idx < 256" not in str(past)
    assert both.best.cost
    assert past.best.cost
    assert both.best.cost.flops > 1.5 * past.best.cost.flops


def test_every_tile_is_listed_on_demand(call: Call) -> None:
    _, few, _ = call("tiles --n 2048 --device h200")
    _, every, _ = call("tiles --n 2048 --device h200 --all")
    assert "more, 13 of which do not fit: --all" in few
    assert len(every.splitlines()) > 100 > len(few.splitlines())


COMMANDS = (
    "tiles --n 18000 --d 128 --dtype bf16 --device h200 --causal",
    "tiles --n 4096 --d 192 --dv 128 --heads 32 --kv-heads 8 --batch 2 --window 512 --budget 100KB --device b200",
    "tiles --n 8192 --decode --page-size 32 --device mi300x",
    "tiles --n 8192 --d 64 --causal --backward --device a100-40",
    "io --n 1024 --d 64 --sram 25000",
    "io --symbolic",
    "tiles --equations",
    "tiles --equations --backward",
    "tiles --n 4096 --equations --backward --device h100",
    "tiles --n 65536 --decode --equations --device l40s",
    "kv --layers 40 --hidden 5120 --dtype fp16 --block 16 --tokens 90 --max-context 2048",
    "kv --layers 40 --hidden 5120 --tokens 90 --context 2048",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_and_give_json(call: Call, command: str) -> None:
    status, out, err = call(command)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    status, out, err = call(f"{command} --json")
    assert (status, err) == (0, "")
    assert json.loads(out)


# Equations


@pytest.mark.parametrize("kernel", page.ROOTS)
def test_every_symbol_is_explained(kernel: str) -> None:
    """A new symbol takes a row in planning/glossary.py, or, if it is fitted, a comment beside its number."""
    assert page.untold(kernel) == set()
    assert all(s.meaning and s.source for s in page.symbols(kernel))
    assert all(s.unit for s in page.symbols(kernel) if s.name in page.GLOSSARY)


@pytest.mark.parametrize("kernel", page.ROOTS)
def test_equations_come_to_what_the_table_says(kernel: str) -> None:
    answer = fusecomp.tiles(8192, decode=kernel == "decode", backward="grad" in kernel, device="h200")
    cost = next(r.taken.cost for r in answer.rankings if r.kernel == kernel)
    shown = next(e.to_dict() for e in answer.equations() if e.kernel == kernel)
    values = {e["name"]: e["value"] for p in shown["pages"] for e in p["equations"]}
    assert cost is not None
    smem = values.get("smem", cost.smem_bytes)
    spilled = round(values.get("spilled", 0))
    found = smem, round(values["registers"]) - spilled, values["hbm"], values["flops"], values["seconds"]
    assert found == pytest.approx((cost.smem_bytes, cost.registers, cost.hbm_bytes, cost.flops, cost.seconds))
    assert None not in values.values()


def test_equations_are_those_of_the_source() -> None:
    shown = str(fusecomp.tiles(4096, device="h200").equations()[0])
    for part in (
        "q_tile = WIDTH * BLOCK_M * D = ",
        "(unpipelined if STAGES < 2 else pipelined",
        "programs on one multiprocessor",
        "rows rows of a tile of Q, Br",
        "From the device table",
        "HBM_RATE 4.4e+12 B/s",
        "Fitted on generated kernels",
    ):
        assert part in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


def test_the_bound_is_symbolic_and_doubles_at_half_the_memory() -> None:
    rows = {row["name"]: row["equation"] for row in Bounds().to_dict()["equations"]}
    assert (rows["tiled"], rows["tiled at M / 2"]) == ("N^2*d^2/M", "2*N^2*d^2/M")
    assert sympy.simplify(textbook.HALVED / textbook.FLASH) == 2


# Mistakes

WRONG = {
    "tiles --n 4096 --d 256 --budget 8KB": "nothing fits in 8192 B of shared memory: the smallest tile",
    "tiles --n 64 --device h1000": "unknown device 'h1000': did you mean h100",
    "tiles --n 64 --device=": "unknown device ''",
    "tiles --n 64 --device nothing.toml": "cannot read device file nothing.toml",
    "tiles --n 64 --budget 1XB": "bytes are written 98304, 96KB or 0.2MiB (K = 1024); got '1XB'",
    "tiles --n 64 --budget 25k": "bytes are written 98304, 96KB or 0.2MiB (K = 1024); got '25k'",
    "tiles --n 64 --budget -5": "got '-5'",
    "tiles --n 64 --budget 0": "a size must be at least 1 B; got '0'",
    "tiles --d 64": "give the number of keys: --n 4096",
    "io --d 64": "give the number of keys: --n 4096",
    "tiles --n 0": "n must be at least 1, not 0",
    "tiles --n -4": "n must be at least 1, not -4",
    "tiles --n 64 --m 0": "m must be at least 1, not 0",
    "tiles --n 64 --d 0": "d must be at least 1",
    "tiles --n 999999999999": "n must be at most 16777216",
    "tiles --n 64 --kv-heads 3": "heads (16) must be a multiple of kv_heads (3)",
    "tiles --n 64 --window 0": "window must be at least 1",
    "tiles --n 64 --softcap -1": "softcap must be a positive number",
    "tiles --n 64 --page-size 0": "page_size must be at least 1",
    "tiles --n 64 --dtype int4": "unknown dtype 'int4'; known are bf16",
    "tiles --n 64 --dtype fp8": "unknown dtype 'fp8'; known are bf16",
    "tiles --n 64 --decode --m 32": "a decode step has at most 16 queries a request; got m = 32",
    "tiles --n 64 --decode --backward": "a decode step has no backward pass",
    "tiles --n 64 --page-size 16 --backward": "a paged cache has no backward pass",
    "io --n 0": "n must be at least one element; got 0",
    "io --n 64 --sram 0": "the on-chip memory must be at least one element; got 0",
    "io --n 64 --sram 25k": "25000, or bytes with their unit, such as 100KB; got '25k'",
    "io --n 64 --dtype nothing": "unknown dtype 'nothing'",
    "kv --layers 0 --hidden 8 --tokens 8": "layers must be at least 1; got 0",
    "kv --layers 1 --hidden 8 --tokens 9 --max-context 8": "a request holds 9 tokens, more than max_context, 8",
    "kv --layers 1 --hidden 8 --tokens 9 --memory lots": "got 'lots'",
    "tiles --n x": "as an integer",
    "tiles --n 64 --hedas 4": "No such option: --hedas",
}


@pytest.mark.parametrize("command", WRONG)
def test_mistakes_are_said_and_exit_with_2(call: Call, command: str) -> None:
    status, out, err = call(command)
    assert (status, out) == (2, "")
    assert WRONG[command] in " ".join(err.replace("│", "").split())
    assert "Traceback" not in err


def test_mistakes_of_callers_are_errors_of_ours() -> None:
    for wrong in (lambda: fusecomp.tiles(0), lambda: fusecomp.io(1, sram="x"), lambda: fusecomp.kv(1, 1, 0)):
        with pytest.raises(FusecompError):
            wrong()


@pytest.mark.parametrize(
    ("text", "count"),
    [("98304", 98304), (96, 96), ("96KB", 98304), ("96 kib", 98304), ("0.2MiB", 209_715), (".5gb", 2**29), ("7b", 7)],
)
def test_sizes_as_people_write_them(text: str | int, count: int) -> None:
    assert units.number_of_bytes(text) == count


@pytest.mark.parametrize(
    ("value", "text"),
    [(512, "512 B"), (819_200, "800 KiB"), (1600 << 20, "1,600 MiB"), (24 << 30, "24 GiB"), (12_800, "12.5 KiB")],
)
def test_sizes_as_people_read_them(value: int, text: str) -> None:
    assert units.held(value) == text
