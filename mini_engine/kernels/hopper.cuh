// What the kernels for Hopper share: barriers that count copied bytes, maps of tensors for TMA, early launches, and pairs of
// bfloat16.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void initialize(uint64_t* barrier, int arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void wait(uint64_t* barrier, uint32_t phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// The policy under which the L2 cache gives up these lines first, for what a step reads once.
__device__ inline uint64_t read_once() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ inline void prefetch(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A kernel may start before the previous one has ended (programmatic dependent launch). Before this wait it may read only what
// no earlier kernel of the step writes, and must write nothing to global memory. This concerns all earlier kernels, not
// only the previous one, which may let this one start before its own wait, while the kernels before it still run. Every kernel
// waits before it ends, so the end of one kernel implies the end of all kernels before it.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Takes effect when all blocks of the grid have called it or ended.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The numbers of a pair of bfloat16.
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// The driver's function that describes a tensor for TMA; null if the driver has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found)) return nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}
