"""A tile, the plan of one kernel, and what it is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N and its schedule."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    pack: int = 1
    loads: str = "pointer"
    """How K and V are fetched: "pointer" or "descriptor"."""
    resident: int = 0
    """Of decoding: programs of a multiprocessor, as many as the keys are split for; 0 where they are not split."""


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one launch. Bytes, operations and seconds, of a whole launch unless a field says otherwise."""

    flops: float
    """Tensor-core operations, a multiply-add counted as two."""
    hbm_bytes: float
    """Bytes moved to and from device memory."""
    unfused_hbm_bytes: float
    """The same for eager PyTorch, which writes and reads the M x N scores and probabilities."""
    smem_bytes: int
    """Shared memory of one program."""
    registers: int
    """32-bit registers of one thread."""
    programs: int
    """Programs in the grid."""
    waves: float
    """Programs over what the device holds at once."""
    seconds: float
    """Predicted time."""
    bound: str
    """What limits it: "tensor cores", "special functions", "memory", "shared memory", "latency"."""
    spilled: int = 0
    """More registers that a thread would need, which are kept in memory instead."""

    @property
    def a_thread(self) -> str:
        """ "168 registers a thread", "255 registers a thread and 4 spilled"."""
        return f"{self.registers} registers a thread" + (f" and {self.spilled} spilled" if self.spilled else "")


@dataclass(frozen=True)
class Rejected:
    """A tile that was considered and not taken."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    reason: str
    """"needs 262144 B of shared memory, 232448 usable", "predicted 12 % slower" ..."""
    loads: str = "pointer"
    resident: int = 0


@dataclass(frozen=True)
class TilePlan:
    """Br x Bc = block_m x block_n and the schedule of one kernel."""

    skeleton: str
    """"prefill": a program per query tile walks its keys. "decode": the keys are split over programs, then combined."""
    block_m: int
    """Rows of a query tile (with `pack` > 1: query rows times packed heads)."""
    block_n: int
    """Keys of a tile."""
    d_chunks: tuple[tuple[int, ...], ...]
    """For each product, D as a sum of at most two powers of two >= 16, largest first: 192 = (128, 64), 80 = (64, 16).
    Their sum may exceed D; the rest is masked."""
    dv_chunks: tuple[int, ...]
    """The same for Dv."""
    warps: int
    stages: int
    pack: int = 1
    """Query heads that share a KV head and lie in one tile's rows."""
    cost: Cost | None = None
    rejected: tuple[Rejected, ...] = ()
    device: str = ""
    """Name of the device planned for."""
    resident: int = 4
    """Programs that a multiprocessor holds at once; "decode" makes as many shares of the keys as the device holds.
    Of "prefill" 0: few queries, whose keys are not split, for there are programs enough. With `consumers`: 1, or 2 that
    share it."""
    share: int = 0
    """Of "decode": tiles of keys of one share. 0: all shares of a launch are about as long, so that they end together;
    else the shares of a request depend on its own length alone."""
    splits: int = 16
    """Of "decode": shares of a request that are combined at a time, as many as it is predicted to have."""
    looks: int = 32
    """Of "decode": requests that are looked through at a time."""
    registers: int = 0
    """32-bit registers that a thread may take, so that `resident` programs fit on a multiprocessor; 0: as many as it
    wants."""
    overlap: bool = False
    """Whether the kernel that combines the shares is made ready while they are computed, as sm_90 and later can."""
    loads: str = "pointer"
    """How tiles of K and V are fetched. "pointer": element by element, from anywhere. "descriptor": as blocks of rows,
    by the unit that devices from sm_90 on have for it (codegen/descriptors.py)."""
    consumers: int = 0
    """Groups of four warps that multiply, beside one warp that copies (codegen/hopper.py); 0: every warp does all."""
    visits: str = "bounds"
    """Which keys a query tile visits. "bounds": those between the edges that the mask's terms put on kv_idx. "table":
    the tiles in which it sees a key, listed once per mask from its data (codegen/table.py). "ranges": from the first of
    those to the last (codegen/table_ranges.py)."""

    @property
    def decodes(self) -> bool:
        """Whether it is for few queries and many keys, split or not."""
        return self.skeleton == "decode" or not self.resident
