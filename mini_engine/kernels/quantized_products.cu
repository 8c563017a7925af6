// Products of a few tokens with a quantized matrix, each with the work after it, for Hopper.
//
// For few tokens, a product is a read of its weight. So the warps of a block read different columns of the same rows, each into
// a ring of its own in shared memory (bulk copies), which it fills as far ahead as there is room, even with the block's next
// rows. A warp converts the numbers to bfloat16 and multiplies them on the tensor cores, weight times tokens, because these
// take 16 rows of the first operand and only 8 columns of the second, and tokens are few. The sums of all warps are added up
// in shared memory.
//
// Scales are applied to sums: those of rows at the end, those of groups of columns after two tiles. If a group is narrower than
// that, they are applied to numbers. The tensor cores also compute the sum of the tokens' numbers, by which the offset of a
// group is multiplied, and the sum of squares that a norm needs: the diagonal of tokens times tokens.
//
// With one token, instructions take longer than the bytes: with INT4, the kernel takes 1.4 times as long as one that only
// copies. So what is the same for all strips, the sums of the tokens' numbers, is computed once and kept, and a chunk's tokens
// are loaded into the registers of the chunk before it as soon as that has been multiplied.
//
// The kernel may start while the previous one still runs. Then it fills its rings with weights, which no kernel of a step
// writes.
#include <type_traits>
#include "hopper.cuh"
#include "quantized.cuh"

constexpr Kind KIND = static_cast<Kind>(WEIGHT_KIND);
// A scale for each row, or a scale and an offset for groups of columns: narrow ones, or as wide as two tiles or more.
enum Groups { NONE, NARROW, WIDE };
constexpr Groups GROUPS = static_cast<Groups>(WEIGHT_GROUPS);
// Whether the sums of the tokens' numbers are needed: for offsets, and for what INT4 is too large.
constexpr bool USES_SUMS = GROUPS == WIDE || (KIND == INT4 && GROUPS == NONE);
constexpr int WARPS = 8, THREADS = WARPS * 32, TILE_BYTES = 32 * Tile<KIND>::BYTES;

enum Work { STORE, ADD, SWIGLU };

struct Arguments {
    const uint16_t* tokens;       // [num_tokens, num_columns]
    const uint16_t* norm_weight;  // [num_columns], or null
    const unsigned char* weight;
    const void* scales;           // float [num_rows], or with groups uint32_t [strips, groups, TILE_ROWS]: pairs of scale and offset
    uint16_t* out;                // [num_tokens, rows of the result]
    int num_tokens, num_rows, num_columns;
    int half_rows;                // from a row of a tile's first half to the same row of its second half
    int log2_group, work;         // base-2 logarithm of the columns of a group
    float eps;                    // of the norm; negative: the tokens are not normalized
};

// --- instructions -------------------------------------------------------------------------------------------------------

__device__ inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void copy(uint32_t to, const void* from, int bytes, uint64_t* barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// Load eight registers, or leave them as they are.
__device__ inline void load_eight_if(bool condition, uint32_t (&to)[8], const void* from) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %8, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%9];\n"
        "@p ld.global.v4.u32 {%4, %5, %6, %7}, [%9 + 16];\n}\n"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]), "+r"(to[4]), "+r"(to[5]), "+r"(to[6]), "+r"(to[7])
        : "r"(static_cast<uint32_t>(condition)), "l"(from));
}

__device__ inline float to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

__device__ inline uint16_t to_bf16(float x) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// --- the weight ---------------------------------------------------------------------------------------------------------

// A strip is 16 rows of the weight: 8 neighbors, and the 8 that are half_rows further on.
struct Weight {
    const Arguments& a;
    int num_strips, num_tiles, lane = threadIdx.x % 32;

