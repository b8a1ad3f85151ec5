"""The picture of a ranking: what is written in it, and what is said where it cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import fusecomp
from fusecomp import calculator
from fusecomp.errors import OptionError

figure = pytest.importorskip("matplotlib.figure")


def composed(answer: calculator.Tiles) -> tuple[list[str], list[str], list[Any]]:
    """(words in the map, words in the roofline, the map's cells)."""
    from fusecomp.plot import compose

    drawn = figure.Figure(figsize=(13, 5.8), layout="constrained")
    compose(drawn, answer.workload, answer.device, answer.rankings[0])
    cells, roof = drawn.axes[0], drawn.axes[1]
    return [t.get_text() for t in cells.texts], [t.get_text() for t in roof.texts], list(cells.patches)


def test_the_map_has_every_cell_the_taken_one_framed_and_misfits_hatched() -> None:
    answer = fusecomp.tiles(4096, 256, "fp32", "a100", budget="60KB")
    words, _, cells = composed(answer)
    assert len(cells) == len({(x.tile.block_m, x.tile.block_n) for x in answer.rankings[0].lines}) == 16
    assert sum(w.startswith("taken: ") for w in words) == 1
    assert [c.get_linewidth() > 0 for c in cells].count(True) == 1
    hatched = [c for c in cells if c.get_hatch()]
    assert len(hatched) == sum(w.startswith("too large") for w in words) > 5
    assert any("of 60 KiB" in w for w in words)


def test_the_best_schedule_of_a_cell_is_the_one_shown() -> None:
    from fusecomp.plot import best_cells

    lines = fusecomp.tiles(4096, device="h200").rankings[0].lines
    for cell, shown in best_cells(lines).items():
        fits = [x for x in lines if (x.tile.block_m, x.tile.block_n) == cell and x.fits]
        assert shown.taken or shown.cost.seconds == min(x.cost.seconds for x in fits)  # type: ignore[union-attr]


def test_the_roofline_names_its_ceilings_with_the_figures_of_the_device() -> None:
    _, words, _ = composed(fusecomp.tiles(1024, 64, softcap=30.0, device="b200"))
    text = "\n".join(words)
    for part in ("memory: 8 TB/s", "tensor cores, bf16: 2,250 TFLOP/s", "special functions (3 a score): 375"):
        assert part in text
    assert "taken: " in text
    assert "unfused traffic:" in text
    _, words, _ = composed(fusecomp.tiles(65536, decode=True, device="a100-40", dtype="fp32"))
    assert "float32 units, fp32: 19.5 TFLOP/s" in words
    assert "memory: 1.55 TB/s" in words


def test_ceilings_that_coincide_are_named_apart() -> None:
    """At D 64 an H100 has as many exponentials as products."""
    from fusecomp.plot import compose

    answer = fusecomp.tiles(8192, 64, device="h100-sxm")
    drawn = figure.Figure()
    compose(drawn, answer.workload, answer.device, answer.rankings[0])
    rates = [t for t in drawn.axes[1].texts if t.get_text().endswith("989 TFLOP/s")]
    assert len(rates) == 2
    assert len({t.xyann for t in rates}) == 2


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files(tmp_path: Path, kind: str) -> None:
    fusecomp.tiles(512, 64, device="l4").plot(tmp_path / f"plan.{kind}")
    assert (tmp_path / f"plan.{kind}").stat().st_size > 5000


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = fusecomp.tiles(512, 64, device="l4")
    with pytest.raises(OptionError, match=r"a plot is a file that ends in \..*got 'plan'"):
        answer.plot("plan")
    with pytest.raises(OptionError, match="cannot write the plot"):
        answer.plot(tmp_path / "nowhere" / "plan.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match="needs matplotlib, which is not installed: pip install matplotlib"):
        answer.plot(tmp_path / "plan.png")
