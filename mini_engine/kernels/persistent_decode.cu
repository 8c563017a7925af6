// A decode step of one request in one kernel: all layers and the LM head, for Llama and Qwen3.
//
// One thread block per SM stays for the whole step. In each block one warp streams the block's rows of every weight
// through a ring of buffers in shared memory, in the order in which they are needed and as fast as the memory delivers
// them; eight warps multiply. So the memory never waits for a phase of the computation to end.
//
// Blocks exchange vectors through global memory without barriers: every value is stored together with a tag that says
// which layer of which step wrote it, in one 8-byte store, and a reader loads it until the tag is right ("LL" protocol
// of NCCL). A buffer can be overwritten one layer later, because by then every block depends on values that every other
// block wrote after it had read.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cstdint>

using bf16 = __nv_bfloat16;

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int SEGMENT = 1024;  // elements of a row that one warp multiplies
constexpr int GROUP = Q_HEADS / KV_HEADS, Q_SIZE = Q_HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_HEADS * HEAD_DIM;
constexpr int KEYS_PER_SPLIT = 128, MAX_SPLITS = 32;
constexpr int UNITS = 16, STAGE_BYTES = UNITS * SEGMENT * 2;  // segments in one buffer of the ring
constexpr int LARGEST = INTERMEDIATE > Q_SIZE ? INTERMEDIATE : Q_SIZE;
constexpr int VECTOR = LARGEST > HIDDEN ? LARGEST : HIDDEN;
constexpr int FLUSH = 8;  // rounds whose partial sums are kept
constexpr int STAGES = (227 * 1024 - 4 * (VECTOR + WARPS * GROUP * HEAD_DIM) - 12288) / STAGE_BYTES;
static_assert(HIDDEN % SEGMENT == 0 && Q_SIZE % SEGMENT == 0 && INTERMEDIATE % SEGMENT == 0, "rows of whole segments");
static_assert(STAGES >= 2 && VECTOR <= WARPS * SEGMENT, "too large");

struct Layer {
    const bf16 *qkv, *o, *gate_up, *down, *input_norm, *mlp_norm, *q_norm, *k_norm;
    bf16 *k_cache, *v_cache;
};

using Tagged = unsigned long long;  // a float, and the tag of its writer above it

struct Step {
    const Layer* layers;
    const bf16 *embedding, *final_norm, *lm_head;
    const float* inv_freq;    // [HEAD_DIM / 2]
    const int64_t *token_id, *token_source, *last_token;  // the token, if no row's last one is
    const int64_t* position;
    const int32_t* pages;     // of the request
    int64_t page_stride, token_stride, head_stride;  // of the cache, in elements
    Tagged *qkv, *attention, *lse, *after_attention, *activation, *after_mlp;
    uint32_t* count;          // of steps
    float* logits;
    float scale, eps;
    int page_size, vocab_size;
};

// --- the ring of weights -----------------------------------------------------------------------------------------------

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

struct Ring {
    unsigned char* stages;
    uint64_t *full, *empty;
    int stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ static void wait(uint64_t* barrier, uint32_t phase) {
        asm volatile(
            "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n}\n" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
    }
    __device__ void copy(int offset, const bf16* from, int bytes) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                shared_address(stages + stage * STAGE_BYTES + offset)),
            "l"(from), "r"(bytes), "r"(shared_address(full + stage)) : "memory");
    }
    __device__ void expect(int bytes) {
        wait(empty + stage, phase ^ 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full + stage)), "r"(bytes)
                     : "memory");
    }
    __device__ void release() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(empty + stage)) : "memory");
    }
};

// The rows of a block: every block has its share of every matrix.
struct Share {
    int first, end;
    __device__ explicit Share(int rows)
        : first(static_cast<int>(static_cast<int64_t>(rows) * blockIdx.x / gridDim.x)),
          end(static_cast<int>(static_cast<int64_t>(rows) * (blockIdx.x + 1) / gridDim.x)) {}
};

// Rows of K elements in one buffer.
template <int K> constexpr int ROWS = UNITS / (K / SEGMENT);

