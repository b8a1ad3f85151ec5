"""The device table, look-up by name, and devices from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusecomp.errors import DeviceError
from fusecomp.planning import device
from fusecomp.planning.devices import ALIASES, DEVICES

WANTED = (
    "a100-40",
    "a100-80",
    "a10g",
    "l4",
    "l40s",
    "rtx-3090",
    "rtx-4090",
    "h100-sxm",
    "h100-pcie",
    "h200",
    "b200",
    "mi300x",
)


def test_the_table_holds_every_promised_device() -> None:
    assert set(WANTED) <= set(DEVICES)
    assert set(ALIASES.values()) <= set(DEVICES)


@pytest.mark.parametrize(
    ("name", "smem"), [("h200", 232448), ("a100", 166912), ("4090", 101376), ("a10g", 101376), ("mi300x", 65536)]
)
def test_usable_shared_memory(name: str, smem: int) -> None:
    assert device.find(name).smem_bytes == smem


def test_a100_of_the_chapter() -> None:
    """312 TFLOP/s, 1.5 to 2 TB/s, 108 multiprocessors, about 19 TB/s and 20 MB on chip."""
    a100 = device.find("A100")
    assert (a100.flops_half, a100.sms) == (312e12, 108)
    assert 1.5e12 <= device.find("a100-40").hbm_rate <= a100.hbm_rate <= 2.1e12
    assert a100.smem_rate == pytest.approx(19e12, rel=0.05)
    assert a100.sms * a100.smem_per_sm == pytest.approx(18e6, rel=0.1)


PER_CLOCK = {"sm_80": 2048, "sm_86": 512, "sm_89": 1024, "sm_90": 4096, "sm_100": 8192, "gfx942": 2048}
"""Dense half-precision FLOP of a multiprocessor in one clock, with float32 sums. GeForce has half of sm_89's."""
LIMITS = {
    "sm_80": (163, 164, 2048, 65536),
    "sm_86": (99, 100, 1536, 65536),
    "sm_89": (99, 100, 1536, 65536),
    "sm_90": (227, 228, 2048, 65536),
    "sm_100": (227, 228, 2048, 65536),
    "gfx942": (64, 64, 2048, 131072),
}
"""KB of shared memory of a program and of a multiprocessor, threads and registers of a multiprocessor."""


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"h200"}))
def test_matrix_rates_follow_from_units_and_clock(name: str) -> None:
    d = DEVICES[name]
    rate = d.sms * PER_CLOCK[d.arch] * d.clock / (2 if name == "rtx-4090" else 1)
    assert d.matmul_rate("bfloat16") == d.matmul_rate("float16") == pytest.approx(rate, rel=0.03)
    assert d.matmul_rate("float32", "tf32") == pytest.approx(rate / 2, rel=0.03)


def test_the_h200_is_as_measured_and_below_its_data_sheet() -> None:
    h200, h100 = DEVICES["h200"], DEVICES["h100-sxm"]
    assert 0.75 < h200.flops_half / h100.flops_half < 1
    assert 0.85 < h200.hbm_rate / 4.8e12 < 1
    assert (h200.sms, h200.arch, h200.l2_bytes) == (h100.sms, h100.arch, h100.l2_bytes)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_limits_are_those_of_the_architecture(name: str) -> None:
    d = DEVICES[name]
    smem, per_sm, threads, registers = LIMITS[d.arch]
    assert (d.smem_bytes, d.smem_per_sm) == (smem * 1024, per_sm * 1024)
    assert (d.threads_per_sm, d.registers_per_sm) == (threads, registers)
    assert d.warp * d.registers_per_thread < registers
    assert d.l2_bytes < d.memory_bytes
    assert d.hbm_rate < d.l2_rate < d.smem_rate


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_peak_fp32_follows_from_units_and_clock(name: str) -> None:
    """2 * FMA units * clock is the data sheet's float32 rate, to the rounding of clocks."""
    d = DEVICES[name]
    assert d.matmul_rate("float32") == pytest.approx(2 * d.fma_rate, rel=0.12)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("L4", "l4"),
    ],
)
def test_names_as_people_and_drivers_write_them(name: str, key: str) -> None:
    assert device.find(name) is DEVICES[key]


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(DeviceError, match=r"unknown device 'h20': did you mean h200.*known are a100-40"):
        device.find("h20")


def test_unlisted_hardware_takes_rates_from_its_relatives() -> None:
    assert device.like("NVIDIA A100-SXM4-80GB", "sm_80").name == "a100-80"
    assert device.like("NVIDIA RTX 6000 Ada Generation", "sm_89").arch == "sm_89"
    assert device.like("NVIDIA GH200 480GB", "sm_90").arch == "sm_90"
    assert device.like("AMD Instinct MI250", "gfx90a").arch == "gfx942"
    half = device.scaled(DEVICES["h100-sxm"], 66, name="half")
    assert (half.sms, half.flops_half) == (66, DEVICES["h100-sxm"].flops_half / 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_planning_needs_no_gpu() -> None:
    assert device.live() is None
    assert device.current().name == "h200"


@pytest.mark.gpu
def test_the_live_gpu_is_probed() -> None:
    live = device.live()
    assert live is not None
    assert live.sms == torch.cuda.get_device_properties(0).multi_processor_count


def test_a_file_adds_a_device(tmp_path: Path) -> None:
    path = tmp_path / "h20.toml"
    path.write_text('like = "h200"\nname = "h20"\nsms = 78\nflops_half = 148e12\n')
    h20 = device.find(str(path))
    assert (h20.name, h20.sms, h20.flops_half, h20.smem_bytes) == ("h20", 78, 148e12, 232448)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "h200"\nsmz = 3', "unknown key 'smz'; did you mean 'sms'"),
        ('like = "h200"\nsms = -3', "key 'sms' must be a positive whole number, not -3"),
        ('like = "h200"\nsms = true', "key 'sms' must be a positive whole number"),
        ('like = "h200"\nclock = "fast"', "key 'clock' must be a positive number"),
        ('like = "h200"\nname = 3', "key 'name' must be a text"),
        ('name = "x"\nsms = 3', "key 'arch' is missing"),
        ('like = "nothing"', "key 'like': unknown device 'nothing'"),
        ('like = "h20"', "did you mean h200"),
        ('like = "d.toml"', "key 'like' must name a device of the table"),
        ("like = 3", "key 'like' must name a device of the table"),
        ('lik = "h200"', "unknown key 'lik'; did you mean 'like'"),
        ('like = "h200"\narch = "hopper"', "key 'arch' must be as"),
        ('like = "h200"\nsmem_bytes = 300_000', "key 'smem_bytes', 300000, exceeds 'smem_per_sm', 233472"),
        ('like = "h200"\nclock = inf', "key 'clock' must be a positive number, in bytes, hertz"),
        ('like = "h200"\nclock = 1e-9', "key 'clock' must be a positive number, in bytes, hertz"),
        ('like = "h200"\nclock = nan', "key 'clock' must be a positive number"),
        ('like = "h200"\n[sms]\nmany = 3', "key 'sms' must be a positive whole number"),
        ("sms = ", "cannot read device file"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=message.replace("(", r"\(")):
        device.from_toml(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="cannot read device file"):
        device.find("nowhere.toml")
