"""The forward kernel for Hopper's tensor cores as pages with named holes: one warp copies, groups of four multiply.

    S_j = Q K_j^T and O += P_(j-1) V_(j-1) are under way together, and meanwhile one takes the softmax of S_j

FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2) has both ideas: warps that only copy, and groups that take
turns, so that one multiplies while the others are at their exponentials. Here K runs from the last key to the first,
and programs take tiles of queries from a counter until none is left.

Where the time went, by the device's clock read inside the kernel (probes_h200.json; N 4096, microseconds):

                                D 64, 192 rows    D 128 causal    D 256 causal
    each tile of keys           1.50              1.39            1.39             128, 128 and 64 keys
    waits for Q, for K          0.3, 0.1          1.0, 0.3        0.8, 1.0         once a tile of queries
    last product to store       0.7               0.9             1.6

At D 64, three groups that waited for S, then for P V once their maxima were known, took 0.574 ms where they take 0.515
waiting for both (FlashAttention-3 0.521); two groups are the other way round, causal 0.289 and 0.299. Neither unit was
full there: with an eighth or a quarter of its exponentials made by polynomials, a kernel of 0.559 ms took 0.591 and
0.673; with S of the next keys begun before the softmax of these, in registers of its own, 0.682 ms instead of 0.570.
Where a tile was taken as the one before began, causal programs at D 256 ended between 181 and 204 us, since who had the
longest tiles held more of them: it is taken when the loads are done. So it is where all are alike, 0.515 and 0.526 ms.
Nsight Compute on D 128 causal: tensor cores 82 % busy, special functions 42 %, issue slots 40 %; of the 7.4 cycles
between two instructions of a warp it spends 37 % at barriers.
"""

from __future__ import annotations

HALF_LAYOUT = "HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, «columns», 16]))  # of a half of O"
WIDE = "WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))  # of float32"
LAYOUTS = """\
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, «block_n», 16]))  # of the accumulator of S
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, «size», 16]))  # of the accumulator of O
ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
Q_TILE = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
P_TILE = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
«stored»
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
«wide»
BOXES = {(bits, n): gl.NVMMASharedLayout(128, bits, n) for bits in (16, 32) for n in (2, 3, 4, 5)}  # in shared memory
«flags»
THREADS = gl.constexpr(«threads»)  # of all warps that multiply, and the one that copies
# Numbers of the hardware's named barriers; Triton itself uses those up to 3
«names» = «barriers»
"""

HELPERS = '''\
@gluon.jit
def sums(p):
    """Of each row, four sums: one for each thread that holds a part of it."""
    return gl.sum(gl.sum(p.reshape([64, BLOCK_N // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def place_of(tile, all_tiles, section«length»):
    """(first query, which head) of a tile: section by section of the heads, whose K and V then stay in L2, and in each
    the tiles with most keys first."""
    q_tiles = gl.cdiv(«m», BLOCK_M)
    first = tile // (section * q_tiles) * section
    turns = gl.minimum(section, all_tiles // q_tiles - first)
    inside = tile - first * q_tiles
    return (q_tiles - 1 - inside // turns) * BLOCK_M, first + inside % turns


@gluon.jit
def hand(next_smem, slot, value):
    """Tell a number to those who multiply: were they to work it out, they would divide while nothing is multiplied."""
    next_smem.index(slot).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value)


@gluon.jit
def handed(next_smem, slot):
    return gl.max(next_smem.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
'''

PRODUCE = '''\
@gluon.jit
def produce(given):
    """One warp: hands out tiles of queries, and copies Q, K and V ahead of those who multiply them."""
    «given» = given
    tile = gl.program_id(0)
    q_start, head = place_of(tile, all_tiles, section«length»)
    turn = 0
    done = 0  # tiles of keys, of all tiles of queries before
    while tile < all_tiles:
        «program»
        «fixed»
        «counted»
        for group in gl.static_range(GROUPS):
            if turn > 0:
                barrier("sync", Q_FREE + group, 160)
            mbarrier.expect(q_ready.index(group), «q_bytes»)
            tma.async_copy_global_to_shared(
                q_desc, «q_at», q_ready.index(group), q_smem.index(group)._reinterpret(«q_block»)
            )
        next_tile = tile
        for block in range(blocks + 1):
            if block < blocks:
                count = done + block
                slot = count % STAGES
                k_start = «k_start»
                if count >= STAGES:
                    barrier("sync", K_FREE + slot, THREADS)
                «expected»
                tma.async_copy_global_to_shared(
                    k_desc, «k_at», k_ready.index(slot), k_smem.index(slot)._reinterpret(«k_block»)
                )
                «copy_pairs»
            if block == blocks:
                # While V has no room yet, and not before: a long tile would hold the next one back from who is done
                next_tile = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
            if block > 0:
                count = done + block - 1
                slot = count % STAGES
                k_start = «v_start»
                if count >= STAGES:
                    barrier("sync", V_FREE + slot, THREADS)
                mbarrier.expect(v_ready.index(slot), «k_bytes»)
                tma.async_copy_global_to_shared(
                    v_desc, «v_at», v_ready.index(slot), v_smem.index(slot)._reinterpret(«v_block»)
                )
        done += blocks
        tile = next_tile
        mbarrier.wait(next_taken.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        q_start, head = place_of(tile, all_tiles, section«length»)
        hand(next_smem, (turn & 1) * 3, tile)
        hand(next_smem, (turn & 1) * 3 + 1, q_start)
        hand(next_smem, (turn & 1) * 3 + 2, head)
        mbarrier.arrive(next_ready.index(turn & 1))
        turn += 1
'''

