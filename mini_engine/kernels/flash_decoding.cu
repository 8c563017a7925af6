// Attention of one query per request over a paged KV cache, for Hopper.
//
// The keys of all requests form one sequence of tiles of 16 keys, ordered by request. The sequence is divided into ranges
// of equal length, and each thread block computes one range for one KV head. So all blocks finish at about the same time,
// whatever the lengths of the requests ("stream-K" of Osama et al. 2023). The blocks of one range are neighbors in the grid.
// CUDA does not specify the order in which blocks start, but in practice neighbors start together, so they read different
// heads of the same pages at about the same time, and these heads are adjacent in memory. The tiles of one request in a
// block's range are one item of the block's work.
//
// In each block, one warp copies the tiles of the range to a ring of buffers in shared memory (TMA). It runs ahead as far
// as the ring has room, even into the next item, so the memory never waits for the computation. The other warps take
// turns: each computes every WARPS-th tile with its own online softmax, and at the end of an item their states are merged.
//
// If SPLIT is not 0, the keys of each request are also cut into splits, at places that depend on its own length alone. Each
// split is an item, ranges begin and end at splits, and results are merged split by split, in order of position. So the result
// of a request has the same bits whatever other requests there are (batch invariance).
//
// With a sliding window, the first tile of a request is the first one that the window reaches; earlier ones are not read.
//
// Keys and values may be stored in e4m3, queries and outputs in bfloat16 or float16. Hopper converts two numbers of e4m3 to
// float16 with one instruction, without rounding, so the products are then computed in float16. Queries in bfloat16 are
// converted, too: without rounding from 2^-14 to 65,504, and smaller ones are rounded to multiples of 2^-24.
//
// A range can start or end inside a request's keys. The block that has the first tile of such a request waits for the
// blocks that continue the request, and merges their results with its own. The wait always ends, because no block has to end
// before another can start: `FlashDecoding` launches at most BLOCKS_PER_SM blocks for each SM, and their registers (the
// kernel's launch bounds) and shared memory (SHARED_BYTES) are limited so that this many fit. (If there are more KV heads than
// that, each head has one range, and no block waits.) The wait is short, because those blocks compute this request first, and
// because the last blocks of the grid take the first range: in practice, blocks with lower indices start earlier.
#include "hopper.cuh"
#include "matrices.cuh"

#include <cstring>

#if IS_BF16
#define DTYPE "bf16"
#else
#define DTYPE "f16"
#endif
#if IS_E4M3
#define PRODUCT_DTYPE "f16"
#else
#define PRODUCT_DTYPE DTYPE
#endif

constexpr int TILE = 16, TILES_PER_PAGE = PAGE_SIZE / TILE, K_STEPS = HEAD_DIM / 16;
constexpr int KV_BYTES = IS_E4M3 ? 1 : 2, LOADS = HEAD_DIM * KV_BYTES / 32;  // bytes of a number; load_matrices for a tile's keys
constexpr int ROW_BYTES = HEAD_DIM * KV_BYTES < 128 ? HEAD_DIM * KV_BYTES : 128, SLICE_BYTES = TILE * ROW_BYTES;
constexpr int SLICES = HEAD_DIM * KV_BYTES / ROW_BYTES;  // a buffer holds the first ROW_BYTES of each key, then the next ones
constexpr int MATRIX_BYTES = SLICES * SLICE_BYTES, STAGE_BYTES = 2 * MATRIX_BYTES;  // keys, then values
// Tiles in e4m3 have half the bytes, so there are twice as many copies in the same time, and two warps take turns at them.
constexpr int PRODUCERS = IS_E4M3 ? 2 : 1;
constexpr int MOST_SPLITS = 64;  // of a request
constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + PRODUCERS * 32, MOST_STAGES = 64;
constexpr int ROW = GROUP * HEAD_DIM;  // queries or outputs of one KV head
constexpr int PARTS = SPLIT ? MOST_SPLITS : 1;  // most results of a range that continue a request
constexpr float INF = __builtin_huge_valf();
static_assert(PAGE_SIZE % TILE == 0 && HEAD_DIM % 64 == 0 && GROUP <= 8 && (WARPS & WARPS - 1) == 0, "not supported");
static_assert(WARPS % PRODUCERS == 0, "one producer fills all tiles of a buffer");

