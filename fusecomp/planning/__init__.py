"""Floor 3, cost: which tile a kernel takes, what it is predicted to cost, and why each other tile lost.

    plan, backward, hopper, tile  the choice: forward and decoding, gradients, Hopper's kernel; what a plan is
    worth                         the tiles that are considered
    ranking, unfused, visits      every tile beside the chosen one; separate kernels instead; tables of tiles
    cost*, queueing               the pages of equations
    resources, backward_resources, rates        shared memory, registers, what products reach of the peak
    symbols, glossary, page, written            the words of those pages, and the pages as a person reads them
    equations, straight           pages compiled, for choosing
    facts, candidate, chunks, holes             the numbers that go in: of a region, of a tile, of a mask
    device, devices, accelerator  machines
    workload, textbook, units     attention and caches given by numbers alone
"""
