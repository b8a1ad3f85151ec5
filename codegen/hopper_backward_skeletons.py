"""The backward kernels for Hopper's tensor cores as pages with named holes: one warp copies, two groups multiply.

    keys stay       S^T = K Q^T, dP^T = V dO^T        dV += P^T dO,  dK += dS^T Q
    queries stay    S = Q K^T,   dP = dO V^T          dQ += dS K

P and dS are left factors from registers, so that nothing is written to shared memory but what is copied there, and no
two programs add to one place: the result is the same every time.

Nsight Compute, causal D 128, B 4, H 16, N 4096 (probes_h200.json): the kernel of dQ, three products, 579 us, keeps the
tensor cores 80 % busy and uses 29 % of the schedulers' slots; that of dK and dV, four products, 868 us, 68 % and 23 %.
Its warps spend 49 and 44 % of the cycles between two instructions at barriers, half of that the three beside the one
that copies, which sleep at one throughout.
"""

from __future__ import annotations

LAYOUTS = """\
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BOXES = {(bits, n): gl.NVMMASharedLayout(128, bits, n) for bits in (16, 32) for n in (2, 3, 4, 5)}  # in shared memory
ROW_BOX = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, «size», 16]))  # of the accumulators of gradients
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
KEYS_DOWN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, «block_m», 16]))  # of S^T and dP^T
# Numbers of the hardware's named barriers; Triton itself uses those up to 3
FIRST_FREE, SECOND_FREE = «barriers»
"""

QUERY_LAYOUT = """\
QUERIES_DOWN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, «block_n», 16]))  # of S and dP
"""

COPY_FOR_KEYS = '''\
@gluon.jit
def copy_queries(given):
    """One warp: a tile of K and V, then the queries that see it, with dO, lse and delta."""
    BLOCK_M: gl.constexpr = «block_m»
    BLOCK_N: gl.constexpr = 128
    «given» = given
    «program»
    «fixed»

    mbarrier.expect(k_ready, «k_bytes»)
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(k_desc, «k_at», k_ready, k_smem.index(group)._reinterpret(«k_block»))
        tma.async_copy_global_to_shared(v_desc, «v_at», k_ready, v_smem.index(group)._reinterpret(«v_block»))

    count = 0  # tiles of queries
    «queries»
'''

COPY_QUERIES = '''\
«member»
«fixed»
«query_range»
for q_start in range(«begin», «end», BLOCK_M):
    slot = count % STAGES
    if count >= STAGES:
        barrier("sync", FIRST_FREE + slot, 288)
    mbarrier.expect(q_ready.index(slot), «q_bytes»)
    tma.async_copy_global_to_shared(q_desc, «q_at», q_ready.index(slot), q_smem.index(slot)._reinterpret(«q_block»))
    row_block = row_smem.index(slot)._reinterpret(«row_block»)
    tma.async_copy_global_to_shared(row_desc, «row_at», q_ready.index(slot), row_block)
    if count >= STAGES:
        barrier("sync", SECOND_FREE + slot, 288)
    mbarrier.expect(do_ready.index(slot), «do_bytes»)
    do_block = do_smem.index(slot)._reinterpret(«do_block»)
    tma.async_copy_global_to_shared(do_desc, «do_at», do_ready.index(slot), do_block)
    count += 1
'''

MULTIPLY_FOR_KEYS = '''\
@gluon.jit
def key_sums(given, group: gl.constexpr):
    """Four warps, 64 keys of the tile: dK and dV."""
    BLOCK_M: gl.constexpr = «block_m»
    BLOCK_N: gl.constexpr = 128
    «given» = given
    «program»

    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, KEYS_DOWN))
    n = group * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, KEYS_DOWN))[:, None]
    «places»
    «begun»
    «fixed»

    k_tile = k_smem.index(group)
    v_tile = v_smem.index(group)
    mbarrier.wait(k_ready, 0)
    «held»
    dk_acc = gl.zeros([64, «size»], gl.float32, SUMS)
    dv_acc = gl.zeros([64, «size»], gl.float32, SUMS)
    count = 0
    «queries»

    «last»
    v_tile.store(dv_acc.to(«dtype»))
    k_tile.store((dk_acc«factor»).to(«dtype»))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, «dk_at», k_tile._reinterpret(«dk_block»))
    tma.async_copy_shared_to_global(dv_desc, «dv_at», v_tile._reinterpret(«dv_block»))
    tma.store_wait(0)
'''

MULTIPLY_QUERIES = '''\
«member»
«fixed»
«query_range»
«before»
for q_start in range(«begin», «end», BLOCK_M):
    «step»

«after»
'''

KEY_STEP = '''\
slot = count % STAGES
copied(q_ready, count, STAGES)
q_tile = q_smem.index(slot)
do_tile = do_smem.index(slot)
score = product(«k_left», q_tile, KEYS_DOWN, BLOCK_M)
copied(do_ready, count, STAGES)
d_p = product(«v_left», do_tile, KEYS_DOWN, BLOCK_M)
«values»
score = warpgroup_mma_wait(1, (score,))
«score»
lse = row_smem.index(slot).slice(0, BLOCK_M).load(gl.SliceLayout(0, KEYS_DOWN))
«weights»
left = gl.convert_layout(p.to(«dtype»), LEFT)
dv_acc = warpgroup_mma(left, do_tile, dv_acc, is_async=True)
«slope»
d_p = warpgroup_mma_wait(1, (d_p,))
delta = row_smem.index(slot).slice(BLOCK_M, BLOCK_M).load(gl.SliceLayout(0, KEYS_DOWN))
«gradients»
«hand_over»
d_left = gl.convert_layout(«d_name».to(«dtype»), LEFT)
dk_acc = warpgroup_mma(d_left, q_tile, dk_acc, is_async=True)
«share»
dv_acc, dk_acc, left, d_left«kept» = warpgroup_mma_wait(«under_way», (dv_acc, dk_acc, left, d_left«kept»))
barrier("arrive", FIRST_FREE + slot, 288)
barrier("arrive", SECOND_FREE + slot, 288)
«added»
count += 1
'''