// Maps of one layer's keys and values: [page, head, slice, token, ROW_BYTES].
struct Cache {
    CUtensorMap keys, values;
};

struct Arguments {
    const uint16_t* q;       // [requests, heads, HEAD_DIM]
    uint16_t* out;           // same shape, contiguous
    const int4* ranges;      // [ranges, 2] see Range
    const int2* requests;    // [requests] number of keys, first entry in `pages`
    const int32_t* pages;
    float *partials, *lse;   // [ranges, PARTS, heads, ROW], [ranges, PARTS, heads, GROUP] results of items that continue a request
    uint32_t* arrived;       // [ranges, heads] number of finished blocks that continue a range's last item; 0 between launches
    float* out_lse;          // [requests, heads, GROUP] base-2 logarithms of the sums of the weights; null: not wanted
    int64_t q_stride;        // between requests, in elements
    float scale, v_scale;    // of the scores, times log2(e); of the values
    float cap_scale;         // with a soft-cap: factor on the products, see `capped`; `scale` is then the cap, times log2(e)
    int kv_heads;
};

// The shared memory of a block, besides the ring.
struct Shared {
    float states[2][WARPS][GROUP][HEAD_DIM + 4];  // of this item and the previous one; the gap puts rows in different banks
    float maxima[2][WARPS][GROUP], sums[2][WARPS][GROUP];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
    uint64_t continued;  // completed when the ranges that continue the last item are done
};

constexpr int SHARED_BYTES = (228 / BLOCKS_PER_SM - 1) * 1024 - 1024;  // minus what the launch and the alignment need
constexpr int STAGES_THAT_FIT = (SHARED_BYTES - static_cast<int>(sizeof(Shared))) / STAGE_BYTES;
// A multiple of WARPS, so that one warp computes all tiles of a buffer and cannot mistake one of them for the next.
constexpr int STAGES = (STAGES_THAT_FIT < MOST_STAGES ? STAGES_THAT_FIT : MOST_STAGES) / WARPS * WARPS;
constexpr int LAUNCH_BYTES = 1024 + STAGES * STAGE_BYTES + static_cast<int>(sizeof(Shared));
static_assert(STAGES > 0, "too large");
// An SM of Hopper has 228 KiB, and 1 KiB of it is reserved for each block.
static_assert(BLOCKS_PER_SM * (LAUNCH_BYTES + 1024) <= 228 * 1024, "blocks that wait for each other must fit at the same time");

// --- instructions -------------------------------------------------------------------------------------------------------