    __device__ explicit Weight(const Arguments& a) : a(a) {
        const int block_rows = 2 * a.half_rows;  // the strips of a block of rows are made of its two halves
        num_strips = (a.num_rows + block_rows - 1) / block_rows * (a.half_rows / 8);
        num_tiles = (a.num_columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    }

    // The row that is number r of a strip.
    __device__ int row(int strip, int r) const {
        const int strips = a.half_rows / 8;
        return strip / strips * 2 * a.half_rows + r / 8 * a.half_rows + strip % strips * 8 + r % 8;
    }

    __device__ const unsigned char* at(int strip, int tile) const {
        return a.weight + (static_cast<int64_t>(strip) * num_tiles + tile) * TILE_BYTES;
    }

    // The pairs of scale and offset of rows g and g + 8 for this lane's columns of a tile.
    __device__ uint2 load_scales(int strip, int tile) const {
        const int groups = ((a.num_columns - 1) >> a.log2_group) + 1;
        const int column = tile * TILE_COLUMNS + (GROUPS == WIDE ? 0 : lane % 4 * 16);
        const int group = min(column >> a.log2_group, groups - 1);
        const uint32_t* from = static_cast<const uint32_t*>(a.scales) + (strip * groups + group) * TILE_ROWS + lane / 4;
        return {__ldg(from), __ldg(from + 8)};
    }
};

// A warp's ring. A stage has a chunk of TILES neighboring tiles of each strip; the warps take turns with chunks.
template <int STRIPS, int TILES, int BYTES> struct Ring {
    static constexpr int CHUNK = TILES, CHUNK_BYTES = TILES * TILE_BYTES, STAGE_BYTES = STRIPS * CHUNK_BYTES;
    static constexpr int STAGES = BYTES / WARPS / STAGE_BYTES;
    static_assert(STAGES > 0);

    unsigned char* memory;
    uint64_t* full;  // [STAGES]
    uint64_t policy = read_once();
    const unsigned char* from;                   // the strips that are copied next
    int offset, strip_bytes, strip, num_strips;  // in them; size of a strip; number of the first one; of all

    __device__ Ring(const Weight& weight, unsigned char* memory, uint64_t* full)
        : memory(memory), full(full), from(weight.at(blockIdx.x * STRIPS, 0)), offset(threadIdx.x / 32 * CHUNK_BYTES),
          strip_bytes(weight.num_tiles * TILE_BYTES), strip(blockIdx.x * STRIPS), num_strips(weight.num_strips) {
        if (offset >= strip_bytes) strip = num_strips;  // there is no chunk for this warp
    }

    // Copy the next chunk (one thread).
    __device__ void fill(int stage) {
        if (strip >= num_strips) return;
        const int bytes = min(CHUNK_BYTES, strip_bytes - offset);
        expect(full + stage, STRIPS * bytes);
#pragma unroll
        for (int i = 0; i < STRIPS; i++)  // beyond the last strip, it is copied again
            copy(shared_address(memory + stage * STAGE_BYTES + i * CHUNK_BYTES),
                 from + (i == 0 ? 0 : min(i, num_strips - 1 - strip) * strip_bytes) + offset, bytes, full + stage, policy);
        offset += WARPS * CHUNK_BYTES;
        if (offset < strip_bytes) return;
        const int step = gridDim.x * STRIPS;
        offset = threadIdx.x / 32 * CHUNK_BYTES, strip += step, from += static_cast<int64_t>(step) * strip_bytes;
    }

    __device__ Tile<KIND> tile(int stage, int strip, int i) const {
        const auto* from = reinterpret_cast<const uint4*>(memory + stage * STAGE_BYTES + (strip * TILES + i) * TILE_BYTES);
        Tile<KIND> tile;
#pragma unroll
        for (int j = 0; j < Tile<KIND>::VECTORS; j++) tile.vectors[j] = from[threadIdx.x % 32 * Tile<KIND>::VECTORS + j];
        return tile;
    }
};

// --- the product --------------------------------------------------------------------------------------------------------

__device__ __align__(16) const uint16_t zeros[16] = {};

// A lane's part of the tokens for a tile: token g of every eight, and 16 columns of it.
template <int EIGHTS> struct Tokens {
    uint32_t pairs[EIGHTS][8];

    // Load a tile's part. Tokens that do not exist keep the zeros that they had at the start. If not IS_WHOLE, columns may not
    // exist, and they are zeros, too.
    template <bool IS_WHOLE> __device__ void load(const Arguments& a, int tile) {
        const int lane = threadIdx.x % 32, column = tile * TILE_COLUMNS + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const int token = i * 8 + lane / 4;
            const void* from = IS_WHOLE || column < a.num_columns ? a.tokens + (token * a.num_columns + column) : zeros;
            load_eight_if(token < a.num_tokens, pairs[i], from);
        }
    }

