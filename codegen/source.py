"""The text of one generated file, and what must hold of it before it is used."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from dataclasses import dataclass

from fusecomp.codegen.wrap import wrapped_lines
from fusecomp.errors import KernelError
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan


@dataclass(frozen=True)
class KernelSource:
    """A generated module: `launch(out, tensors, sizes)` runs it, `main()` checks it against plain PyTorch."""

    name: str
    """Of the file and the kernel: attention_causal_gqa3_d64_bfloat16_1a2b3c4d."""
    text: str
    key: str
    """A hash of region, plan and generator."""
    plan: TilePlan
    region: AttentionRegion

    def plan_of(self, kernel: str) -> TilePlan:  # noqa: ARG002 - a file of several kernels may have a plan for each
        """The schedule of one kernel of the file."""
        return self.plan


def tidy(kernel: str) -> str:
    """A kernel without the definitions that nothing reads, and without blank lines that separate nothing."""
    while (shorter := _without_unused(kernel)) != kernel:
        kernel = shorter
    kernel = re.sub(r"\n\n\n+", "\n\n", kernel)
    return wrapped_lines(re.sub(r":\n\n+(?= )", ":\n", kernel).rstrip() + "\n")


def _without_unused(kernel: str) -> str:
    read = {n.id for n in ast.walk(ast.parse(kernel)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

    def needed(line: str) -> bool:
        match = re.match(r" +(\w+) = ", line)
        return not match or match[1] in read

    return "".join(line for line in kernel.splitlines(keepends=True) if needed(line))


def names_read(kernel: str) -> frozenset[str]:
    """Every name that the text reads."""
    tree = ast.parse(kernel)
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def check(name: str, text: str) -> None:
    """Raise KernelError unless the text parses, defines what it reads and uses its parameters."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise KernelError(f"{name} is not Python: {error}; please report this with the region") from error
    problems = [*_undefined(text), *_unused_parameters(tree)]
    if problems:
        raise KernelError(f"{name} is not a sound kernel: {'; '.join(problems)}")


def _undefined(text: str) -> list[str]:
    module = symtable.symtable(text, "kernel", "exec")
    known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()} | set(dir(builtins))
    free = {
        (table.get_name(), s.get_name())
        for table in module.get_children()
        for s in table.get_symbols()
        if s.is_global() and s.get_name() not in known
    }
    return [f"{function} reads {name}, which nothing defines" for function, name in sorted(free)]


def _unused_parameters(tree: ast.Module) -> list[str]:
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
    found = []
    for function in functions:
        used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        unused = [a.arg for a in function.args.args if a.arg not in used]
        found += [f"{function.name} does not use its parameter {name}" for name in unused]
    return found
