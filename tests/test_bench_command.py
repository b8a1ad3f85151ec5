"""`fusecomp bench` as a person types it, and the records that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusecomp import cli
from fusecomp.bench import cases, measure, page, peers, picture, record
from fusecomp.bench.cases import CASES
from fusecomp.bench.record import Measured, Record, Row
from fusecomp.bench.timing import Bench, Timing
from fusecomp.errors import OptionError

Call = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run `fusecomp bench ...` in this process: (exit status, stdout, stderr), lines joined."""
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path / "cache"))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fusecomp", "bench", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        shown = capsys.readouterr()
        return int(caught.value.code or 0), shown.out, " ".join(shown.err.split())

    return run


def made() -> Record:
    """Two cases: one timed by three peers, one where ours was not fused and another was wrong."""
    def times(ms: float) -> tuple[Timing, ...]:
        return (Timing("burst", ms * 0.9, ms * 0.89, ms * 0.91, 40), Timing("sustained", ms, ms * 0.98, ms * 1.02, 90))

    eager, flex = Row("eager", times(10.0), 0.004, 2**32), Row("FlexAttention", times(0.75), 0.002)
    ours = Row("fusecomp", times(0.5), 0.002, 2**25)
    roofs = {"burst": 8e14, "sustained": 7e14}
    one = Measured("causal D128 B4 H16 N4096", "forward", {"b": 4}, 2.8e11, "FLOP", roofs, (eager, flex, ours), 12.0)
    wrong = Row("FlexAttention", error=0.5, problem="wrong: relative error 0.5, of at most 0.02")
    slow = replace(ours, note="not fused: 1 declined, 0 fell back, of 1")
    two = replace(one, case="full D64 B4 H16 N4096", rows=(eager, wrong, slow))
    return Record({"device": "H200", "date": "2030-01-01", "command": "fusecomp bench"}, (), (one, two))


def test_a_record_survives_json(tmp_path: Path) -> None:
    made().write(tmp_path / "r.json")
    assert record.read(tmp_path / "r.json") == made()
    follows = json.loads((tmp_path / "r.json").read_text())["cases"][0]["rows"][2]["follows"]["sustained"]
    assert follows == {"rate": pytest.approx(5.6e14), "of_roof": pytest.approx(0.8), "over_best": pytest.approx(1.5)}


def test_fusecomp_with_other_options_is_no_peer_of_its_own() -> None:
    one = made().cases[0]
    any_order = replace(one.rows[2], peer="fusecomp in any order", timings=(Timing("sustained", 0.25, 0.2, 0.3, 90),))
    found = replace(one, rows=(*one.rows, any_order))
    assert found.over_best(found.rows[2], "sustained") == 1.5
    assert found.over_best(any_order, "sustained") == 3.0
    assert found.over_best(found.rows[1], "sustained") == pytest.approx(1 / 3)


def test_a_record_becomes_the_tables_of_the_readme() -> None:
    burst, sustained = (p.markdown for p in page.pages(made()))
    assert burst.startswith("Forward, short bursts on a card that rested, ms; ceiling 800 TFLOP/s:\n\n| case | eager |")
    assert sustained.splitlines()[4:] == [
        "| causal D128 B4 H16 N4096 | 10.00 | 0.750 | **0.500** | 560 | 80% | 2.0% | 1.50x |",
        "| full D64 B4 H16 N4096 | 10.00 | wrong | **0.500 (not fused)** | 560 | 80% | 2.0% | 20.00x |",
    ]


def test_columns_are_chosen_and_ratios_are_to_the_best_of_all() -> None:
    _, sustained = (p.markdown for p in page.pages(made(), {"eager", "fusecomp"}))
    assert sustained.splitlines()[2].startswith("| case | eager | fusecomp |")
    assert sustained.splitlines()[4] == "| causal D128 B4 H16 N4096 | 10.00 | **0.500** | 560 | 80% | 2.0% | 1.50x |"


def test_a_ceiling_far_from_all_peers_is_not_drawn() -> None:
    one = made().cases[0]
    assert picture.roofs_of([one], "sustained") == [7e14]
    assert picture.roofs_of([one, replace(one, roofs={"sustained": 2.9e15})], "sustained") == [None, None]
    assert picture.roofs_of([replace(one, roofs={})], "sustained") == [None]


README_PEERS = "eager,Inductor,FlexAttention,FlexAttention autotuned,SDPA cuDNN,FlashAttention-3,fusecomp,in any order"


