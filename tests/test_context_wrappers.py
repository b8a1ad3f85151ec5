"""Training under autocast, with a scaled loss, and inside the wrappers of torch.distributed."""

from __future__ import annotations

import copy
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


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@pytest.fixture
def mesh(group: None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


@pytest.mark.parametrize(("around", "fused"), [("inside", 1), ("after", 1), ("returned", 1), ("distributed", 0)])
def test_distributed_tensors(around: str, fused: int, mesh: Any) -> None:
    """What is inside one is known at run time alone, and no constant of the graph. No kernel takes whole ones."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def spread(x: Tensor) -> DTensor:
        return DTensor.from_local(x, mesh, [Shard(1)])

    programs: dict[str, Callable[..., Tensor]] = {
        "inside": lambda q, k, v: attend(q.to_local(), k.to_local(), v.to_local()),
        "after": lambda q, k, v: (spread(attend(q.to_local(), k.to_local(), v.to_local())) * 2).to_local(),
        "returned": lambda q, k, v: spread(attend(*(spread(x.to_local()).to_local() for x in (q, k, v)))),
        "distributed": lambda q, k, v: attend(q, k, v).to_local(),
    }
    local = [torch.randn(2, 3, 21, 8) for _ in range(3)]
    fn, found = programs[around], []
    for run in (fn, torch.compile(fn, backend="fusecomp", options={"inner": "aot_eager", "strict": True})):
        leaves = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in local]
        out = run(*leaves)
        out = out.to_local() if isinstance(out, DTensor) else out
        out.square().sum().backward()
        found.append([out, *(x.grad.to_local() for x in leaves if isinstance(x.grad, DTensor))])
    for e, g in zip(*found, strict=True):
        assert type(g) is Tensor
        compare(g, e, 1e-4)
    assert fusecomp.counters()["fused"] == fused


def test_tensor_parallel_layers(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return self.o(attend(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    torch.manual_seed(1)
    plain, found = Layer(), []
    split = parallelize_module(
        copy.deepcopy(plain), mesh, {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()}
    )
    for run in (plain, torch.compile(split, backend="fusecomp", options={"inner": "aot_eager", "strict": True})):
        x = torch.linspace(-1, 1, 2 * 21 * 24).view(2, 21, 24).requires_grad_()
        run(x).square().sum().backward()
        found.append(x.grad)
    compare(found[1], found[0], 1e-4)
    assert fusecomp.counters()["fused"] == 1
