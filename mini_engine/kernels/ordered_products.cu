// Matrix products of a few tokens whose sums have the bits of cuBLAS's products without split-K, for Hopper.
//
// Those products add 16 columns at a time, from the first to the last, in one accumulator: what the tensor cores do if each
// multiplication continues the previous one. (Measured, and checked by the tests.) So no two warps may share the columns of a
// row. Each warp here has a few rows of the weight and all of their columns, and each multiplication waits for the previous
// one. To hide that, and the memory's latency, a warp copies its rows to a ring of stages in shared memory, far ahead. The first
// copies start while the previous kernel still runs.
#include "hopper.cuh"

constexpr int COLUMNS = 64, ROW_BYTES = 2 * COLUMNS, STAGES = 12;  // columns of a stage
constexpr int TOKENS = 8;                                          // of a tile of the tensor cores

struct Arguments {
    const uint16_t *x, *weight;  // [tokens, columns], [rows, columns] in bfloat16
    const uint16_t* residual;    // [tokens, rows] is added before rounding; null: nothing
    uint16_t* out;               // [tokens, rows], may be `residual`
    int tokens, rows, columns;
};

// Where chunk i (16 bytes) of row r of a stage is. So the same chunk of eight rows is in different banks.
__device__ inline uint32_t place(int row, int chunk) { return row * ROW_BYTES + (chunk ^ row % 8) * 16; }

// Copy 64 columns of some rows; rows that do not exist are zeros.
template <int ROWS> __device__ inline void copy(uint32_t to, const uint16_t* from, int columns, int count) {
#pragma unroll
    for (int i = threadIdx.x; i < 8 * ROWS; i += 32) {
        const int row = i / 8, exists = row < count ? 16 : 0;
        const uint16_t* chunk = from + static_cast<int64_t>(exists ? row : 0) * columns + i % 8 * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + place(row, i % 8)), "l"(chunk), "r"(exists) : "memory");
    }
}

__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ inline void load(uint32_t (&a)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

__device__ inline void multiply_accumulate(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ROWS of the weight, 16, or 8 if there would be too few warps otherwise; the tensor cores then have eight rows of zeros.
template <int ROWS, int TILES> __global__ void __launch_bounds__(32) ordered_product(const __grid_constant__ Arguments a) {
    constexpr int WEIGHT_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = WEIGHT_BYTES + TILES * TOKENS * ROW_BYTES;
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t ring = shared_address(memory);
    const int lane = threadIdx.x, first_row = blockIdx.x * ROWS, stages = a.columns / COLUMNS;
    const uint16_t* weight = a.weight + static_cast<int64_t>(first_row) * a.columns;
    const auto stage = [&](int i) { return ring + i % STAGES * STAGE_BYTES; };
    const auto copy_weight = [&](int i) { copy<ROWS>(stage(i), weight + i * COLUMNS, a.columns, ROWS); };
    const auto copy_tokens = [&](int i) { copy<TILES * TOKENS>(stage(i) + WEIGHT_BYTES, a.x + i * COLUMNS, a.columns, a.tokens); };

    for (int i = 0; i < min(STAGES - 1, stages); i++) copy_weight(i);
    wait_for_previous_kernel(), let_next_kernel_start();
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < stages) copy_tokens(i);
        commit();  // the first group has the weights, too
    }
    float sums[TILES][4] = {};
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();  // all lanes have the stage's copies, and have read the stage before
        if (i + STAGES - 1 < stages) copy_weight(i + STAGES - 1), copy_tokens(i + STAGES - 1);
        commit();
        const uint32_t rows = stage(i), tokens = rows + WEIGHT_BYTES;
        uint32_t x[TILES][2][4];  // two steps of 16 columns at a time
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int j = 0; j < 2; j++) load(x[t][j], tokens + place(t * TOKENS + lane % 8, 4 * j + lane / 8));
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
            uint32_t own[4];  // 16 rows and 16 columns, or 8 rows and 32 columns
            if (ROWS == 16) load(own, rows + place(lane % 16, 2 * j + lane / 16));
            else load(own, rows + place(lane % 8, j / 2 * 4 + lane / 8));
            uint32_t w[4] = {own[0], own[1], own[2], own[3]};
            if (ROWS == 8) w[0] = own[j % 2 * 2], w[1] = 0, w[2] = own[j % 2 * 2 + 1], w[3] = 0;
#pragma unroll
            for (int t = 0; t < TILES; t++) multiply_accumulate(sums[t], w, x[t][j / 2][j % 2 * 2], x[t][j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = t * TOKENS + lane % 4 * 2 + i % 2, row = lane / 4 + i / 2 * 8;
            if (token >= a.tokens || row >= ROWS) continue;
            const int64_t at = static_cast<int64_t>(token) * a.rows + first_row + row;
            float sum = sums[t][i];
            if (a.residual) sum += __uint_as_float(static_cast<uint32_t>(a.residual[at]) << 16);
            uint16_t rounded;
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
            a.out[at] = rounded;
        }
    }
}

template <int ROWS, int TILES> static int launch(const Arguments& a, cudaStream_t stream) {
    constexpr int BYTES = STAGES * (ROWS + TILES * TOKENS) * ROW_BYTES;
    static const cudaError_t error =
        cudaFuncSetAttribute(ordered_product<ROWS, TILES>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (error) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(a.rows / ROWS), config.blockDim = dim3(32), config.dynamicSmemBytes = BYTES;
    config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, ordered_product<ROWS, TILES>, a);
}

// `rows_of_warp` divides the rows; at most 32 tokens.
extern "C" int launch_ordered_product(const Arguments& a, int rows_of_warp, void* stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    const int tiles = (a.tokens + TOKENS - 1) / TOKENS;
    if (rows_of_warp == 8) return tiles == 1 ? launch<8, 1>(a, on) : tiles == 2 ? launch<8, 2>(a, on) : launch<8, 4>(a, on);
    return tiles == 1 ? launch<16, 1>(a, on) : tiles == 2 ? launch<16, 2>(a, on) : launch<16, 4>(a, on);
}