// Copy a tile of one head to shared memory.
__device__ inline void copy_tile(uint32_t to, const CUtensorMap* map, int page, int head, int token, uint64_t* barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %2, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(0), "r"(token), "r"(head), "r"(page), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." PRODUCT_DTYPE "." PRODUCT_DTYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn." PRODUCT_DTYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline uint16_t round_output(float x) {
    uint16_t y;
    asm("cvt.rn." DTYPE ".f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Convert four numbers of e4m3 to two pairs of float16.
__device__ inline void widen(uint32_t& low, uint32_t& high, uint32_t four) {
    asm("{\n.reg .b16 two, others;\nmov.b32 {two, others}, %2;\ncvt.rn.f16x2.e4m3x2 %0, two;\ncvt.rn.f16x2.e4m3x2 %1, others;\n}\n"
        : "=r"(low), "=r"(high) : "r"(four));
}

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh(x / (2 log2(e))), with an error of about 2^-22. That of tanh.approx is 2^-11, and the cap would multiply it.
__device__ inline float capped(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + exp2_of(x)));
    return 1 - 2 * inverse;
}

__device__ inline void add_release(uint32_t* to) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory"); }

__device__ inline uint32_t load_acquire(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// The kernel may start before the previous one has ended, and lets the next one do the same. Before this wait it reads only
// the step's plan and keys of earlier steps: queries and the step's own keys may still be written.
__device__ inline void wait_for_inputs() { wait_for_previous_kernel(), let_next_kernel_start(); }

// --- the work -----------------------------------------------------------------------------------------------------------

// A range of the sequence of tiles, as planned by the host.
struct alignas(16) Range {
    int row, tile, tiles, num_keys;     // request and tile that it starts with; its number of tiles; keys of its first request
    int first_page, owner, last;        // of that request, in `pages`; range with its first tile; range with the last request's last tile
    int last_is_new;                    // whether only the last key of each request is of this step
};

// Whether a request's query attends to a key; both arguments are counted from the same key.
__device__ inline bool is_attended(int key, int num_keys) { return key < num_keys && (WINDOW == 0 || key >= num_keys - WINDOW); }

// The first tile of a request that has such keys.
__device__ inline int first_tile(int num_keys) { return WINDOW ? max(num_keys - WINDOW, 0) / TILE : 0; }

// Tiles of a split: SPLIT, or more for long requests.
__device__ inline int split_tiles(int num_keys) {
    if (!SPLIT) return 1 << 30;
    const int tiles = (num_keys + TILE - 1) / TILE - first_tile(num_keys);
    return max(SPLIT, (tiles + MOST_SPLITS - 1) / MOST_SPLITS);
}

// The work of a block: one range for one KV head.
struct Block {
    Range range;
    int index, head, heads;  // number of the range; KV head; number of KV heads

    __device__ explicit Block(const Arguments& a) {
        const int place = gridDim.x - 1 - blockIdx.x;
        heads = a.kv_heads, index = place / heads, head = place % heads;
        reinterpret_cast<int4*>(&range)[0] = a.ranges[2 * index], reinterpret_cast<int4*>(&range)[1] = a.ranges[2 * index + 1];
    }
    __device__ int at(int range) const { return range * heads + head; }  // index of this head's part of a range
    __device__ int at(int range, int part) const { return at(range * PARTS + part); }  // of its results
};

// The current item of a block; `advance` goes on to the next one.
struct Item {
    int row, tile, left;       // request and first tile of the item; tiles from there to the end of the range
    int num_keys, first_page;  // of the request

    __device__ explicit Item(const Range& range)
        : row(range.row), tile(range.tile), left(range.tiles), num_keys(range.num_keys), first_page(range.first_page) {}
    __device__ int to_end() const { return (num_keys + TILE - 1) / TILE - tile; }
    __device__ int tiles() const { return min(min(left, to_end()), split_tiles(num_keys)); }
    __device__ bool starts() const { return tile == first_tile(num_keys); }  // the request
    __device__ bool ends() const { return to_end() == tiles(); }
    __device__ bool is_last_here() const { return ends() || left == tiles(); }  // of the request's items in this range
    __device__ void advance(const Arguments& a) {
        const int count = tiles(), is_inside = !ends();
        left -= count, tile += count;
        if (!left || is_inside) return;
        row++;
        const int2 request = a.requests[row];
        num_keys = request.x, first_page = request.y, tile = first_tile(num_keys);
    }
};

struct Stage {
    int index;
    uint32_t phase;
    __device__ explicit Stage(int position) : index(position % STAGES), phase(position / STAGES & 1) {}
};

// Copy all tiles of the range to the ring; if there are two such warps, each copies every second tile. A warp loads 32 page
// numbers at a time, and one thread starts the copies.
// It can copy tiles of earlier steps while the previous kernel still computes this step's queries and keys.
// After the last copy, one thread waits for the ranges that continue the last item, while the other warps still compute.
__device__ inline void produce(const Arguments& a, const Cache& cache, const Block& block, uint32_t ring, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - WARPS;
    const uint64_t policy = read_once();
    int position = 0;  // of the item's first tile in the range
    bool owns = false;  // the item's request begins in this range
    bool has_waited = false;
    const auto wait_once = [&] {
        if (!has_waited) wait_for_inputs(), has_waited = true;
    };
#pragma unroll 1
    for (Item item(block.range); item.left; item.advance(a)) {
        const int count = item.tiles(), skipped = warp - position & PRODUCERS - 1;
#pragma unroll 1
        for (int first = 0; first < count; first += 32) {
            const int own = item.tile + first + lane;
            const int own_page = first + lane < count ? a.pages[item.first_page + own / TILES_PER_PAGE] : 0;
#pragma unroll 1
            for (int i = skipped; i < min(32, count - first); i += PRODUCERS) {
                if (!block.range.last_is_new || first + i + 1 == item.to_end()) wait_once();
                const int page = __shfl_sync(~0u, own_page, i), token = (item.tile + first + i) % TILES_PER_PAGE * TILE;
                if (lane) continue;
                const Stage stage(position + first + i);
                const uint32_t to = ring + stage.index * STAGE_BYTES;
                wait(shared.empty + stage.index, stage.phase ^ 1);
                expect(shared.full + stage.index, STAGE_BYTES);
                copy_tile(to, &cache.keys, page, block.head, token, shared.full + stage.index, policy);
                copy_tile(to + MATRIX_BYTES, &cache.values, page, block.head, token, shared.full + stage.index, policy);
            }
        }
        position += count, owns |= item.starts();
        if (owns && !item.ends() && item.is_last_here() && lane == 0 && warp == 0) {
            wait_once();
            uint32_t* arrived = a.arrived + block.at(block.index);
            while (load_acquire(arrived) != block.range.last - block.index) {}
            *arrived = 0;
            arrive(&shared.continued);
        }
    }
}

// --- attention ----------------------------------------------------------------------------------------------------------

// A thread's part of an item's queries, as second operands of multiply_accumulate: columns are queries, and rows are
// dimensions. Columns beyond the group repeat its last query, and their results are not read. With keys in e4m3, the order of
// every 16 dimensions is that of the keys: four adjacent ones take the place of two and of the two that are eight further on.
struct Queries {
    uint32_t parts[K_STEPS][2];

    __device__ void load(const Arguments& a, int row, int head) {
        const int lane = threadIdx.x % 32, query = min(lane / 4, GROUP - 1);
        const auto* from = reinterpret_cast<const uint32_t*>(a.q + row * a.q_stride + head * ROW + query * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < K_STEPS; i++) {
            if (IS_E4M3) {
                const uint2 four = reinterpret_cast<const uint2*>(from)[4 * i + lane % 4];
                parts[i][0] = four.x, parts[i][1] = four.y;
            } else {
                parts[i][0] = from[8 * i + lane % 4], parts[i][1] = from[8 * i + 4 + lane % 4];
            }
        }
    }

    // Convert the loaded queries to the dtype of the products. Separate from `load`, which does not wait for the memory.
    __device__ void convert() {
        if constexpr (IS_BF16 && IS_E4M3) {
#pragma unroll
            for (int i = 0; i < 2 * K_STEPS; i++) {
                uint32_t& pair = parts[i / 2][i % 2];
                pair = pack(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
            }
        }
    }
};

// Where TMA stores part i (16 bytes) of a key in a buffer. In rows of 128 bytes, part i of row r is at position i ^ r % 8, and
// in rows of 64 bytes at position i ^ r / 2 % 4. So the same part of eight keys is in different banks.
__device__ inline uint32_t offset_of(int key, int i) {
    constexpr int PARTS = ROW_BYTES / 16;
    return i / PARTS * SLICE_BYTES + key * ROW_BYTES + (i % PARTS ^ key * ROW_BYTES / 128 % PARTS) * 16;
}

// A warp's online softmax over its tiles of an item. A thread holds two queries, 2 * (lane % 4) and the next
// one. Of every 16 keys or dimensions of each, it holds numbers lane / 4 and lane / 4 + 8; but with values in e4m3, dimensions
// lane / 4 * 2 and the next one.
struct State {
    float out[K_STEPS][4] = {};  // transposed: rows are dimensions, columns are queries
    float best[2] = {-INF, -INF}, sum[2] = {};

    // Add the tile at the shared address `keys`; `num_keys` is the request's number of keys, counted from the tile's first one.
    __device__ void attend(const Arguments& a, const Queries& queries, uint32_t keys, int num_keys) {
        const int lane = threadIdx.x % 32;
        float two[2][4] = {};  // two sums, each over every second step
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            uint32_t loaded[4];
            load_matrices(loaded, keys + offset_of(lane % 16, 2 * i + lane / 16));
            if constexpr (IS_E4M3) {
#pragma unroll
                for (int j = 0; j < 2; j++) {  // 16 dimensions
                    uint32_t wide[4];
                    widen(wide[0], wide[2], loaded[2 * j]), widen(wide[1], wide[3], loaded[2 * j + 1]);
                    multiply_accumulate(two[j], wide, queries.parts[2 * i + j]);
                }
            } else {
                multiply_accumulate(two[i % 2], loaded, queries.parts[i]);
            }
        }
        float scores[2][2], shrink[2];  // by key and query; by query
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float score = two[0][i] + two[1][i];
            scores[i / 2][i % 2] = !is_attended(lane / 4 + i / 2 * 8, num_keys) ? -INF : SOFTCAP ? capped(score * a.cap_scale) : score;
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float most = fmaxf(scores[0][j], scores[1][j]);
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
            most = fmaxf(most, best[j]);
            shrink[j] = exp2_of((best[j] - most) * a.scale), best[j] = most;
#pragma unroll
            for (int i = 0; i < 2; i++) scores[i][j] = exp2_of((scores[i][j] - most) * a.scale);
            sum[j] = sum[j] * shrink[j] + scores[0][j] + scores[1][j];
        }
        // Transpose the weights, whose rows are keys and columns are queries, for the product with the values.
        const uint32_t weights[2] = {transpose(pack(scores[0][0], scores[0][1])), transpose(pack(scores[1][0], scores[1][1]))};
        // Masks the values of two keys each: missing keys have weight 0, but their values may be NaN. (Those before a window were
        // written and are finite.) With e4m3, four bytes hold two dimensions of one key, then of the next one: `exists` sorts the
        // bytes by dimension, and takes 0 (byte 4) for missing keys.
        uint32_t exists[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from_here = num_keys - lane % 4 * 2 - i * 8;
            if (IS_E4M3) exists[i] = from_here > 1 ? 0x3120 : from_here == 1 ? 0x4140 : 0x4444;
            else exists[i] = from_here > 1 ? ~0u : from_here == 1 ? 0xffffu : 0;
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            uint32_t loaded[4];
            load_transposed(loaded, keys + MATRIX_BYTES + offset_of(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
            if constexpr (IS_E4M3) {
#pragma unroll
                for (int j = 0; j < 2; j++) {  // 16 dimensions
                    uint32_t wide[4];
                    widen(wide[0], wide[1], __byte_perm(loaded[j], 0, exists[0]));
                    widen(wide[2], wide[3], __byte_perm(loaded[j + 2], 0, exists[1]));
                    accumulate(2 * i + j, wide, weights, shrink);
                }
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) loaded[j] &= exists[j / 2];
                accumulate(i, loaded, weights, shrink);
            }
        }
    }

    // Add the weighted values of 16 dimensions to the rescaled sums.
    __device__ void accumulate(int i, const uint32_t (&values)[4], const uint32_t (&weights)[2], const float (&shrink)[2]) {
#pragma unroll
        for (int j = 0; j < 4; j++) out[i][j] *= shrink[j % 2];
        multiply_accumulate(out[i], values, weights);
    }

    // Write the state to shared memory for the merge; `warp` is the warp's place there.
    __device__ void store(Shared& shared, int buffer, int warp) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int query = lane % 4 * 2 + j;
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], mask);
            if (query >= GROUP) continue;
#pragma unroll
            for (int i = 0; i < 2 * K_STEPS; i++) {
                const int dimension = i / 2 * 16 + (IS_E4M3 ? lane / 4 * 2 + i % 2 : i % 2 * 8 + lane / 4);
                shared.states[buffer][warp][query][dimension] = out[i / 2][i % 2 * 2 + j];
            }
            if (lane < 4) shared.maxima[buffer][warp][query] = best[j], shared.sums[buffer][warp][query] = sum[j];
        }
    }
};

