"""Floor 1, graphs: what FX graphs say, in one small vocabulary.

    capture, repeats, recordings  from Dynamo's graph to ATen calls; equal calls are traced once
    levels, modes, learning       torch.vmap written out; where gradients and autocast are on; what learns
    holding                       parameters and buffers, under their own names
    facts                         order, shapes, storages, writes, the user's source lines
    rewriting, sdpa               calls that are written out, and put back where nothing came of it
    program                       the calls of a graph as they were before that
"""