template <int K> __device__ void stream(Ring& ring, const bf16* matrix, int rows) {
    Share share(rows);
    for (int row = share.first; row < share.end; row += ROWS<K>) {
        int bytes = min(ROWS<K>, share.end - row) * K * 2;
        ring.expect(bytes);
        ring.copy(0, matrix + static_cast<int64_t>(row) * K, bytes);
        ring.advance();
    }
}

// Rows of the gate in the first half of a stage, the same rows of the up projection in the second.
template <int K> __device__ void stream_pairs(Ring& ring, const bf16* matrix, int rows) {
    Share share(rows);
    constexpr int PAIRS = ROWS<K> / 2;
    for (int row = share.first; row < share.end; row += PAIRS) {
        int bytes = min(PAIRS, share.end - row) * K * 2;
        ring.expect(2 * bytes);
        ring.copy(0, matrix + static_cast<int64_t>(row) * K, bytes);
        ring.copy(STAGE_BYTES / 2, matrix + static_cast<int64_t>(rows + row) * K, bytes);
        ring.advance();
    }
}

// --- exchange between blocks --------------------------------------------------------------------------------------------

__device__ inline void publish_bits(Tagged* to, uint32_t bits, uint32_t tag) {
    Tagged both = static_cast<Tagged>(tag) << 32 | bits;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}

__device__ inline void publish(Tagged* to, float value, uint32_t tag) { publish_bits(to, __float_as_uint(value), tag); }

__device__ inline float value_of(Tagged both) { return __uint_as_float(static_cast<uint32_t>(both)); }

// Load N pairs of values, `stride` apart, until all of them have the tag.
template <int N> __device__ inline void receive(const Tagged* from, int stride, uint32_t tag, Tagged (&got)[2 * N]) {
    bool ready;
    do {
        ready = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(got[2 * i]), "=l"(got[2 * i + 1]) : "l"(from + i * stride) : "memory");
            ready &= got[2 * i] >> 32 == tag && got[2 * i + 1] >> 32 == tag;
        }
    } while (!ready);
}

__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Where element i of a vector of N is kept: lanes that read eight adjacent elements each then meet in no bank.
template <int N> __device__ inline int place(int i) { return (i & 4 ? N / 2 : 0) + i / 8 * 4 + i % 4; }

template <int N> __device__ void gather(const Tagged* from, uint32_t tag, float* vector) {
    constexpr int EACH = N / (2 * CONSUMERS);
    const int first = 2 * threadIdx.x;
    Tagged got[2 * EACH];
    receive<EACH>(from + first, 2 * CONSUMERS, tag, got);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        *reinterpret_cast<float2*>(vector + place<N>(first + i * 2 * CONSUMERS)) =
            make_float2(value_of(got[2 * i]), value_of(got[2 * i + 1]));
    sync_consumers();
}

// --- arithmetic ---------------------------------------------------------------------------------------------------------

template <int LANES = 32> __device__ inline float sum(float x) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask >>= 1) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

__device__ inline void unpack(uint4 packed, float (&x)[8]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// What the warps share.
struct Shared {
    float vector[VECTOR];
    float states[WARPS][GROUP * HEAD_DIM], maxima[WARPS][GROUP], sums[WARPS][GROUP];
    float partial[FLUSH * UNITS];
    float residual[256];  // of the block's rows
    float cosine[HEAD_DIM / 2], sine[HEAD_DIM / 2];  // of the position
    Layer layers[LAYERS];
    uint64_t full[STAGES], empty[STAGES];
};

// Loads that are issued here, and not where their values are used.
__device__ inline uint4 load_now(const void* from) {
    uint4 r;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from));
    return r;
}

// A lane's elements of its warp's segment of the vector: eight adjacent ones in each quarter.
template <int K> __device__ void load_segment(const float* vector, float (&x)[32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* segment = vector + warp % (K / SEGMENT) * SEGMENT / 2 + lane * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *reinterpret_cast<float4*>(x + 8 * i) = *reinterpret_cast<const float4*>(segment + i * 128);
        *reinterpret_cast<float4*>(x + 8 * i + 4) = *reinterpret_cast<const float4*>(segment + K / 2 + i * 128);
    }
}

