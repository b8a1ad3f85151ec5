"""What a user can choose: options of `torch.compile(..., backend="fusecomp", options={...})`, and the environment.

    explicit option  >  environment variable  >  default

Each field of `Options` carries how it is read, so that an option is described in exactly one place.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from fusecomp.errors import CacheError, OptionError

LOWERINGS = ("auto", "triton", "cpu", "off")
EMPTY_ROWS = ("nan", "zero")
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

CACHE_DIR = "FUSECOMP_CACHE_DIR"
"""Where kernels and verdicts are kept; `cache_dir()`."""


def _flag(value: object) -> bool:
    """A truth value, or its spelling on a command line or in the environment."""
    if value in (True, False) and isinstance(value, bool | int):
        return bool(value)
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    raise OptionError("takes true or false")


def _count(value: object) -> int:
    """A natural number, or its decimal text."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise OptionError("takes a number of tiles to time, 0 or more")


def _one_of(*allowed: str) -> Callable[[object], str]:
    """A reader that takes one of a few words."""

    def read(value: object) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        raise OptionError(f"takes one of {', '.join(allowed)}{_suggest(value, allowed)}")

    return read


def _backend(value: object) -> str:
    """The name of another torch.compile backend."""
    import torch._dynamo as dynamo

    if value == "inductor":
        return "inductor"
    if value == "fusecomp":
        raise OptionError("takes another backend than fusecomp itself")
    known = dynamo.list_backends(exclude_tags=())
    if isinstance(value, str) and value in known:
        return value
    raise OptionError(f"takes a torch.compile backend, such as inductor, aot_eager or eager{_suggest(value, known)}")


def _mode(value: object) -> str | None:
    """A torch.compile mode."""
    import torch._inductor as inductor

    return None if value is None else _one_of(*inductor.list_mode_options())(value)


def _option(default: Any, read: Callable[[object], Any], meaning: str, env: str = "") -> Any:
    return field(default=default, metadata={"read": read, "meaning": meaning, "env": env})


@dataclass(frozen=True)
class Options:
    """The choices of one compilation."""

    verify: bool = _option(
        True, _flag, "use a kernel only after it agreed with eager; a verdict is kept on disk", "FUSECOMP_VERIFY"
    )
    strict: bool = _option(
        False, _flag, "raise on a kernel that disagrees or an error inside fusecomp, instead of running eager",
        "FUSECOMP_STRICT",
    )  # fmt: skip
    lowering: str = _option(
        "auto",
        _one_of(*LOWERINGS),
        'what runs attention: "triton" kernels, the "cpu" library path, "auto" by device, "off" to only report',
        "FUSECOMP_LOWERING",
    )
    tune: int = _option(0, _count, "time this many of the best planned tiles on the device and keep the fastest")
    inner: str = _option("inductor", _backend, "the torch.compile backend that takes the rest of the graph")
    mode: str | None = _option(None, _mode, "torch.compile mode for the rest of the graph")
    empty_rows: str = _option(
        "nan", _one_of(*EMPTY_ROWS), 'a query that sees no key gives "nan", as softmax does, or "zero"'
    )

    batch_invariant: bool = _option(
        False, _flag, "a request's result depends on no other request, bit by bit: generated kernels cut its keys alike"
    )

    deterministic: bool = _option(
        True, _flag, "generated kernels give the same gradients every time, bit by bit; faster ones add in any order"
    )

    @classmethod
    def parse(cls, options: Mapping[str, object] | None = None, mode: str | None = None) -> Options:
        """Options from what torch.compile passes on. Raises OptionError, saying what is accepted."""
        given = {str(k): v for k, v in (options or {}).items()}
        if mode is not None:
            given.setdefault("mode", mode)
        known = {f.name: f for f in fields(cls)}
        for name in given:
            if name not in known:
                raise OptionError(_unknown(name, known))
        asked = {f.name: _read(f, f"option {f.name!r}", given[f.name]) for f in known.values() if f.name in given}
        return cls(**{**from_environment(), **asked})


def _read(f: Field[Any], label: str, value: object) -> Any:
    try:
        return f.metadata["read"](value)
    except OptionError as error:
        raise OptionError(f"fusecomp: {label} {error}; got {value!r}") from None


def _unknown(name: str, known: Iterable[str]) -> str:
    names = list(known)
    return f"fusecomp: unknown option {name!r}{_suggest(name, names)}. Options are: {', '.join(names)}"


def _suggest(word: object, names: Iterable[str]) -> str:
    """ " (did you mean 'verify'?)" where a name is close."""
    close = difflib.get_close_matches(str(word), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def from_environment() -> dict[str, Any]:
    """The options that environment variables set."""
    named = {f: f.metadata["env"] for f in fields(Options) if f.metadata["env"]}
    return {f.name: _read(f, f"variable {v}", os.environ[v]) for f, v in named.items() if os.environ.get(v)}


def environment() -> dict[str, str | None]:
    """Every environment variable that fusecomp reads, and its value."""
    names = [CACHE_DIR, *(f.metadata["env"] for f in fields(Options) if f.metadata["env"])]
    return {name: os.environ.get(name) for name in names}


def cache_dir() -> Path:
    """$FUSECOMP_CACHE_DIR, else ~/.cache/fusecomp. Not created here. Raises CacheError where no home is known."""
    chosen = os.environ.get(CACHE_DIR) or str(Path("~", ".cache", "fusecomp"))
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError as error:
        raise CacheError(f"{chosen}: {error} Set {CACHE_DIR} to a folder of your own") from error
