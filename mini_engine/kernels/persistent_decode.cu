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
//
// A layer runs once in ten microseconds, and its instructions have left the nearest cache when it comes again. So what
// counts is how many different instructions a layer has: loops stay loops, and all products share one function.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cstdint>

using bf16 = __nv_bfloat16;

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int GROUP = Q_HEADS / KV_HEADS, Q_SIZE = Q_HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_HEADS * HEAD_DIM;
constexpr int LARGEST = INTERMEDIATE > Q_SIZE ? INTERMEDIATE : Q_SIZE, VECTOR = LARGEST > HIDDEN ? LARGEST : HIDDEN;

// A buffer of the ring has 1,024 columns of eight rows; the gap behind each row moves the next one to other banks.
constexpr int ROWS = 8, COLUMNS = 1024, ROW_BYTES = COLUMNS * 2 + 64, STAGE_BYTES = ROWS * ROW_BYTES;
constexpr int FLUSH = 6 * ROWS;  // rows whose sums are kept before they are used
static_assert(HIDDEN % COLUMNS == 0 && Q_SIZE % COLUMNS == 0 && INTERMEDIATE % COLUMNS == 0, "rows of whole buffers");

constexpr int LANES = HEAD_DIM / 8, AT_ONCE = 32 / LANES, STRIDE = WARPS * AT_ONCE;  // lanes to a key; keys to a warp, a block
constexpr int AHEAD = 4;                                                            // keys of a lane on their way
constexpr int MAX_SPLITS = 32;                                                      // a lane merges each

struct Layer {
    const bf16 *qkv, *o, *gate_up, *down, *input_norm, *mlp_norm, *q_norm, *k_norm;
    bf16 *k_cache, *v_cache;
};

using Tagged = unsigned long long;  // a float or two bf16, and the tag of their writer above them

struct Step {
    const Layer* layers;
    const bf16 *embedding, *final_norm, *lm_head;
    const float* inv_freq;    // [HEAD_DIM / 2]
    const int64_t *token_id, *token_source, *last_token;  // the token, if no row's last one is
    const int64_t* position;
    const int32_t* pages;     // of the request
    int64_t page_stride, token_stride, head_stride;  // of the cache, in elements
    Tagged *qkv, *splits, *lse, *attention, *after_attention, *activation, *after_mlp;
    uint32_t* count;          // of steps
    float* logits;
    float scale, eps;
    int vocab_size;
};

// What the threads of a block share.
struct Shared {
    bf16 vector[VECTOR];                   // what a product multiplies
    uint4 keys[AHEAD][CONSUMERS], values[AHEAD][CONSUMERS];
    __align__(16) float q[GROUP][HEAD_DIM];
    __align__(16) bf16 fresh[2][HEAD_DIM];               // the new key and value
    __align__(16) float states[WARPS][GROUP * HEAD_DIM], maxima[WARPS][GROUP], sums[WARPS][GROUP];
    __align__(16) float partial[2][FLUSH][WARPS];        // sums over each warp's columns
    __align__(16) float squares[WARPS];                  // of each warp's part of the residual stream
    float residual[256];                   // of the block's rows
    float cosine[HEAD_DIM / 2], sine[HEAD_DIM / 2];  // of the position
    Layer layers[LAYERS];
    uint64_t full[16], empty[16];
};

constexpr int STAGES_THAT_FIT = (227 * 1024 - static_cast<int>(sizeof(Shared))) / STAGE_BYTES;
constexpr int STAGES = STAGES_THAT_FIT < 16 ? STAGES_THAT_FIT : 16;
static_assert(STAGES >= 4, "too large");

extern __shared__ __align__(128) unsigned char memory[];  // the ring, and behind it what the threads share

__device__ inline unsigned char* stage(int position) { return memory + position % STAGES * STAGE_BYTES; }
__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(memory + STAGES * STAGE_BYTES); }

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// A block's share of the rows of a matrix, or of other things.
struct Share {
    int first, end;
    __device__ explicit Share(int all, int unit = 1)
        : first(all / unit * blockIdx.x / BLOCKS * unit), end(all / unit * (blockIdx.x + 1) / BLOCKS * unit) {}
};

// --- the ring of weights -----------------------------------------------------------------------------------------------

