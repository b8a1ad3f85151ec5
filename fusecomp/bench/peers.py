"""Who is timed: one row each. A peer binds to a case once, then to each set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from fusecomp.backend import fusecomp
from fusecomp.bench.cases import MODES, Case, words
from fusecomp.bench.inputs import Attend, Inputs, dense
from fusecomp.bench.record import OURS
from fusecomp.errors import OptionError

Bind = Callable[[Inputs], Attend | None]
"""None where the peer cannot say the variant."""
INFERENCE = tuple(mode for mode in MODES if mode != "backward")


@dataclass(frozen=True)
class Peer:
    """One way to compute a case: compiled once, bound to each set of inputs."""

    name: str
    bind: Callable[[Case], Bind]
    modes: Sequence[str] = tuple(MODES)
    devices: Sequence[str] = ("cuda",)
    slow: bool = False
    """Compiles for long, so that a quick run leaves it out unless it is named."""
    lacks: Callable[[], str] = str
    """What is not installed here; empty if nothing."""
    tuned: str = ""
    """Who searches among settings of which this one takes the first: where that one is asked, this one is not."""

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        return f"{self.name}: {lack}" if (lack := self.lacks()) else ""

    def times(self, case: Case) -> bool:
        """Whether it is asked. A backward pass is tuned for minutes: not where libraries are ahead of it anyway."""
        return case.mode in self.modes and not (self.slow and case.learns and case.variant.plain)

    @property
    def compiles(self) -> bool:
        """Whether it makes kernels for a case."""
        return getattr(self.bind, "func", self.bind) in (compiled, flex)


def eager(case: Case) -> Bind:
    return lambda x: lambda: case.variant.fn(*x.all)


def compiled(case: Case, **how: Any) -> Bind:
    """torch.compile of the same function."""
    fast = torch.compile(case.variant.fn, dynamic=False, **how)
    return lambda x: lambda: fast(*x.all)


# ----------------------------------------------------------------------------------------------------------------
# FlexAttention


def flex(case: Case, each_time: bool = False, mode: str | None = None) -> Bind:
    """Its block mask made before, or `each_time`, compiled with the rest; keys of pages gathered before."""
    says, after, s = case.variant.flex, case.variant.after, case.shape
    attend = torch.compile(_flex, dynamic=False, mode=mode)

    def bind(x: Inputs) -> Attend | None:
        score, mask = says(s, *x.extra) if says else (None, None)
        if says is None or (each_time and (mask is None or case.reads)):
            return None
        blocks, sizes = None, (s.b if case.reads else None, None, s.queries, s.n)
        if mask is not None and not each_time:
            blocks = create_block_mask(mask, *sizes, x.q.device)
        given = (*dense(case, x), score, blocks, mask if each_time else None, after, x.extra)
        return lambda: attend(*given)

    return bind


def _flex(
    q: Tensor, k: Tensor, v: Tensor, score: Any, blocks: Any, mask: Any, after: Any, extra: tuple[Tensor, ...]
) -> Any:
    if mask is not None:
        blocks = create_block_mask(mask, None, None, q.shape[-2], k.shape[-2], q.device)
    given = {"score_mod": score, "block_mask": blocks, "enable_gqa": q.shape[1] != k.shape[1]}
    if after is None:
        return flex_attention(q, k, v, **given)
    out, aux = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
    return after(out, aux.lse, *extra)


# ----------------------------------------------------------------------------------------------------------------
# Libraries


def sdpa(backend: SDPBackend, case: Case) -> Bind:
    """One kernel of scaled_dot_product_attention; keys of pages gathered before."""

    def bind(x: Inputs) -> Attend | None:
        given = case.variant.sdpa(case.shape, *x.extra) if case.variant.sdpa else None
        if given is None:
            return None
        q, k, v = dense(case, x)
        attend = partial(scaled_dot_product_attention, q, k, v, enable_gqa=q.shape[1] != k.shape[1], **given)

        def run() -> Tensor:
            with sdpa_kernel(backend):
                return attend()

        return run

    return bind


def no_fa3() -> str:
    return "" if find_spec("fa3_fwd_interface") else "no module fa3_fwd_interface"


def fa3(case: Case) -> Bind:
    """FlashAttention-3's wheel, [B, N, H, D]."""
    import fa3_fwd_interface as library

    def bind(x: Inputs) -> Attend | None:
        if case.variant.fa3 is None:
            return None
        if case.reads:
            return _fa3_cache(library, case, x)
        q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
        attend = partial(library.flash_attn_func, q, k, v, **case.variant.fa3)
        return lambda: _first(attend()).transpose(1, 2)

    return bind


