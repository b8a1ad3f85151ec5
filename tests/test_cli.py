"""The command line, as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecomp import cli

MODEL = '''
import torch
print("a module that talks")

def attention(q, k, v):
    print("and a function")
    scores = q @ k.transpose(-1, -2) * 0.125
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return torch.softmax(scores.masked_fill(j > i, float("-inf")), -1) @ v

def mixed(q, k, v):
    return torch.softmax((q @ k.transpose(-1, -2)).cumsum(-1), -1) @ v

def none(x):
    return x + 1

def frozen(q, k, v):
    return attention(q.detach(), k.detach(), v.detach())
'''

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run `fusecomp ...` in this process: (exit status, stdout, stderr)."""
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "140")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fusecomp", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        shown = capsys.readouterr()
        return int(caught.value.code or 0), shown.out, shown.err

    return run


def process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m fusecomp ...` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **variables}
    command = [sys.executable, "-m", "fusecomp", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_no_command_prints_help(call: Call) -> None:
    _, out, err = call()
    for command in ("explain", "show", "verify", "tiles", "env"):
        assert command in out + err


def test_env_names_versions_device_cache_and_variables(call: Call, tmp_path: Path) -> None:
    status, out, _ = call("env")
    assert status == 0
    for part in ("python", "torch", "triton", "device", str(tmp_path / "cache"), "FUSECOMP_STRICT", "not set"):
        assert part in out


def test_explain_a_fused_attention(call: Call, model: str) -> None:
    status, out, _ = call("explain", f"{model}:attention", "-o", "inner=aot_eager")
    assert status == 0
    for part in ("fusecomp attention", "1 fused", "model.py:9", "S = score * 0.125", "keep", "verdict"):
        assert part in out


def test_explain_a_declined_one_as_json(call: Call, model: str) -> None:
    status, out, _ = call("explain", f"{model}:mixed", "-o", "inner=aot_eager", "--json")
    assert status == 0
    (entry,) = json.loads(out)["entries"]
    assert entry["status"] == "declined"
    assert entry["reason"]
    assert entry["where"].endswith("model.py:12")


def test_explain_nothing(call: Call, model: str) -> None:
    status, out, _ = call("explain", f"{model}:none", "-o", "inner=aot_eager")
    assert status == 0
    assert "No softmax" in out


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("graph", "torch.ops.aten.matmul.default(q, "),
        ("region", "keep"),
        ("plan", "(Br x Bc)"),
        ("kernel", "@triton.jit"),
        ("ptx", ".target sm_90"),
    ],
)
def test_show_each_stage(call: Call, model: str, stage: str, part: str) -> None:
    status, out, _ = call("show", "--until", stage, f"{model}:attention", "--device", "h100")
    assert status == 0
    assert part in out


@pytest.mark.parametrize(
    ("device", "stage", "part"),
    [
        ("a100", "plan", "key gradients"),
        ("a100", "kernel", "def key_gradients("),
        ("h100", "kernel", "def key_gradients("),
        ("a100", "ptx", ": query_gradient for sm_80: "),
    ],
)
def test_show_the_gradients(call: Call, model: str, device: str, stage: str, part: str) -> None:
    given = f"{model}:attention", "--device", device, "--arg", "1x2x512x64:bf16"
    status, out, _ = call("show", "--backward", "--until", stage, *given)
    assert status == 0
    assert part in out
    assert part not in call("show", "--until", stage, *given)[1]


def test_show_without_computing(call: Call, tmp_path: Path) -> None:
    """Scores that no machine could hold: the tensors have no elements."""
    path = tmp_path / "wide.py"
    path.write_text("import torch\n\ndef attention(q, k, v):\n    return torch.softmax(q @ k.mT * 0.125, -1) @ v\n")
    status, out, _ = call("show", f"{path}:attention", "--on", "meta", "--arg", "1x8x131072x8:bf16")
    assert status == 0
    assert "[1, 8, 131072, 8]  bfloat16" in out


def test_show_says_where_nothing_is_trained(call: Call, model: str) -> None:
    status, out, _ = call("show", "--backward", f"{model}:frozen")
    assert status == 0
    assert "# nothing that it reads is trained" in out


def test_show_says_why_there_is_nothing(call: Call, model: str) -> None:
    _, out, _ = call("show", f"{model}:mixed")
    assert "declined" in out
    assert "# declined: " in out
    assert "# advice: " in out
    _, out, _ = call("show", f"{model}:none")
    assert out.startswith("# No softmax")


def test_verify_runs_the_kernel_in_the_interpreter(model: str, tmp_path: Path) -> None:
    done = process("verify", f"{model}:attention", "-o", "inner=aot_eager", FUSECOMP_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "1 fused" in done.stdout
    assert "generated Triton kernel" in done.stdout


WRONG = {
    "error: --until takes one of graph, region, plan, kernel, ptx; got 'ir'": ("show", "--until", "ir", "MODEL:mixed"),
    "(did you mean 'attention'?)": ("explain", "MODEL:atention"),
    "is not FILE:FUNCTION": ("explain", "attention"),
    "--option takes KEY=VALUE": ("explain", "MODEL:attention", "-o", "inner"),
    "unknown option 'iner' (did you mean 'inner'?)": ("explain", "MODEL:attention", "-o", "iner=eager"),
    "does not run in eager PyTorch, on inputs (float32 [2, 3]": (
        "explain", "MODEL:attention", "--arg", "2x3", "--arg", "2x4", "--arg", "2x3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_one_line_and_exit_status_2(call: Call, model: str, message: str) -> None:
    status, out, err = call(*(word.replace("MODEL", model) for word in WRONG[message]))
    assert status == 2
    assert message in err.replace("\n", " ")
    assert "Traceback" not in out + err


def test_python_dash_m() -> None:
    done = process("env")
    assert done.returncode == 0, done.stderr
    assert "python" in done.stdout
