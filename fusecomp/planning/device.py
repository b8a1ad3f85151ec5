"""The machine a kernel is planned for: a row of the table of `devices`, what the driver says, or a TOML file."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fusecomp.errors import DeviceError
from fusecomp.planning.accelerator import Device as Device
from fusecomp.planning.devices import ALIASES, DEVICES

LARGEST = 1e18
"""No figure of a device is larger, in any of its units."""


def find(name: str) -> Device:
    """The device called `name`, in any case and with or without its maker; or a TOML file."""
    if name.lower().endswith(".toml"):
        return from_toml(name)
    key = _plain(name)
    key = ALIASES.get(key, key)
    if key not in DEVICES:
        near = difflib.get_close_matches(key, [*DEVICES, *ALIASES], 3, 0.4)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise DeviceError(f"unknown device {name!r}: {hint}known are {', '.join(DEVICES)}, or a .toml file")
    return DEVICES[key]


def _plain(name: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    words = re.split(r"[\s_\-]+", name.lower().strip())
    return "-".join(w for w in words if w not in ("nvidia", "amd", "instinct", "geforce", "tesla"))


@lru_cache(maxsize=8)
def _probe(index: int) -> Device:
    """What the driver says; rates it does not say come from the table."""
    said = torch.cuda.get_device_properties(index)
    hip = getattr(torch.version, "hip", None)
    arch = said.gcnArchName.split(":")[0] if hip else f"sm_{said.major}{said.minor}"
    base = like(said.name, arch)
    known = {
        "sms": "multi_processor_count",
        "smem_bytes": "shared_memory_per_block_optin",
        "smem_per_sm": "shared_memory_per_multiprocessor",
        "registers_per_sm": "regs_per_multiprocessor",
        "threads_per_sm": "max_threads_per_multi_processor",
        "warp": "warp_size",
        "l2_bytes": "L2_cache_size",
        "memory_bytes": "total_memory",
    }
    found = {ours: int(value) for ours, theirs in known.items() if (value := getattr(said, theirs, 0))}
    if hip:  # the driver's figures for shared memory are those of the whole unit
        found = {k: v for k, v in found.items() if not k.startswith("smem")}
    return scaled(base, found.pop("sms", base.sms), name=said.name, arch=arch, **found)


def scaled(base: Device, sms: int, **changes: Any) -> Device:
    """`base` with another number of multiprocessors, and the matrix rates in proportion."""
    share = sms / base.sms
    rates = {f: getattr(base, f) * share for f in ("flops_half", "flops_tf32", "flops_fp32")}
    return replace(base, **{**rates, **changes, "sms": sms})


def like(name: str, arch: str) -> Device:
    """The table's device whose name is inside `name`, else the one of the nearest architecture."""
    key = _plain(name)
    inside = [n for n in (*DEVICES, *ALIASES) if key == n or key.startswith(f"{n}-")]
    if inside:
        best = max(inside, key=len)
        return DEVICES[ALIASES.get(best, best)]
    digits = int(re.sub(r"\D", "", arch) or 0)
    family = [d for d in DEVICES.values() if d.arch[:2] == arch[:2]] or list(DEVICES.values())
    return min(family, key=lambda d: abs(int(re.sub(r"\D", "", d.arch)) - digits))


def live() -> Device | None:
    """The GPU that PyTorch would use now, or None."""
    return _probe(torch.cuda.current_device()) if torch.cuda.is_available() else None


def current() -> Device:
    """The live GPU, or the H200 of the table where there is none (planning needs no GPU)."""
    return live() or find("h200")


def named(name: str) -> Device | None:
    """The device that a plan was made for: the live GPU, or one of the table; None for any other."""
    gpu = live()
    return gpu if gpu is not None and gpu.name == name else DEVICES.get(name)


def from_toml(path: str | Path) -> Device:
    """A device from a file: `like = "h100-sxm"` and what differs, or every key of `Device`."""
    try:
        held = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeviceError(f"cannot read device file {path}: {why}") from error
    base = _base(held.pop("like"), path) if "like" in held else None
    keys = {f.name: str(f.type) for f in fields(Device)}
    for key, value in held.items():
        held[key] = _checked(key, value, keys, path)
    missing = [k for k in keys if k not in held and k != "launch"]
    if base is None and missing:
        raise DeviceError(
            f'{path}: key {missing[0]!r} is missing (missing in all: {", ".join(missing)}); or say like = "h200"'
        )
    return _possible(replace(base, **held) if base else Device(**held), path)


def _base(like: object, path: str | Path) -> Device:
    """The device of the table that a file builds on."""
    if not isinstance(like, str) or like.lower().endswith(".toml"):
        raise DeviceError(f"{path}: key 'like' must name a device of the table, such as \"h200\", not {like!r}")
    try:
        return find(like)
    except DeviceError as error:
        raise DeviceError(f"{path}: key 'like': {error}") from error


def _possible(device: Device, path: str | Path) -> Device:
    """The device, unless its figures contradict each other."""
    if not re.fullmatch(r"sm_\d+|gfx\w+", device.arch):
        raise DeviceError(f"{path}: key 'arch' must be as \"sm_90\" or \"gfx942\", not {device.arch!r}")
    if device.smem_bytes > device.smem_per_sm:
        raise DeviceError(
            f"{path}: key 'smem_bytes', {device.smem_bytes}, exceeds 'smem_per_sm', {device.smem_per_sm}: "
            "one program cannot use more than its multiprocessor has"
        )
    return device


def _checked(key: str, value: object, keys: dict[str, str], path: str | Path) -> object:
    """`value` as the field's type, or an error that names the key."""
    if key not in keys:
        near = difflib.get_close_matches(key, [*keys, "like"], 1)
        raise DeviceError(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if keys[key] == "str":
        if isinstance(value, str) and value:
            return value
        raise DeviceError(f"{path}: key {key!r} must be a text, not {value!r}")
    whole = keys[key] == "int"
    kind = f"a positive {'whole number' if whole else 'number'}"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
        raise DeviceError(f"{path}: key {key!r} must be {kind}, not {value!r}")
    if not (1 if key != "launch" else 0) <= value <= LARGEST:
        raise DeviceError(f"{path}: key {key!r} must be {kind}, in bytes, hertz, FLOP/s or B/s, not {value:g}")
    return value if whole else float(value)