template <int K> struct NormWeights {
    uint4 packed[4];
    __device__ explicit NormWeights(const bf16* weights) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[i] = load_now(weights + warp % (K / SEGMENT) * SEGMENT + i * 256 + lane * 8);
    }
};

template <int K>
__device__ void load_normalized(const float* vector, const NormWeights<K>& weights, float eps, float (&x)[32]) {
    float squares[4] = {};
    load_segment<K>(vector, x);
    if constexpr (K == SEGMENT) {
#pragma unroll
        for (int i = 0; i < 32; i++) squares[i % 4] += x[i] * x[i];
    } else {
        for (int i = threadIdx.x % 32; i < K; i += 32) squares[0] += vector[i] * vector[i];
    }
    const float factor = rsqrtf(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / K + eps);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float w[8];
        unpack(weights.packed[i], w);
#pragma unroll
        for (int j = 0; j < 8; j++) x[8 * i + j] *= factor * w[j];
    }
}

// Multiply the block's rows of a matrix with the vector whose segment is in x, and call emit(row, sum) for each, in one
// thread. In PAIRS, `rows` counts pairs, and emit gets (row, gate, up).
template <int K, bool PAIRS, typename Emit>
__device__ void multiply(Ring& ring, Shared& shared, const float (&x)[32], int rows, Emit emit) {
    constexpr int SEGMENTS = K / SEGMENT, EACH = PAIRS ? ROWS<K> / 2 : ROWS<K>;
    constexpr int AT_ONCE = WARPS / SEGMENTS, MINE = (ROWS<K> + AT_ONCE - 1) / AT_ONCE;  // rows: of all warps, of a warp
    static_assert(!PAIRS || MINE == 2, "a warp multiplies the gate's row and the up projection's");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, segment = warp % SEGMENTS, first = warp / SEGMENTS;
    Share share(rows);
    for (int begin = share.first; begin < share.end; begin += FLUSH * EACH) {
        const int end = min(share.end, begin + FLUSH * EACH);
        for (int row = begin, round = 0; row < end; row += EACH, round++) {
            Ring::wait(ring.full + ring.stage, ring.phase);
            const unsigned char* stage = ring.stages + ring.stage * STAGE_BYTES;
            float dots[MINE];
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                const int index = first + i * AT_ONCE;  // of the row in the stage; of what was not copied nothing is used
                const auto* unit = reinterpret_cast<const uint4*>(stage + (min(index, ROWS<K> - 1) * SEGMENTS + segment) * SEGMENT * 2);
                float sums[4] = {};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float w[8];
                    unpack(unit[j * 32 + lane], w);
#pragma unroll
                    for (int k = 0; k < 8; k++) sums[j] += w[k] * x[8 * j + k];
                }
                dots[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            }
#pragma unroll
            for (int i = 0; i < MINE; i++) dots[i] = sum(dots[i]);
            if (lane == 0) ring.release();
            ring.advance();
            if constexpr (PAIRS && SEGMENTS == 1) {
                if (lane == 0 && row + first < end) emit(row + first, dots[0], dots[1]);
            } else if constexpr (SEGMENTS == 1) {
#pragma unroll
                for (int i = 0; i < MINE; i++)
                    if (lane == i && row + first + i * AT_ONCE < end) emit(row + first + i * AT_ONCE, dots[i], 0);
            } else if (lane == 0 && first < AT_ONCE) {
#pragma unroll
                for (int i = 0; i < MINE; i++)
                    if (first + i * AT_ONCE < ROWS<K>)
                        shared.partial[round * UNITS + (first + i * AT_ONCE) * SEGMENTS + segment] = dots[i];
            }
        }
        if constexpr (SEGMENTS > 1) {
            sync_consumers();
            for (int i = threadIdx.x; i < end - begin; i += CONSUMERS) {
                const float* of_row = shared.partial + i / EACH * UNITS + i % EACH * SEGMENTS;
                float total = 0, up = 0;
#pragma unroll
                for (int s = 0; s < SEGMENTS; s++) {
                    total += of_row[s];
                    if (PAIRS) up += of_row[s + EACH * SEGMENTS];
                }
                emit(begin + i, total, up);
            }
            if (end < share.end) sync_consumers();
        }
    }
    if constexpr (SEGMENTS == 1) sync_consumers();  // every warp has read its segment: the vector may be overwritten
}