__device__ inline void wait(uint64_t* barrier, uint32_t phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(shared_address(barrier)), "r"(phase) : "memory");
}

// The thread that fills the ring.
struct Producer {
    int position = 0;  // in the sequence of all buffers

    // Copy `rows` rows of 1,024 columns to the next buffer.
    __device__ void copy(const bf16* from, int64_t row_stride, int rows) {
        const uint32_t full = shared_address(shared().full + position % STAGES), to = shared_address(stage(position));
        wait(shared().empty + position % STAGES, position / STAGES & 1 ^ 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(rows * COLUMNS * 2) : "memory");
#pragma unroll 1
        for (int row = 0; row < rows; row++)
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    to + row * ROW_BYTES),
                "l"(from + row * row_stride), "r"(COLUMNS * 2), "r"(full) : "memory");
        position++;
    }

    // The block's share of a matrix [parts * rows, columns]: eight rows of each part, then the next eight.
    __device__ void stream(const bf16* matrix, int rows, int columns, int parts = 1) {
        const Share share(rows, parts);
#pragma unroll 1
        for (int row = share.first; row < share.end; row += ROWS)
#pragma unroll 1
            for (int part = 0; part < parts; part++)
#pragma unroll 1
                for (int column = 0; column < columns; column += COLUMNS)
                    copy(matrix + static_cast<int64_t>(part * rows + row) * columns + column, columns, min(ROWS, share.end - row));
    }
};

__device__ inline void multiply_accumulate(float (&sums)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

// Multiply the next rows of the ring, `row_blocks` times eight, with the vector: a warp 128 of 1,024 columns. Each row's
// sum over them goes to `partial[buffer]`. The eight rows are half of a tile of the tensor cores; all columns of the tile that
// they are multiplied with are the vector. A thread loads eight adjacent elements, which are other ones than the
// instruction calls for, but the same ones of the row and of the vector. Returns the position in the ring.
__device__ __noinline__ int accumulate(int position, int columns, int row_blocks, int buffer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bf16* mine = shared().vector + warp * (COLUMNS / WARPS) + lane % 4 * 8;
    const int offset = lane / 4 * ROW_BYTES + warp * (COLUMNS / WARPS) * 2 + lane % 4 * 16;
#pragma unroll 1
    for (int block = 0; block < row_blocks; block++) {
        float sums[2][4] = {};
#pragma unroll 1
        for (int column = 0; column < columns; column += COLUMNS) {
            wait(shared().full + position % STAGES, position / STAGES & 1);
            const auto* rows = reinterpret_cast<const uint4*>(stage(position) + offset);
            const auto* x = reinterpret_cast<const uint4*>(mine + column);
#pragma unroll
            for (int i = 0; i < COLUMNS / WARPS / 32; i++) {
                const uint4 w = rows[i * 4], v = x[i * 4];
                multiply_accumulate(sums[0], w.x, w.y, v.x, v.y);
                multiply_accumulate(sums[1], w.z, w.w, v.z, v.w);
            }
            __syncwarp();
            if (lane == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(shared().empty + position % STAGES)) : "memory");
            position++;
        }
        if (lane % 4 == 0) shared().partial[buffer][block * ROWS + lane / 4][warp] = sums[0][0] + sums[1][0];
    }
    return position;
}

__device__ inline float total(const float (&partial)[WARPS]) {
    const float4 a = *reinterpret_cast<const float4*>(partial), b = *reinterpret_cast<const float4*>(partial + 4);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// --- exchange between blocks --------------------------------------------------------------------------------------------

__device__ inline void publish(Tagged* to, uint32_t bits, uint32_t tag) {
    const Tagged both = static_cast<Tagged>(tag) << 32 | bits;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}

__device__ inline void publish(Tagged* to, float value, uint32_t tag) { publish(to, __float_as_uint(value), tag); }

__device__ inline uint32_t pack(float low, float high) {
    return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16(high))) << 16 | __bfloat16_as_ushort(__float2bfloat16(low));
}

__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Load N pairs of values, `stride` apart, until all of them have the tag.
template <int N> __device__ inline void receive(const Tagged* from, int stride, uint32_t tag, uint32_t (&bits)[2 * N]) {
    bool ready;
    do {
        ready = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            Tagged a, b;
            asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from + i * stride) : "memory");
            ready &= a >> 32 == tag && b >> 32 == tag;
            bits[2 * i] = static_cast<uint32_t>(a), bits[2 * i + 1] = static_cast<uint32_t>(b);
        }
    } while (!ready);
}

