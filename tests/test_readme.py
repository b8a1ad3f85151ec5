"""Figures of the README beside the records that they are from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusecomp.bench import record

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "examples" / "bench" / "records"
README = (ROOT / "README.md").read_text()


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the first table below `head`, without its two lines of titles and without emphasis."""
    below = text.split(head, 1)[1]
    table = re.search(r"(?:^\|.*\n)+", below, re.M)
    assert table is not None
    return [[c.strip().strip("*") for c in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RECORDS / name).read_text())["rows"]  # type: ignore[no-any-return]


def number(ms: float) -> str:
    """17.60, 4.888, 0.410."""
    return f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}"


def sustained(case: str) -> dict[str, float]:
    """Milliseconds back to back of each peer that ran a case of the main record."""
    (found,) = [
        c
        for c in record.read(RECORDS / "bench_h200.json").cases
        if c.case == case and c.mode in ("forward", "variants")
    ]
    return {row.peer: t.median for row in found.rows for t in row.timings if t.protocol == "sustained"}


def of_the_bench(case: str) -> list[str]:
    ms = sustained(case)
    flex = min(t for peer, t in ms.items() if peer.startswith("FlexAttention"))
    return [number(t) for t in (ms["eager"], ms["Inductor"], flex, ms["fusecomp"])]


def of_paging(case: str) -> list[str]:
    us = {row["impl"]: row["us"] for row in rows_of("paged_h200.json") if row["case"] == case}
    return [f"{us[name] / 1e3:.3f}" for name in ("eager", "inductor", "flex on gathered keys", "fusecomp")]


def three(value: float) -> str:
    """372, 56.9, 49.0."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def of_training(what: str) -> list[str]:
    found = {r["backend"]: r[what] for r in rows_of("gpt2_h200.json") if r["model"] == "GPT-2 small" and r["n"] == 4096}
    return [three(found[name]) if what == "ms" else f"{found[name]:.1f}" for name in ("eager", "inductor", "fusecomp")]


def test_the_first_table() -> None:
    soft_cap, alibi, causal, pages, training, memory = rows(README, "<!-- glance -->")
    assert soft_cap[1:] == of_the_bench("soft cap D64 B4 H16 N4096")
    assert alibi[1:] == of_the_bench("ALiBi D64 B4 H16 N4096")
    assert causal[1:] == of_the_bench("causal D128 B4 H16 N4096")
    assert f"FlashAttention-3: {number(sustained('causal D128 B4 H16 N4096')['FlashAttention-3'])}" in causal[0]
    assert pages[1:] == of_paging("b64 ctx4096")
    assert [c for c in training[1:] if c] == of_training("ms")
    assert [c for c in memory[1:] if c] == of_training("peak_gib")


TRAINED = rows(README, "(`examples/train_gpt2.py`, `gpt2_h200.json`")


@pytest.mark.parametrize(("model", "size", "cells"), [(model, size, cells) for model, size, *cells in TRAINED])
def test_training(model: str, size: str, cells: list[str]) -> None:
    b, n = map(int, size.split(" x "))
    known = {
        r["backend"]: f"{three(r['ms'])} ms, {r['peak_gib']:.1f} GiB" if r["ms"] else "out of memory"
        for r in rows_of("gpt2_h200.json")
        if (r["model"], r["b"], r["n"]) == (model.replace("-large", " large"), b, n)
    }
    assert cells == [known[name] for name in ("eager", "inductor", "fusecomp")]