// --- attention ----------------------------------------------------------------------------------------------------------

constexpr int LANES = HEAD_DIM / 8, AT_ONCE = 32 / LANES;  // lanes to a key, keys to a warp
constexpr int STRIDE = WARPS * AT_ONCE;                    // keys to a block
constexpr int AHEAD = KEYS_PER_SPLIT / STRIDE;             // keys of a lane that are loaded together

// A lane's eight dimensions of a head: normalized, and rotated with those of the lane that has the other half.
__device__ inline void norm_and_rotate(float (&x)[8], bool norm, uint4 weights, const Shared& shared, float eps) {
    const int part = threadIdx.x % LANES;
    const float *cosine = shared.cosine + part * 8 % (HEAD_DIM / 2), *sine = shared.sine + part * 8 % (HEAD_DIM / 2);
    if (norm) {
        float squares = 0, w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) squares += x[i] * x[i];
        const float factor = rsqrtf(sum<LANES>(squares) / HEAD_DIM + eps);
        unpack(weights, w);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] *= factor * w[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(~0u, x[i], LANES / 2);
        x[i] = x[i] * cosine[i] + (part < LANES / 2 ? -other : other) * sine[i];
    }
}

// A block's share of the keys, the same in all layers.
struct Split {
    int head, index, count, first, end, last;  // KV head; split, of how many; the lane's first key; end of the split; new key
    bool has_work;
    int64_t offsets[AHEAD];  // of the lane's first keys

    __device__ Split(const Step& step, int num_keys) {
        const int splits = min(static_cast<int>(gridDim.x) / KV_HEADS, MAX_SPLITS), lane = threadIdx.x % 32;
        const int per_head = gridDim.x / KV_HEADS;
        head = blockIdx.x / per_head, index = blockIdx.x % per_head, last = num_keys - 1;
        count = min(splits, (num_keys + KEYS_PER_SPLIT - 1) / KEYS_PER_SPLIT);
        has_work = head < KV_HEADS && index < count;
        const int each = (num_keys + count - 1) / count;
        end = min(num_keys, (index + 1) * each), first = index * each + threadIdx.x / 32 * AT_ONCE + lane / LANES;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) offsets[i] = has_work && first + i * STRIDE < end ? offset(step, first + i * STRIDE) : 0;
    }
    __device__ int64_t offset(const Step& step, int key) const {
        return step.pages[key / step.page_size] * step.page_stride + key % step.page_size * step.token_stride +
               head * step.head_stride + threadIdx.x % LANES * 8;
    }
};

__device__ void attention(const Step& step, const Layer& layer, Shared& shared, const Split& split, uint32_t tag) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % LANES;
    uint4 k[AHEAD], v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {  // while the projection is still computed
        const bool old = split.first + i * STRIDE < min(split.end, split.last);
        k[i] = old ? load_now(layer.k_cache + split.offsets[i]) : uint4{};
        v[i] = old ? load_now(layer.v_cache + split.offsets[i]) : uint4{};
    }
    const bool norm = layer.q_norm != nullptr;
    const uint4 q_weights = norm ? load_now(layer.q_norm + part * 8) : uint4{};
    const uint4 k_weights = norm ? load_now(layer.k_norm + part * 8) : uint4{};

    // Queries of the group, then the new key and value.
    for (int i = 2 * threadIdx.x; i < (GROUP + 2) * HEAD_DIM; i += 2 * CONSUMERS) {
        const int which = i / HEAD_DIM;
        const int of = which < GROUP ? split.head * GROUP + which : Q_HEADS + (which - GROUP) * KV_HEADS + split.head;
        Tagged got[2];
        receive<1>(step.qkv + of * HEAD_DIM + i % HEAD_DIM, 0, tag, got);
        *reinterpret_cast<float2*>(shared.vector + i) = make_float2(value_of(got[0]), value_of(got[1]));
    }
    sync_consumers();
    float q[GROUP][8], new_key[8] = {}, new_value[8] = {};
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int i = 0; i < 8; i++) q[g][i] = shared.vector[g * HEAD_DIM + part * 8 + i];
        norm_and_rotate(q[g], norm, q_weights, shared, step.eps);
