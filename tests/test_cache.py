"""What is kept on disk, and that its loss or damage never costs the model's result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.table import Draw, qkv, scores
from kernels import tiles
from regions import attention
from torch import Tensor

import fusecomp
from fusecomp.codegen.emit import emit
from fusecomp.running import cache, loader
from fusecomp.running.lower import runnable

pytestmark = pytest.mark.usefixtures("own_cache")


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def draw() -> list[Tensor]:
    return qkv(Draw(torch.float32, "cpu", 1))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="fusecomp", options={"inner": "eager"})


def a_file(path: Path) -> Path:
    path.write_text("not a folder")
    return path


def under_a_file(path: Path) -> Path:
    return a_file(path) / "below"


@pytest.mark.parametrize("make", [a_file, under_a_file])
def test_a_cache_that_cannot_be_used(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(make(tmp_path / "taken")))
    args = draw()
    torch.testing.assert_close(compiled(plain)(*args), plain(*args))
    assert fusecomp.counters()["fused"] == 1
    assert sum("cannot be used" in r.getMessage() for r in caplog.records) <= 1


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(cache, "write", full)
    args = draw()
    torch.testing.assert_close(compiled(plain)(*args), plain(*args))
    assert fusecomp.counters()["fused"] == 1


ODD = '{"passed": "yes", "error": null, "budget": [], "against": 3, "detail": {}}'


@pytest.mark.parametrize("garbage", ["", "{", "[1, 2]", '{"passed": true}', "\x00\xff", "null", "[" * 100_000, ODD])
def test_damaged_verdicts_are_found_again(garbage: str, own_cache: Path) -> None:
    args = draw()
    compiled(plain)(*args)
    (kept,) = (own_cache / "verdicts").iterdir()
    kept.write_text(garbage)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(plain)(*args), plain(*args))
    assert json.loads(kept.read_text())["passed"] is True


def test_verdicts_of_other_code_are_not_believed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("one", "one", "another"):
        monkeypatch.setattr("fusecomp.running.verify.own_code", lambda code=code: code)
        torch._dynamo.reset()
        compiled(plain)(*draw())
    assert len(list((own_cache / "verdicts").iterdir())) == 2


@pytest.mark.parametrize("chosen", ["", "~nobody-of-this-name/cache"])
def test_without_a_home_a_temporary_folder_serves(
    chosen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("FUSECOMP_CACHE_DIR", chosen)
    monkeypatch.setattr(Path, "expanduser", homeless)
    torch._dynamo.reset()
    compiled(plain)(*draw())
    assert fusecomp.counters()["fused"] == 1
    assert caplog.text.count("Set FUSECOMP_CACHE_DIR to a folder of your own") <= 1


def test_a_full_disk_costs_no_kernel(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = loader._write

    def full(path: Path, text: str) -> None:
        if path.is_relative_to(own_cache):
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(loader, "_write", full)
    monkeypatch.setattr(loader, "_loaded", {})
    module = runnable(emit(attention(), tiles(attention())))
    assert module.__file__ is not None
    assert not Path(module.__file__).is_relative_to(own_cache)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.os, "getuid", lambda: 12345)
    with pytest.raises(cache.CacheError, match="belongs to another user; set FUSECOMP_CACHE_DIR"):
        cache.secured(tmp_path)
