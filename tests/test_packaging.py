"""What `pip install` puts on a disk: every module under its real name, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"fusecomp": "fusecomp", "patterns": "fusecomp/patterns", "codegen": "fusecomp/codegen"}
SKIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree, built from a copy so that no stale build folder takes part."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=SKIPPED)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, copy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_every_file_of_the_tree_is_inside(wheel: zipfile.ZipFile) -> None:
    files = {f: [p for p in (ROOT / f).rglob("*") if p.is_file() and "__pycache__" not in p.parts] for f in FOLDERS}
    wanted = {f"{FOLDERS[f]}/{p.relative_to(ROOT / f)}" for f, paths in files.items() for p in paths}
    assert wanted - set(wheel.namelist()) == set()


def test_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"fusecomp"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    read = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "[torch_dynamo_backends]\nfusecomp = fusecomp.backend:fusecomp\n" in read["entry_points.txt"]
    assert "[console_scripts]\nfusecomp = fusecomp.cli:main\n" in read["entry_points.txt"]
    assert "Apache License" in read["LICENSE"]
    for line in ("Requires-Python: >=3.11", "License-Expression: Apache-2.0", "Requires-Dist: torch>=2.11"):
        assert line in read["METADATA"]


def test_the_installed_package_imports_by_its_real_names(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    modules = [n[:-3].replace("/", ".").removesuffix(".__init__") for n in wheel.namelist() if n.endswith(".py")]
    wanted = [m for m in modules if not m.endswith("__main__")]
    program = f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
    program += f"for name in {wanted!r}: assert {str(tmp_path)!r} in importlib.import_module(name).__file__, name\n"
    program += "assert not {'patterns', 'codegen'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_torch_finds_the_backend_without_an_import() -> None:
    program = "import torch._dynamo as d, sys; assert 'fusecomp' in d.list_backends(), d.list_backends()\n"
    program += "assert 'fusecomp' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
