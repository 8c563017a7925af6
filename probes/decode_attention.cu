// Attention of one decode token over a paged KV cache, fused with what comes before it: QK-norm, rotation and the
// append of the new key and value. One cluster of thread blocks for each KV head; each thread block attends to a share
// of the keys, and the blocks exchange their states through distributed shared memory.
//
// A warp attends to whole keys: a lane holds the same few dimensions of the queries, of every key and of every value,
// the two of a rotated pair among them, so rotation needs no exchange, and scores need one reduction over the warp.
// What does not depend on the previous kernel (old keys, page indices, rotation, norm weights) is loaded before
// `griddepcontrol.wait`, while that kernel still runs (programmatic dependent launch).
#include <cuda_bf16.h>
#include <cooperative_groups.h>
#include <cstdint>

namespace cg = cooperative_groups;
using bf16 = __nv_bfloat16;

constexpr int WARPS = 8, SPLITS = 8, PREFETCHED = 8;  // keys per warp that are loaded before the wait

struct Params {
    const bf16* qkv;              // [(Hq + 2 Hk) D]
    const bf16 *q_weight, *k_weight;  // [D], or null: no norm
    const float *cos, *sin;       // [D / 2]
    bf16 *k_cache, *v_cache;      // pages
    int64_t page_stride, token_stride, head_stride;
    const int32_t* pages;         // page of each page_size keys
    const int64_t* position;      // of the new key; as many keys are old
    bf16* out;                    // [Hq D]
    int num_kv_heads, page_size;
    float scale, eps;
};

template <int N> struct Vec { bf16 x[N]; };
template <> struct __align__(4) Vec<2> { bf16 x[2]; };
template <> struct __align__(8) Vec<4> { bf16 x[4]; };

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// The lane's 2 V of D dimensions: V in the first half, V in the second.
template <int V> struct Dims { float x[2 * V]; };

template <int D, int V = D / 64>
__device__ inline Dims<V> load(const bf16* row, int lane) {
    auto a = reinterpret_cast<const Vec<V>*>(row)[lane], b = reinterpret_cast<const Vec<V>*>(row + D / 2)[lane];
    Dims<V> r;
#pragma unroll
    for (int i = 0; i < V; i++) r.x[i] = __bfloat162float(a.x[i]), r.x[V + i] = __bfloat162float(b.x[i]);
    return r;
}

template <int D, int V = D / 64>
__device__ inline void store(bf16* row, int lane, const Dims<V>& r) {
    Vec<V> a, b;
#pragma unroll
    for (int i = 0; i < V; i++) a.x[i] = __float2bfloat16(r.x[i]), b.x[i] = __float2bfloat16(r.x[V + i]);
    reinterpret_cast<Vec<V>*>(row)[lane] = a, reinterpret_cast<Vec<V>*>(row + D / 2)[lane] = b;
}

template <int V>
__device__ inline Dims<V> norm_and_rotate(
    Dims<V> x, const bool norm, const Dims<V>& weight, const Dims<V>& turn, float eps, int d) {
    if (norm) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 2 * V; i++) squares += x.x[i] * x.x[i];
        float inverse = rsqrtf(warp_sum(squares) / d + eps);
#pragma unroll
        for (int i = 0; i < 2 * V; i++) x.x[i] *= inverse * weight.x[i];
    }
    Dims<V> r;
#pragma unroll
    for (int i = 0; i < V; i++) {
        r.x[i] = x.x[i] * turn.x[i] - x.x[V + i] * turn.x[V + i];
        r.x[V + i] = x.x[V + i] * turn.x[i] + x.x[i] * turn.x[V + i];
    }
    return r;
}

