"""Everything fusecomp raises on purpose. Each message says what, where, and what to do next."""

from __future__ import annotations


class FusecompError(Exception):
    """Base of all fusecomp errors."""


class OptionError(FusecompError, ValueError):
    """An unknown option, or a value that an option does not take."""


class TargetError(FusecompError):
    """A FILE:FUNCTION that cannot be found, loaded or run."""


class DeviceError(FusecompError):
    """A device that is unknown, or whose description is wrong or partial."""


class CaptureError(FusecompError):
    """A graph that cannot be traced again."""


class PlanError(FusecompError):
    """No tile of the region fits the device's budget."""


class KernelError(FusecompError):
    """A kernel that cannot be written, compiled or launched."""


class VerificationError(FusecompError):
    """A kernel that disagrees with eager (raised only under strict=True)."""


class CacheError(FusecompError):
    """A cache directory that cannot be trusted or used."""


class OutOfBlocks(FusecompError):
    """A paged cache has too few free blocks; nothing was changed."""


class SequenceError(FusecompError, ValueError):
    """A sequence of a paged cache that is unknown, or not in a state for what is asked; nothing was changed."""
