// The matrix products of a decoder layer for the tokens of a decode step, each with the work after it, for Hopper.
//
// A thread block computes a tile: 128 rows of the weight, in two halves, times 64 tokens. The halves are what the work after a
// product combines: rows of the gate and of the up projection, for example. A decode step has too few tiles for all SMs, so
// several blocks share a tile (split-K): each takes some of the columns. They form a cluster, so they can write to each
// other's shared memory. Each block sends every other block the partial sums of that block's tokens, adds up what it receives,
// always in the same order, and does the work after the product for its own tokens.
//
// With more than 64 tokens, the blocks of every 64 tokens read the same rows of the weight from the L2 cache. So two of these
// blocks can be in one cluster, too. Each copies a part of the rows to the shared memory of both (multicast).
//
// In each block, one thread copies tiles of both matrices to a ring of buffers in shared memory (TMA), and the other warps
// multiply them on the tensor cores (wgmma). The kernel may start while the previous one still runs. Then it copies weights,
// which no kernel of a step writes, as far as the ring has room, and prefetches the rest to the L2 cache.
#include "hopper.cuh"

constexpr int HALF = 64, ROWS = 2 * HALF, TOKENS = 64, COLUMNS = 64;  // of a tile
constexpr int HALF_BYTES = HALF * COLUMNS * 2, STAGE_BYTES = 3 * HALF_BYTES;  // two halves of the weight, and the tokens
constexpr int STAGES = 4;  // two blocks fit in an SM, of this kernel or of this one and the next
// Four warps multiply, four others compute the norm, all of them finish tokens, and one more copies.
constexpr int MULTIPLIERS = 4, WARPS = 8, THREADS = (WARPS + 1) * 32;
// Sums of one token: the rows of a tile, then the sum of squares of its columns. The gap puts tokens in different banks.
constexpr int SUMS = ROWS + 4, SUMS_BYTES = SUMS * 4;
constexpr int RECEIVED = TOKENS * SUMS;  // where the received sums begin, after the block's own
constexpr int LAUNCH_BYTES = 1024 + STAGES * STAGE_BYTES;  // with what the alignment needs
static_assert(2 * TOKENS * SUMS_BYTES <= STAGES * STAGE_BYTES, "the sums take the place of the ring");

struct Matrices {
    CUtensorMap tokens, weight;  // [tokens, columns] and [rows, columns]
};

struct Arguments {
    int num_tokens, num_rows, num_columns;  // of the matrices
    int tiles, next_tile, next_half;        // number of tiles; rows from a tile to the next, and from its first half to its second
    int splits;                             // blocks that share a tile: 1, 2, 4 or 8
    int sharers;                            // blocks of different tokens that share the copies of the weight's rows: 1 or 2
    int next_may_start;                     // whether the next kernel may start while this one runs
    float eps;
};

struct Barriers {
    uint64_t full[STAGES], empty[STAGES];
    uint64_t ready, received;  // the other blocks have room for sums; their sums have arrived
};

// --- instructions -------------------------------------------------------------------------------------------------------

__device__ inline void copy_tile(uint32_t to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// The same, to all blocks of the cluster whose bits are set in the mask, and to the barrier of each.
__device__ inline void copy_tile_to_blocks(uint32_t to, const CUtensorMap* map, int column, int row, uint64_t* barrier, int mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(mask)) : "memory");
}

__device__ inline void copy_tile_to_l2(const CUtensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row) : "memory");
}

// A barrier of all threads of the cluster's blocks, which does not order their memory accesses.
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address at which another block of the cluster has what this block has at `p`.
__device__ inline uint32_t in_block(const void* p, int block) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(block));
    return there;
}

__device__ inline void arrive_in_block(uint64_t* barrier, int block) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, block)) : "memory");
}

// Copy shared memory to another block, and count the bytes at its barrier.
__device__ inline void send(float* to, const float* from, int bytes, uint64_t* barrier, int block) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_block(to, block)),
                 "r"(shared_address(from)), "r"(bytes), "r"(in_block(barrier, block)) : "memory");
}

