"""Every example runs as a reader would run it, in a process of its own, and checks itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from recognising import region_of

from fusecomp.codegen.emit import emit
from fusecomp.ir.region import describe
from fusecomp.planning.device import find
from fusecomp.planning.plan import plan

EXAMPLES = Path(__file__).parent.parent / "examples"

RUNS = {
    "quickstart": ("quickstart.py", {}, "agrees with eager PyTorch"),
    "custom variant, CPU path": ("custom_variant.py", {}, "at both lengths"),
    "custom variant, generated kernel": ("custom_variant.py", {"TRITON_INTERPRET": "1"}, "at both lengths"),
    "long document": ("long_document.py", {}, "Largest tensor allocated"),
    "serving": ("serving.py", {}, "22 replies, each equal, token for token, to its request alone"),
    "training": ("train_gpt2.py --small --json curves.json --plot curves.png", {}, "two seeds of eager by"),
    "hugging face": ("huggingface.py", {}, "gpt_oss: 2 of 2 attentions fused"),
}
"""What is run: file and arguments, environment, and a part of what it prints."""


@pytest.mark.parametrize("name", RUNS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    command, variables, expected = RUNS[name]
    file, *arguments = command.split()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"FUSECOMP_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "FUSECOMP_STRICT": "1", **variables}
    done = subprocess.run([sys.executable, EXAMPLES / file, *arguments], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=500, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert expected in done.stdout
    assert all((tmp_path / a).stat().st_size for a in arguments if "." in a)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_every_example_has_a_docstring_and_a_main_and_is_run(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert f"python examples/{path.name}" in (ast.get_docstring(tree) or "")
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert path.name in {command.split()[0] for command, _, _ in RUNS.values()}


def readme_blocks() -> list[str]:
    """What stands between fences, in order."""
    return re.findall(r"^```(?:python)?\n(.*?)^```$", (EXAMPLES.parent / "README.md").read_text(), re.M | re.S)


def test_the_readme_shows_what_is_made_of_its_example() -> None:
    example, _, _, mathematics, loop, *_ = readme_blocks()
    space: dict[str, Any] = {}
    exec(example, space)
    region = region_of(space["attention"], *(torch.randn(2, 3, 70, 64, dtype=torch.bfloat16) for _ in range(3)))
    assert mathematics in "".join(f"{line.strip()}\n" for line in describe(region))
    chosen = plan(region, {"B": 4, "H": 16, "M": 4096, "N": 4096}, find("a100"))
    assert textwrap.indent(loop, "    ") in emit(region, chosen).text


def test_the_readme_example_is_what_it_says() -> None:
    block = readme_blocks()[0]
    program = f"{block}\nimport fusecomp\nargs = [torch.randn(2, 3, n, 16) for n in (37, 37, 37)]\n"
    program += "assert len(fusecomp.explain(attention, *args).fused) == 1\n"
    fast = 'torch.compile(attention, backend="fusecomp", options={"inner": "eager"})'
    program += f"torch.testing.assert_close({fast}(*args), attention(*args))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