// A normalized output in one dimension, and the base-2 logarithm of the sum of the weights.
struct Result {
    float value, lse;
};

__device__ inline Result merge_warps(const Shared& shared, int buffer, int query, int dimension, float scale) {
    float most = -INF, all = 0, value = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) most = fmaxf(most, shared.maxima[buffer][warp][query]);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        const float weight = exp2_of((shared.maxima[buffer][warp][query] - most) * scale);
        all += weight * shared.sums[buffer][warp][query], value += weight * shared.states[buffer][warp][query][dimension];
    }
    return {__fdividef(value, all), most * scale + __log2f(all)};
}

// The results of a request's items, merged in order.
struct Merged {
    float most = -INF, all = 0, value = 0;

    __device__ void add(Result next) {
        const float larger = fmaxf(most, next.lse), shrink = exp2_of(most - larger), weight = exp2_of(next.lse - larger);
        most = larger, all = all * shrink + weight, value = value * shrink + weight * next.value;
    }
    __device__ Result result() const { return {__fdividef(value, all), most + __log2f(all)}; }
};

constexpr int AT_ONCE = 16;  // results that are loaded at a time

// Add the results of other ranges in dimension i of a row of results, `count` of them from `begin` on.
template <typename At> __device__ inline void add_results(const Arguments& a, Merged& merged, int i, int begin, int count, At at) {
#pragma unroll 1
    for (int first = begin; first < begin + count; first += AT_ONCE) {
        Result results[AT_ONCE];
        float most = merged.most;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const bool exists = first + j < begin + count;
            results[j].lse = exists ? __ldcg(a.lse + at(first + j) * GROUP + i / HEAD_DIM) : -INF;
            results[j].value = exists ? __ldcg(a.partials + at(first + j) * ROW + i) : 0;
        }
        if constexpr (SPLIT > 0) {  // one by one, so that it does not matter which of them are loaded together
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (first + j < begin + count) merged.add(results[j]);
        } else {
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) most = fmaxf(most, results[j].lse);
            const float shrink = exp2_of(merged.most - most);
            merged.most = most, merged.all *= shrink, merged.value *= shrink;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const float weight = exp2_of(results[j].lse - most);
                merged.all += weight, merged.value += weight * results[j].value;
            }
        }
    }
}