// Let copies read what this thread wrote to shared memory.
__device__ inline void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// Describe a matrix of 64 columns at a shared address for the tensor cores: rows of 128 bytes, eight of them a group of 1,024,
// in the order in which TMA stores them (128-byte swizzle).
__device__ inline uint64_t describe(uint32_t address) {
    return address >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Add 64 rows of the weight times 64 tokens, for 16 columns. Of the sums `[rows, tokens]` a thread holds rows lane / 4 and
// lane / 4 + 8 of the 16 rows of its warp, and of every eight tokens the pair lane % 4.
__device__ inline void multiply_accumulate(float (&d)[32], uint64_t weight, uint64_t tokens) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
          "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(weight), "l"(tokens));
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ inline void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

__device__ inline uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two numbers rounded to e4m3. Those beyond its range become its largest ones.
__device__ inline uint16_t pack_e4m3(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// --- the work after a product -------------------------------------------------------------------------------------------

// A lane's part of one token: two adjacent rows, and two rows that are SECOND rows further on.
struct Part {
    float2 first, second;

    __device__ void scale(float by) { first.x *= by, first.y *= by, second.x *= by, second.y *= by; }
    __device__ float squares() const {
        return first.x * first.x + first.y * first.y + second.x * second.x + second.y * second.y;
    }
};

// Rotate queries and keys, and store keys and values in the KV cache. A tile has one head or two.
template <int HEAD_DIM> struct QkvAppend {
    static constexpr bool NORMALIZES = true;
    static constexpr int SECOND = HEAD_DIM / 2, HEADS = ROWS / HEAD_DIM, LANES = 32 / HEADS;

    const uint16_t *q_norm, *k_norm;  // [HEAD_DIM], or null
    const float *cos, *sin;           // [tokens, HEAD_DIM / 2]
    const int64_t* slots;             // [tokens]
    uint16_t *q, *keys, *values;      // [tokens, q_heads, HEAD_DIM]; the layer's KV cache
    int64_t page_stride, slot_stride, head_stride;
    int page_size, q_heads, kv_heads;
    float k_factor, v_factor;  // 1 / the scales of a cache in e4m3; 0: the cache is in bfloat16

    struct Loaded {
        float2 cos, sin;
        uint32_t first_norm, second_norm;
        int slot;
    };

    __device__ static int lane_row() { return threadIdx.x % LANES * 2; }  // of the head
    __device__ static int row() { return threadIdx.x % 32 / LANES * HEAD_DIM + lane_row(); }
    __device__ static int head(int tile) { return tile * HEADS + threadIdx.x % 32 / LANES; }

    __device__ Loaded load(int token, int tile) const {
        const int at = (token * SECOND + lane_row()) / 2;
        Loaded loaded{reinterpret_cast<const float2*>(cos)[at], reinterpret_cast<const float2*>(sin)[at], 0, 0, static_cast<int>(slots[token])};
        if (q_norm) {
            const auto* norm = reinterpret_cast<const uint32_t*>(head(tile) < q_heads ? q_norm : k_norm) + lane_row() / 2;
            loaded.first_norm = norm[0], loaded.second_norm = norm[SECOND / 2];
        }
        return loaded;
    }

    __device__ void store(const Arguments& a, int token, int tile, Part part, const Loaded& loaded) const {
        const int head = this->head(tile);
        const bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
        float squares = part.squares();
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
        if (head >= q_heads + 2 * kv_heads) return;
        if (!is_v) {
            if (q_norm) {
                part.scale(rsqrtf(squares / HEAD_DIM + a.eps));
                part.first.x *= low_of(loaded.first_norm), part.first.y *= high_of(loaded.first_norm);
                part.second.x *= low_of(loaded.second_norm), part.second.y *= high_of(loaded.second_norm);
            }
            const float2 c = loaded.cos, s = loaded.sin;
            const Part old = part;
            part.first = {old.first.x * c.x - old.second.x * s.x, old.first.y * c.y - old.second.y * s.y};
            part.second = {old.second.x * c.x + old.first.x * s.x, old.second.y * c.y + old.first.y * s.y};
        }
        uint16_t* to = is_q ? q : is_v ? values : keys;
        int64_t at = (static_cast<int64_t>(token) * q_heads + head) * HEAD_DIM + lane_row();
        if (!is_q) {
            const int kv_head = is_v ? head - q_heads - kv_heads : head - q_heads;
            at = loaded.slot / page_size * page_stride + loaded.slot % page_size * slot_stride + kv_head * head_stride + lane_row();
            if (k_factor != 0) {
                part.scale(is_v ? v_factor : k_factor);
                uint8_t* bytes = reinterpret_cast<uint8_t*>(to) + at;
                *reinterpret_cast<uint16_t*>(bytes) = pack_e4m3(part.first.x, part.first.y);
                *reinterpret_cast<uint16_t*>(bytes + SECOND) = pack_e4m3(part.second.x, part.second.y);
                return;
            }
        }
        *reinterpret_cast<uint32_t*>(to + at) = pack(part.first.x, part.first.y);
        *reinterpret_cast<uint32_t*>(to + at + SECOND) = pack(part.second.x, part.second.y);
    }
};

// The gated activation: the first half of a tile is the gate's, the second half the up projection's.
struct SwiGLU {
    static constexpr bool NORMALIZES = true;
    static constexpr int SECOND = HALF;

    uint16_t* out;  // [tokens, size]
    int size;

    struct Loaded {};

    __device__ static int row() { return threadIdx.x % 32 * 2; }
    __device__ Loaded load(int, int) const { return {}; }
    __device__ static float activate(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }

    __device__ void store(const Arguments&, int token, int tile, const Part& part, const Loaded&) const {
        const int at = tile * HALF + row();
        if (at >= size) return;
        const uint32_t pair = pack(activate(part.first.x, part.second.x), activate(part.first.y, part.second.y));
        *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(token) * size + at) = pair;
    }
};

// The addition to the residual stream, in place.
struct AddToResidual {
    static constexpr bool NORMALIZES = false;
    static constexpr int SECOND = HALF;

    uint16_t* residual;  // [tokens, size]
    int size;

    struct Loaded {
        uint32_t first, second;
    };

    __device__ static int row() { return threadIdx.x % 32 * 2; }
    __device__ uint32_t* at(int token, int row) const {
        return reinterpret_cast<uint32_t*>(residual + static_cast<int64_t>(token) * size + row);
    }

    __device__ Loaded load(int token, int tile) const {
        const int first = tile * ROWS + row(), second = first + HALF;
        return {first < size ? *at(token, first) : 0, second < size ? *at(token, second) : 0};
    }

    __device__ void store(const Arguments&, int token, int tile, const Part& part, const Loaded& before) const {
        const int first = tile * ROWS + row(), second = first + HALF;
        if (first < size) *at(token, first) = pack(low_of(before.first) + part.first.x, high_of(before.first) + part.first.y);
        if (second < size) *at(token, second) = pack(low_of(before.second) + part.second.x, high_of(before.second) + part.second.y);
    }
};

// --- the product --------------------------------------------------------------------------------------------------------

// The part of a product that a block computes, and the tokens of the tile that it finishes.
struct Block {
    int split, tile, first_token, count;  // number of tokens of the tile that exist
    int sharer;                           // which of the blocks that share copies
    int begin, steps;                     // first step of COLUMNS columns, and number of steps
    int share;                            // tokens that each block finishes; the last ones may have fewer or none

    __device__ explicit Block(const Arguments& a) {
        const int all_steps = (a.num_columns + COLUMNS - 1) / COLUMNS;
        split = blockIdx.x % a.splits, tile = blockIdx.x / a.splits, first_token = blockIdx.y * TOKENS;
        sharer = blockIdx.y % a.sharers;
        count = max(min(TOKENS, a.num_tokens - first_token), 0), share = (count + a.splits - 1) / a.splits;
        begin = all_steps * split / a.splits, steps = all_steps * (split + 1) / a.splits - begin;
    }
    __device__ int tokens_of(int split) const { return max(min(share, count - split * share), 0); }
    __device__ int rank(const Arguments& a, int split, int sharer) const { return sharer * a.splits + split; }  // in the cluster
};

struct Stage {
    int index;
    uint32_t phase;
    __device__ explicit Stage(int step) : index(step % STAGES), phase(step / STAGES & 1) {}
};

// Copy the block's tiles to the ring (one thread). Blocks that share copies each copy some rows of both halves for all of them.
__device__ inline void produce(const Matrices& matrices, const Arguments& a, const Block& block, uint32_t ring, Barriers& barriers) {
    const int first = block.sharer * (HALF / a.sharers), row = block.tile * a.next_tile + first, ahead = min(block.steps, STAGES);
    int mask = 0;
    for (int sharer = 0; sharer < a.sharers; sharer++) mask |= 1 << block.rank(a, block.split, sharer);
    const auto copy_weight = [&](int i) {
        const int column = (block.begin + i) * COLUMNS, index = Stage(i).index;
        const uint32_t to = ring + index * STAGE_BYTES + first * COLUMNS * 2;
        expect(barriers.full + index, STAGE_BYTES);
        if (a.sharers == 1) {
            copy_tile(to, &matrices.weight, column, row, barriers.full + index);
            copy_tile(to + HALF_BYTES, &matrices.weight, column, row + a.next_half, barriers.full + index);
        } else {
            copy_tile_to_blocks(to, &matrices.weight, column, row, barriers.full + index, mask);
            copy_tile_to_blocks(to + HALF_BYTES, &matrices.weight, column, row + a.next_half, barriers.full + index, mask);
        }
    };
#pragma unroll 1
    for (int i = 0; i < ahead; i++) copy_weight(i);
    if (blockIdx.y < a.sharers) {  // the blocks of other tokens need the same rows
#pragma unroll 1
        for (int i = ahead; i < block.steps; i++) {
            const int column = (block.begin + i) * COLUMNS;
            copy_tile_to_l2(&matrices.weight, column, row), copy_tile_to_l2(&matrices.weight, column, row + a.next_half);
        }
    }
    if (a.next_may_start) let_next_kernel_start();
    wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < block.steps; i++) {
        const Stage stage(i);
        if (i >= ahead) wait(barriers.empty + stage.index, stage.phase ^ 1), copy_weight(i);
        copy_tile(ring + stage.index * STAGE_BYTES + 2 * HALF_BYTES, &matrices.tokens, (block.begin + i) * COLUMNS, block.first_token,
                  barriers.full + stage.index);
    }
}

