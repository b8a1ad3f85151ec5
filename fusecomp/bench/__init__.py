"""`fusecomp bench`: attention in plain PyTorch, timed beside its peers in one run, each result checked first.

    variant.py, variants.py, decoding.py   attentions as a person writes them, and how each peer says the same
    cases.py      variants at the sizes that are timed
    inputs.py     their tensors, and the result in float64
    peers.py      who is timed: one row each
    ahead.py      their kernels, compiled beforehand
    timing.py     protocols, medians, spreads; ceilings.py, reading.py: what the device could do at most
    measure.py    one case: check, then time in one order and in the other
    record.py     what a run found, as JSON; page.py, picture.py: as tables and as a picture
"""