    // Add up the numbers of each token: products with a matrix of ones.
    __device__ void add_numbers(float (&sums)[EIGHTS][4]) const {
        constexpr uint32_t ONES = 0x3f803f80u;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int step = 0; step < STEPS_OF_TILE; step++)
                multiply_accumulate(sums[i], {ONES, ONES, ONES, ONES}, pairs[i][2 * step], pairs[i][2 * step + 1]);
        }
    }

    // Add products of the tokens with each other: of every eight tokens, the squares are on the diagonal.
    __device__ void add_squares(float (&squares)[EIGHTS][4]) const {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int step = 0; step < STEPS_OF_TILE; step++) {
                const uint32_t first = pairs[i][2 * step], second = pairs[i][2 * step + 1];
                multiply_accumulate(squares[i], {first, 0, second, 0}, first, second);
            }
        }
    }

    __device__ void apply_norm_weight(const Arguments& a, int tile) {
        const int column = tile * TILE_COLUMNS + threadIdx.x % 4 * 16;
        if (column >= a.num_columns) return;
        const uint4* from = reinterpret_cast<const uint4*>(a.norm_weight + column);
        const uint4 first = __ldg(from), second = __ldg(from + 1);
        const uint32_t weights[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) pairs[i][j] = multiply_pairs(pairs[i][j], weights[j]);
        }
    }
};

// Scale this lane's part of a step: rows g, g + 8, g, g + 8.
__device__ inline void scale_numbers(uint32_t (&numbers)[4], uint2 scales) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t pair = i % 2 ? scales.y : scales.x;
        numbers[i] = multiply_add_pairs(numbers[i], __byte_perm(pair, pair, 0x1010), __byte_perm(pair, pair, 0x3232));
    }
}

// Convert this lane's part of a step, as far as the sums do not make up for it.
__device__ inline void convert(const Tile<KIND>& tile, int step, uint2 scales, uint32_t (&numbers)[4]) {
    tile.convert<USES_SUMS>(step, numbers);
#pragma unroll
    for (int i = 0; KIND == FP8 && i < 4; i++) numbers[i] = multiply_pairs(numbers[i], FP8_FACTOR);
    if constexpr (GROUPS == NARROW) scale_numbers(numbers, scales);
}

template <int STRIPS, int EIGHTS> struct Sums {
    static constexpr int ROWS = STRIPS * TILE_ROWS, GAP = ROWS + 4;  // the gap puts tokens in different banks
    float products[WARPS][EIGHTS * 8][GAP];

    __device__ void store(const float (&own)[STRIPS][EIGHTS][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int j = 0; j < STRIPS; j++) {
#pragma unroll
                for (int k = 0; k < 4; k++) products[warp][i * 8 + 2 * t + k % 2][j * TILE_ROWS + g + k / 2 * 8] = own[j][i][k];
            }
        }
    }

    __device__ float2 of_rows(int token, int row) const {  // and of the row of the other half
        float2 all{};
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) all.x += products[warp][token][row], all.y += products[warp][token][row + 8];
        return all;
    }
};