def _fa3_cache(library: Any, case: Case, x: Inputs) -> Attend:
    q, lengths = x.q.transpose(1, 2).contiguous(), x.extra[-1].flatten()
    k, v = (x.k, x.v) if case.shape.page else (t.transpose(1, 2).contiguous() for t in (x.k, x.v))
    given = {"page_table": x.extra[0]} if case.shape.page else {}
    attend = partial(library.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, causal=True, pack_gqa=True)
    return lambda: _first(attend(**given)).transpose(1, 2)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def no_block_tables() -> str:
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has none"
    from torch.nn.attention.varlen import varlen_attn

    told = "block_table" in signature(varlen_attn).parameters
    return "" if told else f"that of torch {torch.__version__} takes no block table"


def varlen(case: Case) -> Bind:
    """PyTorch's attention over a block table, of the releases that take one."""
    from torch.nn.attention.varlen import varlen_attn

    def bind(x: Inputs) -> Attend:
        b, m, (table, lengths) = case.shape.b, case.shape.queries, x.extra
        starts = torch.arange(0, (b + 1) * m, m, dtype=torch.int32, device=x.q.device)
        q, most = x.q.transpose(1, 2).flatten(0, 1), max(case.shape.held)
        given: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": lengths, "block_table": table}
        attend = partial(varlen_attn, q, x.k, x.v, starts, None, m, most, **given)
        return lambda: _first(attend()).unflatten(0, (b, m)).transpose(1, 2)

    return bind


BOTH = ("cuda", "cpu")
PEERS = (
    Peer("eager", eager, devices=BOTH),
    Peer("Inductor", compiled),
    Peer("aot_eager", partial(compiled, backend="aot_eager"), devices=("cpu",)),
    Peer("FlexAttention", flex, tuned="FlexAttention autotuned"),
    Peer("FlexAttention autotuned", partial(flex, mode="max-autotune-no-cudagraphs"), slow=True),
    Peer("FlexAttention + its mask", partial(flex, each_time=True), ("variants",), slow=True),
    Peer("SDPA flash", partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    Peer("SDPA cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
    Peer("SDPA efficient", partial(sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    Peer("SDPA math", partial(sdpa, SDPBackend.MATH), devices=("cpu",)),
    Peer("FlashAttention-3", fa3, INFERENCE, lacks=no_fa3),
    Peer("varlen_attn", varlen, ("paged",), lacks=no_block_tables),
    Peer(OURS, partial(compiled, backend=fusecomp)),
    Peer(f"{OURS} in any order", partial(compiled, backend=fusecomp, options={"deterministic": False}), ("backward",)),
    Peer(OURS, partial(compiled, backend=fusecomp, options={"inner": "aot_eager"}), devices=("cpu",)),
)


def asked(case: Case, peers: Sequence[Peer]) -> list[Peer]:
    """Those of the peers that are asked for a case."""
    able = [peer for peer in peers if peer.times(case)]
    names = {peer.name for peer in able}
    return [peer for peer in able if peer.tuned not in names]


def chosen(names: str, device: str, quick: bool = False) -> list[Peer]:
    """The device's peers that a word names, or whose name holds it. OptionError for a word of which neither is so."""
    here = [peer for peer in PEERS if device in peer.devices]
    named = {word: [p for p in here if _same(p, word)] or [p for p in here if _holds(p, word)] for word in words(names)}
    for word, found in named.items():
        if not found:
            known = ", ".join(peer.name for peer in here)
            raise OptionError(f"--peers takes names or parts of them, with commas, out of {known}; got {word!r}")
    return [p for p in here if any(p in found for found in named.values()) or not (named or (quick and p.slow))]


def _same(peer: Peer, word: str) -> bool:
    return word.lower() == peer.name.lower()


def _holds(peer: Peer, word: str) -> bool:
    return word.lower() in peer.name.lower()