CONSUME = '''\
@gluon.jit
def consume(given, group: gl.constexpr):
    """Four warps, 64 rows of each tile of queries."""
    «given» = given
    «first_turn»
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    n_pos = n[None, :].to(gl.float32)
    row = group * 64 + gl.arange(0, 64, layout=ROWS)[:, None]
    tile = gl.program_id(0)
    q_start, head = place_of(tile, all_tiles, section«length»)
    turn = 0
    done = 0
    while tile < all_tiles:
        «program»
        «rows»
        «fixed»
        «pointers»
        «counted»
        «parts»

        mbarrier.wait(q_ready.index(group), turn & 1)
        «query»

        «keys»

        row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), ROWS)
        «finish»
        o = (acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUTPUT))[:, None]).to(«dtype»)
        «store»

        mbarrier.wait(next_ready.index(turn & 1), (turn >> 1) & 1)
        tile = handed(next_smem, (turn & 1) * 3)
        q_start = handed(next_smem, (turn & 1) * 3 + 1)
        head = handed(next_smem, (turn & 1) * 3 + 2)
        mbarrier.arrive(next_taken.index(turn & 1))
        turn += 1
    tma.store_wait(0)
'''

FIRST_TURN = '''\
if group == GROUPS - 1:
    barrier("arrive", MULTIPLY, 256)
'''

IN_TURNS = '''\
# The last keys: nothing to add to yet
k_start = «first_start»
count = done
«ahead»
copied(k_ready, count, STAGES)
«pairs»
k_tile = k_smem.index(count % STAGES).permute((1, 0))
score = warpgroup_mma(q_tile, k_tile, «product»is_async=True)
«freed»
score = warpgroup_mma_wait(0, (score,))
barrier("arrive", K_FREE + count % STAGES, THREADS)
«edge_score»
row_max = «first_max»
«weights»
row_sum = sums(weights)
«rounded»
acc = gl.zeros([64, «size»], gl.float32, OUTPUT)

«above_loop»
for block in range(«full_begin», «full_end»):
    «full_step»

«below_loop»
«query_read»
done += blocks
copied(v_ready, done - 1, STAGES)
«whole»
acc = warpgroup_mma(p, v_smem.index((done - 1) % STAGES), acc, is_async=True)
acc, p = warpgroup_mma_wait(0, (acc, p))
barrier("arrive", V_FREE + (done - 1) % STAGES, THREADS)
'''

HELD = '''\
q_tile = q_smem.index(group).load(Q_TILE)
«scaled»
fence_async_shared()
barrier("arrive", Q_FREE + group, 160)
'''

STORE = '''\
tma.store_wait(0)
o_smem.index(group).store(«o»)
fence_async_shared()
tma.async_copy_shared_to_global(out_desc, «o_at», o_smem.index(group)._reinterpret(«o_block»))
'''

STEP = '''\
k_start = «k_start»
count = done + block
«ahead»
copied(k_ready, count, STAGES)
«pairs»
barrier("sync", MULTIPLY + group, 256)
k_tile = k_smem.index(count % STAGES).permute((1, 0))
score = warpgroup_mma(q_tile, k_tile, «product»is_async=True)
copied(v_ready, count - 1, STAGES)
«whole»
acc = warpgroup_mma(p, v_smem.index((count - 1) % STAGES), acc, is_async=True)
barrier("arrive", MULTIPLY + (group + 1) % GROUPS, 256)
«freed»
«scored»
«score»
new_max = gl.maximum(row_max, gl.max(score, axis=1)«to_max»)
«known»
rescale = «rescale»
row_max = new_max
«weights»
row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + sums(weights)
«multiplied»
acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
«rounded»
'''

ONE_BY_ONE = '''\
score = warpgroup_mma_wait(1, (score,))
barrier("arrive", K_FREE + count % STAGES, THREADS)
'''

LATER = '''\
acc, p = warpgroup_mma_wait(0, (acc, p))
barrier("arrive", V_FREE + (count - 1) % STAGES, THREADS)
'''

AT_ONCE = '''\
score, acc, p = warpgroup_mma_wait(0, (score, acc, p))
barrier("arrive", K_FREE + count % STAGES, THREADS)
barrier("arrive", V_FREE + (count - 1) % STAGES, THREADS)
'''

ATTENTION = '''\
@gluon.jit(do_not_specialize=«sizes»)
def attention(
    «parameters»
):
    q_smem = gl.allocate_shared_memory(«dtype», [GROUPS, 64, «size»], SHARED)
    k_smem = gl.allocate_shared_memory(«dtype», [STAGES, BLOCK_N, «size»], SHARED)
    v_smem = gl.allocate_shared_memory(«dtype», [STAGES, BLOCK_N, «size»], SHARED)
    o_smem = gl.allocate_shared_memory(«dtype», [GROUPS, 64, «columns»], SHARED)
    «pairs_smem»
    next_smem = gl.allocate_shared_memory(gl.int32, [6, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    next_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    next_taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(next_ready.index(i), count=1)
        mbarrier.init(next_taken.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    consumed = (
        «consumed»
    )
    produced = (
        «produced»
    )
    # The first group has the four warps of the launch; the others, and who copies, these warps and registers a thread
    gl.warp_specialize([«consumers», (produce, (produced,))], «warps», «registers»)
'''
