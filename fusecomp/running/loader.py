"""A generated kernel's text as a module. Triton reads its functions' source from a file, so there has to be one.

The file's name holds the hash of its text: a file that another kernel, or another hand, wrote is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from fusecomp.codegen.interpreter import interpreting, teach
from fusecomp.codegen.source import KernelSource
from fusecomp.errors import CacheError, KernelError

_loaded: dict[str, ModuleType] = {}


def load(source: KernelSource, directory: Path) -> ModuleType:
    """The module of `source`, from a file under `directory` that only its owner can read or write."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()
    if digest not in _loaded:
        if interpreting():
            teach()
        _loaded[digest] = _import(_written(source, digest, directory), f"fusecomp_kernels.{source.name}_{digest[:8]}")
    return _loaded[digest]


def _written(source: KernelSource, digest: str, directory: Path) -> Path:
    """The file that holds the text, written now unless it is there already, word for word."""
    path = directory / f"{source.name}_{digest[:16]}.py"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _holds(path, digest):
            _write(path, source.text)
    except OSError as error:
        raise CacheError(f"cannot write kernels to {directory}: {error}; choose another cache directory") from error
    if not _holds(path, digest):
        raise CacheError(f"{path} does not hold the kernel that was written to it; choose another cache directory")
    return path


def _holds(path: Path, digest: str) -> bool:
    return path.is_file() and not path.is_symlink() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _write(path: Path, text: str) -> None:
    """All at once: another process sees the whole file or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".kernel-", suffix=".py")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class _FromText(SourceFileLoader):
    """Runs the text, whose hash was checked, never bytecode that lies beside it; and leaves none."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # type: ignore[no-any-return]


def _import(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromText(name, str(path)))
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise KernelError(f"{path} does not load: {type(error).__name__}: {error}") from error
    return module
