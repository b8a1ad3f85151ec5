"""What verification draws for the operands of a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from corpus.table import Draw, qkv, scores
from recognising import candidates
from regions import attention
from torch import Tensor

from fusecomp.errors import VerificationError
from fusecomp.graph.program import Call
from fusecomp.patterns.build import Match
from fusecomp.running import inputs
from fusecomp.running.original import original
from fusecomp.running.subgraph import Run
from fusecomp.running.verify import drawn_inside

SIZES = {"B": 2, "H": 3, "M": 13, "N": 21}


def draw(build: Callable[..., Sequence[Tensor]] = qkv) -> list[Tensor]:
    return list(build(Draw(torch.float32, "cpu", 1)))


def operands(match: object, sizes: dict[str, int]) -> list[Tensor]:
    assert isinstance(match, Match)
    examples = [inputs.example_of(n.meta["val"]) for n in match.inputs]
    return inputs.draw(match.region, examples, sizes, torch.device("cpu"))


def test_indices_that_are_drawn_stay_inside_what_they_index() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, at: Tensor, lengths: Tensor) -> Tensor:
        s = scores(q, k) + table[at]
        return s.masked_fill(torch.arange(21) >= lengths[:, None, None, None], -1e9).softmax(-1) @ v

    args = [*draw(), torch.randn(4), torch.randint(0, 4, (21,)), torch.tensor([3, 21])]
    (match,) = candidates(fn, *args)
    drawn = [x for x in operands(match, SIZES) if x.dtype == torch.int64]
    at, lengths = sorted(drawn, key=lambda x: -x.numel())
    assert at.max() < 4
    assert lengths.max() > 4  # only what indexes is kept small


def test_a_mask_of_numbers_is_drawn_with_both_values() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scores(q, k).masked_fill(mask == 0, -1e9).softmax(-1) @ v

    (match,) = candidates(fn, *draw(), torch.ones(13, 21))
    *_, mask = operands(match, SIZES)
    assert 0 < int((mask == 0).sum()) < mask.numel()


def test_labels_are_drawn_alike() -> None:
    """Parts of windows (Swin) told by numbers: else one key had all the weight, and no gradient was left to judge."""

    def fn(q: Tensor, k: Tensor, v: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        apart = labels - labels[:, None]
        s = scores(q, k) + apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0) + bias
        return s.softmax(-1) @ v

    (match,) = candidates(fn, *draw(lambda d: [d(2, 3, 21, 16)] * 3), torch.ones(21), torch.ones(21, 21))
    drawn = operands(match, {**SIZES, "M": 21})
    (labels,) = [x for x in drawn if x.dim() == 1]
    (bias,) = [x for x in drawn if x.shape == (21, 21)]
    assert labels.equal(labels.round())
    assert not bias.equal(bias.round())  # only what is compared


def test_no_indices_inside_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    region = attention()
    examples = [((2, 3, n, 16), (3 * n * 16, n * 16, 16, 1), torch.float32) for n in (13, 21, 21)]
    monkeypatch.setattr(inputs, "leaving", lambda *_: {"q"})
    with pytest.raises(VerificationError, match="no random values of q stay inside the tensor they index"):
        inputs.draw(region, examples, SIZES, torch.device("cpu"))


def test_what_the_graph_indexes_by_integers_is_watched() -> None:
    """Parents of a tree of drafts, followed twice: on a GPU, an index outside would end the process."""

    def fn(q: Tensor, k: Tensor, v: Tensor, parents: Tensor) -> Tensor:
        seen = torch.eye(13, dtype=torch.bool).expand(2, 13, 13)
        for _ in range(2):
            seen = seen | torch.gather(seen, 1, parents[..., None].expand(-1, -1, 13))
        return scores(q, k).masked_fill(~seen[:, None], -1e9).softmax(-1) @ v

    args = [*draw(lambda d: [d(2, 3, 13, 16)] * 3), torch.randint(0, 13, (2, 13))]
    (match,) = candidates(fn, *args)
    assert isinstance(match, Match)
    drawn = drawn_inside(match, {**SIZES, "N": 13}, torch.device("cpu"))
    (parents,) = [x for x in drawn if x.dtype == torch.int64]
    assert original(match).inside(drawn)
    for outside in (13, -1):
        parents[1, 3] = outside
        assert not original(match).inside(drawn)


def test_brackets_count_from_the_end() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        seen = torch.eye(13, dtype=torch.bool)[at - 1]
        return scores(q, k).masked_fill(~seen, -1e9).softmax(-1) @ v

    (match,) = candidates(fn, *draw(lambda d: [d(2, 3, 13, 16)] * 3), torch.arange(13))
    assert isinstance(match, Match)
    drawn = drawn_inside(match, {**SIZES, "N": 13}, torch.device("cpu"))
    (at,) = [x for x in drawn if x.dtype == torch.int64]
    for value, expected in ((-12, True), (-13, False)):
        at[0] = value
        assert original(match).inside(drawn) == expected


def test_lengths_that_are_kept_above_a_number_are_positive() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = q.norm(dim=-1, keepdim=True) @ k.norm(dim=-1, keepdim=True).mT
        return (q @ k.mT / lengths.clamp(min=1e-6)).softmax(-1) @ v

    (match,) = candidates(fn, *draw())
    drawn = [x for x in operands(match, SIZES) if x.shape[-1] == 1]
    assert len(drawn) == 2
    assert all(x.min() > 0 for x in drawn)


def test_what_a_program_has_read_for_the_last_time_is_not_kept() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        weights = (s - s.amax(-1, True)).exp()
        return weights / weights.sum(-1, True) @ v

    q, k, v = draw()
    (match,) = candidates(fn, q, k, v)
    held: list[int] = []

    class Watched(Run):
        def call(self, call: Call) -> object:
            found = super().call(call)
            held.append(sum(isinstance(x, Tensor) and x.shape[-2:] == (13, 21) for x in self.env.values()))
            return found

    section = original(match)
    run = Watched(None, q.device, {n: x for (n,), x in zip(section.given, (q, k, v), strict=True)})
    torch.testing.assert_close(run.through(section.calls, section.result), fn(q, k, v))
    assert set(run.env) == {section.result}
    assert max(held) <= 2
    torch.testing.assert_close(section.run([q, k, v], torch.float64), fn(q.double(), k.double(), v.double()))
