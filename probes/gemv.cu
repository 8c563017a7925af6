// Matrix times vector for one decode token, fused with the norm before it and with what comes after it.
//
// A warp computes a few rows. Each lane holds the same columns of every row and of the vector, so the norm and the
// products need reductions over the warp and no barrier. The weights are loaded before `griddepcontrol.wait`, while the
// previous kernel still runs (programmatic dependent launch): only the vector is on the critical path.
#include <cuda_bf16.h>
#include <cstdint>

using bf16 = __nv_bfloat16;
enum Epilogue { STORE, ADD, GATE };  // out = y; out += y; out = silu(gate) * up
#ifndef GEMV_WARPS
#define GEMV_WARPS 4
#endif

__device__ inline float sum_over_warp(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

__device__ inline float2 unpacked(uint32_t pair) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

template <int K, int R, bool NORM, Epilogue E>
__global__ void __launch_bounds__(GEMV_WARPS * 32) gemv(
    const bf16* x, const bf16* norm_weight, float eps, const bf16* w, bf16* out, int n) {
    constexpr int VECS = K / 256, ROWS = E == GATE ? 2 * R : R;  // 8 numbers in a vector, 32 lanes
    const int lane = threadIdx.x % 32, row = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * R;
    uint4 weights[ROWS][VECS], norm_weights[NORM ? VECS : 1];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int v = 0; v < VECS; v++) {
            int at = r < R ? row + r : n + row + r - R;  // the up projection comes behind the gate
            weights[r][v] = __ldcs(reinterpret_cast<const uint4*>(w + int64_t(at) * K) + v * 32 + lane);
        }
    if (NORM)
#pragma unroll
        for (int v = 0; v < VECS; v++) norm_weights[v] = reinterpret_cast<const uint4*>(norm_weight)[v * 32 + lane];

    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    uint4 input[VECS];
#pragma unroll
    for (int v = 0; v < VECS; v++) input[v] = reinterpret_cast<const uint4*>(x)[v * 32 + lane];
    float y[ROWS] = {}, squares = 0;
#pragma unroll
    for (int v = 0; v < VECS; v++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 a = unpacked((&input[v].x)[i]);
            if (NORM) {
                squares += a.x * a.x + a.y * a.y;
                float2 b = unpacked((&norm_weights[v].x)[i]);
                a.x *= b.x, a.y *= b.y;  // the factor that all columns share is applied to the product
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float2 b = unpacked((&weights[r][v].x)[i]);
                y[r] += a.x * b.x + a.y * b.y;
            }
        }
    float factor = NORM ? rsqrtf(sum_over_warp(squares) / K + eps) : 1.f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) y[r] = factor * sum_over_warp(y[r]);
    if (lane < R) {
        float mine = 0, up = 0;
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (lane == r) mine = y[r];
            if (E == GATE && lane == r) up = y[R + r];
        }
        if (E == GATE) mine = mine / (1 + __expf(-mine)) * up;
        if (E == ADD) mine += __bfloat162float(out[row + lane]);
        out[row + lane] = __float2bfloat16(mine);
    }
}

template <int K, int R, bool NORM, Epilogue E>
static int launch(const bf16* x, const bf16* nw, float eps, const bf16* w, bf16* out, int n, void* stream) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n / (R * GEMV_WARPS)), config.blockDim = dim3(GEMV_WARPS * 32);
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gemv<K, R, NORM, E>, x, nw, eps, w, out, n);
}

#ifndef R_QKV
#define R_QKV 4
#define R_O 2
#define R_GATE 2
#define R_DOWN 1
#define R_HEAD 4
#endif
#define GEMV(name, K, R, NORM, E)                                                                                \
    extern "C" int name(const bf16* x, const bf16* nw, float eps, const bf16* w, bf16* out, int n, void* s) {    \
        return launch<K, R, NORM, E>(x, nw, eps, w, out, n, s);                                                  \
    }
GEMV(gemv_qkv, 1024, R_QKV, true, STORE)
GEMV(gemv_o, 2048, R_O, false, ADD)
GEMV(gemv_gate, 1024, R_GATE, true, GATE)
GEMV(gemv_down, 3072, R_DOWN, false, ADD)
GEMV(gemv_head, 1024, R_HEAD, true, STORE)