@pytest.mark.parametrize("file", ["README.md", "examples/bench/README.md"])
def test_the_tables_in_a_readme_are_those_of_its_record(file: str) -> None:
    text, found = (ROOT / file).read_text(), record.read(ROOT / "examples/bench/records/bench_h200.json")
    shown = text.split("<!-- bench -->\n")[1].split("\n<!-- /bench -->")[0]
    names = {peer.name for peer in peers.chosen(README_PEERS, "cuda")}
    tables = {p.title: p.markdown for p in page.pages(found, names)}
    assert shown == "\n\n".join(table for title, table in tables.items() if title in shown)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "fusecomp bench 1"}', json.dumps({**made().to_dict(), "cases": [{"rows": []}]})],
)
def test_what_is_no_record_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(OptionError, match=r"r\.json is no record of `fusecomp bench --json`"):
        record.read(tmp_path / "r.json")


def test_a_run_that_is_cut_off_leaves_what_it_had(tmp_path: Path) -> None:
    two = cases.tiny(CASES)[:2]
    run = measure.records(two, peers.chosen("math", "cpu"), Bench(torch.device("cpu"), quick=True), {}, lambda _: None)
    next(run).write(tmp_path / "r.json")
    assert [case.case for case in record.read(tmp_path / "r.json").cases] == [two[0].name]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


# ----------------------------------------------------------------------------------------------------------------
# The command


def test_a_tiny_run_on_a_cpu(call: Call, tmp_path: Path) -> None:
    out, plot = tmp_path / "r.json", tmp_path / "r.svg"
    words = ["--device", "cpu", "--quick", "--modes", "forward,paged", "--peers", "eager,math,fusecomp"]
    status, shown, _ = call(*words, "--json", str(out), "--plot", str(plot))
    assert status == 0, shown
    found = record.read(out)
    assert {case.mode for case in found.cases} == {"forward", "paged"}
    for case in found.cases:
        assert {row.peer for row in case.rows} == {"eager", "SDPA math", "fusecomp"}
        assert all(row.timings and not row.problem and not row.note for row in case.rows), case.rows
    assert {c.what for c in found.ceilings} >= {"product", "copy 1 MiB"}
    assert found.machine["command"].startswith("fusecomp bench --device cpu --quick")
    assert "causal D16 B3 H2 N300" in shown
    assert "fusecomp" in plot.read_text()
    status, shown, _ = call("--table", str(out))
    assert status == 0
    assert "| case | eager | SDPA math | fusecomp | GB/s |" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--modes", "up"], "--modes takes a list of forward, variants, backward, small, decode, paged; got 'up'"),
        (["--cases", "alibi,nobody"], "--cases takes a list of"),
        (["--peers", "nobody"], "--peers takes names or parts of them, with commas, out of eager, Inductor"),
        (["--only", "D1000"], "leave no case to time; there are forward: causal D128 B4 H16 N4096"),
        (["--device", "tpu"], "--device takes cuda or cpu; got 'tpu'"),
        (["--peers", "flashattention-3"], "nobody is left to time: FlashAttention-3: no module fa3_fwd_interface"),
        (["--table", "nowhere.json"], "cannot read the record nowhere.json: No such file"),
        (["--json", "nowhere/r.json"], "cannot write nowhere/r.json: give a file in a folder that exists"),
        (["--plot", "r.text"], "a plot is a file that ends in ."),
    ],
)
def test_bad_words_are_told_before_anything_is_timed(
    words: list[str], told: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    status, shown, error = call(*words)
    assert (status, shown) == (2, "")
    assert told in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(call: Call) -> None:
    status, _, error = call("--quick")
    assert status == 2
    assert "no GPU to time on" in error
    assert "--device cpu" in error
    assert "--table RECORD.json" in error


def test_words_choose_peers() -> None:
    def names(text: str, quick: bool = False) -> list[str]:
        return [peer.name for peer in peers.chosen(text, "cuda", quick)]

    assert names("FlexAttention") == ["FlexAttention"]
    assert names("flex, cudnn") == [
        "FlexAttention", "FlexAttention autotuned", "FlexAttention + its mask", "SDPA cuDNN",
    ]  # fmt: skip
    assert set(names("")) - set(names("", quick=True)) == {"FlexAttention autotuned", "FlexAttention + its mask"}
    assert names("autotuned", quick=True) == ["FlexAttention autotuned"]


def test_words_choose_cases() -> None:
    assert {c.variant.name for c in cases.chosen(names="alibi, Soft Cap")} == {"ALiBi", "soft cap"}
    assert {c.mode for c in cases.chosen(modes="small,decode")} == {"small", "decode"}
    assert all("D256" in c.name or "N18000" in c.name for c in cases.chosen(only="D256,N18000"))
    assert {c.mode for c in cases.chosen(quick=True)} == set(cases.MODES)
    assert len({(c.mode, c.name) for c in CASES}) == len(CASES)


@pytest.mark.gpu
def test_a_quick_case_on_a_gpu(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "r.json"
    chosen = ["--modes", "small,paged", "--peers", "eager,FlexAttention,SDPA flash,fusecomp"]
    assert call("--quick", *chosen, "--json", str(out))[0] == 0
    for case in record.read(out).cases:
        assert all(row.timings for row in case.rows), case.rows
        assert case.row("fusecomp") is not None