__device__ inline uint32_t receive_one(const Tagged* from, uint32_t tag) {
    Tagged got;
    do asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(got) : "l"(from) : "memory");
    while (got >> 32 != tag);
    return static_cast<uint32_t>(got);
}

// Receive a vector of N bf16, in pairs.
template <int N> __device__ inline void gather(const Tagged* from, uint32_t tag) {
    constexpr int EACH = N / (4 * CONSUMERS);
    uint32_t pairs[2 * EACH];
    receive<EACH>(from + 2 * threadIdx.x, 2 * CONSUMERS, tag, pairs);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        *reinterpret_cast<uint2*>(shared().vector + 4 * (threadIdx.x + i * CONSUMERS)) = make_uint2(pairs[2 * i], pairs[2 * i + 1]);
    sync_consumers();
}

// --- arithmetic ---------------------------------------------------------------------------------------------------------

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

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

__device__ inline void unpack(uint4 packed, float (&x)[8]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = low_of(words[i]), x[2 * i + 1] = high_of(words[i]);
}

// A thread's part of the residual stream, and of the weights of the norm behind it.
struct Residual {
    static constexpr int EACH = HIDDEN / (4 * CONSUMERS);
    uint2 weights[EACH];
    float x[4 * EACH];

    __device__ explicit Residual(const bf16* norm) {  // loaded here, and not where they are used
#pragma unroll
        for (int i = 0; i < EACH; i++)
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                         : "=r"(weights[i].x), "=r"(weights[i].y) : "l"(norm + 4 * (threadIdx.x + i * CONSUMERS)));
    }
    __device__ void embed(const bf16* embedding) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) x[4 * i + j] = __bfloat162float(embedding[4 * (threadIdx.x + i * CONSUMERS) + j]);
    }
    __device__ void gather(const Tagged* from, uint32_t tag) {
        uint32_t bits[4 * EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            uint32_t(&four)[4] = *reinterpret_cast<uint32_t(*)[4]>(bits + 4 * i);
            receive<2>(from + 4 * (threadIdx.x + i * CONSUMERS), 2, tag, four);
        }
#pragma unroll
        for (int i = 0; i < 4 * EACH; i++) x[i] = __uint_as_float(bits[i]);
    }
    // Write the normalized vector, but for the norm's factor: sums are multiplied by it.
    __device__ void normalize() const {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float* own = x + 4 * i;
            const uint2 pairs = make_uint2(pack(own[0] * low_of(weights[i].x), own[1] * high_of(weights[i].x)),
                                           pack(own[2] * low_of(weights[i].y), own[3] * high_of(weights[i].y)));
            *reinterpret_cast<uint2*>(shared().vector + 4 * (threadIdx.x + i * CONSUMERS)) = pairs;
            squares += (own[0] * own[0] + own[1] * own[1]) + (own[2] * own[2] + own[3] * own[3]);
        }
        squares = sum(squares);
        if (threadIdx.x % 32 == 0) shared().squares[threadIdx.x / 32] = squares;
        sync_consumers();
    }
};

__device__ inline float norm_factor(float eps) { return rsqrtf(total(shared().squares) / HIDDEN + eps); }

// --- attention ----------------------------------------------------------------------------------------------------------

// A block's share of the keys, the same in all layers.
struct Split {
    int head, index, count, last;  // KV head; split, of how many; the new key
    int first, end;                // the lane's first key; end of the split
    bool has_work;

