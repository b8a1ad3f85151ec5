"""The shape of the source tree: imports point down only, files are short, nothing names one person's machine."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent

FLOORS = {
    "fusecomp.errors": 0,
    "fusecomp.settings": 0,
    "fusecomp.ir": 0,
    "fusecomp.graph": 1,
    "fusecomp.paged": 1,
    "fusecomp.patterns": 2,
    "fusecomp.planning": 3,
    "fusecomp.codegen": 4,
    "fusecomp.running": 5,
    "fusecomp.report": 6,
    "fusecomp.pipeline": 6,
    "fusecomp.backend": 6,
    "fusecomp.target": 7,
    "fusecomp.calculator": 6,
    "fusecomp.tables": 6,
    "fusecomp.equations": 6,
    "fusecomp.plot": 6,
    "fusecomp.bench": 6,
    "fusecomp.bench.command": 7,
    "fusecomp.commands": 7,
    "fusecomp.show": 7,
    "fusecomp.cli": 7,
    "fusecomp.__main__": 7,
}
"""What a module may import: its own floor and those below. CONTRIBUTING.md says what each is for."""

FOLDERS = {"fusecomp": "fusecomp", "patterns": "fusecomp.patterns", "codegen": "fusecomp.codegen"}


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, as the package-dir mapping of pyproject.toml has them."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def python_files() -> list[Path]:
    return sorted({*sources().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")})


def floor(module: str) -> int | None:
    """The floor of the longest prefix in the table."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((FLOORS[p] for p in prefixes if p in FLOORS), None)


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Modules of fusecomp that the statements import, `from package import module` included."""
    for node in nodes:
        match node:
            case ast.Import(names):
                yield from (a.name for a in names if a.name.startswith("fusecomp"))
            case ast.ImportFrom(str() as package, names) if package.startswith("fusecomp"):
                whole = [f"{package}.{a.name}" for a in names]
                yield from (name if name in sources() else package for name in whole)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", [m for m in sources() if m != "fusecomp"])
def test_imports_point_down(module: str) -> None:
    own = floor(module)
    assert own is not None, f"{module} has no floor: add it to the table"
    for other in imports(ast.walk(tree(sources()[module]))):
        below = floor(other)
        assert below is not None, f"{module} imports {other}, which has no floor"
        assert below <= own, f"{module} (floor {own}) imports {other} (floor {below})"


def test_no_import_cycles() -> None:
    modules = {m: tree(path) for m, path in sources().items() if m != "fusecomp"}
    edges = [(m, other) for m, module in modules.items() for other in imports(iter(module.body))]
    assert list(nx.simple_cycles(nx.DiGraph(edges))) == []


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_files_are_short(path: Path) -> None:
    if path.parent.name == "corpus":
        return  # a table of programs is as long as people's ideas are many
    limit = 640 if path.parent.name == "golden" else 300  # a backward file holds three kernels, or four
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("module", FLOORS)
def test_the_floor_plan_says_where_a_module_is(module: str) -> None:
    rows = [r for r in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if r.startswith(f"| {FLOORS[module]} ")]
    name = module.rpartition(".")[2]
    assert any(f"{name}.py`" in row or f"{name}/`" in row for row in rows)


def test_functions_are_short() -> None:
    functions = [n for path in sources().values() for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)]
    lengths = [(n.end_lineno or n.lineno) - n.lineno + 1 for n in functions]
    assert statistics.median(lengths) <= 12


MAPPED = (
    "fusecomp/ir", "fusecomp/graph", "fusecomp/paged", "patterns", "fusecomp/planning", "codegen", "fusecomp/running",
)  # fmt: skip


@pytest.mark.parametrize("folder", MAPPED)
def test_a_folders_docstring_says_what_each_of_its_modules_is_for(folder: str) -> None:
    said = ast.get_docstring(tree(ROOT / folder / "__init__.py"), clean=False) or ""
    names = [name for line in re.findall(r"^    ([\w*]+(?:, [\w*]+)*)", said, re.M) for name in line.split(", ")]
    modules = [path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    assert [m for m in modules if not any(fnmatch(m, name) for name in names)] == []
    assert [name for name in names if not any(fnmatch(m, name) for m in modules)] == []


# Every rule is about one person's machine or one team's bookkeeping, which mean nothing to a reader elsewhere.
PRIVATE = {
    "an absolute path": r"(?<![\w.:/{}])/(?:work|home|root|Users|mnt|opt|data)/\w",
    "a path out of the repository": r"\.\./(?!\.)\w*shared\b",
    "an issue number": r"(?i)\b(?:issue|ticket|fixes|closes)\s*#?\d+",
    "a host": r"https?://(?!(?:www\.apache\.org|arxiv\.org)/)",
}


@cache
def tracked() -> tuple[Path, ...]:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(ROOT / line for line in listed.splitlines() if (ROOT / line).is_file())


@pytest.mark.parametrize("what", PRIVATE)
def test_nothing_private_is_named(what: str) -> None:
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(PRIVATE[what], line) and path != Path(__file__):
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_the_ci_script_runs_what_the_readme_says() -> None:
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert 'pip install -e ".[test]" && pytest\n' in readme
    assert 'pip install --quiet -e ".[test]"\n' in script
    assert script.rstrip().endswith("\npytest")
