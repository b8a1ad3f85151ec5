"""Attention over pages equals dense attention, and the backend reads the pages themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paging import BLOCK, DV, HKV, D, H, cache_of, dense, filled, holds, more, run
from torch import Tensor

import fusecomp
from fusecomp import backend
from fusecomp.errors import OptionError
from fusecomp.paged import PagedKVCache, Step
from fusecomp.pipeline import Compilation


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "paged"))
    torch._dynamo.reset()
    fusecomp.reset()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 6}, "soft cap": {"softcap": 2.0, "scale": 0.5},
    "sinks": {"sinks": torch.linspace(-1, 1, H)},
    "all": {"window": 5, "softcap": 3.0, "sinks": torch.linspace(-2, 1, H)},
}  # fmt: skip


FORMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "decode": ((1, 1, 1), {"columns": 1}),
    "decode in a fixed batch": ((1, 1, 1), {"columns": 1, "rows": 5}),
    "drafts": ((3, 3, 3), {"columns": 3}),
    "drafts of several lengths": ((1, 3, 2), {"columns": 3, "rows": 4}),
    "packed": ((1, 5, 2), {}),
    "packed in a fixed size": ((1, 5, 2), {"tokens": 11, "rows": 4}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMS)
def test_attention_over_pages_is_attention(form: str, variant: str) -> None:
    cache = cache_of()
    seqs = filled(cache)
    counts, shape = FORMS[form]
    more(cache, seqs, counts)
    got = run(cache, seqs, **shape, **VARIANTS[variant])
    for (seq, tokens), count in zip(seqs.items(), counts, strict=True):
        torch.testing.assert_close(got[seq].double(), dense(tokens, count, **VARIANTS[variant]), rtol=1e-4, atol=1e-5)
    holds(cache, seqs)


@pytest.mark.parametrize("variant", [v if v == "all" else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
@pytest.mark.parametrize("form", FORMS)
def test_the_backend_reads_the_pages(form: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of()
    seqs = filled(cache)
    counts, shape = FORMS[form]
    more(cache, seqs, counts)
    heard: list[Compilation] = []
    monkeypatch.setattr(backend, "_listeners", [heard])
    fast = torch.compile(cache.attend, backend="fusecomp", options={"inner": "eager", "strict": True})
    with torch.no_grad():
        got = run(cache, seqs, fast, **shape, **VARIANTS[variant])
    (entry,) = (e for c in heard for e in c.entries)
    assert entry.status == "fused", entry.reason
    score, value = str(entry.region.products[0].k), str(entry.region.v)
    assert f"kv_idx // {BLOCK}" in score and f"kv_idx // {BLOCK}" in value  # noqa: PT018
    for (seq, tokens), count in zip(seqs.items(), counts, strict=True):
        torch.testing.assert_close(got[seq].double(), dense(tokens, count, **VARIANTS[variant]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_eager_too_forgives_what_lies_past_a_length(form: str) -> None:
    """Blocks come back with what others left in them, NaN perhaps."""
    cache = cache_of()
    seqs = filled(cache)
    counts, shape = FORMS[form]
    more(cache, seqs, counts)
    held = [torch.tensor(cache.table(seq)).repeat_interleave(BLOCK)[: len(tokens)] for seq, tokens in seqs.items()]
    places = [torch.arange(len(tokens)) % BLOCK for tokens in seqs.values()]
    live = torch.zeros(cache.dump + 1, BLOCK, dtype=torch.bool)
    live[torch.cat(held), torch.cat(places)] = True
    live[cache.null] = True
    for pages in (*cache.keys, *cache.values):
        pages[~live] = float("nan")
    got = run(cache, seqs, **shape)
    for (seq, tokens), count in zip(seqs.items(), counts, strict=True):
        torch.testing.assert_close(got[seq].double(), dense(tokens, count), rtol=1e-4, atol=1e-5)


WRONG: dict[str, Callable[[PagedKVCache, Step, Tensor, Tensor, Tensor], object]] = {
    "write: k is [8, 16, 2], not [8, 2, 16]": lambda c, s, q, k, v: c.write(0, k.mT, v, s),
    "write: v is [1, 2, 24], not [8, 2, 24]": lambda c, s, q, k, v: c.write(0, k, v[:1], s),
    "write: there is no layer 2 in a cache of 2, counted from 0": lambda c, s, q, k, v: c.write(2, k, v, s),
    "attend: q is [8, 3, 16], not [8, a multiple of 2, 16]": lambda c, s, q, k, v: c.attend(0, q[:, :3], s),
    "attend: q is [7, 6, 16], not [8, a multiple of 2, 16]": lambda c, s, q, k, v: c.attend(0, q[:7], s),
    "attend: sinks are [3], not [6]": lambda c, s, q, k, v: c.attend(0, q, s, sinks=torch.zeros(3)),
    "attend: a window of 0 tokens": lambda c, s, q, k, v: c.attend(0, q, s, window=0),
    "attend: a soft cap of 0": lambda c, s, q, k, v: c.attend(0, q, s, softcap=0),
    "pages of torch.int8": lambda c, s, q, k, v: c.add_layer(HKV, D, DV, torch.int8),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_would_be_read_as_something_else_is_refused(said: str) -> None:
    """Keys with heads and sizes exchanged hold as many numbers."""
    cache = cache_of()
    seqs = filled(cache)
    more(cache, seqs, (1, 5, 2))
    step, q = cache.step(list(seqs)), torch.randn(8, H, D)
    k, v = torch.randn(8, HKV, D), torch.randn(8, HKV, DV)
    whole = cache.keys[0].clone()
    with pytest.raises(OptionError, match=re.escape(said)):
        WRONG[said](cache, step, q, k, v)
    assert torch.equal(cache.keys[0], whole)
