"""Training under autocast, with a scaled loss, and inside the wrappers of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agree, compare, compiled, plain, qkv
from test_context_training import Block
from torch import Tensor, nn

import fusecomp


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    fusecomp.reset()
    torch.manual_seed(0)


def cast(fn: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Callable[..., Any]:
    def run(*args: Tensor) -> Any:
        with torch.autocast("cpu", dtype, enabled=enabled):
            return fn(*args)

    return run


def mixed(*dtypes: torch.dtype) -> list[Tensor]:
    return [x.to(t).requires_grad_() for x, t in zip(qkv(), dtypes, strict=True)]


FULL, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = [(FULL, FULL, BF16), (FULL, BF16, FULL), (BF16, BF16, FULL), (FULL, FULL, FULL)]


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("to", [BF16, FP16], ids=str)
def test_autocast_of_mixed_inputs(dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> None:
    """Each product in autocast's dtype, whatever its factors come in; each gradient in its input's."""
    agree(cast(plain, to), mixed(*dtypes), train=True, tolerance=3e-2)


def test_autocast_switched_off_inside() -> None:
    """In float32 there, to the last bits."""
    agree(cast(cast(plain, enabled=False)), qkv(learn=True), train=True)
    agree(cast(lambda *x: cast(plain, enabled=False)(*(y * 2 for y in x)) + 1), qkv(learn=True), train=True)


def test_grad_scaler() -> None:
    """Steps of float16 autocast with a scaled loss, as eager takes them; one whose gradients overflow is skipped."""
    found = []
    for compile_it in (False, True):
        torch.manual_seed(1)
        model = Block()
        run = compiled(model) if compile_it else model
        scaler, best = torch.amp.GradScaler("cpu", init_scale=2.0**8), torch.optim.SGD(model.parameters(), 0.1)
        for scale in (1.0, 1.0, float("inf")):
            with torch.autocast("cpu", FP16):
                loss = run(torch.ones(2, 21, 24).cumsum(1) / 21).square().mean() * scale
            best.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(best)
            scaler.update()
        found.append([*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())])
    assert fusecomp.counters()["fused"] == 1
    assert found[0][-1] == 2.0**7
    for e, g in zip(*found, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-2, atol=2e-3)


# ----------------------------------------------------------------------------------------------------------------
# Modes and wrappers


def test_train_and_eval() -> None:
    """Dropout in training alone; a compiled module follows its mode."""
    model = Block(0.5)
    run, x = compiled(model, fullgraph=False), torch.randn(2, 21, 24)
    assert not torch.equal(run(x), run(x))
    model.eval()
    compare(run(x), model(x), 1e-4)
    model.train()
    torch.manual_seed(3)
    first = run(x)
    torch.manual_seed(3)
    assert torch.equal(first, run(x))
    assert fusecomp.counters()["fused"] == 2


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "ddp inside", "fsdp"])
@pytest.mark.usefixtures("group")
def test_wrappers(wrapper: str) -> None:
    """A step of a wrapped model, compiled around the wrapper or inside it."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for compile_it in (False, True):
        torch.manual_seed(1)
        model: Any = nn.Sequential(Block(), Block())
        if wrapper == "fsdp":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        if wrapper == "ddp inside" and compile_it:
            model.compile(backend="fusecomp", options={"inner": "aot_eager", "strict": True})
        run = DistributedDataParallel(model) if wrapper != "fsdp" else model
        if compile_it and wrapper != "ddp inside":
            run = compiled(run, fullgraph=False)
        best = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            best.zero_grad()
            run(torch.ones(2, 21, 24).cumsum(1) / 21).square().mean().backward()
            best.step()
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        found.append([p.detach().clone() for p in whole])
    assert fusecomp.counters()["fused"] >= 1
    for e, g in zip(*found, strict=True):
        compare(g, e, 1e-4)