// The sum of squares of each token, in the columns of each warp.
template <int EIGHTS> struct Squares {
    float squares[WARPS][EIGHTS * 8];

    __device__ void store(const float (&own)[EIGHTS][4]) {
        const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++)
            if (g / 2 == lane % 4) squares[threadIdx.x / 32][i * 8 + g] = g % 2 ? own[i][1] : own[i][0];
    }

    __device__ float norm_factor(const Arguments& a, int token) const {
        float all = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) all += squares[warp][token];
        return rsqrtf(all / a.num_columns + a.eps);
    }
};

// The work after the product, for all tokens and pairs of rows of some strips.
template <int STRIPS, int EIGHTS>
__device__ inline void finish(
    const Arguments& a, const Weight& weight, const Sums<STRIPS, EIGHTS>& sums, const Squares<EIGHTS>& squares, int strip) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a.num_tokens * STRIPS * 8; i += THREADS) {
        const int token = i / (STRIPS * 8), own = strip + i / 8 % STRIPS, row = weight.row(own, i % 8), other = row + a.half_rows;
        if (own >= weight.num_strips || row >= a.num_rows) continue;
        float2 product = sums.of_rows(token, i / 8 % STRIPS * TILE_ROWS + i % 8);
        const bool has_other = other < a.num_rows;
        const float factor = a.eps < 0 ? 1.0f : squares.norm_factor(a, token);
        const float* scales = static_cast<const float*>(a.scales);
        product.x *= GROUPS != NONE ? factor : factor * __ldg(scales + row);
        product.y *= GROUPS != NONE || !has_other ? factor : factor * __ldg(scales + other);
        if (a.work == SWIGLU) {
            const float activated = __fdividef(product.x, 1 + __expf(-product.x)) * product.y;
            a.out[static_cast<int64_t>(token) * (a.num_rows / 2) + row] = to_bf16(activated);
            continue;
        }
        uint16_t* to = a.out + static_cast<int64_t>(token) * a.num_rows;
        if (a.work == ADD) product.x += to_float(to[row]), product.y += has_other ? to_float(to[other]) : 0;
        to[row] = to_bf16(product.x);
        if (has_other) to[other] = to_bf16(product.y);
    }
}

// Add the product of a group's numbers, times their scale, and their offset times the sum of the tokens' numbers.
template <int EIGHTS>
__device__ inline void add_group(float (&to)[EIGHTS][4], const float (&of_group)[EIGHTS][4], const float (&sums)[EIGHTS][4], uint2 scales) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t pair = half ? scales.y : scales.x;
        const float scale = low_of(pair), offset = high_of(pair) - (KIND == INT4 ? INT4_BIAS * scale : 0);
#pragma unroll
        for (int l = 0; l < EIGHTS; l++) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) to[l][i] = fmaf(scale, of_group[l][i], fmaf(offset, sums[l][i], to[l][i]));
        }
    }
}

constexpr int blocks_per_sm(int eights) { return eights > 2 ? 1 : 2; }  // many tokens need many registers

// An SM of Hopper has 256 KiB for shared memory and its L1 cache, which keeps a few tokens for all strips. 1 KiB is reserved for
// each block. With a larger ring for one token, the L1 cache loses tokens, and the kernel is slower.
constexpr int shared_bytes(int eights) { return (eights > 2 ? 195 : eights > 1 ? 97 : 65) * 1024; }

constexpr int MOST_KEPT = 256;  // groups, of two tiles or more

// Long chunks give a warp more independent work, but the tokens for them need registers.
constexpr int tiles_of_chunk(int eights) { return eights > 2 ? 1 : (eights > 1 ? 1024 : 2048) / TILE_BYTES; }

