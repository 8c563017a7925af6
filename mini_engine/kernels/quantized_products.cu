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
// The kernel may start while the previous one still runs. Then it fills its rings with weights, which no kernel of a step
// writes.
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
        const int group = min((tile * TILE_COLUMNS + lane % 4 * 16) >> a.log2_group, groups - 1);
        const uint32_t* from = static_cast<const uint32_t*>(a.scales) + (strip * groups + group) * TILE_ROWS + lane / 4;
        return {__ldg(from), __ldg(from + 8)};
    }
};

// A warp's ring. A stage has a chunk of TILES neighboring tiles of each strip; the warps take turns with chunks.
template <int STRIPS, int TILES, int BYTES> struct Ring {
    static constexpr int CHUNK = TILES, STAGE_BYTES = STRIPS * TILES * TILE_BYTES, STAGES = BYTES / WARPS / STAGE_BYTES;
    static_assert(STAGES > 0);

    const Weight& weight;
    unsigned char* memory;
    uint64_t* full;  // [STAGES]
    uint64_t policy = read_once();
    int strip, chunk, num_chunks;  // what is copied next; chunks of a strip

    __device__ Ring(const Weight& weight, unsigned char* memory, uint64_t* full)
        : weight(weight), memory(memory), full(full), strip(blockIdx.x * STRIPS), chunk(threadIdx.x / 32),
          num_chunks((weight.num_tiles + TILES - 1) / TILES) {}

    // Copy the next chunk (one thread).
    __device__ void fill(int stage) {
        if (strip >= weight.num_strips || chunk >= num_chunks) return;
        const int bytes = min(TILES, weight.num_tiles - chunk * TILES) * TILE_BYTES;
        expect(full + stage, STRIPS * bytes);
#pragma unroll
        for (int i = 0; i < STRIPS; i++) {  // beyond the last strip, it is copied again
            const unsigned char* from = weight.at(min(strip + i, weight.num_strips - 1), chunk * TILES);
            copy(shared_address(memory + stage * STAGE_BYTES + i * TILES * TILE_BYTES), from, bytes, full + stage, policy);
        }
        chunk += WARPS;
        if (chunk >= num_chunks) chunk = threadIdx.x / 32, strip += gridDim.x * STRIPS;
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

// A lane's part of the tokens for a tile: token g of every eight, and 16 columns of it.
template <int EIGHTS> struct Tokens {
    uint32_t pairs[EIGHTS][8];

    __device__ void load(const Arguments& a, int tile) {
        const int lane = threadIdx.x % 32, column = tile * TILE_COLUMNS + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const int token = i * 8 + lane / 4;
            const bool exists = token < a.num_tokens && column < a.num_columns;
            const uint4* from = reinterpret_cast<const uint4*>(a.tokens + (token * a.num_columns + column));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = exists ? from[half] : uint4{};
                pairs[i][half * 4] = v.x, pairs[i][half * 4 + 1] = v.y, pairs[i][half * 4 + 2] = v.z, pairs[i][half * 4 + 3] = v.w;
            }
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
    float products[WARPS][EIGHTS * 8][GAP], squares[WARPS][EIGHTS * 8];

    __device__ void store(const float (&own)[STRIPS][EIGHTS][4], const float (&own_squares)[EIGHTS][4]) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
            for (int j = 0; j < STRIPS; j++) {
#pragma unroll
                for (int k = 0; k < 4; k++) products[warp][i * 8 + 2 * t + k % 2][j * TILE_ROWS + g + k / 2 * 8] = own[j][i][k];
            }
            if (g / 2 == t) squares[warp][i * 8 + g] = g % 2 ? own_squares[i][1] : own_squares[i][0];
        }
    }

    __device__ float2 of_rows(int token, int row) const {  // and of the row of the other half
        float2 all{};
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) all.x += products[warp][token][row], all.y += products[warp][token][row + 8];
        return all;
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
__device__ inline void finish(const Arguments& a, const Weight& weight, const Sums<STRIPS, EIGHTS>& sums, int strip) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a.num_tokens * STRIPS * 8; i += THREADS) {
        const int token = i / (STRIPS * 8), own = strip + i / 8 % STRIPS, row = weight.row(own, i % 8), other = row + a.half_rows;
        if (own >= weight.num_strips || row >= a.num_rows) continue;
        float2 product = sums.of_rows(token, i / 8 % STRIPS * TILE_ROWS + i % 8);
        const bool has_other = other < a.num_rows;
        const float factor = a.eps < 0 ? 1.0f : sums.norm_factor(a, token);
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
// each block.
constexpr int shared_bytes(int eights) { return (eights > 2 ? 195 : eights > 1 ? 97 : 81) * 1024; }

// Long chunks give a warp more independent work, but the tokens for them need registers.
constexpr int tiles_of_chunk(int eights) { return eights > 2 ? 1 : (eights > 1 ? 1024 : 2048) / TILE_BYTES; }

template <int STRIPS, int EIGHTS> struct Shared {
    using OwnRing = Ring<STRIPS, tiles_of_chunk(EIGHTS), shared_bytes(EIGHTS) - static_cast<int>(sizeof(Sums<STRIPS, EIGHTS>)) - 2048>;  // 2 KiB for barriers
    unsigned char rings[WARPS][OwnRing::STAGES * OwnRing::STAGE_BYTES];
    Sums<STRIPS, EIGHTS> sums;
    uint64_t full[WARPS][OwnRing::STAGES];
};

template <int STRIPS, int EIGHTS>
static __global__ void __launch_bounds__(THREADS, blocks_per_sm(EIGHTS)) product(const __grid_constant__ Arguments a) {
    using OwnRing = typename Shared<STRIPS, EIGHTS>::OwnRing;
    constexpr int TILES = OwnRing::CHUNK, STAGES = OwnRing::STAGES, AT_ONCE = GROUPS == WIDE && TILES > 1 ? 2 : 1;
    extern __shared__ __align__(128) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<STRIPS, EIGHTS>*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = gridDim.x * STRIPS;
    const Weight weight(a);
    OwnRing ring(weight, shared.rings[warp], shared.full[warp]);
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) initialize(ring.full + i);
        publish_barriers();
        for (int i = 0; i < STAGES; i++) ring.fill(i);
    }
    __syncwarp();
    const int num_chunks = ring.num_chunks;
    int position = 0;  // of the ring
    // The scales of a chunk are loaded while the chunk before it is multiplied. The tokens come from the L1 cache, or soon.
    uint2 scales[TILES][STRIPS], next_scales[TILES][STRIPS];
    const auto load_scales = [&](int strip, int chunk) {
#pragma unroll
        for (int i = 0; GROUPS != NONE && i < TILES; i += AT_ONCE) {
#pragma unroll
            for (int j = 0; j < STRIPS; j++) next_scales[i][j] = weight.load_scales(min(strip + j, weight.num_strips - 1), chunk * TILES + i);
        }
    };
    load_scales(blockIdx.x * STRIPS, warp);
    let_next_kernel_start();
    wait_for_previous_kernel();