// Add the results of the ranges that continue a request, `left` tiles of it.
__device__ inline void add_ranges(const Arguments& a, const Block& block, Merged& merged, int i, int left, int split) {
    if constexpr (SPLIT == 0) {
        add_results(a, merged, i, block.index + 1, block.range.last - block.index, [&](int range) { return block.at(range); });
    } else {
#pragma unroll 1
        for (int range = block.index + 1; range <= block.range.last; range++) {
            const int tiles = min(left, a.ranges[2 * range].z);
            add_results(a, merged, i, 0, (tiles + split - 1) / split, [&](int part) { return block.at(range, part); });
            left -= tiles;
        }
    }
}

constexpr int OWN = (ROW + CONSUMERS - 1) / CONSUMERS;  // results of a thread

// Merge the states of the warps. If the request begins in this range, add the result to the others of the request, and after its
// last item here also those of the ranges that continue it. Otherwise store the result for the range that has the first tile.
__device__ inline void finish(
    const Arguments& a, const Block& block, const Item& item, Shared& shared, int buffer, Merged (&merged)[OWN], bool owns, int part) {
    const int left = item.to_end() - item.tiles();
    const bool is_last_here = item.is_last_here();
    if (owns && left && is_last_here) wait(&shared.continued, 0);
    const int place = block.at(block.index, part);
    const int64_t out = static_cast<int64_t>(item.row) * block.heads + block.head;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int i = threadIdx.x + j * CONSUMERS, query = i / HEAD_DIM;
        if (ROW % CONSUMERS && i >= ROW) break;
        const Result own = merge_warps(shared, buffer, query, i % HEAD_DIM, a.scale);
        if (!owns) {
            a.partials[place * ROW + i] = own.value;
            if (i % HEAD_DIM == 0) a.lse[place * GROUP + query] = own.lse;
            continue;
        }
        if (item.starts()) merged[j] = Merged();
        merged[j].add(own);
        if (!is_last_here) continue;
        if (left) add_ranges(a, block, merged[j], i, left, split_tiles(item.num_keys));
        const Result result = merged[j].result();
        a.out[out * ROW + i] = round_output(result.value * a.v_scale);
        if (a.out_lse && i % HEAD_DIM == 0) a.out_lse[out * GROUP + query] = result.lse;
    }
    if (!owns && is_last_here) {
        sync_consumers();
        if (threadIdx.x == 0) add_release(a.arrived + block.at(block.range.owner));
    }
}

