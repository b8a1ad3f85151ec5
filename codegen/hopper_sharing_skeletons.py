"""How a program of the forward kernel for Hopper's tensor cores walks its keys where it shares a multiprocessor with
another, as parts of the pages of codegen/hopper_skeletons.py.

    S = Q K^T, its softmax, O += P V        one after another: the other program's groups multiply meanwhile

A tile of queries that visits few tiles of keys is mostly beginning and end, when its program waits for Q, for the first
K, and for O to be written. Two programs of two groups have 104 registers a thread: Q stays in shared memory, and P is
multiplied before the next S is begun.
"""

from __future__ import annotations

WALK = '''\
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

STEP = '''\
k_start = «k_start»
count = done + block
«ahead»
copied(k_ready, count, STAGES)
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