template <int STRIPS, int EIGHTS> struct Shared {
    // With few tokens, there are two buffers of sums: warps begin with the next strips while one of them finishes these. And the
    // sums of the tokens' numbers in groups are kept for the next strips, if the kernel has so many groups at most.
    static constexpr int BUFFERS = EIGHTS == 1 ? 2 : 1, KEPT = EIGHTS == 1 && GROUPS == WIDE ? MOST_KEPT : 0;
    static constexpr int OTHER_BYTES = BUFFERS * static_cast<int>(sizeof(Sums<STRIPS, EIGHTS>)) + KEPT * EIGHTS * 32;
    static constexpr int BARRIER_BYTES = 2048 * (1 + EIGHTS / 8);  // of the squares, too
    using OwnRing = Ring<STRIPS, tiles_of_chunk(EIGHTS), shared_bytes(EIGHTS) - OTHER_BYTES - BARRIER_BYTES>;
    unsigned char rings[WARPS][OwnRing::STAGES * OwnRing::STAGE_BYTES];
    Sums<STRIPS, EIGHTS> sums[BUFFERS];
    Squares<EIGHTS> squares;
    float kept[KEPT + 1][EIGHTS * 8];
    uint64_t full[WARPS][OwnRing::STAGES];

    __device__ void keep(int group, const float (&own)[EIGHTS][4]) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++)  // all rows are equal
            if (threadIdx.x % 32 < 4) *reinterpret_cast<float2*>(&kept[group][i * 8 + threadIdx.x % 4 * 2]) = {own[i][0], own[i][1]};
    }
    __device__ void recall(int group, float (&own)[EIGHTS][4]) const {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const float2 two = *reinterpret_cast<const float2*>(&kept[group][i * 8 + threadIdx.x % 4 * 2]);
            own[i][0] = own[i][2] = two.x, own[i][1] = own[i][3] = two.y;
        }
    }
};

template <int STRIPS, int EIGHTS, bool IS_WHOLE>
static __global__ void __launch_bounds__(THREADS, blocks_per_sm(EIGHTS)) product(const __grid_constant__ Arguments a) {
    using OwnShared = Shared<STRIPS, EIGHTS>;
    using OwnRing = typename OwnShared::OwnRing;
    constexpr int TILES = OwnRing::CHUNK, STAGES = OwnRing::STAGES, AT_ONCE = GROUPS == WIDE && TILES > 1 ? 2 : 1;
    extern __shared__ __align__(128) unsigned char memory[];
    auto& shared = *reinterpret_cast<OwnShared*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * STRIPS, begin = blockIdx.x * STRIPS;
    const Weight weight(a);
    OwnRing ring(weight, shared.rings[warp], shared.full[warp]);
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) initialize(ring.full + i);
        publish_barriers();
        for (int i = 0; i < STAGES; i++) ring.fill(i);
    }
    __syncwarp();
    const int num_chunks = (weight.num_tiles + TILES - 1) / TILES;
    const int earliest = min(warp, num_chunks - 1);  // the warp's first chunk, if it has one
    int stage = 0, phase = 0, buffer = 0;            // of the ring; of the sums
    // Scales and tokens of a chunk are loaded as soon as the chunk before it has been multiplied; many tokens, as they are needed.
    constexpr bool LOADS_AHEAD = EIGHTS <= 4;
    uint2 scales[TILES][STRIPS];
    Tokens<EIGHTS> tokens[TILES] = {};
    float sums[EIGHTS][4] = {};
    const auto load_scales = [&](int i, int strip, int chunk) {
#pragma unroll
        for (int j = 0; GROUPS != NONE && j < STRIPS; j++)
            scales[i][j] = weight.load_scales(min(strip + j, weight.num_strips - 1), chunk * TILES + i);
    };