__device__ inline void consume(const Arguments& a, const Block& block, uint32_t ring, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int position = 0, buffer = 0;  // of the item's first tile in the range; buffer of the item's states
    int part = 0;                  // number of the item in the range
    bool owns = false;             // its request begins in this range
    Item item(block.range);
    Merged merged[OWN];
    wait_for_inputs();
    Queries queries;
    queries.load(a, item.row, block.head);
#pragma unroll 1
    while (item.left) {
        Item next = item;
        Queries next_queries;
        next.advance(a);
        if (next.left) next_queries.load(a, next.row, block.head);  // loads while this item is computed
        queries.convert();
        State state;
        const int end = position + item.tiles();
#pragma unroll 1
        for (int i = position + (warp - position & WARPS - 1); i < end; i += WARPS) {
            const Stage stage(i);
            wait(shared.full + stage.index, stage.phase);
            state.attend(a, queries, ring + stage.index * STAGE_BYTES, item.num_keys - (item.tile + i - position) * TILE);
            __syncwarp();
            if (lane == 0) arrive(shared.empty + stage.index);
        }
        owns |= item.starts();
        state.store(shared, buffer, warp - position & WARPS - 1);  // the warps in the order of their first tiles
        sync_consumers();  // from here on, all warps have finished reading the other buffer
        finish(a, block, item, shared, buffer, merged, owns, part++);
        position = end, buffer ^= 1, item = next, queries = next_queries;
    }
}

