"""The table of devices. Figures are the vendors' own unless a row says measured; `tests/test_device.py` works the rates
out again from units and clocks.

Matrix rates are dense, with float32 sums: where a data sheet quotes sparsity, half of its figure. The clock is the one
that the half-precision rate assumes; the float32 rates of H100 and B200 are quoted at a boost clock 7 or 8 % higher.
Multiprocessor limits: CUDA Programming Guide, "Technical Specifications per Compute Capability"; special functions and
FMA a clock: its table of arithmetic throughput (16, and 64 or 128 results).
"""

from __future__ import annotations

from fusecomp.planning.accelerator import Device

KB, MB, GB = 1024, 1024**2, 1024**3
TERA = 1e12

AMPERE = {"smem_bytes": 163 * KB, "smem_per_sm": 164 * KB, "threads_per_sm": 2048, "fma_per_clock": 64}
CONSUMER = {"smem_bytes": 99 * KB, "smem_per_sm": 100 * KB, "threads_per_sm": 1536, "fma_per_clock": 128}
HOPPER = {"smem_bytes": 227 * KB, "smem_per_sm": 228 * KB, "threads_per_sm": 2048, "fma_per_clock": 128}
"""Compute capability 8.0; 8.6 and 8.9; 9.0 and 10.0. Of the shared memory, 1 KB a program is the driver's."""


def _nvidia(
    name: str,
    arch: str,
    sms: int,
    tera: tuple[float, float, float],
    ghz: float,
    tb: float,
    l2: float,
    gb: int,
    per_sm: dict[str, int],
) -> Device:
    """`tera`: TFLOP/s of (half, tf32, fp32) products; `tb`: TB/s of device memory; `l2` in MB."""
    half, tf32, fp32 = (t * TERA for t in tera)
    return Device(
        name=name, arch=arch, sms=sms, registers_per_sm=65536, registers_per_thread=255, warp=32,
        flops_half=half, flops_tf32=tf32, flops_fp32=fp32, clock=ghz * 1e9, sfu_per_clock=16,
        hbm_rate=tb * TERA, l2_bytes=int(l2 * MB), memory_bytes=gb * GB, **per_sm,
    )  # fmt: skip


# MI300X data sheet: 304 units, 2.1 GHz, rates, 5.3 TB/s. CDNA 3 white paper: 64 KB of LDS, 512 KB of registers a unit,
# 4 MB of L2 on each of 8 dies; the 256 MB behind them are not counted.
MI300X = Device(
    name="mi300x", arch="gfx942", sms=304, smem_bytes=64 * KB, smem_per_sm=64 * KB, registers_per_sm=131072,
    registers_per_thread=512, threads_per_sm=2048, warp=64, flops_half=1307.4 * TERA, flops_tf32=653.7 * TERA,
    flops_fp32=163.4 * TERA, clock=2.1e9, fma_per_clock=128, sfu_per_clock=16, hbm_rate=5.3 * TERA,
    l2_bytes=32 * MB, memory_bytes=192 * GB, launch=5e-6,
)  # fmt: skip

DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        #       name         arch     SMs   half    tf32   fp32    GHz   TB/s  L2 MB GB
        # A100 data sheet (SXM), GA100 white paper
        _nvidia("a100-40", "sm_80", 108, (312, 156, 19.5), 1.41, 1.555, 40, 40, AMPERE),
        _nvidia("a100-80", "sm_80", 108, (312, 156, 19.5), 1.41, 2.039, 40, 80, AMPERE),
        # On AWS alone (G5: 24 GB, 600 GB/s): GA102 with 80 multiprocessors, FP32 sums at half rate as on GeForce
        _nvidia("a10g", "sm_86", 80, (70, 35, 35), 1.71, 0.600, 6, 24, CONSUMER),
        # GA102 white paper, appendix A: 71 TFLOP/s with FP32 sums
        _nvidia("rtx-3090", "sm_86", 82, (71, 35.6, 35.6), 1.695, 0.936, 6, 24, CONSUMER),
        # L4 and L40S data sheets; AD102 white paper for L2 and clocks
        _nvidia("l4", "sm_89", 58, (121, 60, 30.3), 2.04, 0.300, 48, 24, CONSUMER),
        _nvidia("l40s", "sm_89", 142, (362, 183, 91.6), 2.52, 0.864, 96, 48, CONSUMER),
        # AD102 white paper, appendix A: 165.2 TFLOP/s with FP32 sums
        _nvidia("rtx-4090", "sm_89", 128, (165.2, 82.6, 82.6), 2.52, 1.008, 72, 24, CONSUMER),
        # H100 data sheet and GH100 white paper: tensor cores at 1620 MHz (PCIe), 1830 MHz (SXM)
        _nvidia("h100-pcie", "sm_90", 114, (756, 378, 51), 1.620, 2.0, 50, 80, HOPPER),
        _nvidia("h100-sxm", "sm_90", 132, (989, 495, 67), 1.83, 3.35, 50, 80, HOPPER),
        # Measured: 786 TFLOP/s, reads at 4.46 TB/s (bench/records/ceilings_h200.json); data sheet: 989, 4.8
        _nvidia("h200", "sm_90", 132, (786, 393, 53), 1.755, 4.4, 50, 141, HOPPER),
        # HGX B200 data sheet, an eighth of the board; multiprocessors and L2 as the driver reports them
        _nvidia("b200", "sm_100", 148, (2250, 1125, 75), 1.856, 8.0, 126, 180, HOPPER),
        MI300X,
    )
}

ALIASES: dict[str, str] = {
    "a100": "a100-80",
    "a100-sxm4-40gb": "a100-40",
    "a100-pcie-40gb": "a100-40",
    "a100-sxm4-80gb": "a100-80",
    "a100-sxm": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "a10": "a10g",
    "3090": "rtx-3090",
    "rtx3090": "rtx-3090",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "h100": "h100-sxm",
    "h100-80gb-hbm3": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h200-sxm": "h200",
    "mi300": "mi300x",
    "gfx942": "mi300x",
}
"""Other names, as people and drivers write them."""
