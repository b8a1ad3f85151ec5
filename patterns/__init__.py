"""Floor 2, recognition: attention in a graph becomes a region, or a decline that says why and where.

    attention, contraction, products    the anchor: two products, around a softmax over the keys
    lift                                what lies between, at one index, as a scalar expression; its rules are in
    spellings, scalars, activations, reductions     functions of elements and of rows
    views, fetches, progressions        rearrangements, look-ups, running sums
    promotion, rounding                 dtypes: what is computed in, what it does to values
    weights, exponentials, positive, normalisers, rows, seen     the softmax in that expression, however it was spelled
    entries                             which entries of the normalised axis are keys
    masks, dropout, logsums, stops      the mask in it, what stands beside the softmax, and where gradients end
    operands, quantised, apart, naming  what Q, K, V and the others are in memory, and what they are called
    build, reasons                      the region and its binding, or why there is none
    written                             what is rewritten before any of this, each in a module of its own:
    chains, columns, distances, folding, joined, online, partly, renormalised, sdpa, series, sums, together
"""