template <int D, int G>
__global__ void __launch_bounds__(WARPS * 32) decode_attention(const Params p) {
    constexpr int V = D / 64;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x, split = blockIdx.y;
    const int first = split * WARPS + warp, stride = SPLITS * WARPS;  // keys first, first + stride, ... are this warp's
    const int old = static_cast<int>(*p.position);
    cg::cluster_group cluster = cg::this_cluster();

    auto key_offset = [&](int i) {
        return p.pages[i / p.page_size] * p.page_stride + (i % p.page_size) * p.token_stride + head * p.head_stride;
    };
    Vec<V> k_first[PREFETCHED], k_second[PREFETCHED], v_first[PREFETCHED], v_second[PREFETCHED];
#pragma unroll
    for (int j = 0; j < PREFETCHED; j++) {
        int i = first + j * stride;
        if (i < old) {
            int64_t at = key_offset(i);
            k_first[j] = reinterpret_cast<const Vec<V>*>(p.k_cache + at)[lane];
            k_second[j] = reinterpret_cast<const Vec<V>*>(p.k_cache + at + D / 2)[lane];
            v_first[j] = reinterpret_cast<const Vec<V>*>(p.v_cache + at)[lane];
            v_second[j] = reinterpret_cast<const Vec<V>*>(p.v_cache + at + D / 2)[lane];
        }
    }
    const bool norm = p.q_weight != nullptr;
    Dims<V> q_weight{}, k_weight{}, turn;
    if (norm) q_weight = load<D>(p.q_weight, lane), k_weight = load<D>(p.k_weight, lane);
#pragma unroll
    for (int i = 0; i < V; i++) turn.x[i] = p.cos[lane * V + i], turn.x[V + i] = p.sin[lane * V + i];
    const int64_t new_at = key_offset(old);
    cluster.sync();  // every block of the cluster runs, so its shared memory can be written

    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    Dims<V> q[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        q[g] = load<D>(p.qkv + (head * G + g) * D, lane);
        q[g] = norm_and_rotate<V>(q[g], norm, q_weight, turn, p.eps, D);
#pragma unroll
        for (int i = 0; i < 2 * V; i++) q[g].x[i] *= p.scale * 1.44269504f;  // exponentials are to base 2
    }
    float m[G], l[G];
    Dims<V> acc[G];
#pragma unroll
    for (int g = 0; g < G; g++) m[g] = -INFINITY, l[g] = 0, acc[g] = {};

    // Attend to `count` keys at once: their scores, one new maximum, one rescaling.
    auto attend = [&](const Dims<V>* k, const Dims<V>* v, const bool* seen, auto count) {
        constexpr int N = decltype(count)::value;
        float s[G][N];
#pragma unroll
        for (int g = 0; g < G; g++) {
            float best = m[g];
#pragma unroll
            for (int j = 0; j < N; j++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < 2 * V; i++) dot += q[g].x[i] * k[j].x[i];
                s[g][j] = seen[j] ? warp_sum(dot) : -INFINITY;
                best = fmaxf(best, s[g][j]);
            }
            float shrink = best == -INFINITY ? 0.f : exp2f(m[g] - best);
            m[g] = best, l[g] *= shrink;
#pragma unroll
            for (int i = 0; i < 2 * V; i++) acc[g].x[i] *= shrink;
#pragma unroll
            for (int j = 0; j < N; j++) {
                float weight = seen[j] ? exp2f(s[g][j] - best) : 0.f;
                l[g] += weight;
#pragma unroll
                for (int i = 0; i < 2 * V; i++) acc[g].x[i] += weight * (seen[j] ? v[j].x[i] : 0.f);
            }
        }
    };
    auto unpack = [](const Vec<V>& a, const Vec<V>& b) {
        Dims<V> r;
#pragma unroll
        for (int i = 0; i < V; i++) r.x[i] = __bfloat162float(a.x[i]), r.x[V + i] = __bfloat162float(b.x[i]);
        return r;
    };
    {
        Dims<V> k[PREFETCHED], v[PREFETCHED];
        bool seen[PREFETCHED];
#pragma unroll
        for (int j = 0; j < PREFETCHED; j++) {
            seen[j] = first + j * stride < old;
            k[j] = unpack(k_first[j], k_second[j]), v[j] = unpack(v_first[j], v_second[j]);
        }
        attend(k, v, seen, std::integral_constant<int, PREFETCHED>{});
    }
    for (int begin = first + PREFETCHED * stride; begin < old; begin += 4 * stride) {
        Dims<V> k[4], v[4];
        bool seen[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = begin + j * stride;
            seen[j] = i < old;
            if (seen[j]) k[j] = load<D>(p.k_cache + key_offset(i), lane), v[j] = load<D>(p.v_cache + key_offset(i), lane);
        }
        attend(k, v, seen, std::integral_constant<int, 4>{});
    }
    if (first == 0) {  // the new key, of which the cache gets a copy
        Dims<V> k = norm_and_rotate<V>(load<D>(p.qkv + (p.num_kv_heads * G + head) * D, lane), norm, k_weight, turn, p.eps, D);
        Dims<V> v = load<D>(p.qkv + (p.num_kv_heads * (G + 1) + head) * D, lane);
        store<D>(p.k_cache + new_at, lane, k), store<D>(p.v_cache + new_at, lane, v);
#pragma unroll
        for (int i = 0; i < 2 * V; i++) k.x[i] = __bfloat162float(__float2bfloat16(k.x[i]));  // as later steps read it
        const bool seen[1] = {true};
        attend(&k, &v, seen, std::integral_constant<int, 1>{});
    }

    // Merge the warps of the block, then the blocks of the cluster: each block finishes a share of the outputs.
    constexpr int OUTPUTS = G * D, SHARE = OUTPUTS / SPLITS;
    __shared__ float warp_m[WARPS][G], warp_l[WARPS][G], warp_acc[WARPS][OUTPUTS];
    __shared__ float block_m[SPLITS][G], block_l[SPLITS][G], block_acc[SPLITS][SHARE];
