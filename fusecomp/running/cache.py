"""What is kept on disk: generated kernels (by `loader`) and verdicts, in a directory that only its owner can use.

Kernels are code. The directory must belong to the user and be closed to others; a file is written whole and renamed
into place; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from fusecomp.errors import CacheError
from fusecomp.settings import CACHE_DIR, cache_dir

log = logging.getLogger(__name__)


def directory(name: str) -> Path:
    """A private folder of the cache, made if need be; a private temporary one where the cache cannot be used."""
    try:
        return secured(cache_dir() / name)
    except (OSError, CacheError) as error:
        return instead(name, error)


_instead: dict[str, Path] = {}
"""What FUSECOMP_CACHE_DIR says -> what this process uses."""


def instead(name: str, error: Exception) -> Path:
    """A private temporary folder for this process, and one warning."""
    chosen = os.environ.get(CACHE_DIR, "")
    if chosen not in _instead:
        _instead[chosen] = Path(tempfile.mkdtemp(prefix="fusecomp-"))
        log.warning("the cache cannot be used (%s); this process uses %s", error, _instead[chosen])
    return secured(_instead[chosen] / name)


def secured(path: Path) -> Path:
    """`path` as a folder of mode 0700 that the current user owns. Raises CacheError or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise CacheError(f"{path} belongs to another user; set FUSECOMP_CACHE_DIR to a folder of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def digest(*parts: object) -> str:
    """A hash of the text of some values."""
    return hashlib.sha256("\x00".join(map(str, parts)).encode()).hexdigest()[:32]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, mode 0600."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from the cache, or None where there is none or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Keep a JSON object; a cache that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        write(path, json.dumps(value, indent=1))