COPY_FOR_QUERIES = '''\
@gluon.jit
def copy_keys(given):
    """One warp: a tile of Q and dO, then K and V of the keys that it sees."""
    BLOCK_M: gl.constexpr = 128
    BLOCK_N: gl.constexpr = «block_n»
    «given» = given
    «program»
    «fixed»

    mbarrier.expect(q_ready, «q_bytes»)
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(q_desc, «q_at», q_ready, q_smem.index(group)._reinterpret(«q_block»))
        tma.async_copy_global_to_shared(do_desc, «do_at», q_ready, do_smem.index(group)._reinterpret(«do_block»))

    count = 0  # tiles of keys
    «key_range»
    for k_start in range(«begin», «end», BLOCK_N):
        slot = count % STAGES
        if count >= STAGES:
            barrier("sync", FIRST_FREE + slot, 288)
        mbarrier.expect(k_ready.index(slot), «k_bytes»)
        tma.async_copy_global_to_shared(k_desc, «k_at», k_ready.index(slot), k_smem.index(slot)._reinterpret(«k_block»))
        if count >= STAGES:
            barrier("sync", SECOND_FREE + slot, 288)
        mbarrier.expect(v_ready.index(slot), «k_bytes»)
        tma.async_copy_global_to_shared(v_desc, «v_at», v_ready.index(slot), v_smem.index(slot)._reinterpret(«v_block»))
        count += 1
'''

MULTIPLY_FOR_QUERIES = '''\
@gluon.jit
def query_sums(given, group: gl.constexpr):
    """Four warps, 64 queries of the tile: dQ."""
    BLOCK_M: gl.constexpr = 128
    BLOCK_N: gl.constexpr = «block_n»
    «given» = given
    «program»

    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, QUERIES_DOWN))
    n_pos = n[None, :].to(gl.float32)
    row = group * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, QUERIES_DOWN))[:, None]
    «rows»
    «fixed»
    «pointers»
    «key_range»
    «full_range»

    row_values = outer * row_values_stride_1 + q_start + row
    lse = gl.load(row_values_ptr + row_values)
    delta = gl.load(row_values_ptr + row_values_stride_0 + row_values)
    q_tile = q_smem.index(group)
    do_tile = do_smem.index(group)
    mbarrier.wait(q_ready, 0)
    dq_acc = gl.zeros([64, «size»], gl.float32, SUMS)
    count = 0
    «before»
    for k_start in range(«begin», «end», BLOCK_N):
        «step»

    «after»

    q_tile.store((dq_acc«factor»).to(«dtype»))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, «dq_at», q_tile._reinterpret(«dq_block»))
    tma.store_wait(0)
'''

QUERY_STEP = '''\
slot = count % STAGES
copied(k_ready, count, STAGES)
k_tile = k_smem.index(slot)
score = product(q_tile, k_tile, QUERIES_DOWN, BLOCK_N)
copied(v_ready, count, STAGES)
d_p = product(do_tile, v_smem.index(slot), QUERIES_DOWN, BLOCK_N)
score = warpgroup_mma_wait(1, (score,))
«score»
«weights»
«slope»
d_p = warpgroup_mma_wait(0, (d_p,))
barrier("arrive", SECOND_FREE + slot, 288)
«gradients»
left = gl.convert_layout(«d_name».to(«dtype»), LEFT)
dq_acc = warpgroup_mma(left, k_tile, dq_acc, is_async=True)
dq_acc, left = warpgroup_mma_wait(0, (dq_acc, left))
barrier("arrive", FIRST_FREE + slot, 288)
count += 1
'''

HELPERS = '''\
@gluon.jit
def product(left, right, layout: gl.constexpr, columns: gl.constexpr):
    """left right^T of 64 rows, under way."""
    zero = gl.zeros([64, columns], gl.float32, layout)
    return warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)
'''

KEY_GRADIENTS = '''\
@gluon.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    k_smem = gl.allocate_shared_memory(«dtype», [2, 64, «size»], SHARED)
    v_smem = gl.allocate_shared_memory(«dtype», [2, 64, «size»], SHARED)
    q_smem = gl.allocate_shared_memory(«dtype», [STAGES, «rows», «size»], SHARED)
    do_smem = gl.allocate_shared_memory(«dtype», [STAGES, «rows», «size»], SHARED)
    row_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * «rows»], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    «memory»
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
    «ready»
    «given»
    # The first group has the four warps of the launch; the others, and who copies, these warps and registers a thread
    gl.warp_specialize(
        [(key_sums, (multiplied, 0)), (key_sums, (multiplied, 1)), «more»(copy_queries, (copied_in,))],
        «warps», «registers»
    )
'''

QUERY_GRADIENT = '''\
@gluon.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    q_smem = gl.allocate_shared_memory(«dtype», [2, 64, «size»], SHARED)
    do_smem = gl.allocate_shared_memory(«dtype», [2, 64, «size»], SHARED)
    k_smem = gl.allocate_shared_memory(«dtype», [STAGES, «rows», «size»], SHARED)
    v_smem = gl.allocate_shared_memory(«dtype», [STAGES, «rows», «size»], SHARED)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    «given»
    # The first group has the four warps of the launch; the others, and who copies, these warps and registers a thread
    gl.warp_specialize(
        [(query_sums, (multiplied, 0)), (query_sums, (multiplied, 1)), (copy_keys, (copied_in,))],
        «warps», «registers»
    )
'''