#pragma unroll
    for (int g = 0; g < G; g++) {
        if (lane == 0) warp_m[warp][g] = m[g], warp_l[warp][g] = l[g];
#pragma unroll
        for (int i = 0; i < V; i++) {
            warp_acc[warp][g * D + lane * V + i] = acc[g].x[i];
            warp_acc[warp][g * D + D / 2 + lane * V + i] = acc[g].x[V + i];
        }
    }
    __syncthreads();
    for (int o = threadIdx.x; o < OUTPUTS; o += WARPS * 32) {
        int g = o / D;
        float best = -INFINITY, sum = 0, value = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, warp_m[w][g]);
        float base = best == -INFINITY ? 0.f : best;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float weight = exp2f(warp_m[w][g] - base);
            sum += weight * warp_l[w][g], value += weight * warp_acc[w][o];
        }
        int owner = o / SHARE;
        cluster.map_shared_rank(&block_acc[0][0], owner)[split * SHARE + o % SHARE] = value;
        if (o % SHARE == 0 || o % D == 0) {
            cluster.map_shared_rank(&block_m[0][0], owner)[split * G + g] = best;
            cluster.map_shared_rank(&block_l[0][0], owner)[split * G + g] = sum;
        }
    }
    cluster.sync();
    for (int i = threadIdx.x; i < SHARE; i += WARPS * 32) {
        int o = split * SHARE + i, g = o / D;
        float best = -INFINITY, sum = 0, value = 0;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) best = fmaxf(best, block_m[s][g]);
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            float weight = exp2f(block_m[s][g] - best);
            sum += weight * block_l[s][g], value += weight * block_acc[s][i];
        }
        p.out[head * OUTPUTS + o] = __float2bfloat16(value / sum);
    }
}

template <int D, int G>
static int launch(const Params& p, void* stream) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = 1, attributes[0].val.clusterDim.y = SPLITS, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(p.num_kv_heads, SPLITS), config.blockDim = dim3(WARPS * 32);
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, decode_attention<D, G>, p);
}

extern "C" int launch_decode_attention(const Params* p, int head_dim, int group, void* stream) {
    if (head_dim == 128 && group == 2) return launch<128, 2>(*p, stream);
    if (head_dim == 128 && group == 4) return launch<128, 4>(*p, stream);
    if (head_dim == 64 && group == 3) return launch<64, 3>(*p, stream);
    return cudaErrorInvalidValue;
}
