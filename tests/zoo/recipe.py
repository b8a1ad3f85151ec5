"""What a model needs beyond a shrunk configuration of its own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How one model is built."""

    type: str = ""
    """The model type, where it is not the name."""
    over: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration; a dict for a sub-configuration."""
    cls: str = ""
    """The class, where it is not the bare model's."""
    inputs: Callable[[Any], dict[str, Any]] | None = None
    """The inputs, where the signature does not tell."""
    more: Callable[[Any], dict[str, Any]] | None = None
    """Inputs besides those."""
