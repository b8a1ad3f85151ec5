"""Floor 0, words: what one attention is, as mathematics that a test can write by hand.

    expr, primitives              scalar expressions, and the functions in them: a row each
    algebra, poly, intervals      arithmetic on them: normal forms, and bounds over a tile
    widths                        which integers need 64 bits
    region                        one attention
    reference, logsumexp, philox  its value, densely: what every kernel is held against
    ranges, data                  which keys a query tile reaches, by its bounds or by the mask's data
"""