// Tell all blocks that copy to the buffer of a step that a warp does not need it any more, if there is another step for it: all
// of them wait for this, so no arrival comes after a block has ended.
__device__ inline void release(const Arguments& a, const Block& block, Barriers& barriers, int step) {
    const int lane = threadIdx.x % 32;
    uint64_t* empty = barriers.empty + Stage(step).index;
    if (step + STAGES >= block.steps) return;
    if (a.sharers == 1) {
        if (lane == 0) arrive(empty);
    } else if (lane < a.sharers) {
        arrive_in_block(empty, block.rank(a, block.split, lane));
    }
}

// Multiply the block's tiles, and leave the sums in shared memory, where the ring was (four warps).
__device__ inline void multiply(const Arguments& a, const Block& block, uint32_t ring, float* sums, Barriers& barriers) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float halves[2][32] = {};
#pragma unroll 1
    for (int i = 0; i < block.steps; i++) {
        const Stage stage(i);
        wait(barriers.full + stage.index, stage.phase);
        const uint32_t weight = ring + stage.index * STAGE_BYTES, tokens = weight + 2 * HALF_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                multiply_accumulate(halves[half], describe(weight + half * HALF_BYTES + k * 32), describe(tokens + k * 32));
        }
        commit_products();
        wait_for_products<1>();
        if (i > 0) release(a, block, barriers, i - 1);
    }
    wait_for_products<0>();
    sync_consumers();  // all warps have finished reading the ring
