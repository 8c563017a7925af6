// Products of a few tokens with a quantized matrix, each with the work after it, for Hopper.
//
// For few tokens, a product is a read of its weight. So the warps of a block read different columns of the same rows, straight
// into registers, each two stages ahead of what it multiplies, and go on to the block's next rows without a pause. Each stage
// is converted to bfloat16 and multiplied on the tensor cores, weight times tokens, because they take 16 rows of the first
// operand and only 8 columns of the second, and tokens are few. The warps' sums are added up in shared memory.
//
// A scale for a row is applied to sums, one for a group of columns to the weight's numbers. The tensor cores also compute the
// sum of squares that a norm needs: the diagonal of tokens times tokens.
//
// The kernel may start while the previous one still runs. Then it loads its first weights, which no kernel of a step writes.
#include "hopper.cuh"
#include "quantized.cuh"

constexpr Kind KIND = static_cast<Kind>(WEIGHT_KIND);
constexpr bool GROUPED = IS_GROUPED;  // a scale and an offset for groups of columns, not a scale for each row
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr bool SHIFTS = KIND == FP8 && !GROUPED;  // whether tokens and sums make up for FP8_FACTOR
constexpr uint32_t TOKEN_FACTOR = 0x73807380u;    // a pair of 2^104: neither a token nor a number is too large or too small
constexpr float SUM_FACTOR = SHIFTS ? FP8_FACTOR * 0x1p-104f : 1.0f;

enum Work { STORE, ADD, SWIGLU };

struct Arguments {
    const uint16_t* tokens;       // [num_tokens, num_columns]
    const uint16_t* norm_weight;  // [num_columns], or null
    const uint4* weight;
    const void* scales;           // float [num_rows], or with groups uint32_t [strips, groups, TILE_ROWS]: pairs of scale and offset
    uint16_t* out;                // [num_tokens, rows of the result]
    int num_tokens, num_rows, num_columns;
    int half_rows;                // from a row of a tile's first half to the same row of its second half
    int group_columns, work;
    float eps;                    // of the norm; negative: the tokens are not normalized
};

// --- instructions -------------------------------------------------------------------------------------------------------

__device__ inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
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

    __device__ Tile<KIND> load(int strip, int tile) const {
        Tile<KIND> loaded;
        if constexpr (KIND == FP8) {
            const int column = tile * TILE_COLUMNS + lane % 4 * 16;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t at = min(row(strip, lane / 4 + 8 * half), a.num_rows - 1);
                loaded.vectors[half] = column < a.num_columns ? load_once(a.weight + (at * a.num_columns + column) / 16) : uint4{};
            }
        } else {
            constexpr int VECTORS = Tile<KIND>::VECTORS;
            const uint4* from = a.weight + ((static_cast<int64_t>(strip) * num_tiles + tile) * 32 + lane) * VECTORS;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) loaded.vectors[i] = load_once(from + i);
        }
        return loaded;
    }

    // The pairs of scale and offset of rows g and g + 8 for this lane's columns of a tile.
    __device__ uint2 load_scales(int strip, int tile) const {
        const int groups = (a.num_columns + a.group_columns - 1) / a.group_columns;
        const int group = min((tile * TILE_COLUMNS + lane % 4 * 16) / a.group_columns, groups - 1);
        const uint32_t* from = static_cast<const uint32_t*>(a.scales) + (strip * groups + group) * TILE_ROWS + lane / 4;
        return {__ldg(from), __ldg(from + 8)};
    }
};

// What a warp holds of some strips: AHEAD tiles of each, WARPS tiles apart, because the warps take turns.
template <int STRIPS, int AHEAD> struct Stage {
    Tile<KIND> tiles[AHEAD][STRIPS];
    uint2 scales[AHEAD][STRIPS];

    __device__ void load(const Weight& weight, int strip, int first_tile) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int tile = first_tile + i * WARPS;
            if (tile >= weight.num_tiles) continue;
#pragma unroll
            for (int j = 0; j < STRIPS; j++) {
                const int own = min(strip + j, weight.num_strips - 1);
                tiles[i][j] = weight.load(own, tile);
                if constexpr (GROUPED) scales[i][j] = weight.load_scales(own, tile);
            }
        }
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
            const uint4* from = reinterpret_cast<const uint4*>(a.tokens + static_cast<int64_t>(token) * a.num_columns + column);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 v = exists ? __ldcg(from + half) : uint4{};
                pairs[i][half * 4] = v.x, pairs[i][half * 4 + 1] = v.y, pairs[i][half * 4 + 2] = v.z, pairs[i][half * 4 + 3] = v.w;
            }
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

    // Apply the norm's weight, and what FP8 needs: another order, and a factor.
    __device__ void prepare(const Arguments& a, int tile) {
        const int column = tile * TILE_COLUMNS + threadIdx.x % 4 * 16;
        if (a.norm_weight && column < a.num_columns) {
            const uint4* from = reinterpret_cast<const uint4*>(a.norm_weight + column);
            const uint4 first = __ldg(from), second = __ldg(from + 1);
            const uint32_t weights[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
                for (int j = 0; j < 8; j++) pairs[i][j] = multiply_pairs(pairs[i][j], weights[j]);
            }
        }
        if constexpr (KIND == FP8) {
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const uint32_t low = __byte_perm(pairs[i][j], pairs[i][j + 1], 0x5410);
                    const uint32_t high = __byte_perm(pairs[i][j], pairs[i][j + 1], 0x7632);
                    pairs[i][j] = SHIFTS ? multiply_pairs(low, TOKEN_FACTOR) : low;
                    pairs[i][j + 1] = SHIFTS ? multiply_pairs(high, TOKEN_FACTOR) : high;
                }
            }
        }
    }
};