#pragma unroll
    for (int i = 0; i < TILES; i += AT_ONCE) load_scales(i, begin, earliest);
    let_next_kernel_start();
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; LOADS_AHEAD && i < TILES; i++) tokens[i].template load<IS_WHOLE>(a, earliest * TILES + i);

    // The sums of the tokens' numbers and squares are the same for all strips.
    const auto multiply = [&](auto first, int strip) {
        constexpr bool IS_FIRST = decltype(first)::value;
        float products[STRIPS][EIGHTS][4] = {}, squares[EIGHTS][4] = {};
#pragma unroll 1
        for (int chunk = warp; chunk < num_chunks; chunk += WARPS) {
            const bool ends = chunk + WARPS >= num_chunks;
            const int next = ends ? warp : chunk + WARPS, next_strip = ends ? strip + step : strip;
#pragma unroll
            for (int i = 0; !LOADS_AHEAD && i < TILES; i++) tokens[i].template load<IS_WHOLE>(a, chunk * TILES + i);
            if (a.eps >= 0) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    if constexpr (IS_FIRST) tokens[i].add_squares(squares);
                    tokens[i].apply_norm_weight(a, chunk * TILES + i);
                }
            }
            wait(ring.full + stage, phase);
            // A last chunk may have fewer tiles. In place of the others the stage has older numbers, and the tokens are zeros.
#pragma unroll
            for (int i = 0; i < TILES; i += AT_ONCE) {
                const int group = (chunk * TILES + i) / AT_ONCE;
                if constexpr (USES_SUMS && (IS_FIRST || GROUPS == WIDE && !OwnShared::KEPT)) {
                    if constexpr (GROUPS == WIDE) memset(sums, 0, sizeof sums);
#pragma unroll
                    for (int h = i; h < i + AT_ONCE; h++) tokens[h].add_numbers(sums);
                    if constexpr (OwnShared::KEPT) shared.keep(group, sums);
                } else if constexpr (OwnShared::KEPT) {
                    shared.recall(group, sums);
                }
#pragma unroll
                for (int j = 0; j < STRIPS; j++) {
                    float of_group[EIGHTS][4] = {};
                    auto& to = GROUPS == WIDE ? of_group : products[j];
#pragma unroll
                    for (int h = i; h < i + AT_ONCE; h++) {
                        const Tile<KIND> numbers = ring.tile(stage, j, h);
#pragma unroll
                        for (int k = 0; k < STEPS_OF_TILE; k++) {
                            uint32_t converted[4];
                            convert(numbers, k, scales[h][j], converted);
#pragma unroll
                            for (int l = 0; l < EIGHTS; l++)
                                multiply_accumulate(to[l], converted, tokens[h].pairs[l][2 * k], tokens[h].pairs[l][2 * k + 1]);
                        }
                    }
                    if constexpr (GROUPS == WIDE) add_group(products[j], of_group, sums, scales[i][j]);
                }
                load_scales(i, next_strip, next);
#pragma unroll
                for (int h = i; LOADS_AHEAD && h < i + AT_ONCE; h++) tokens[h].template load<IS_WHOLE>(a, next * TILES + h);
            }
            __syncwarp();  // all lanes have read the stage
            if (lane == 0) ring.fill(stage);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        if constexpr (USES_SUMS && GROUPS == NONE) {
#pragma unroll
            for (int i = 0; i < STRIPS; i++) {
#pragma unroll
                for (int j = 0; j < EIGHTS * 4; j++) products[i][j / 4][j % 4] -= INT4_BIAS * sums[j / 4][j % 4];
            }
        }
        if constexpr (IS_FIRST) shared.squares.store(squares);
        shared.sums[buffer].store(products);
        __syncthreads();
        finish(a, weight, shared.sums[buffer], shared.squares, strip);
        if (OwnShared::BUFFERS == 1) __syncthreads();  // before the next sums
        else buffer ^= 1;
    };
    if (begin < weight.num_strips) multiply(std::true_type{}, begin);
#pragma unroll 1
    for (int strip = begin + step; strip < weight.num_strips; strip += step) multiply(std::false_type{}, strip);
}

// --- the matrix as bfloat16 ---------------------------------------------------------------------------------------------