#pragma unroll
    for (int i = 0; i < 64; i++) {
        if (i % 32 / 4 * 8 >= block.count) continue;
        const int token = i % 32 / 4 * 8 + lane % 4 * 2 + i % 2, row = i / 32 * HALF + warp * 16 + lane / 4 + i % 4 / 2 * 8;
        sums[token * SUMS + row] = halves[i / 32][i % 32];
    }
}

// Compute each token's sum of squares of the block's columns (four warps, two threads for each token). Then tell the other
// blocks that they can send their sums, because the ring is not needed any more.
template <bool NORMALIZES>
__device__ inline void compute_squares(const Arguments& a, const Block& block, uint32_t ring, float* sums, Barriers& barriers) {
    const int thread = threadIdx.x - MULTIPLIERS * 32, token = thread / 2, first = thread % 2 * 4;
    float squares[4] = {};
#pragma unroll 1
    for (int step = 0; NORMALIZES && step < block.steps; step++) {
        const Stage stage(step);
        const uint32_t row = ring + stage.index * STAGE_BYTES + 2 * HALF_BYTES + token * 128;
        wait(barriers.full + stage.index, stage.phase);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pairs[4];  // TMA stores part i (16 bytes) of row r at position i ^ r % 8
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                         : "r"(row + ((first + i) ^ token % 8) * 16) : "memory");
#pragma unroll
            for (int j = 0; j < 4; j++) squares[j] += low_of(pairs[j]) * low_of(pairs[j]) + high_of(pairs[j]) * high_of(pairs[j]);
        }
        __syncwarp();
        release(a, block, barriers, step);
    }
    sync_consumers();
    if (thread < a.splits && thread != block.split) arrive_in_block(&barriers.ready, block.rank(a, thread, block.sharer));
    float all = squares[0] + squares[1] + (squares[2] + squares[3]);
    all += __shfl_xor_sync(~0u, all, 1);
    if (NORMALIZES && token < block.count) sums[token * SUMS + ROWS] = all;  // two threads write the same
}