#pragma unroll
        for (int i = 0; i < 8; i++) q[g][i] *= step.scale * 1.44269504f;  // exponentials are to base 2
    }
    if (split.end > split.last) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            new_key[i] = shared.vector[GROUP * HEAD_DIM + part * 8 + i];
            new_value[i] = shared.vector[(GROUP + 1) * HEAD_DIM + part * 8 + i];
        }
        norm_and_rotate(new_key, norm, k_weights, shared, step.eps);
        __align__(16) bf16 stored[2][8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            stored[0][i] = __float2bfloat16(new_key[i]), stored[1][i] = __float2bfloat16(new_value[i]);
            new_key[i] = __bfloat162float(stored[0][i]), new_value[i] = __bfloat162float(stored[1][i]);
        }
        if (threadIdx.x < LANES) {
            const int64_t at = split.offset(step, split.last);
            *reinterpret_cast<uint4*>(layer.k_cache + at) = *reinterpret_cast<const uint4*>(stored[0]);
            *reinterpret_cast<uint4*>(layer.v_cache + at) = *reinterpret_cast<const uint4*>(stored[1]);
        }
    }
    float best[GROUP], total[GROUP], out[GROUP][8] = {};
#pragma unroll
    for (int g = 0; g < GROUP; g++) best[g] = -INFINITY, total[g] = 0;
    for (int first = split.first; __any_sync(~0u, first < split.end); first += AHEAD * STRIDE) {
        if (first != split.first) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const bool old = first + i * STRIDE < min(split.end, split.last);
                const int64_t at = old ? split.offset(step, first + i * STRIDE) : 0;
                k[i] = old ? load_now(layer.k_cache + at) : uint4{};
                v[i] = old ? load_now(layer.v_cache + at) : uint4{};
            }
        }
        float scores[GROUP][AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float key[8];
            unpack(k[i], key);
#pragma unroll
            for (int j = 0; j < 8; j++) key[j] = first + i * STRIDE == split.last ? new_key[j] : key[j];
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                scores[g][i] = 0;
#pragma unroll
                for (int j = 0; j < 8; j++) scores[g][i] += q[g][j] * key[j];
            }
        }
#pragma unroll
        for (int mask = LANES / 2; mask; mask >>= 1)
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
#pragma unroll
                for (int g = 0; g < GROUP; g++) scores[g][i] += __shfl_xor_sync(~0u, scores[g][i], mask);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float next = best[g];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (first + i * STRIDE >= split.end) scores[g][i] = -INFINITY;
                next = fmaxf(next, scores[g][i]);
            }
            const float base = next == -INFINITY ? 0.f : next, shrink = exp2f(best[g] - base);
            best[g] = next, total[g] *= shrink;
#pragma unroll
            for (int j = 0; j < 8; j++) out[g][j] *= shrink;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) scores[g][i] = exp2f(scores[g][i] - base), total[g] += scores[g][i];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float value[8];
            unpack(v[i], value);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                value[j] = first + i * STRIDE == split.last ? new_value[j] : value[j];