    __device__ explicit Split(int num_keys) {
        constexpr int PER_HEAD = BLOCKS / KV_HEADS;
        head = blockIdx.x / PER_HEAD, index = blockIdx.x % PER_HEAD, last = num_keys - 1;
        count = min(min(PER_HEAD, MAX_SPLITS), (num_keys + STRIDE - 1) / STRIDE);
        has_work = head < KV_HEADS && index < count;
        first = num_keys * index / count + threadIdx.x / LANES, end = num_keys * (index + 1) / count;
    }
    __device__ int64_t offset(const Step& step, int key) const {
        return step.pages[key / PAGE_SIZE] * step.page_stride + key % PAGE_SIZE * step.token_stride + head * step.head_stride;
    }
    // Start to load the key and value of an iteration, if they are in the cache. Every call is a group of its own.
    __device__ void load(const Step& step, const Layer& layer, int iteration) const {
        const int key = first + iteration * STRIDE;
        if (has_work && key < end && key != last) {
            const int64_t at = offset(step, key) + threadIdx.x % LANES * 8;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&shared().keys[iteration % AHEAD][threadIdx.x])), "l"(layer.k_cache + at) : "memory");
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&shared().values[iteration % AHEAD][threadIdx.x])), "l"(layer.v_cache + at) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

// Receive the queries of the group, the new key and the new value, a warp one head: normalize and rotate.
__device__ inline void receive_heads(const Step& step, const Layer& layer, const Split& split, uint32_t tag) {
    constexpr int EACH = HEAD_DIM / 32;  // dimensions of a lane
    const int lane = threadIdx.x % 32, at = lane * EACH, half = at % (HEAD_DIM / 2);
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < GROUP + 2; i += WARPS) {
        const bool is_query = i < GROUP, is_value = i == GROUP + 1;
        const int head = is_query ? split.head * GROUP + i : Q_HEADS + (i - GROUP) * KV_HEADS + split.head;
        const bf16* norm = is_value ? nullptr : is_query ? layer.q_norm : layer.k_norm;
        float weights[EACH], x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) weights[j] = norm ? __bfloat162float(norm[at + j]) : 1;
        uint32_t bits[EACH];
        receive<EACH / 2>(step.qkv + head * HEAD_DIM + at, 2, tag, bits);
        float squares = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) x[j] = __uint_as_float(bits[j]), squares += x[j] * x[j];
        const float factor = norm ? rsqrtf(sum(squares) / HEAD_DIM + step.eps) : 1;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            x[j] *= factor * weights[j];
            const float other = __shfl_xor_sync(~0u, x[j], 16);
            if (!is_value) x[j] = x[j] * shared().cosine[half + j] + (lane < 16 ? -other : other) * shared().sine[half + j];
        }
        if (is_query) {
#pragma unroll
            for (int j = 0; j < EACH; j++) shared().q[i][at + j] = x[j] * step.scale * 1.44269504f;  // exponentials are to base 2
        } else if (split.end > split.last) {
            bf16* cache = (is_value ? layer.v_cache : layer.k_cache) + split.offset(step, split.last);
#pragma unroll
            for (int j = 0; j < EACH; j++) shared().fresh[i - GROUP][at + j] = cache[at + j] = __float2bfloat16(x[j]);
        }
    }
    sync_consumers();
}

__device__ inline void attend(const Step& step, const Layer& layer, const Split& split, uint32_t tag) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % LANES;
    receive_heads(step, layer, split, tag);
    float q[GROUP][8], best[GROUP], total[GROUP], out[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        best[g] = -INFINITY, total[g] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) q[g][i] = shared().q[g][part * 8 + i], out[g][i] = 0;
    }
    const int of_warp = split.first - lane / LANES;
#pragma unroll 1
    for (int iteration = 0; of_warp + iteration * STRIDE < split.end; iteration++) {
        const int key = split.first + iteration * STRIDE, slot = iteration % AHEAD;
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
        const bool is_new = key == split.last, exists = key < split.end;
        const uint4 zero = {0, 0, 0, 0};
        const uint4 key_bits = is_new ? reinterpret_cast<const uint4*>(shared().fresh[0])[part] : shared().keys[slot][threadIdx.x];
        const uint4 value_bits = is_new ? reinterpret_cast<const uint4*>(shared().fresh[1])[part] : exists ? shared().values[slot][threadIdx.x] : zero;
        split.load(step, layer, iteration + AHEAD);
        float k[8], v[8];
        unpack(key_bits, k);
        unpack(value_bits, v);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) score += q[g][i] * k[i];
            score = sum<LANES / 2>(score);
            if (!exists) score = -INFINITY;
            const float next = fmaxf(best[g], score), base = next == -INFINITY ? 0.f : next;
            const float shrink = exp2_of(best[g] - base), weight = exp2_of(score - base);
            best[g] = next, total[g] = total[g] * shrink + weight;