// Send the other blocks the sums of their tokens: thread i sends those of block i.
__device__ inline void exchange(const Arguments& a, const Block& block, float* sums, Barriers& barriers) {
    const int other = threadIdx.x, tokens = block.tokens_of(other);
    publish_to_copies();
    sync_consumers();
    if (other >= a.splits || other == block.split) return;
    wait(&barriers.ready, 0);  // even with nothing to send: no arrival may come after the block has ended
    if (!tokens) return;
    send(sums + RECEIVED + block.split * block.share * SUMS, sums + other * block.share * SUMS, tokens * SUMS_BYTES, &barriers.received,
         block.rank(a, other, block.sharer));
}

// Finish the block's tokens: each warp takes every WARPS-th of them, two at a time, so that their loads overlap. Four at a time
// and an unrolled loop over the splits were slower in a trial.
template <class Finish>
__device__ inline void finish_tokens(const Arguments& a, const Block& block, const float* sums, Barriers& barriers, const Finish& finish) {
    constexpr int AT_ONCE = 2;
    const int own = block.split * block.share, count = block.tokens_of(block.split), first_token = block.first_token + own;
    typename Finish::Loaded loaded[AT_ONCE];
    const auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (begin + i * WARPS < count) loaded[i] = finish.load(first_token + begin + i * WARPS, block.tile);
    };
    load(threadIdx.x / 32);
    if (a.splits > 1) wait(&barriers.received, 0);
    if (a.splits * a.sharers > 1) arrive_in_cluster();
#pragma unroll 1
    for (int begin = threadIdx.x / 32; begin < count; begin += AT_ONCE * WARPS) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int token = begin + i * WARPS;
            if (token >= count) break;
            Part part{};
            float squares = 0;
#pragma unroll 1
            for (int split = 0; split < a.splits; split++) {
                const float* from = sums + (split == block.split ? own + token : TOKENS + split * block.share + token) * SUMS;
                const auto first = *reinterpret_cast<const float2*>(from + Finish::row());
                const auto second = *reinterpret_cast<const float2*>(from + Finish::row() + Finish::SECOND);
                part.first.x += first.x, part.first.y += first.y, part.second.x += second.x, part.second.y += second.y;
                if (Finish::NORMALIZES) squares += from[ROWS];
            }
            if (Finish::NORMALIZES) part.scale(rsqrtf(squares / a.num_columns + a.eps));
            finish.store(a, first_token + token, block.tile, part, loaded[i]);
        }
        load(begin + AT_ONCE * WARPS);
    }
}