#pragma unroll 1
    for (int strip = blockIdx.x * STRIPS; strip < weight.num_strips; strip += step) {
        float products[STRIPS][EIGHTS][4] = {}, squares[EIGHTS][4] = {}, sums[EIGHTS][4] = {};
#pragma unroll 1
        for (int chunk = warp; chunk < num_chunks; chunk += WARPS, position++) {
            const int stage = position % STAGES;
            Tokens<EIGHTS> tokens[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) tokens[i].load(a, chunk * TILES + i);  // zeros beyond the last column
            memcpy(scales, next_scales, sizeof scales);
            const bool ends = chunk + WARPS >= num_chunks;
            load_scales(ends ? strip + step : strip, ends ? warp : chunk + WARPS);
            if (a.eps >= 0) {
#pragma unroll
                for (int i = 0; i < TILES; i++) tokens[i].add_squares(squares), tokens[i].apply_norm_weight(a, chunk * TILES + i);
            }
            wait(ring.full + stage, position / STAGES & 1);
            // A last chunk may have fewer tiles. In place of the others the stage has older numbers, and the tokens are zeros.
#pragma unroll
            for (int i = 0; i < TILES; i += AT_ONCE) {
                if constexpr (GROUPS == WIDE) memset(sums, 0, sizeof sums);
#pragma unroll
                for (int h = i; USES_SUMS && h < i + AT_ONCE; h++) tokens[h].add_numbers(sums);
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
            }
            __syncwarp();  // all lanes have read the stage
            if (lane == 0) ring.fill(stage);
        }
#pragma unroll
        for (int i = 0; USES_SUMS && GROUPS == NONE && i < STRIPS; i++) {
#pragma unroll
            for (int j = 0; j < EIGHTS * 4; j++) products[i][j / 4][j % 4] -= INT4_BIAS * sums[j / 4][j % 4];
        }
        shared.sums.store(products, squares);
        __syncthreads();
        finish(a, weight, shared.sums, strip);
        __syncthreads();  // before the next sums
    }
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

template <int STRIPS, int EIGHTS> static int launch(const Arguments& a, int num_strips, int num_sms, void* stream) {
    constexpr int SHARED_BYTES = sizeof(Shared<STRIPS, EIGHTS>);
    static_assert(SHARED_BYTES <= shared_bytes(EIGHTS));
    const auto kernel = product<STRIPS, EIGHTS>;
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
    if (a->num_tokens <= 8) return launch<1, 1>(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 16) return launch<2, 2>(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 32) return (is_tall ? launch<4, 4> : launch<2, 4>)(*a, num_strips, num_sms, stream);
    return launch<2, 8>(*a, num_strips, num_sms, stream);
}

extern "C" int launch_dequantize(const Arguments* a, int num_strips, void* stream) {
    const int num_tiles = (a->num_columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    dequantize<<<(num_strips * num_tiles + WARPS - 1) / WARPS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*a);
    return cudaGetLastError();
}