// Each warp converts a tile. A lane has 16 columns of two rows, 32 bytes each.
static __global__ void __launch_bounds__(THREADS) dequantize(const __grid_constant__ Arguments a) {
    const Weight weight(a);
    const int lane = threadIdx.x % 32, index = blockIdx.x * WARPS + threadIdx.x / 32;
    const int strip = index / weight.num_tiles, tile = index % weight.num_tiles, column = tile * TILE_COLUMNS + lane % 4 * 16;
    if (strip >= weight.num_strips || column >= a.num_columns) return;
    Tile<KIND> own;
#pragma unroll
    for (int i = 0; i < Tile<KIND>::VECTORS; i++)
        own.vectors[i] = __ldg(reinterpret_cast<const uint4*>(weight.at(strip, tile)) + lane * Tile<KIND>::VECTORS + i);
    uint32_t pairs[2][8];
#pragma unroll
    for (int step = 0; step < STEPS_OF_TILE; step++) {
        uint32_t numbers[4];
        own.convert(step, numbers);
#pragma unroll
        for (int i = 0; KIND == FP8 && i < 4; i++) numbers[i] = multiply_pairs(numbers[i], FP8_FACTOR);
        if constexpr (GROUPS != NONE) scale_numbers(numbers, weight.load_scales(strip, tile));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            pairs[half][2 * step] = numbers[half], pairs[half][2 * step + 1] = numbers[half + 2];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = weight.row(strip, lane / 4 + 8 * half);
        if (row >= a.num_rows) continue;
        if constexpr (GROUPS == NONE) {
            const float scale = __ldg(static_cast<const float*>(a.scales) + row);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float low = to_float(pairs[half][i] & 0xffff) * scale, high = to_float(pairs[half][i] >> 16) * scale;
                pairs[half][i] = to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
            }
        }
        uint4* to = reinterpret_cast<uint4*>(a.out + static_cast<int64_t>(row) * a.num_columns + column);
        to[0] = {pairs[half][0], pairs[half][1], pairs[half][2], pairs[half][3]};
        to[1] = {pairs[half][4], pairs[half][5], pairs[half][6], pairs[half][7]};
    }
}

// --- the host -----------------------------------------------------------------------------------------------------------

// IS_WHOLE: the columns are whole chunks.
template <int STRIPS, int EIGHTS, bool IS_WHOLE = false>
static int launch(const Arguments& a, int num_strips, int num_sms, void* stream) {
    constexpr int SHARED_BYTES = sizeof(Shared<STRIPS, EIGHTS>);
    static_assert(SHARED_BYTES <= shared_bytes(EIGHTS));
    const auto kernel = product<STRIPS, EIGHTS, IS_WHOLE>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES)) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    const int blocks = (num_strips + STRIPS - 1) / STRIPS, most = blocks_per_sm(EIGHTS) * num_sms;
    config.gridDim = dim3(blocks < most ? blocks : most), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, a);
}

// Blocks of more strips read the tokens fewer times. They need enough strips for all SMs.
extern "C" int launch_quantized_product(const Arguments* a, int num_strips, int num_sms, void* stream) {
    const bool is_tall = num_strips >= 4 * num_sms;
    const bool is_whole = a->num_columns % (tiles_of_chunk(1) * TILE_COLUMNS) == 0;
    if (a->num_tokens <= 8 && a->num_columns <= MOST_KEPT * 2 * TILE_COLUMNS)
        return (is_whole ? launch<1, 1, true> : launch<1, 1>)(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 16) return launch<2, 2>(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 32) return (is_tall ? launch<4, 4> : launch<2, 4>)(*a, num_strips, num_sms, stream);
    return launch<2, 8>(*a, num_strips, num_sms, stream);
}

extern "C" int launch_dequantize(const Arguments* a, int num_strips, void* stream) {
    const int num_tiles = (a->num_columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    dequantize<<<(num_strips * num_tiles + WARPS - 1) / WARPS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*a);
    return cudaGetLastError();
}