#pragma unroll
                for (int g = 0; g < GROUP; g++) out[g][j] += scores[g][i] * value[j];
            }
        }
    }
    // Merge the keys of the warp, then the warps.
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int mask = LANES; mask < 32; mask <<= 1) {
            const float next = fmaxf(best[g], __shfl_xor_sync(~0u, best[g], mask));
            const float mine = next == -INFINITY ? 0.f : exp2f(best[g] - next);
            best[g] = next, total[g] *= mine;
            total[g] += __shfl_xor_sync(~0u, total[g], mask);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                out[g][i] *= mine;
                out[g][i] += __shfl_xor_sync(~0u, out[g][i], mask);
            }
        }
        if (lane < LANES) {
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                *reinterpret_cast<float4*>(shared.states[warp] + g * HEAD_DIM + part * 8 + i) =
                    make_float4(out[g][i], out[g][i + 1], out[g][i + 2], out[g][i + 3]);
        }
        if (lane == 0) shared.maxima[warp][g] = best[g], shared.sums[warp][g] = total[g];
    }
    sync_consumers();
    for (int i = 2 * threadIdx.x; i < GROUP * HEAD_DIM; i += 2 * CONSUMERS) {
        const int g = i / HEAD_DIM, of = split.index * Q_HEADS + split.head * GROUP + g;
        float most = -INFINITY, all = 0;
        float2 merged = {0, 0};
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared.maxima[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2f(shared.maxima[w][g] - most);
            all += weight * shared.sums[w][g];
            merged.x += weight * shared.states[w][i], merged.y += weight * shared.states[w][i + 1];
        }
        const uint32_t low = __bfloat16_as_ushort(__float2bfloat16(merged.x / all));
        const uint32_t high = __bfloat16_as_ushort(__float2bfloat16(merged.y / all));
        publish_bits(step.attention + (of * HEAD_DIM + i % HEAD_DIM) / 2, high << 16 | low, tag);
        if (i % HEAD_DIM == 0) publish(step.lse + of, most + log2f(all), tag);
    }
}

// Merge the splits of every head into the vector that the output projection reads.
__device__ void merge(const Step& step, Shared& shared, int num_splits, uint32_t tag) {
    constexpr int TOGETHER = 4;  // splits that are loaded at once
    for (int i = 8 * threadIdx.x; i < Q_SIZE; i += 8 * CONSUMERS) {
        float best = -INFINITY, total = 0, out[8] = {};
        for (int first = 0; first < num_splits; first += TOGETHER) {
            Tagged got[TOGETHER][5];
            bool ready;
            do {
                ready = true;
#pragma unroll
                for (int s = 0; s < TOGETHER; s++) {
                    const int split = min(first + s, num_splits - 1);
                    const Tagged* from = step.attention + (split * Q_SIZE + i) / 2;
                    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(got[s][0]), "=l"(got[s][1]) : "l"(from) : "memory");
                    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(got[s][2]), "=l"(got[s][3]) : "l"(from + 2) : "memory");
                    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(got[s][4]) : "l"(step.lse + split * Q_HEADS + i / HEAD_DIM) : "memory");
                }
#pragma unroll
                for (int s = 0; s < TOGETHER; s++)
#pragma unroll
                    for (int j = 0; j < 5; j++) ready &= got[s][j] >> 32 == tag;
            } while (!ready);
#pragma unroll
            for (int s = 0; s < TOGETHER; s++) {
                const float lse = first + s < num_splits ? value_of(got[s][4]) : -INFINITY;
                const float next = fmaxf(best, lse), old = exp2f(best - next), weight = exp2f(lse - next);
                best = next, total = total * old + weight;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t pair = static_cast<uint32_t>(got[s][j]);
                    out[2 * j] = out[2 * j] * old + weight * __uint_as_float(pair << 16);
                    out[2 * j + 1] = out[2 * j + 1] * old + weight * __uint_as_float(pair & 0xffff0000u);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            *reinterpret_cast<float4*>(shared.vector + place<Q_SIZE>(i + j)) =
                make_float4(out[j] / total, out[j + 1] / total, out[j + 2] / total, out[j + 3] / total);
    }
    sync_consumers();
}

