// Loads of 8 x 8 matrices of 16-bit elements from shared memory, as the tensor cores take them.
#pragma once
#include <cstdint>

// Load four matrices of 8 x 8 elements from shared memory. Of each, a thread gets the elements 2 * (lane % 4) and
// 2 * (lane % 4) + 1 of row lane / 4.
__device__ inline void load_matrices(uint32_t (&a)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

// The same, but transposed: a thread gets these elements of column lane / 4.
__device__ inline void load_transposed(uint32_t (&a)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

// Transpose an 8 x 8 matrix that is spread over the warp in the same way.
__device__ inline uint32_t transpose(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}
