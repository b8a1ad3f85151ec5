"""Floor 4, kernels: a region and its plan become a file that a person can read, run and check.

    emit, backward, hopper_choice the ways in: forward, gradients, and where the kernel for Hopper is chosen
    frame, backward_frame         every decision of a kernel, taken before a line of it is written
    *skeletons                    kernels as pages with named holes
    tile, program, turns          what fills them: a tile of keys; which rows and tiles a program has
    decode, schedule              few queries: keys are split over programs, and their shares combined
    table*, visited               masks that are data: which tiles to visit is found at run time
    address, memory, pages, copied, descriptors, narrow     where elements lie, and how they are loaded
    values, base2, cheaper, slope, derivative       the score and its derivative in few instructions
    functions, philox, logsumexp, bounds            what else a kernel computes
    printer, wrap                 expressions as text; long lines broken
    backward_*                    gradients on any device
    hopper*                       forward and gradients on Hopper's tensor cores, in Gluon
    document, launcher, selfcheck, sample           a file's first page, its host side, and its own check
    function, source              signatures, and what must hold of a text before it is used
    compiled, interpreter         kernels compiled without a GPU, or run without one
"""
