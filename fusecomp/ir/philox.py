"""Philox-4x32-7, the counter-based random numbers of Salmon et al. (SC 2011), in plain PyTorch.

    word(seed, batch, row, key) = Philox(key = seed, counter = (key // 4, row, batch, 0))[key % 4]

A word depends on its place alone: forward, backward, any tile and any device draw the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
"""The fewest that pass every test of BigCrush, by the paper. Ten take kernels 9 to 15 % longer (probes_h200.json)."""
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
"""What each half of the key grows by in a round."""
LOW = 0xFFFFFFFF
WORDS = 1 << 32


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words in [0, 2^32) for each counter of four such words, all as int64; `seed` holds 64 bits."""
    c0, c1, c2, c3 = counter
    keys = [seed & LOW, (seed >> 32) & LOW]
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # the low 64 bits of them, which is all
        c0, c2 = (((p >> 32) ^ (c ^ k)) & LOW for p, c, k in ((second, c1, keys[0]), (first, c3, keys[1])))
        c1, c3 = second, first  # their high halves are dropped where they are used
        keys = [(k + w) & LOW for k, w in zip(keys, WEYL, strict=True)]
    return c0, c1 & LOW, c2, c3 & LOW


def random_words(seed: Tensor, batch: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """The word of each place, as int64. The arguments broadcast; `key` varies along the last axis only, and alone."""
    groups, group = torch.unique(key >> 2, return_inverse=True)
    four = torch.broadcast_tensors(*philox(seed, (groups, row, batch, torch.zeros_like(groups))))
    words, places = torch.stack(four, -1).flatten(-2), (4 * group + (key & 3)).flatten()
    if len(places) and (places.diff() == 1).all():
        return words.narrow(-1, int(places[0]), len(places))
    return words.index_select(-1, places)