// --- the step -----------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(THREADS, 1) decode_step(const Step step) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + STAGES * STAGE_BYTES);
    Ring ring{memory, shared.full, shared.empty};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(shared.full + i)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(shared.empty + i)), "n"(WARPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = threadIdx.x; i < LAYERS; i += THREADS) shared.layers[i] = step.layers[i];
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        for (int i = 0; i < LAYERS; i++) {
            const Layer& layer = shared.layers[i];
            stream<HIDDEN>(ring, layer.qkv, QKV_SIZE);
            stream<Q_SIZE>(ring, layer.o, HIDDEN);
            stream_pairs<HIDDEN>(ring, layer.gate_up, INTERMEDIATE);
            stream<INTERMEDIATE>(ring, layer.down, HIDDEN);
        }
        stream<HIDDEN>(ring, step.lm_head, step.vocab_size);
        return;
    }

    const uint32_t count = *step.count;
    const int num_keys = static_cast<int>(*step.position) + 1;
    const Split split(step, num_keys);
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += CONSUMERS)
        sincosf((num_keys - 1) * step.inv_freq[i], shared.sine + i, shared.cosine + i);
    const int64_t token = *step.token_source < 0 ? *step.token_id : step.last_token[*step.token_source];
    const bf16* embedded = step.embedding + token * HIDDEN;
    const Share own(HIDDEN);
    for (int i = threadIdx.x; i < HIDDEN; i += CONSUMERS) {
        const float value = __bfloat162float(embedded[i]);
        shared.vector[place<HIDDEN>(i)] = value;
        if (i >= own.first && i < own.end) shared.residual[i - own.first] = value;
    }
    sync_consumers();
    float x[32];
    auto add_and_publish = [&](Tagged* to, uint32_t tag) {
        return [=, &shared](int row, float value, float) {
            publish(to + row, shared.residual[row - own.first] += value, tag);
        };
    };
    for (int i = 0; i < LAYERS; i++) {
        const Layer& layer = shared.layers[i];
        const uint32_t tag = count * LAYERS + i + 1;
        {
            const NormWeights<HIDDEN> weights(layer.input_norm);
            if (i) gather<HIDDEN>(step.after_mlp, tag - 1, shared.vector);
            load_normalized<HIDDEN>(shared.vector, weights, step.eps, x);
        }
        multiply<HIDDEN, false>(ring, shared, x, QKV_SIZE, [&](int row, float value, float) { publish(step.qkv + row, value, tag); });
        if (split.has_work) attention(step, layer, shared, split, tag);
        merge(step, shared, split.count, tag);
        load_segment<Q_SIZE>(shared.vector, x);
        multiply<Q_SIZE, false>(ring, shared, x, HIDDEN, add_and_publish(step.after_attention, tag));
        {
            const NormWeights<HIDDEN> weights(layer.mlp_norm);
            gather<HIDDEN>(step.after_attention, tag, shared.vector);
            load_normalized<HIDDEN>(shared.vector, weights, step.eps, x);
        }
        multiply<HIDDEN, true>(ring, shared, x, INTERMEDIATE, [&](int row, float gate, float up) {
            publish(step.activation + row, gate / (1 + __expf(-gate)) * up, tag);
        });
        gather<INTERMEDIATE>(step.activation, tag, shared.vector);
        load_segment<INTERMEDIATE>(shared.vector, x);
        multiply<INTERMEDIATE, false>(ring, shared, x, HIDDEN, add_and_publish(step.after_mlp, tag));
    }
    const NormWeights<HIDDEN> weights(step.final_norm);
    gather<HIDDEN>(step.after_mlp, (count + 1) * LAYERS, shared.vector);
    load_normalized<HIDDEN>(shared.vector, weights, step.eps, x);
    multiply<HIDDEN, false>(ring, shared, x, step.vocab_size, [&](int row, float value, float) { step.logits[row] = value; });
    // Every block has read the count by now: this one has received values from all of them.
    if (blockIdx.x == 0 && threadIdx.x == 0) *step.count = count + 1;
}

extern "C" int launch_decode_step(const Step* step, int num_blocks, void* stream) {
    const int bytes = STAGES * STAGE_BYTES + static_cast<int>(sizeof(Shared));
    if (cudaError_t error = cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    void* arguments[] = {const_cast<Step*>(step)};
    return cudaLaunchCooperativeKernel(
        reinterpret_cast<const void*>(decode_step), dim3(num_blocks), dim3(THREADS), arguments, bytes,
        static_cast<cudaStream_t>(stream));
}