#pragma unroll
            for (int i = 0; i < 8; i++) out[g][i] = out[g][i] * shrink + weight * v[i];
        }
    }
    // Merge the keys of the warp, then the warps.
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        const float most = maximum<16, LANES>(best[g]), weight = most == -INFINITY ? 0.f : exp2_of(best[g] - most);
        total[g] = sum<16, LANES>(total[g] * weight);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[g][i] = sum<16, LANES>(out[g][i] * weight);
            if (lane < LANES) shared().states[warp][g * HEAD_DIM + part * 8 + i] = out[g][i];
        }
        if (lane == 0) shared().maxima[warp][g] = most, shared().sums[warp][g] = total[g];
    }
    sync_consumers();
#pragma unroll 1
    for (int i = 2 * threadIdx.x; i < GROUP * HEAD_DIM; i += 2 * CONSUMERS) {
        const int g = i / HEAD_DIM, head = split.head * GROUP + g;
        float most = -INFINITY, all = 0, low = 0, high = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared().maxima[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = exp2_of(shared().maxima[w][g] - most);
            const float2 pair = *reinterpret_cast<const float2*>(shared().states[w] + i);
            all += weight * shared().sums[w][g], low += weight * pair.x, high += weight * pair.y;
        }
        const float scale = __fdividef(1, all);
        publish(step.splits + (split.index * Q_SIZE + head * HEAD_DIM + i % HEAD_DIM) / 2, pack(low * scale, high * scale), tag);
        if (i % HEAD_DIM == 0) publish(step.lse + split.index * Q_HEADS + head, most + log2f(all), tag);
    }
}

// Merge the splits of the block's share of the attention's output: a warp two dimensions, a lane one split.
__device__ inline void merge(const Step& step, int num_splits, uint32_t tag) {
    const int lane = threadIdx.x % 32;
    const Share pairs(Q_SIZE / 2);
#pragma unroll 1
    for (int i = pairs.first + static_cast<int>(threadIdx.x) / 32; i < pairs.end; i += WARPS) {
        uint32_t pair = 0;
        float lse = -INFINITY;
        if (lane < num_splits) {
            lse = __uint_as_float(receive_one(step.lse + lane * Q_HEADS + 2 * i / HEAD_DIM, tag));
            pair = receive_one(step.splits + lane * (Q_SIZE / 2) + i, tag);
        }
        __syncwarp();
        const float weight = exp2_of(lse - maximum(lse)), all = sum(weight);
        const float low = sum(weight * low_of(pair)), high = sum(weight * high_of(pair));
        if (lane == 0) publish(step.attention + i, pack(__fdividef(low, all), __fdividef(high, all)), tag);
    }
}

// --- the step -----------------------------------------------------------------------------------------------------------

// A block's eight warps that multiply.
struct Consumers {
    const Step& step;
    int position = 0, buffer = 0;  // in the ring; of the sums

    // Multiply the block's rows of a matrix with the vector, and call emit(row, sum) for each, in one thread.
    template <typename Emit> __device__ void multiply(int rows, int columns, Emit emit) {
        const Share share(rows);
#pragma unroll 1
        for (int begin = share.first; begin < share.end; begin += FLUSH) {
            const int count = min(FLUSH, share.end - begin);
            position = accumulate(position, columns, (count + ROWS - 1) / ROWS, buffer);
            sync_consumers();
            if (threadIdx.x < count) emit(begin + static_cast<int>(threadIdx.x), total(shared().partial[buffer][threadIdx.x]));
            buffer ^= 1;
        }
    }

    // SwiGLU of the block's rows, two in one thread, which publishes both.
    __device__ void gate_and_up(uint32_t tag) {
        const Share share(INTERMEDIATE, 2);
#pragma unroll 1
        for (int begin = share.first; begin < share.end; begin += FLUSH / 2) {
            const int count = min(FLUSH / 2, share.end - begin);
            position = accumulate(position, HIDDEN, 2 * ((count + ROWS - 1) / ROWS), buffer);
            sync_consumers();
            const int row = 2 * threadIdx.x;
            if (row < count) {
                const auto* gate = shared().partial[buffer] + row / ROWS * 2 * ROWS + row % ROWS;
                const auto* up = gate + ROWS;
                const float factor = norm_factor(step.eps);
                publish(step.activation + (begin + row) / 2,
                        pack(swiglu(total(gate[0]) * factor, total(up[0]) * factor), swiglu(total(gate[1]) * factor, total(up[1]) * factor)),
                        tag);
            }
            buffer ^= 1;
        }
    }
    __device__ static float swiglu(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }

