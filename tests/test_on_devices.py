"""What only a GPU asks, asked without one: programs are compiled as on that GPU, and called, up to the launch of their
kernels. An error there costs a user the fused kernel alone, which no other test notices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import regions
import torch
from corpus import table
from recognising import candidates
from regions import Variant
from torch import Tensor
from variants import VARIANTS

import fusecomp
from fusecomp import pipeline
from fusecomp.backend import explain
from fusecomp.patterns.build import Match
from fusecomp.planning import device
from fusecomp.planning.backward import backward_plan
from fusecomp.running import hopper, lower, verify
from fusecomp.running.launching import launched
from fusecomp.running.lower import Lowered
from fusecomp.running.verdict import Verdict
from fusecomp.settings import Options

GPUS = ("h200", "a100-80", "b200")
FEW, WIDE = (8, 16, 32), 64
"""Columns of the inputs of short programs, and those that they get here: Hopper's kernel multiplies 64 at least."""
LONGER = 100
"""Times as many rows and keys: what short programs are planned for, so that doing more than the least pays."""
QUICK = ("dense", "paged")
SLOW = ("calls", "extended", "families", "functions", "idioms", "learned", "logsums", "masked", "normalised", "online",
        "packed", "paged_fetched", "paged_latent", "paged_masked", "paged_more", "paged_served", "paged_shared",
        "paged_written", "pieces", "spelled", "written")  # fmt: skip


class Kernel:
    """A kernel of a generated file, which looks at what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.names = [p.name for p in kernel.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(type(n) is int and n >= 0 for n in grid), grid
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        constants = [name for name in options if name not in ("num_warps", "num_stages", "maxnreg", "launch_pdl")]
        assert [*self.names[: len(args)], *constants] == self.names
        for name, x in zip(self.names, args, strict=False):
            assert isinstance(x, Tensor) == name.endswith("_ptr"), name
            assert hasattr(x, "base") == name.endswith("_desc"), name


def not_launched(module: ModuleType, text: str) -> ModuleType:
    for name in launched(text):
        kernel = getattr(module, name)
        setattr(module, name, kernel if isinstance(kernel, Kernel) else Kernel(kernel))
    return module


def longer(match: Match) -> dict[str, int]:
    """Its lengths, as if it were longer."""
    sizes = {name: verify.seen(source) for name, source in match.sizes.items()}
    return {name: n * LONGER if name in ("M", "N") and n > 1 else n for name, n in sizes.items()}


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What goes wrong before a kernel is launched: even where another one takes over."""
    found: list[Exception] = []
    seen = pipeline.seen_sizes

    def checked(match: Match, lowered: Lowered, _: Mapping[str, int], __: Options) -> Verdict:
        sizes = seen(match)
        try:
            with torch.no_grad(), lower.real_tensors():
                drawn = verify.example(match, sizes, torch.device("cpu"))
                for call in verify.launches(match, drawn, lowered.launch, sizes, lowered.backward):
                    call()
        except Exception as error:
            found.append(error)
            raise
        return Verdict(True, 0.0, 0.0, "nothing")

    monkeypatch.setattr(Match, "device", torch.device("cuda"))
    monkeypatch.setattr(pipeline, "seen_sizes", longer)
    monkeypatch.setattr(pipeline, "checked", checked)
    monkeypatch.setattr(lower, "quickened", not_launched)
    monkeypatch.setattr(hopper, "available", lambda: True)
    fusecomp.reset()
    return found


def on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if that GPU were there."""
    gpu = device.find(name)
    said = SimpleNamespace(
        multi_processor_count=gpu.sms, total_memory=gpu.memory_bytes, shared_memory_per_block_optin=gpu.smem_bytes
    )
    monkeypatch.setattr(device, "live", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: said)


def inputs(program: Any, monkeypatch: pytest.MonkeyPatch, trained: bool = False) -> list[Tensor]:
    """Its inputs in bfloat16: wide, if it takes such."""
    make = program.make_args if isinstance(program, Variant) else lambda: program.make_args(torch.bfloat16)
    args = make()
    with monkeypatch.context() as patch, torch.no_grad(), suppress(Exception):
        for source in (regions.Draw, table.Draw):
            patch.setattr(source, "__call__", wide(source.__call__))
        program.fn(*make())
        args = make()
    args = [x.bfloat16() if x.dtype == torch.float32 else x for x in args]
    return [x.requires_grad_(trained and x.dtype == torch.bfloat16) for x in args]


def wide(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """draw(..., d) with WIDE columns instead of few."""
    return lambda own, *shape: draw(own, *shape[:-1], WIDE if len(shape) > 2 and shape[-1] in FEW else shape[-1])


def compiled(program: Any, trained: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of its attentions. Errors are raised."""
    args = inputs(program, monkeypatch, trained)
    with torch.set_grad_enabled(trained):
        return [e.status for e in explain(program.fn, *args, options={"strict": True}).entries]


def programs(*names: str) -> list[Any]:
    found = [(name, case) for name in names for case in importlib.import_module(f"corpus.{name}").CASES]
    return [pytest.param(case, id=f"{name}-{case.name}") for name, case in found]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_variants_in_training(variant: Variant, failures: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    on("h200", monkeypatch)
    assert compiled(variant, True, monkeypatch) == ["fused"]
    assert not failures


@pytest.mark.parametrize("case", programs(*QUICK))
def test_who_runs_what(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch, separate kernels, the kernel for Hopper or the portable one: each question has an answer."""
    for match in candidates(case.fn, *inputs(case, monkeypatch)):
        for gpu in GPUS if isinstance(match, Match) else ():
            on(gpu, monkeypatch)
            sizes = longer(match)
            pipeline.handed(match, sizes, Options())
            pipeline.faster_apart(match, sizes, Options())
            assert hopper.laid_out(match) in (True, False)
            own = hopper.takes(match, sizes, Options())
            assert own is None or gpu == "h200"
            lower.planned(match, sizes)
            backward_plan(match.region, device.current(), sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "trained"), [("h200", False), ("h200", True), ("a100-80", True)])
@pytest.mark.parametrize("program", [*VARIANTS, *programs(*QUICK, *SLOW)], ids=lambda v: v.name)
def test_every_program(
    program: Any, gpu: str, trained: bool, failures: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(gpu, monkeypatch)
    found = compiled(program, trained and bool(getattr(program, "grad", True)), monkeypatch)
    assert not failures
    assert getattr(program, "expect", "fuse") != "fuse" or "fused" in found


def test_planned_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU may be the current one: it may be of another kind, and nothing is launched on it."""
    entered: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        yield
        entered.pop()

    on("h200", monkeypatch)
    seen: list[torch.device] = []
    checked = pipeline.checked

    def noted(*args: Any) -> Verdict | None:
        seen.extend(entered)
        return checked(*args)

    monkeypatch.setattr(Match, "device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(pipeline, "checked", noted)
    assert compiled(VARIANTS[0], True, monkeypatch) == ["fused"]
    assert seen == [torch.device("cuda:1")]
