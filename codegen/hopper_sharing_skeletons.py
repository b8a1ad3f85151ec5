"""How a program of the forward kernel for Hopper's tensor cores walks its keys where it shares a multiprocessor with
another, as parts of the pages of codegen/hopper_skeletons.py.

    S = Q K^T, its softmax, O += P V        one after another: the other program's groups multiply meanwhile

A tile of queries that visits few tiles of keys is mostly beginning and end, when its program waits for Q, for the first
K, and for O to be written. Two programs of two groups have 104 registers a thread: Q stays in shared memory, and P is
multiplied before the next S is begun. What only the other group's queries see, a group leaves out.

Packed documents of 450 places, B 4, H 16, N 4096, D 64: 95 us; 99 with what could be left out; one program on a
multiprocessor 119, with 128 keys a tile 140; portable 106. A second Q in shared memory saves nothing. Nsight Compute:
schedulers 44 % busy, L2 55 %, device memory 27 %; a program's groups wait at barriers for their own products, as each
has one tile of 64 x 64 at a time (probes_h200.json).
"""

from __future__ import annotations

WALK = '''\
# The first and the last key that a query of this group sees
group_first = gl.where(in_runs, gl.min(gl.min(run_first, axis=1), axis=0), 0)
group_last = gl.where(in_runs, gl.max(gl.max(run_last, axis=1), axis=0), k_end)
row_max = gl.full([64], «least», gl.float32, ROWS)
row_sum = sums(gl.zeros([64, BLOCK_N], gl.float32, SCORES))
acc = gl.zeros([64, «size»], gl.float32, OUTPUT)

«above_loop»
for block in range(«full_begin», «full_end»):
    «full_step»

«below_loop»
barrier("arrive", Q_FREE + group, 160)
done += blocks
'''

FULL_STEP = '''\
k_start = «k_start»
count = done + block
copied(k_ready, count, STAGES)
«products»
'''

CUT_STEP = '''\
k_start = «k_start»
count = done + block
copied(k_ready, count, STAGES)
if (k_start <= group_last) & (k_start + BLOCK_N > group_first):
    «products»
else:
    copied(v_ready, count, STAGES)
    barrier("arrive", K_FREE + count % STAGES, THREADS)
    barrier("arrive", V_FREE + count % STAGES, THREADS)
'''

PRODUCTS = '''\
«ahead»
k_tile = k_smem.index(count % STAGES).permute((1, 0))
score = warpgroup_mma(q_tile, k_tile, «product»is_async=True)
score = warpgroup_mma_wait(0, (score,))
barrier("arrive", K_FREE + count % STAGES, THREADS)
«score»
new_max = gl.maximum(row_max, gl.max(score, axis=1)«to_max»)
rescale = «rescale»
row_max = new_max
«weights»
row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + sums(weights)
acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
«rounded»
copied(v_ready, count, STAGES)
acc = warpgroup_mma(p, v_smem.index(count % STAGES), acc, is_async=True)
acc, p = warpgroup_mma_wait(0, (acc, p))
barrier("arrive", V_FREE + count % STAGES, THREADS)
'''