static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_decoding(const __grid_constant__ Cache cache, const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    const uint32_t begin = shared_address(memory), ring = (begin + 1023) / 1024 * 1024;  // alignment that TMA's swizzle needs
    Shared& shared = *reinterpret_cast<Shared*>(memory + (ring - begin) + STAGES * STAGE_BYTES);
    if (threadIdx.x < STAGES) {
        initialize(shared.full + threadIdx.x), initialize(shared.empty + threadIdx.x);
        if (threadIdx.x == 0) initialize(&shared.continued), prefetch(&cache.keys), prefetch(&cache.values);
        publish_barriers();
    }
    const Block block(a);
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) produce(a, cache, block, ring, shared);
    else consume(a, block, ring, shared);
}

// --- the host -----------------------------------------------------------------------------------------------------------

static CUresult encode(CUtensorMap* map, void* pages, const int64_t (&sizes)[2], const int64_t (&strides)[3]) {
    const auto encoder = tensor_map_encoder();
    if (!encoder) return CUDA_ERROR_NOT_FOUND;
    // The axes are elements, tokens, slices, heads and pages; strides are in bytes, for all axes but the first.
    const cuuint64_t shape[5] = {ROW_BYTES / KV_BYTES, PAGE_SIZE, SLICES, static_cast<cuuint64_t>(sizes[1]),
                                 static_cast<cuuint64_t>(sizes[0])};
    const cuuint64_t steps[4] = {static_cast<cuuint64_t>(strides[1] * KV_BYTES), ROW_BYTES,
                                 static_cast<cuuint64_t>(strides[2] * KV_BYTES), static_cast<cuuint64_t>(strides[0] * KV_BYTES)};
    const cuuint32_t box[5] = {ROW_BYTES / KV_BYTES, TILE, SLICES, 1, 1}, ones[5] = {1, 1, 1, 1, 1};
    const auto dtype = IS_E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                       : IS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    // No L2 promotion: with it, copying the first half of a row also fetched the second half, and the kernel was slower.
    return encoder(map, dtype, 5, pages, shape, steps, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   ROW_BYTES == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Create the maps of one layer, and raise the kernel's shared memory limit.
extern "C" int prepare_flash_decoding(void* to, void* keys, void* values, const int64_t (&sizes)[2], const int64_t (&strides)[3]) {
    Cache cache;
    if (CUresult error = encode(&cache.keys, keys, sizes, strides)) return error;
    if (CUresult error = encode(&cache.values, values, sizes, strides)) return error;
    memcpy(to, &cache, sizeof cache);
    return cudaFuncSetAttribute(flash_decoding, cudaFuncAttributeMaxDynamicSharedMemorySize, LAUNCH_BYTES);
}

extern "C" int launch_flash_decoding(const void* maps, const Arguments* arguments, int ranges, void* stream) {
    Cache cache;  // aligned
    memcpy(&cache, maps, sizeof cache);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ranges * arguments->kv_heads), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = LAUNCH_BYTES;
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, flash_decoding, cache, *arguments);
}
