"""Floor 5, running: a kernel is loaded, launched, verified, and put into the graph.

    lower, loader, launching, tune              a region made runnable: planned, emitted, loaded, launched
    library, hopper, cpu, blocks                who runs it: PyTorch's SDPA, Hopper's kernel, operators on a CPU
    backward                                    gradients without a kernel, by recomputation
    verify, verdict, expected, inputs           the judge: random inputs, what is right in float64
    original, rewritten, unkind, subgraph       the program between them, as it was written and as it was read
    cache                                       kernels and verdicts on disk
    operator, substitute, sums, visits, layout  what stands in the graph instead
    unmatched                                   what is left of a graph, kept from Inductor's own patterns
    calls, inductor, direct, replay, launcher   what a call of it costs the host, made small
"""
