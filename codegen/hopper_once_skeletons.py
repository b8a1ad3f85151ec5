"""The backward kernel for Hopper's tensor cores that computes the scores once, as parts of the pages of
codegen/hopper_backward_skeletons.py: each program adds its tile of keys' share to dQ too, with atomic additions.

    S^T = K Q^T, dP^T = V dO^T        dV += P^T dO,  dK += dS^T Q        dQ += dS K

dS goes through shared memory, as the keys of both groups are summed. Of head size 64 a third group multiplies and adds;
of 128 there are not registers enough for three, and the two groups do so, one half of the columns each, a tile of
queries later, so that neither waits for the other. FlashAttention-3 adds in the same place.
"""

from __future__ import annotations

LAYOUT = """\
ADDED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of what is added to dQ
"""

PLACES = '''\
row = gl.arange(0, 64, layout=gl.SliceLayout(1, ADDED))[:, None]
column = gl.arange(0, 64, layout=gl.SliceLayout(0, ADDED))[None, :]
place = column // 8 * 512 + row * 8 + column % 8  # 8 columns lie together, so that warps add to whole lines
'''

HAND_OVER = '''\
if count >= 2:
    barrier("sync", TAKEN + count % 2, 384)
ds_smem.index(count % 2 * 2 + group).store(«d_name».to(«dtype»))
fence_async_shared()
barrier("arrive", GIVEN + count % 2, 384)
'''

ADD_FOR_QUERIES = '''\
@gluon.jit
def query_sums(given):
    """Four warps: the share that the tile of keys has in dQ."""
    BLOCK_M: gl.constexpr = 64
    BLOCK_N: gl.constexpr = 128
    «given» = given
    «program»
    «fixed»

    «places»
    mbarrier.wait(k_ready, 0)
    count = 0
    «queries»
    barrier("arrive", K_READ, 384)
'''

ADD_QUERIES = '''\
«member»
«fixed»
«query_range»
for q_start in range(«begin», «end», BLOCK_M):
    buffer = count % 2
    barrier("sync", GIVEN + buffer, 384)
    added = gl.zeros([64, 64], gl.float32, ADDED)
    for group in gl.static_range(2):
        left = ds_smem.index(buffer * 2 + group).permute((1, 0))
        added = warpgroup_mma(left, k_smem.index(group), added, use_acc=group > 0, is_async=True)
    added = warpgroup_mma_wait(0, (added,))
    barrier("arrive", TAKEN + buffer, 384)
    sums = dq_sums_ptr + «head» * dq_sums_stride_0 + q_start * 64
    gl.atomic_add(sums + place, added, sem="relaxed")
    count += 1
'''

SHARE = '''\
@gluon.jit
def share(ds_smem, k_smem, ds_ready, count, half: gl.constexpr):
    """dS K of the tile of queries before, 64 of its columns, under way. At first it is of nothing, and not used."""
    before = count + 2 * BUFFERS - 1  # count - 1, two rounds later: at first nothing waits
    copied(ds_ready, before, BUFFERS)
    added = gl.zeros([64, 64], gl.float32, ADDED)
    for group in gl.static_range(2):
        left = ds_smem.index(before % BUFFERS * 2 + group).permute((1, 0))
        right = k_smem.index(group)._reinterpret(k_smem.dtype, [2, 64, 64], SHARED).index(half)
        added = warpgroup_mma(left, right, added, use_acc=group > 0, is_async=True)
    return added
'''

KEEP = '''\
ds_smem.index(count % BUFFERS * 2 + group).store(«d_name».to(«dtype»))
fence_async_shared()
'''

ADD = '''\
added = warpgroup_mma_wait(0, (added,))
mbarrier.arrive(ds_ready.index(count % BUFFERS))
if count > 0:
    gl.atomic_add(sums + place, added, sem="relaxed")
sums = dq_sums_ptr + «head» * dq_sums_stride_0 + q_start * 128 + group * 4096
'''

ADD_LAST = '''\
if count > 0:
    added = share(ds_smem, k_smem, ds_ready, count, group)
    added = warpgroup_mma_wait(0, (added,))
    gl.atomic_add(sums + place, added, sem="relaxed")
barrier("sync", K_READ, 256)
'''

READY = '''\
ds_ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
for i in gl.static_range(BUFFERS):
    mbarrier.init(ds_ready.index(i), count=2)
'''

QUERY_GRADIENT = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    «program»

    «rows»
    «columns»
    sums = dq_sums_ptr + outer * dq_sums_stride_0 + q_start * «size»
    dq_acc = tl.load(sums + (d // 8 * 512 + d % 8)[None, :] + row * 8)
    «store»
'''