// Scale this lane's part of a step: rows g, g + 8, g, g + 8.
__device__ inline void scale_groups(uint32_t (&numbers)[4], uint2 scales) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t pair = i % 2 ? scales.y : scales.x;
        const uint32_t scale = __byte_perm(pair, pair, 0x1010), offset = __byte_perm(pair, pair, 0x3232);
        if constexpr (KIND == FP8) numbers[i] = multiply_pairs(numbers[i], 0x7b807b80u);  // 2^120
        numbers[i] = multiply_add_pairs(numbers[i], scale, offset);
    }
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
        const float factor = a.eps < 0 ? SUM_FACTOR : SUM_FACTOR * sums.norm_factor(a, token);
        const float* scales = static_cast<const float*>(a.scales);
        product.x *= GROUPED ? factor : factor * __ldg(scales + row);
        product.y *= GROUPED || !has_other ? factor : factor * __ldg(scales + other);
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

constexpr int blocks_per_sm(int eights) { return eights > 4 ? 1 : 2; }  // many tokens need many registers

template <int STRIPS, int EIGHTS, int AHEAD>
static __global__ void __launch_bounds__(THREADS, blocks_per_sm(EIGHTS)) product(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    auto& sums = *reinterpret_cast<Sums<STRIPS, EIGHTS>*>(memory);
    const Weight weight(a);
    const int warp = threadIdx.x / 32, step = gridDim.x * STRIPS;
    int strip = blockIdx.x * STRIPS;
    Stage<STRIPS, AHEAD> stage, next;
    stage.load(weight, strip, warp);
    let_next_kernel_start();
    wait_for_previous_kernel();
#pragma unroll 1
    for (; strip < weight.num_strips; strip += step) {
        float products[STRIPS][EIGHTS][4] = {}, squares[EIGHTS][4] = {};
#pragma unroll 1
        for (int first = 0; first < weight.num_tiles; first += AHEAD * WARPS) {
            const bool ends = first + AHEAD * WARPS >= weight.num_tiles;
            if (!ends) next.load(weight, strip, first + AHEAD * WARPS + warp);
            else if (strip + step < weight.num_strips) next.load(weight, strip + step, warp);
            Tokens<EIGHTS> tokens[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) tokens[i].load(a, first + warp + i * WARPS);  // zeros beyond the last tile
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int tile = first + warp + i * WARPS;
                if (tile >= weight.num_tiles) continue;
                if (a.eps >= 0) tokens[i].add_squares(squares);
                tokens[i].prepare(a, tile);
#pragma unroll
                for (int j = 0; j < STRIPS; j++) {
#pragma unroll
                    for (int k = 0; k < STEPS_OF_TILE; k++) {
                        uint32_t numbers[4];
                        stage.tiles[i][j].convert(k, numbers);
                        if constexpr (GROUPED) scale_groups(numbers, stage.scales[i][j]);
#pragma unroll
                        for (int l = 0; l < EIGHTS; l++)
                            multiply_accumulate(products[j][l], numbers, tokens[i].pairs[l][2 * k], tokens[i].pairs[l][2 * k + 1]);
                    }
                }
            }
            stage = next;
        }
        sums.store(products, squares);
        __syncthreads();
        finish(a, weight, sums, strip);
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
    const Tile<KIND> own = weight.load(strip, tile);
    uint32_t pairs[2][8];
#pragma unroll
    for (int step = 0; step < STEPS_OF_TILE; step++) {
        uint32_t numbers[4];
        own.convert(step, numbers);
        if constexpr (GROUPED) scale_groups(numbers, weight.load_scales(strip, tile));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t first = numbers[half], second = numbers[half + 2];
            pairs[half][2 * step] = KIND == FP8 ? __byte_perm(first, second, 0x5410) : first;
            pairs[half][2 * step + 1] = KIND == FP8 ? __byte_perm(first, second, 0x7632) : second;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = weight.row(strip, lane / 4 + 8 * half);
        if (row >= a.num_rows) continue;
        if constexpr (!GROUPED) {
            const float scale = __ldg(static_cast<const float*>(a.scales) + row) * (SHIFTS ? FP8_FACTOR : 1.0f);
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
    constexpr int TILES = 64 / Tile<KIND>::BYTES / STRIPS / (EIGHTS > 2 ? 2 : 1);  // 64 bytes for each lane, if it has the registers
    const auto kernel = product<STRIPS, EIGHTS, TILES ? TILES : 1>;
    constexpr int SHARED_BYTES = sizeof(Sums<STRIPS, EIGHTS>);
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

extern "C" int launch_quantized_product(const Arguments* a, int num_strips, int num_sms, void* stream) {
    if (a->num_tokens <= 4) return launch<1, 1>(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 8) return launch<2, 1>(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 16) return launch<2, 2>(*a, num_strips, num_sms, stream);
    if (a->num_tokens <= 32) return launch<2, 4>(*a, num_strips, num_sms, stream);
    return launch<2, 8>(*a, num_strips, num_sms, stream);
}

extern "C" int launch_dequantize(const Arguments* a, int num_strips, void* stream) {
    const int num_tiles = (a->num_columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    dequantize<<<(num_strips * num_tiles + WARPS - 1) / WARPS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*a);
    return cudaGetLastError();
}
