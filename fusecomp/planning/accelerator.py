"""What a machine that a kernel is planned for is: what one multiprocessor holds, and the rates of its pipes.

    fma_rate  = sms * fma_per_clock * clock      float32 multiply-adds a second
    sfu_rate  = sms * sfu_per_clock * clock      exp2, log2, reciprocal ... a second
    smem_rate = sms * 128 B * clock              bytes a second between shared memory and the registers
    l2_rate   = sms * 64 B * clock               bytes a second between L2 and the multiprocessors, at most
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator. Bytes, hertz, operations and seconds; a multiply-add is two FLOP."""

    name: str
    arch: str
    """"sm_90", "gfx942"."""
    sms: int
    """Multiprocessors (compute units)."""
    smem_bytes: int
    """Shared memory that one program can use."""
    smem_per_sm: int
    """Shared memory that the programs of one multiprocessor share; each takes `SMEM_RESERVED` more than it uses."""
    registers_per_sm: int
    """32-bit registers."""
    registers_per_thread: int
    """What the compiler may give one thread before it spills."""
    threads_per_sm: int
    warp: int
    """Threads of a warp."""
    flops_half: float
    """FLOP/s of bfloat16 and float16 products with float32 sums, dense."""
    flops_tf32: float
    flops_fp32: float
    """FLOP/s of IEEE float32 products."""
    clock: float
    fma_per_clock: int
    """float32 multiply-adds of one multiprocessor in one clock."""
    sfu_per_clock: int
    """Special functions of one multiprocessor in one clock."""
    hbm_rate: float
    """Bytes a second of device memory."""
    l2_bytes: int
    memory_bytes: int
    launch: float = 3e-6
    """Seconds from one kernel to the next."""

    @property
    def fma_rate(self) -> float:
        return self.sms * self.fma_per_clock * self.clock

    @property
    def sfu_rate(self) -> float:
        return self.sms * self.sfu_per_clock * self.clock

    @property
    def smem_rate(self) -> float:
        return self.sms * 128.0 * self.clock

    @property
    def l2_rate(self) -> float:
        return self.sms * 64.0 * self.clock

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 where there is none (AMD)."""
        return int(self.arch[3:]) if self.arch.startswith("sm_") else 0

    @property
    def wgmma(self) -> bool:
        """Whether a group of four warps multiplies straight from shared memory (Hopper)."""
        return self.capability == 90

    @property
    def descriptors(self) -> bool:
        """Whether a unit of its own copies whole tiles to shared memory."""
        return self.capability in (90, 100)

    def matmul_rate(self, dtype: str, precision: str = "ieee") -> float:
        """FLOP/s of products of `dtype` operands."""
        if dtype in ("float16", "bfloat16"):
            return self.flops_half
        return self.flops_tf32 if precision == "tf32" and dtype == "float32" else self.flops_fp32