template <class Finish>
static __global__ void __launch_bounds__(THREADS, 2)
    product(const __grid_constant__ Matrices matrices, const __grid_constant__ Arguments a, const __grid_constant__ Finish finish) {
    extern __shared__ unsigned char memory[];
    __shared__ Barriers barriers;
    const uint32_t begin = shared_address(memory), ring = (begin + 1023) / 1024 * 1024;  // alignment that TMA's swizzle needs
    float* sums = reinterpret_cast<float*>(memory + (ring - begin));
    const Block block(a);
    if (threadIdx.x == 0) {
        const int warps = Finish::NORMALIZES ? WARPS : MULTIPLIERS;  // that read a buffer
        for (int i = 0; i < STAGES; i++) initialize(barriers.full + i), initialize(barriers.empty + i, warps * a.sharers);
        initialize(&barriers.ready, max(a.splits - 1, 1)), initialize(&barriers.received);
        publish_barriers();
        expect(&barriers.received, (a.splits - 1) * block.tokens_of(block.split) * SUMS_BYTES);
        prefetch(&matrices.tokens), prefetch(&matrices.weight);
    }
    arrive_in_cluster(), wait_for_cluster();  // the barriers are initialized
    if (threadIdx.x >= WARPS * 32) {
        if (threadIdx.x == WARPS * 32) produce(matrices, a, block, ring, barriers);
        __syncwarp();
        if (a.splits * a.sharers > 1) arrive_in_cluster();
    } else {
        wait_for_previous_kernel();
        if (threadIdx.x < MULTIPLIERS * 32) multiply(a, block, ring, sums, barriers);
        else compute_squares<Finish::NORMALIZES>(a, block, ring, sums, barriers);
        exchange(a, block, sums, barriers);
        __syncwarp();
        finish_tokens(a, block, sums, barriers, finish);
    }
    if (a.splits * a.sharers > 1) wait_for_cluster();  // no block ends while others still send sums to it, or arrive at its barriers
}

// --- the host -----------------------------------------------------------------------------------------------------------

static CUresult encode(CUtensorMap* map, const void* matrix, int rows, int columns, int box_rows) {
    const auto encoder = tensor_map_encoder();
    if (!encoder) return CUDA_ERROR_NOT_FOUND;
    const cuuint64_t shape[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)}, strides[1] = {shape[0] * 2};
    const cuuint32_t box[2] = {COLUMNS, static_cast<cuuint32_t>(box_rows)}, ones[2] = {1, 1};
    return encoder(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), shape, strides, box, ones,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <class Finish> static int launch(const void* x, const void* weight, const Arguments& a, const Finish& finish, void* stream) {
    Matrices matrices;
    if (CUresult error = encode(&matrices.tokens, x, a.num_tokens, a.num_columns, TOKENS)) return error;
    const int rows = HALF / a.sharers;  // of a copy
    if (CUresult error = encode(&matrices.weight, weight, a.num_rows, a.num_columns, rows)) return error;
    if (cudaError_t error = cudaFuncSetAttribute(product<Finish>, cudaFuncAttributeMaxDynamicSharedMemorySize, LAUNCH_BYTES)) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = a.splits, attributes[1].val.clusterDim.y = a.sharers, attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    const int token_tiles = (a.num_tokens + TOKENS - 1) / TOKENS;  // rounded up to whole clusters
    config.gridDim = dim3(a.tiles * a.splits, (token_tiles + a.sharers - 1) / a.sharers * a.sharers), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = LAUNCH_BYTES, config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, product<Finish>, matrices, a, finish);
}

#define LAUNCHER(NAME, FINISH)                                                                                       \
    extern "C" int NAME(const void* x, const void* weight, const Arguments* a, const FINISH* finish, void* stream) { \
        return launch(x, weight, *a, *finish, stream);                                                               \
    }
LAUNCHER(launch_qkv_append_64, QkvAppend<64>)
LAUNCHER(launch_qkv_append_128, QkvAppend<128>)
LAUNCHER(launch_gate_up_swiglu, SwiGLU)
LAUNCHER(launch_add_product, AddToResidual)
