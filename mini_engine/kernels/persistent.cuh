// What the kernels of a whole decode step share: arithmetic, barriers in shared memory, instructions of the tensor cores, and
// tagged values that blocks exchange.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>
#include "matrices.cuh"

using bf16 = __nv_bfloat16;

// Round two floats to bf16, and pack them into 32 bits.
__device__ inline uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// PTX instructions take 32-bit addresses of shared memory.
__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 2 to the power of x, approximately.
__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Sum, or maximum, over lanes of the warp. By default over all lanes; with <16, 4> over lanes with the same `lane % 4`.
template <int FROM = 16, int TO = 1> __device__ inline float sum(float x) {
#pragma unroll
    for (int mask = FROM; mask >= TO; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

template <int FROM = 16, int TO = 1> __device__ inline float maximum(float x) {
#pragma unroll
    for (int mask = FROM; mask >= TO; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}

// Wait until a phase of an mbarrier has completed. `phase` is its parity, which alternates with each use of the buffer.
__device__ inline void wait(uint64_t* barrier, uint32_t phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

// Wait for two mbarriers.
__device__ inline void wait_for_both(uint64_t* a, uint32_t phase_of_a, uint64_t* b, uint32_t phase_of_b) {
    asm volatile(
        "{\n.reg .pred a, b;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 a, [%0], %1;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 b, [%2], %3;\nand.pred a, a, b;\n"
        "@!a bra again;\n}\n" ::"r"(shared_address(a)), "r"(phase_of_a), "r"(shared_address(b)), "r"(phase_of_b) : "memory");
}

// Add the product of a 16 x 16 matrix (a) and a 16 x 8 matrix (b) to a 16 x 8 matrix, on tensor cores.
__device__ inline void multiply_accumulate(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What blocks exchange: two bf16 or one float in the lower 32 bits, and the tag in the upper 32 bits.
using Tagged = unsigned long long;

// Write a value and its tag for the other blocks. The store is a single one, so a reader never sees one without the other.
__device__ inline void publish(Tagged* to, uint32_t bits, uint32_t tag) {
    const Tagged both = static_cast<Tagged>(tag) << 32 | bits;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}

__device__ inline void publish(Tagged* to, float value, uint32_t tag) { publish(to, __float_as_uint(value), tag); }

__device__ inline Tagged load_one(const Tagged* from) {
    Tagged got;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(got) : "l"(from) : "memory");
    return got;
}

// Load one value, or two adjacent ones, if the tags are not right yet. The load has a predicate instead of a branch around it,
// so that several loads can be in flight at once.
__device__ inline void load_missing(Tagged& value, const Tagged* from, uint32_t tag) {
    asm volatile("{\n.reg .pred missing;\nsetp.ne.u32 missing, %1, %2;\n@missing ld.relaxed.gpu.global.u64 %0, [%3];\n}\n"
                 : "+l"(value) : "r"(static_cast<uint32_t>(value >> 32)), "r"(tag), "l"(from) : "memory");
}

__device__ inline void load_missing(Tagged (&two)[2], const Tagged* from, uint32_t tag) {
    const uint32_t wrong = static_cast<uint32_t>(two[0] >> 32) ^ tag | static_cast<uint32_t>(two[1] >> 32) ^ tag;
    asm volatile("{\n.reg .pred missing;\nsetp.ne.u32 missing, %2, 0;\n@missing ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%3];\n}\n"
                 : "+l"(two[0]), "+l"(two[1]) : "r"(wrong), "l"(from) : "memory");
}

// Receive N pairs of values, `stride` apart: load those that are missing until all tags are right.
template <int N> __device__ inline void receive(const Tagged* from, int stride, uint32_t tag, uint32_t (&bits)[2 * N]) {
    Tagged values[N][2] = {};  // no writer has tag 0
    bool ready;
    do {
        ready = true;
#pragma unroll
        for (int i = 0; i < N; i++) load_missing(values[i], from + i * stride, tag);
#pragma unroll
        for (int i = 0; i < N; i++) ready &= values[i][0] >> 32 == tag && values[i][1] >> 32 == tag;
    } while (!ready);
#pragma unroll
    for (int i = 0; i < N; i++) bits[2 * i] = static_cast<uint32_t>(values[i][0]), bits[2 * i + 1] = static_cast<uint32_t>(values[i][1]);
}