    __device__ void add_and_publish(int columns, Tagged* to, uint32_t tag) {
        const int first = Share(HIDDEN).first;
        multiply(HIDDEN, columns, [&](int row, float value) { publish(to + row, shared().residual[row - first] += value, tag); });
    }
};

__global__ void __launch_bounds__(THREADS, 1) decode_step(const Step step) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(shared().full + i)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(shared().empty + i)), "n"(WARPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = threadIdx.x; i < LAYERS; i += THREADS) shared().layers[i] = step.layers[i];
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        Producer producer;
#pragma unroll 1
        for (int i = 0; i < LAYERS; i++) {
            const Layer& layer = shared().layers[i];
            producer.stream(layer.qkv, QKV_SIZE, HIDDEN);
            producer.stream(layer.o, HIDDEN, Q_SIZE);
            producer.stream(layer.gate_up, INTERMEDIATE, HIDDEN, 2);
            producer.stream(layer.down, HIDDEN, INTERMEDIATE);
        }
        producer.stream(step.lm_head, step.vocab_size, HIDDEN);
        return;
    }

    const uint32_t count = *step.count;
    const int num_keys = static_cast<int>(*step.position) + 1;
    const Split split(num_keys);
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += CONSUMERS)
        sincosf((num_keys - 1) * step.inv_freq[i], shared().sine + i, shared().cosine + i);
    const int64_t token = *step.token_source < 0 ? *step.token_id : step.last_token[*step.token_source];
    const bf16* embedded = step.embedding + token * HIDDEN;
    const Share own(HIDDEN);
    for (int i = own.first + threadIdx.x; i < own.end; i += CONSUMERS) shared().residual[i - own.first] = __bfloat162float(embedded[i]);
    Consumers consumers{step};
#pragma unroll 1
    for (int i = 0; i < LAYERS; i++) {
        const Layer& layer = shared().layers[i];
        const uint32_t tag = count * LAYERS + i + 1;
#pragma unroll
        for (int j = 0; j < AHEAD; j++) split.load(step, layer, j);
        {
            Residual residual(layer.input_norm);
            if (i) residual.gather(step.after_mlp, tag - 1);
            else residual.embed(embedded);
            residual.normalize();
        }
        consumers.multiply(QKV_SIZE, HIDDEN, [&](int row, float value) { publish(step.qkv + row, value * norm_factor(step.eps), tag); });
        if (split.has_work) attend(step, layer, split, tag);
        merge(step, split.count, tag);
        gather<Q_SIZE>(step.attention, tag);
        consumers.add_and_publish(Q_SIZE, step.after_attention, tag);
        {
            Residual residual(layer.mlp_norm);
            residual.gather(step.after_attention, tag);
            residual.normalize();
        }
        consumers.gate_and_up(tag);
        gather<INTERMEDIATE>(step.activation, tag);
        consumers.add_and_publish(INTERMEDIATE, step.after_mlp, tag);
    }
    Residual residual(step.final_norm);
    residual.gather(step.after_mlp, (count + 1) * LAYERS);
    residual.normalize();
    consumers.multiply(step.vocab_size, HIDDEN, [&](int row, float value) { step.logits[row] = value * norm_factor(step.eps); });
    // Every block has read the count by now: this one has received values from all of them.
    if (blockIdx.x == 0 && threadIdx.x == 0) *step.count = count + 1;
}

extern "C" int launch_decode_step(const Step* step, void* stream) {
    const int bytes = STAGES * STAGE_BYTES + static_cast<int>(sizeof(Shared));
    if (cudaError_t error = cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    void* arguments[] = {const_cast<Step*>(step)};
    return cudaLaunchCooperativeKernel(
        reinterpret_cast<const void*>(decode_step), dim3(BLOCKS), dim3(THREADS), arguments, bytes,
        static_cast<cudaStream_t>(stream));
}
