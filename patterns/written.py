"""What a program says in one call, written as what it means, so that recognition has one thing to read.

    s[.., a:b] = c, then f(s)                f(c where a <= n < b, else s)               patterns/partly.py
    scaled_dot_product_attention(Q, K, V)    softmax(scale Q K^T + mask) V              patterns/sdpa.py
    cosine_similarity(Q, K), cdist(Q, K)^2   a product of Q and K, and what each adds    patterns/distances.py
    einsum(P, V, W), P V + C in one call     (P V) W; P V, and C added                   patterns/chains.py
    (exp(S) [V, 1])[.., :D]                  exp(S) V                                    patterns/columns.py
    sum_j p_j x_j,  p a softmax              (p [x])[.., 0]                              patterns/columns.py
    exp(S) 1                                 sum exp(S)                                  patterns/folding.py
    N / D,  both summed chunk by chunk       softmax([s_1, .., s_n]) [V_1; ..; V_n]      patterns/online.py
    [Q K_1^T, .., Q K_n^T]                   Q [K_1; ..; K_n]^T                          patterns/together.py
    p[:n] V + p[n:] W,  p a softmax          p [V; W]                                    patterns/joined.py
    f p / g(sum f p) V,  p a softmax         N / g(D),  [N, D] = f p [V, 1]              patterns/renormalised.py
    (softmax(a) - lam W) V                   softmax(a) V - lam (W V)                   patterns/sums.py
    sum_p sum_s w[p, s] v[p, s]              sum_n w[n] v[n]                            patterns/folding.py
    dropout(P, p)                            P f(seed, place)                           patterns/dropout.py

Each is of the program as the ones above left it. `graph.rewriting.put_back` gives what is not fused its place again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from fusecomp.graph.program import keep
from fusecomp.graph.rewriting import Written, attempt
from fusecomp.patterns.chains import unchain
from fusecomp.patterns.columns import take_apart, widen
from fusecomp.patterns.distances import measure
from fusecomp.patterns.dropout import seed_dropouts
from fusecomp.patterns.folding import count, fold
from fusecomp.patterns.joined import join
from fusecomp.patterns.online import at_once
from fusecomp.patterns.partly import choose
from fusecomp.patterns.renormalised import renormalise
from fusecomp.patterns.sdpa import define
from fusecomp.patterns.sums import distribute
from fusecomp.patterns.together import bring_together

MEANINGS = (
    choose, define, measure, unchain, widen, take_apart, count, at_once, bring_together, join, renormalise, distribute,
    fold, seed_dropouts,
)  # fmt: skip


def raised(_: str, error: Exception) -> None:
    raise error


def write_out(module: GraphModule, failed: Callable[[str, Exception], None] = raised) -> list[Written]:
    """Write out every such call. A rewriting that stops with an error is told to `failed`; the others go on.
    The graph remembers the program."""
    keep(module)
    found: list[Written] = []
    for meaning in MEANINGS:
        written, error = attempt(module, meaning)
        found += written
        if error is not None:
            failed(meaning.__name__, error)
    return found
