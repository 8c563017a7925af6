// A decode step of TOKENS tokens, one to eight, in one kernel: all layers and the LM head, for Llama and Qwen3 in bfloat16.
//
// persistent_decode.cu explains how such a kernel works. This one reads the weights once for all tokens. A token has its own
// position and its own list of pages. Several tokens may be consecutive ones of the same request.
//
// Products. The tensor cores multiply 16 rows of weights by eight vectors at once, one for each token. So eight tokens take no
// more instructions than one.
//
// Ring. With several tokens, the keys and values of a layer can be as many bytes as its weights. The producers copy them into
// the same ring, between the weights of QKV and those of O. So the memory delivers keys while the consumers wait for the
// queries, and weights while they wait for each other.
//
// Exchange. The vectors of all tokens are too many bytes to store a tag with every value. Here a word of two bf16 is its own
// flag: a buffer is EMPTY, a NaN that no rounding produces, until the words arrive. There are two buffers for each vector. While
// one of them is used in a layer, the writers empty the other one for the next layer, when all blocks have read it. The fence
// after this makes sure that no block finds old values there: a block will not look for values there before it has received
// others that were published after the fence. QKV and the results of splits have few readers each, and keep their tags.
//
// Attention. The blocks of a KV head are divided among the tokens, in proportion to the tokens' keys, at least one for each. So
// a block has keys of one token. The new key of a token, and those of earlier tokens of the same request, come from the exchange
// of QKV instead of the cache. Then each block merges its share of the outputs of all splits, and publishes them.
#include <cuda_bf16.h>
#include <cstdint>
#include "persistent.cuh"

// The host compiles this file with the sizes of a model: LAYERS, HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE and PAGE_SIZE;
// with TOKENS, the number of tokens of a step; and with BLOCKS, the number of thread blocks. With TRACED it also notes when each
// block gets how far, for experiment 12.

// Two warps fill the ring: one would take longer to compute the addresses of keys than the memory takes to deliver them. Another
// warp empties words (see `empty_words`).
constexpr int WARPS = 8, CONSUMERS = WARPS * 32, PRODUCERS = 2, THREADS = CONSUMERS + (PRODUCERS + 1) * 32;
constexpr int GROUP = Q_HEADS / KV_HEADS, Q_SIZE = Q_HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_HEADS * HEAD_DIM;
static_assert(TOKENS <= 8, "tokens are the columns of one tile of the tensor cores");

// A buffer (stage) of the ring holds 1,024 columns of eight rows, or several tiles of keys and values. The padding after a row
// shifts the next row to other banks.
constexpr int ROWS = 8, COLUMNS = 1024, ROW_BYTES = COLUMNS * 2 + 16, STAGE_BYTES = ROWS * ROW_BYTES;
constexpr int FLUSH = 6 * ROWS, STRIPS = FLUSH / 16;  // rows whose sums are computed at a time; strips of 16 rows, of two buffers
constexpr int IN_FLIGHT = 6;                          // most buffers being copied at a time; more could delay exchanges
static_assert(HIDDEN % COLUMNS == 0 && Q_SIZE % COLUMNS == 0 && INTERMEDIATE % COLUMNS == 0, "whole buffers in each row");

constexpr int TILE = 16, TILE_BYTES = TILE * HEAD_DIM * 2, CHUNKS = HEAD_DIM / 8;  // keys in a tile; 16-byte chunks in a key
constexpr int STAGE_TILES = ROWS * COLUMNS / (2 * TILE * HEAD_DIM);                // tiles of keys and values in a stage
constexpr int QUERY_SIZE = HEAD_DIM + 8, STATE_SIZE = HEAD_DIM + 4;                // padded, so that rows start in different banks
constexpr int PER_HEAD = BLOCKS / KV_HEADS;                                        // blocks that share the keys of a KV head
constexpr int MAX_SPLITS = 16;                                                     // most of them that have keys
static_assert(GROUP <= 8, "queries are the columns of one tile of the tensor cores");
static_assert(TOKENS <= PER_HEAD && TOKENS <= MAX_SPLITS, "a block for each token");
static_assert(STAGE_TILES <= WARPS, "a warp has at most one tile of a stage");

// The addresses of a layer's weights and cache, and the arguments of the kernel. persistent_decode.py fills them for both kernels,
// so they have fields for scales.
struct Layer {
    const bf16* weights[4];  // of the phases QKV, O, GATE_UP and DOWN
    const void* scales[4];
    const bf16 *input_norm, *mlp_norm, *q_norm, *k_norm;
    bf16 *k_cache, *v_cache;
};

struct Step {
    const Layer* layers;
    const bf16 *embedding, *final_norm, *lm_head;
    const void* lm_head_scales;
    const float* inv_freq;                             // [HEAD_DIM / 2]
    const int64_t *token_id, *token_source, *last_token;  // last_token[token_source[i]], or token_id[i] if token_source[i] is -1
    const int64_t* position;                           // [TOKENS]
    const int32_t* pages;                              // each token's pages, in the order of its keys, token by token
    int64_t page_stride, token_stride, head_stride;    // strides of the cache, in elements
    Tagged *qkv, *splits, *lse;                        // [TOKENS, QKV_SIZE / 2], [MAX_SPLITS, Q_SIZE / 2, 2]; not used
    uint32_t *attention, *after_attention, *activation, *after_mlp;  // [2, 8, size / 2] words for two layers, see `place_of`
    uint32_t* count;                                   // number of steps so far
    float* logits;                                     // [TOKENS, vocab_size]
    float scale, eps;
    int vocab_size;
};

// What the threads of a block share, apart from the ring.
struct Shared {
    union {
        float partial[WARPS][TOKENS][FLUSH + 4];      // each warp's sums for its columns
        float states[WARPS][GROUP * STATE_SIZE];      // the warps' attention states
    };
    // The vectors that a phase multiplies, in the order in which lanes need them. A lane reads what it has written.
    __align__(16) uint4 vectors[HIDDEN / COLUMNS][WARPS][COLUMNS / WARPS / 32][32];
    __align__(16) bf16 q[GROUP][QUERY_SIZE];          // the queries of the block's token and KV head
    __align__(16) bf16 fresh[TOKENS][2][HEAD_DIM];    // new keys and values of the block's KV head
    float maxima[GROUP][WARPS], sums[GROUP][WARPS];   // of the warps' attention states
    __align__(16) float squares[TOKENS][WARPS];       // sum of squares of each warp's part of the residual stream
    float residual[TOKENS][HIDDEN / BLOCKS + 2];      // the block's rows of the residual stream, in float32
    float cosine[TOKENS][HEAD_DIM / 2], sine[TOKENS][HEAD_DIM / 2];  // of the positions' angles, for the rotation
    int positions[TOKENS], first_split[TOKENS + 1];   // first block of each token among the blocks of a KV head
    Layer layers[LAYERS];
    uint64_t full[16], empty[16];                     // mbarriers of each buffer: it has been filled; all warps have read it
};
static_assert(HIDDEN / BLOCKS + 2 <= FLUSH, "the sums of O and DOWN are computed at once");

constexpr int STAGES_THAT_FIT = (227 * 1024 - static_cast<int>(sizeof(Shared))) / STAGE_BYTES;
constexpr int STAGES = STAGES_THAT_FIT < 16 ? STAGES_THAT_FIT : 16;
static_assert(STAGES >= IN_FLIGHT, "too large");

extern __shared__ __align__(128) unsigned char memory[];  // the ring, followed by what the threads share

// A buffer of the ring, and the parity of its next use, for the barriers.
struct Ring {
    int slot = 0;
    uint32_t parity = 0;
    __device__ void advance(int count) {
        slot += count;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

__device__ inline unsigned char* stage(int slot) { return memory + slot * STAGE_BYTES; }
__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(memory + STAGES * STAGE_BYTES); }

// Wait for all consumers of the block. `__syncthreads` would wait for the producer, too.
__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// The part of `all` pairs that belongs to this block: neighbors from `first` on, up to `end`, not in pairs.
struct Share {
    int first, end;
    __device__ explicit Share(int all) : first(all / 2 * blockIdx.x / BLOCKS * 2), end(all / 2 * (blockIdx.x + 1) / BLOCKS * 2) {}
};

// The four phases of a layer, and the last phase of a step. Each multiplies the rows of one matrix by the tokens' vectors.
enum Phase { QKV, O, GATE_UP, DOWN, LM_HEAD };

// How far a block is in a phase: it has attended to its keys and merged its share of the splits (phase O only), has received all
// vectors, and has published its values.
enum Point { ATTENDED, MERGED, RECEIVED, PUBLISHED, POINTS };

#ifdef TRACED
__device__ int64_t passed[BLOCKS][4 * LAYERS + 1][POINTS];  // when, in cycles of the block's SM
extern "C" int copy_trace(void* to) { return cudaMemcpyFromSymbol(to, passed, sizeof(passed)); }
#endif

// Note that the block has got so far in a phase.
__device__ inline void pass(int phase_of_step, Point point) {
#ifdef TRACED
    if (threadIdx.x == 0) passed[blockIdx.x][phase_of_step][point] = clock64();
#endif
}

// The size of a phase's matrix. `parts` matrices of this size are stacked: two for gate and up.
struct Matrix {
    int rows, columns, parts;
    Share own;  // the block's rows

    __device__ Matrix(int phase, const Step& step)
        : rows(phase == QKV ? QKV_SIZE : phase == GATE_UP ? INTERMEDIATE : phase == LM_HEAD ? step.vocab_size : HIDDEN),
          columns(phase == O ? Q_SIZE : phase == DOWN ? INTERMEDIATE : HIDDEN),
          parts(phase == GATE_UP ? 2 : 1),
          own(rows + rows % 2) {
        own.end = min(own.end, rows);
    }
    // The rows from `begin` on whose sums are computed at a time, and the number of buffers with 1,024 columns of them.
    __device__ int rows_at(int begin) const { return min(FLUSH / parts, own.end - begin); }
    __device__ int buffers_at(int begin) const { return (rows_at(begin) + ROWS - 1) / ROWS * parts; }
};

// --- the keys of a block ------------------------------------------------------------------------------------------------

// The offset of a chunk of a key or value in its tile, in bytes. Chunks are swizzled: the same chunk of eight adjacent keys is
// in different banks.
__device__ inline int place_in_tile(int row, int chunk) { return (row * CHUNKS + (chunk ^ row % 8)) * 16; }

// Sum over this lane and the lanes before it.
__device__ inline int sum_so_far(int x) {
#pragma unroll
    for (int distance = 1; distance < TOKENS; distance *= 2) {
        const int other = __shfl_up_sync(~0u, x, distance);
        if (threadIdx.x % 32 >= distance) x += other;
    }
    return x;
}

// A block's share of the keys of one token and KV head. It is the same in all layers.
struct Split {
    int token = 0, head, index, last, first = 0, end = 0;  // KV head; index among its blocks; the new key; the first key; the end
    const int32_t* pages;  // of the token
    uint32_t fresh;        // as bits, the tokens whose new keys are in the split: its own, and earlier ones of the same request
    bool has_work;

    // All warps compute the same division of a head's blocks among the tokens. Each lane has a token.
    __device__ explicit Split(const Step& step) : head(blockIdx.x / PER_HEAD), index(blockIdx.x % PER_HEAD) {
        constexpr int TO_DIVIDE = (PER_HEAD < MAX_SPLITS ? PER_HEAD : MAX_SPLITS) - TOKENS;  // besides one block for each token
        const int lane = threadIdx.x % 32, position = lane < TOKENS ? static_cast<int>(step.position[lane]) : -1;
        const int tiles = lane < TOKENS ? position / TILE + 1 : 0, all = __reduce_add_sync(~0u, tiles);
        // A token with several blocks has at least one tile for each warp.
        const int count = min(1 + TO_DIVIDE * tiles / all, (tiles + WARPS - 1) / WARPS);
        const int stop = sum_so_far(count), start = stop - count;
        const int num_pages = lane < TOKENS ? position / PAGE_SIZE + 1 : 0;
        const int32_t* own_pages = step.pages + sum_so_far(num_pages) - num_pages;
        if (threadIdx.x < TOKENS)
            shared().positions[lane] = position, shared().first_split[lane] = start, shared().first_split[lane + 1] = stop;
        const uint32_t found = __ballot_sync(~0u, lane < TOKENS && index >= start && index < stop);
        has_work = found != 0;
        if (has_work) {
            token = __ffs(found) - 1;
            const int of_token = index - __shfl_sync(~0u, start, token), blocks = __shfl_sync(~0u, count, token);
            const int own_tiles = __shfl_sync(~0u, tiles, token);
            first = own_tiles * of_token / blocks * TILE, end = own_tiles * (of_token + 1) / blocks * TILE;
        }
        last = __shfl_sync(~0u, position, token), end = min(end, last + 1);
        pages = reinterpret_cast<const int32_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(own_pages), token));
        const bool is_inside = lane < TOKENS && position >= first && position < end;
        const bool is_earlier = is_inside && position < last && own_pages[num_pages - 1] == pages[num_pages - 1];
        fresh = __ballot_sync(~0u, is_inside && (lane == token || is_earlier));
    }
    __device__ int tiles() const { return (end - first + TILE - 1) / TILE; }
    // The place of a key of the split's head in the cache, in chunks; for keys after the last one, that of the last one.
    __device__ uint32_t place_of(const Step& step, int key) const {
        key = min(key, last);
        return (pages[key / PAGE_SIZE] * step.page_stride + key % PAGE_SIZE * step.token_stride + head * step.head_stride) / 8;
    }
};

// --- the ring -----------------------------------------------------------------------------------------------------------

// Tell the producer that this warp has read a buffer. The buffer is empty when all warps have.
__device__ inline void release(int slot) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(shared().empty + slot)) : "memory");
}

// The state of a warp that fills the ring. Each of them copies its share of every buffer. The barrier `full` completes when all
// their lanes have arrived, and as many bytes as they expect.
struct Producer {
    int position = 0;  // of the next buffer to fill: the number of buffers that have been filled
    const int lane = threadIdx.x % 32, warp = (threadIdx.x - CONSUMERS) / 32;

    // Wait until the next buffer is empty.
    __device__ uint32_t begin() {
        const int earlier = position - IN_FLIGHT;
        if (earlier >= 0) wait(shared().full + earlier % STAGES, earlier / STAGES & 1);
        wait(shared().empty + position % STAGES, position / STAGES & 1 ^ 1);
        return shared_address(stage(position % STAGES));
    }
    // Copy the block's share of a matrix, in the order in which it is multiplied. A lane copies a row.
    __device__ void stream(const bf16* weights, const Matrix& matrix) {
        constexpr int EACH = ROWS / PRODUCERS;
#pragma unroll 1
        for (int begin_row = matrix.own.first; begin_row < matrix.own.end; begin_row += FLUSH / matrix.parts) {
            const int end = begin_row + matrix.rows_at(begin_row);
#pragma unroll 1
            for (int column = 0; column < matrix.columns; column += COLUMNS)
#pragma unroll 1
                for (int first = begin_row; first < end; first += ROWS)
#pragma unroll 1
                    for (int part = 0; part < matrix.parts; part++) {
                        const uint32_t to = begin() + (warp * EACH + lane) * ROW_BYTES;
                        const uint32_t full = shared_address(shared().full + position % STAGES);
                        const int row = first + warp * EACH + lane, rows = min(EACH, max(end - (row - lane), 0));
                        const bf16* from = weights + static_cast<int64_t>(part * matrix.rows + row) * matrix.columns + column;
                        if (lane == 0) {
                            asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(full),
                                         "r"(rows * COLUMNS * 2) : "memory");
                            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 32;" ::"r"(full) : "memory");
                        }
                        __syncwarp();
                        if (lane < rows) {
                            // Keys may have been copied here before, by other means. They are older than the row.
                            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                                             "r"(to), "l"(from), "n"(COLUMNS * 2), "r"(full) : "memory");
                        }
                        position++;
                    }
        }
    }
    // Copy the keys and values of the block's split. Those that are not in the cache become 0: after the end, and the new key.
    // Those of earlier tokens of the same step may have any value. `attend` replaces them, like the new key.
    __device__ void stream(const Step& step, const Layer& layer, const Split& split) {
        constexpr int KEYS = STAGE_TILES * TILE, EACH = KEYS / PRODUCERS;
        const int chunk = lane % CHUNKS, own = warp * EACH;
        const auto* keys = reinterpret_cast<const uint4*>(layer.k_cache) + chunk;
        const auto* values = reinterpret_cast<const uint4*>(layer.v_cache) + chunk;
        uint32_t next = split.place_of(step, split.first + own + lane % EACH);
#pragma unroll 1
        for (int key = split.first; key < split.end; key += KEYS) {
            const uint32_t places = next;
            next = split.place_of(step, key + KEYS + own + lane % EACH);
            const uint32_t to = begin();
#pragma unroll
            for (int i = 0; i < EACH; i += 32 / CHUNKS) {
                const int row = own + i + lane / CHUNKS, bytes = key + row < min(split.last, split.end) ? 16 : 0;
                const uint32_t from = __shfl_sync(~0u, places, i + lane / CHUNKS);
                const uint32_t at = to + row / TILE * 2 * TILE_BYTES + place_in_tile(row % TILE, chunk);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(keys + from), "r"(bytes) : "memory");
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + TILE_BYTES), "l"(values + from),
                             "r"(bytes) : "memory");
            }
            const uint32_t full = shared_address(shared().full + position % STAGES);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
            position++;
        }
    }
};

// --- exchange between blocks --------------------------------------------------------------------------------------------

constexpr uint32_t EMPTY = 0xffffffff;  // a word that has not arrived; results of `pack` are different, even if they are NaN

// The buffer of a vector for a layer. `size` is that of one token's vector.
__device__ inline uint32_t* of_layer(uint32_t* vector, int size, uint32_t layer) { return vector + layer % 2 * (8 * size / 2); }

// Vectors are exchanged in the order in which the tensor cores take them. A warp has 128 of every 1,024 columns, in 16 chunks of
// eight. Lane 4 n + t has the words 2 t and 2 t + 1 of token n of every chunk: 16 words, four of which are adjacent.
constexpr int LOADS = COLUMNS / WARPS / 32, OF_LOAD = 32 * 4, OF_WARP = LOADS * OF_LOAD, OF_PART = WARPS * OF_WARP;  // words
__device__ inline int place_of(int token, int column) {
    const int chunk = column / 8, lane = token * 4 + column % 8 / 2;
    return chunk / 4 * OF_LOAD + lane * 4 + chunk % 4;
}

__device__ inline void store_word(uint32_t* to, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Whether all words are there.
__device__ inline bool has_arrived(const uint4& x) { return max(max(x.x, x.y), max(x.z, x.w)) != EMPTY; }

// Load 16 bytes, unless they have arrived before. The load has a predicate instead of a branch around it, so that several loads
// can be in flight at once.
__device__ inline void load_missing(uint4& x, const uint32_t* from) {
    asm volatile(
        "{\n.reg .pred missing;\nsetp.ne.s32 missing, %4, 0;\n@missing ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%5];\n}\n"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w) : "r"(static_cast<int>(!has_arrived(x))), "l"(from) : "memory");
}

__device__ inline int lane_token() { return threadIdx.x % 32 / 4; }

constexpr int AT_ONCE = 3;  // most times 1,024 columns that a lane begins to load at a time
using Part = uint4[LOADS];  // a lane's part of 1,024 columns of the vectors

// Mark a part as missing, or as arrived, like those of a lane without a token.
__device__ inline void begin_receive(Part& x, bool is_missing) {
    const uint32_t word = is_missing && lane_token() < TOKENS ? EMPTY : 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) x[i] = make_uint4(word, word, word, word);
}

__device__ inline bool has_arrived(const Part& x) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < LOADS; i++) all &= has_arrived(x[i]);
    return all;
}

// Load what is missing of the parts from `first` on, until that one has arrived. `from` is where the parts begin.
template <int COUNT> __device__ __forceinline__ void receive(Part (&x)[COUNT], int first, const uint32_t* from) {
    const uint32_t* own = from + threadIdx.x / 32 * OF_WARP + threadIdx.x % 32 * 4;
#pragma unroll 1
    while (!has_arrived(x[first])) {
#pragma unroll
        for (int p = 0; p < COUNT; p++)
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (p >= first) load_missing(x[p][i], own + p * OF_PART + i * OF_LOAD);
    }
    __syncwarp();
}

// Empty the block's words in the buffers of the next layer. This is done after QKV, and so after the block has received values that
// all blocks published when they had read these buffers. `after_mlp` is the exception: its other buffer may still have readers, so
// this layer's own one is emptied, before the block writes there. A fence takes as long as an exchange, so a warp of its own does
// this.
__device__ inline void empty_words(const Step& step, uint32_t layer) {
    const int lane = threadIdx.x % 32;
    const auto clear = [&](uint32_t* vector, const Share& own) {
#pragma unroll 1
        for (int token = 0; token < TOKENS; token++)
#pragma unroll 1
            for (int i = own.first + 2 * lane; i < own.end; i += 64) store_word(vector + place_of(token, i), EMPTY);
    };
    clear(of_layer(step.after_attention, HIDDEN, layer + 1), Share(HIDDEN));
    clear(of_layer(step.activation, INTERMEDIATE, layer + 1), Share(INTERMEDIATE));
    clear(of_layer(step.after_mlp, HIDDEN, layer), Share(HIDDEN));
    const Share merged(TOKENS * Q_SIZE);
    uint32_t* attention = of_layer(step.attention, Q_SIZE, layer + 1);
#pragma unroll 1
    for (int i = merged.first + 2 * lane; i < merged.end; i += 64)
        store_word(attention + place_of(i / Q_SIZE, i % Q_SIZE), EMPTY);
    __threadfence();
}

// The consumers tell the warp that empties words that QKV has been computed, and wait until it has emptied them.
__device__ inline void start_emptying() { asm volatile("bar.arrive 2, %0;" ::"n"(CONSUMERS + 32) : "memory"); }
__device__ inline void wait_for_start() { asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS + 32) : "memory"); }
__device__ inline void end_emptying() { asm volatile("bar.arrive 3, %0;" ::"n"(CONSUMERS + 32) : "memory"); }
__device__ inline void wait_for_end() { asm volatile("bar.sync 3, %0;" ::"n"(CONSUMERS + 32) : "memory"); }

// --- products -----------------------------------------------------------------------------------------------------------

// Multiplies the rows in the ring by the tokens' vectors. A warp has 128 of every 1,024 columns.
//
// One `mma` takes 16 rows: the eight rows of one buffer followed by the eight rows of the next buffer, which hold the same columns.
// The next 16 rows are always loaded into registers ahead of time. For a phase's first ones, this is done before its vectors have
// arrived.
struct Product {
    Ring next;                    // the next buffer to load
    uint32_t rows[2 * LOADS][4];  // the warp's columns of the next 16 rows, as the tensor cores take them

    // Wait for the next one or two buffers. Returns where the lane's part of the rows begins. If there is only one buffer, its rows
    // are loaded twice.
    __device__ uint32_t wait_for(int count) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Ring other = next;
        if (count > 1) other.advance(1);
        if (count > 0) wait_for_both(shared().full + next.slot, next.parity, shared().full + other.slot, other.parity);
        // Lanes 0 to 7 load eight columns of the first buffer's rows, the next eight lanes those of the second buffer, and the other
        // lanes the next eight columns.
        return shared_address(memory) + (lane / 8 % 2 ? other.slot : next.slot) * STAGE_BYTES + lane % 8 * ROW_BYTES +
               warp * (COLUMNS / WARPS) * 2 + lane / 16 * 16;
    }
    // Release the buffers.
    __device__ void end_load(int count) {
        __syncwarp();
        const int lane = threadIdx.x % 32;
        Ring other = next;
        if (lane == 1) other.advance(1);
        if (lane < min(count, 2)) release(other.slot);
        if (count > 0) next.advance(min(count, 2));
    }
    // Load a phase's first rows.
    __device__ void begin(int count) {
        const uint32_t from = wait_for(count);
#pragma unroll
        for (int i = 0; i < 2 * LOADS; i++) load_matrices(rows[i], from + i * 32);
        end_load(count);
    }

    // Multiply `count` buffers with the same columns by a lane's part of the vectors, and add to the sums. `after` is the number of
    // buffers with the columns that follow. As soon as some rows have been multiplied, the next ones take their registers. After a
    // phase's last rows, what is loaded is not used.
    __device__ void multiply(float (&sums)[STRIPS][4], const Part& x, int count, int after) {
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            if (2 * s >= count) continue;
            const int following = 2 * s + 2 < count ? count - 2 * s - 2 : after;
            const uint32_t from = wait_for(following);
            float own[4] = {};
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                multiply_accumulate(i % 2 ? own : sums[s], rows[2 * i], x[i].x, x[i].y);
                load_matrices(rows[2 * i], from + i * 64);
                multiply_accumulate(i % 2 ? own : sums[s], rows[2 * i + 1], x[i].z, x[i].w);
                load_matrices(rows[2 * i + 1], from + i * 64 + 32);
            }
            end_load(following);
#pragma unroll
            for (int j = 0; j < 4; j++) sums[s][j] += own[j];
        }
    }

    // Multiply all columns of `count` buffers by vectors that arrive from other blocks. The rows are the only ones of the phase,
    // which is number i of the step.
    __device__ void multiply_received(float (&sums)[STRIPS][4], const uint32_t* from, int parts, int count, int i) {
#pragma unroll 1
        for (int begin = 0; begin < parts; begin += AT_ONCE) {
            Part x[AT_ONCE];
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) begin_receive(x[p], begin + p < parts);
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                if (begin + p >= parts) continue;
                receive(x, p, from + begin * OF_PART);
                if (begin + p + 1 == parts) pass(i, RECEIVED);
                multiply(sums, x[p], count, begin + p + 1 < parts ? count : 0);
            }
        }
    }

    // The same with vectors in shared memory. `after` is the number of buffers with the rows that follow.
    __device__ void multiply_shared(float (&sums)[STRIPS][4], int count, int after) {
#pragma unroll 1
        for (int p = 0; p < HIDDEN / COLUMNS; p++) {
            Part x;
#pragma unroll
            for (int i = 0; i < LOADS; i++) x[i] = shared().vectors[p][threadIdx.x / 32][i][threadIdx.x % 32];
            multiply(sums, x, count, p + 1 < HIDDEN / COLUMNS ? count : after);
        }
    }

    // Write the warp's sums.
    __device__ void store(const float (&sums)[STRIPS][4], int count) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int token = lane % 4 * 2 + j % 2;
                if (2 * s < count && token < TOKENS) shared().partial[warp][token][s * 16 + j / 2 * 8 + lane / 4] = sums[s][j];
            }
    }
};

// --- RMSNorm ------------------------------------------------------------------------------------------------------------

// Write the residual stream, multiplied by a norm's weights, to shared memory, and its sums of squares. The other factor of RMSNorm
// is one number for each token. It needs all warps' squares, so it is applied to the sums of the product (see `norm_factor`). `from`
// is where other blocks publish the residual stream. Before the first layer it is null, and the embedding is taken.
__device__ inline void normalize(const bf16* norm, const bf16* embedded, const uint32_t* from) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float squares = 0;
#pragma unroll 1
    for (int p = 0; p < HIDDEN / COLUMNS; p++) {
        const int first = p * COLUMNS + warp * (COLUMNS / WARPS) + lane % 4 * 2;  // the lane's first column
        uint32_t weights[4 * LOADS];
        Part x[1];
#pragma unroll
        for (int c = 0; c < 4 * LOADS; c++)  // `asm volatile` keeps the loads here, before the wait
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(weights[c]) : "l"(norm + first + c * 8));
        if (from) {
            begin_receive(x[0], true);
            receive(x, 0, from + p * OF_PART);
        } else {
            const auto word = [&](int chunk) { return *reinterpret_cast<const uint32_t*>(embedded + first + chunk * 8); };
#pragma unroll
            for (int i = 0; i < LOADS; i++) x[0][i] = make_uint4(word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3));
        }
        const auto scaled = [&](uint32_t pair, uint32_t weights) {
            squares += low_of(pair) * low_of(pair) + high_of(pair) * high_of(pair);
            return pack(low_of(pair) * low_of(weights), high_of(pair) * high_of(weights));
        };
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            shared().vectors[p][warp][i][lane] = make_uint4(scaled(x[0][i].x, weights[4 * i]), scaled(x[0][i].y, weights[4 * i + 1]),
                                                            scaled(x[0][i].z, weights[4 * i + 2]), scaled(x[0][i].w, weights[4 * i + 3]));
    }
    squares = sum<2, 1>(squares);
    if (lane % 4 == 0 && lane_token() < TOKENS) shared().squares[lane_token()][warp] = squares;
    __syncwarp();
}

// The factor of RMSNorm: 1 / (root mean square of the vector). Valid after `sync_consumers`.
__device__ inline float norm_factor(int token, float eps) {
    const auto* own = reinterpret_cast<const float4*>(shared().squares[token]);
    const float4 a = own[0], b = own[1];
    return rsqrtf((((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w))) / HIDDEN + eps);
}

// --- attention ----------------------------------------------------------------------------------------------------------

// Receive the queries of the block's token and KV head, and the new keys and values in its split. Normalize them (Qwen3 only), and
// rotate them. The split that has the token's own key stores it in the cache, with its value. Each warp takes one head at a time.
__device__ inline void receive_heads(const Step& step, const Layer& layer, const Split& split, uint32_t tag) {
    constexpr int EACH = HEAD_DIM / 32;  // dimensions of a lane
    const int lane = threadIdx.x % 32, at = lane * EACH, half = at % (HEAD_DIM / 2);
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < GROUP + 2 * __popc(split.fresh); i += WARPS) {
        const bool is_query = i < GROUP, is_value = !is_query && (i - GROUP) % 2;
        int token = split.token;
        if (!is_query) {
            uint32_t left = split.fresh;
            for (int skip = (i - GROUP) / 2; skip > 0; skip--) left &= left - 1;
            token = __ffs(left) - 1;
        }
        const int head = is_query ? split.head * GROUP + i : Q_HEADS + is_value * KV_HEADS + split.head;
        const bf16* norm = is_value ? nullptr : is_query ? layer.q_norm : layer.k_norm;
        float weights[EACH], x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) weights[j] = norm ? __bfloat162float(norm[at + j]) : 1;
        const Tagged* from = step.qkv + (token * QKV_SIZE + head * HEAD_DIM + at) / 2;
        Tagged pairs[EACH / 2];
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) pairs[j] = load_one(from + j);
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) ready &= pairs[j] >> 32 == tag;
        } while (!ready);
        __syncwarp();
        float squares = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const auto pair = static_cast<uint32_t>(pairs[j / 2]);
            x[j] = j % 2 ? high_of(pair) : low_of(pair), squares += x[j] * x[j];
        }
        const float factor = norm ? rsqrtf(sum(squares) / HEAD_DIM + step.eps) : 1;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            x[j] *= factor * weights[j];
            const float other = __shfl_xor_sync(~0u, x[j], 16);
            const float cosine = shared().cosine[token][half + j], sine = shared().sine[token][half + j];
            if (!is_value) x[j] = x[j] * cosine + (lane < 16 ? -other : other) * sine;
        }
        auto* to = reinterpret_cast<uint32_t*>((is_query ? shared().q[i] : shared().fresh[token][is_value]) + at);
#pragma unroll
        for (int j = 0; j < EACH / 2; j++) to[j] = pack(x[2 * j], x[2 * j + 1]);
        if (!is_query && token == split.token) {
            const int64_t place = static_cast<int64_t>(split.place_of(step, split.last)) * 8 + at;
            auto* cache = reinterpret_cast<uint32_t*>((is_value ? layer.v_cache : layer.k_cache) + place);
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) cache[j] = to[j];
        }
    }
    sync_consumers();
}

// A warp's attention state: an online softmax over its keys, on tensor cores, as in persistent_decode.cu. The rows of the tiles are
// keys, or dimensions of the values. The columns are the queries of the group. If there are fewer than eight queries, the other
// columns repeat the last one, and their results are ignored. A thread has the queries 2 * (lane % 4) and 2 * (lane % 4) + 1. Of
// each of them, it has the rows lane / 4 and lane / 4 + 8 of every 16.
struct State {
    static constexpr int STEPS = HEAD_DIM / 16;
    uint32_t queries[STEPS][2];
    float out[STEPS][4] = {};                             // rows are dimensions
    float best[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // running maximum of a query's scores; the thread's sum of weights

    // Load the queries into registers.
    __device__ State() {
        const int lane = threadIdx.x % 32;
        const uint32_t from = shared_address(shared().q[min(lane % 8, GROUP - 1)]) + lane / 8 * 16;
#pragma unroll
        for (int i = 0; i < STEPS; i += 2) {
            uint32_t two[4];
            load_matrices(two, from + i * 32);
            queries[i][0] = two[0], queries[i][1] = two[1], queries[i + 1][0] = two[2], queries[i + 1][1] = two[3];
        }
    }
    // Attend to the first `num_keys` keys of a tile.
    __device__ void attend(uint32_t tile, int num_keys, float scale) {
        const int lane = threadIdx.x % 32;
        // Step i needs chunks 2 * i and 2 * i + 1. Because of the swizzle, an exclusive or moves from chunks 0 and 1 to these.
        const uint32_t keys = tile + place_in_tile(lane % 16, lane / 16);
        const uint32_t values = tile + TILE_BYTES + place_in_tile(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        float two[2][4] = {};  // even and odd steps have separate sums, so that they can overlap
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t a[4];
            load_matrices(a, (keys ^ i % 4 * 32) + i / 4 * 128);
            multiply_accumulate(two[i % 2], a, queries[i][0], queries[i][1]);
        }
        float scores[2][2], shrink[2];  // scores[key half][query]; factor of each query's earlier sums
#pragma unroll
        for (int i = 0; i < 4; i++)
            scores[i / 2][i % 2] = lane / 4 + i / 2 * 8 < num_keys ? (two[0][i] + two[1][i]) * scale : -INFINITY;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float most = fmaxf(best[j], maximum<16, 4>(fmaxf(scores[0][j], scores[1][j])));
            shrink[j] = exp2_of(best[j] - most), best[j] = most;
            scores[0][j] = exp2_of(scores[0][j] - most), scores[1][j] = exp2_of(scores[1][j] - most);
            sum[j] = sum[j] * shrink[j] + scores[0][j] + scores[1][j];
        }
        // The weights are in the layout of a result of `mma`. Transposing each 8 x 8 block gives that of its second operand.
        const uint32_t first = transpose(pack(scores[0][0], scores[0][1])), second = transpose(pack(scores[1][0], scores[1][1]));
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t a[4];
            load_transposed(a, (values ^ i % 4 * 32) + i / 4 * 128);
#pragma unroll
            for (int j = 0; j < 4; j++) out[i][j] *= shrink[j % 2];
            multiply_accumulate(out[i], a, first, second);
        }
    }
    // Write the state to shared memory.
    __device__ void store() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        sum[0] = ::sum<16, 4>(sum[0]), sum[1] = ::sum<16, 4>(sum[1]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int query = lane % 4 * 2 + j;
            if (query >= GROUP) continue;
            float* to = shared().states[warp] + query * STATE_SIZE + lane / 4;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) to[i * 8] = out[i / 2][i % 2 * 2 + j];
            if (lane < 4) shared().maxima[query][warp] = best[j], shared().sums[query][warp] = sum[j];
        }
    }
};

// Attend to the keys of the block's split, and publish its outputs, each pair with its log-sum-exp (to base 2). Each tile belongs to
// one warp, but every warp waits for every buffer: it must not release a buffer before it is full, or twice while it is full.
__device__ inline void attend(const Step& step, const Layer& layer, const Split& split, uint32_t tag, Ring& ring) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_tiles = split.tiles();
    receive_heads(step, layer, split, tag);
    State state;
#pragma unroll 1
    for (int begin = 0; begin < num_tiles; begin += STAGE_TILES) {
        wait(shared().full + ring.slot, ring.parity);
        const int index = (warp - begin % WARPS + WARPS) % WARPS;  // of the warp's tile in the buffer
        if (index < STAGE_TILES && begin + index < num_tiles) {
            unsigned char* tile = stage(ring.slot) + index * 2 * TILE_BYTES;
            const int key = split.first + (begin + index) * TILE;
            // New keys may not have been in the cache when the tile was copied.
#pragma unroll 1
            for (uint32_t left = split.fresh; left; left &= left - 1) {
                const int token = __ffs(left) - 1, row = shared().positions[token] - key, matrix = lane / CHUNKS;
                if (row >= 0 && row < TILE && matrix < 2)
                    *reinterpret_cast<uint4*>(tile + matrix * TILE_BYTES + place_in_tile(row, lane % CHUNKS)) =
                        reinterpret_cast<const uint4*>(shared().fresh[token][matrix])[lane % CHUNKS];
            }
            __syncwarp();
            // log2(e), because the exponentials are to base 2.
            state.attend(shared_address(tile), split.last - key + 1, step.scale * 1.44269504f);
        }
        __syncwarp();
        if (lane == 0) release(ring.slot);
        ring.advance(1);
    }
    if (warp < num_tiles) state.store();
    sync_consumers();
    // Merge the states of the warps that had keys. For a warp without keys, the state of the last warp that had some is read
    // and gets weight 0. This needs no branch, so the loads can overlap.
#pragma unroll 1
    for (int i = 2 * threadIdx.x; i < GROUP * HEAD_DIM; i += 2 * CONSUMERS) {
        const int g = i / HEAD_DIM, dimension = i % HEAD_DIM, head = split.head * GROUP + g;
        float weights[WARPS], sums[WARPS], most = -INFINITY, all = 0, low = 0, high = 0;
        float2 pairs[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int from = min(w, num_tiles - 1);
            weights[w] = shared().maxima[g][from], sums[w] = shared().sums[g][from];
            pairs[w] = *reinterpret_cast<const float2*>(shared().states[from] + g * STATE_SIZE + dimension);
            most = fmaxf(most, weights[w]);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = w < num_tiles ? exp2_of(weights[w] - most) : 0;
            all += weight * sums[w], low += weight * pairs[w].x, high += weight * pairs[w].y;
        }
        const float scale = __fdividef(1, all);
        Tagged* to = step.splits + split.index * Q_SIZE + head * HEAD_DIM + dimension;
        publish(to, pack(low * scale, high * scale), tag), publish(to + 1, most + __log2f(all), tag);
    }
}

// Merge the splits: each block merges its share of the pairs of all tokens, and publishes them. Four lanes merge a pair. Each of
// them has every fourth split.
__device__ inline void merge(const Step& step, uint32_t* attention, uint32_t tag) {
    const Share share(TOKENS * Q_SIZE);
    const int lane = threadIdx.x % 4;
#pragma unroll 1
    for (int begin = share.first / 2; begin < share.end / 2; begin += CONSUMERS / 4) {
        const int i = begin + threadIdx.x / 4, token = min(i / (Q_SIZE / 2), TOKENS - 1), pair = i % (Q_SIZE / 2);
        const int first = shared().first_split[token], end = i < share.end / 2 ? shared().first_split[token + 1] : first;
        float most = -INFINITY, all = 0, low = 0, high = 0;
#pragma unroll 1
        for (int s = first + lane; s < end; s += 4) {
            uint32_t got[2];
            receive<1>(step.splits + s * Q_SIZE + 2 * pair, 0, tag, got);
            const float lse = __uint_as_float(got[1]), larger = fmaxf(most, lse);
            const float shrink = exp2_of(most - larger), weight = exp2_of(lse - larger);
            const uint32_t values = got[0];
            low = low * shrink + weight * low_of(values), high = high * shrink + weight * high_of(values);
            all = all * shrink + weight, most = larger;
        }
        __syncwarp();
        const float larger = fmaxf(maximum<2, 1>(most), -1e30f), weight = exp2_of(most - larger);
        low = sum<2, 1>(low * weight), high = sum<2, 1>(high * weight), all = sum<2, 1>(all * weight);
        const uint32_t merged = pack(__fdividef(low, all), __fdividef(high, all));
        if (lane == 0 && end > first) store_word(attention + place_of(token, 2 * pair), merged);
    }
}

// --- the step -----------------------------------------------------------------------------------------------------------

__device__ inline float swiglu(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }

// Complete the sums of `count` rows from `first` on: add the warps' sums, apply what follows the product (the residual stream,
// RMSNorm's factor, SwiGLU), and publish the values or write the logits. A warp has one token, and a lane one pair of rows.
__device__ inline void finish(const Step& step, int phase, int first, int count, uint32_t layer) {
    const int token = threadIdx.x / 32, local = threadIdx.x % 32 * 2, row = first + local;
    if (token >= TOKENS || local >= count) return;
    const auto total = [&](int index) {
        float low = 0, high = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float2 pair = *reinterpret_cast<const float2*>(shared().partial[w][token] + index);
            low += pair.x, high += pair.y;
        }
        return make_float2(low, high);
    };
    if (phase == O || phase == DOWN) {
        float* own = shared().residual[token] + row - Share(HIDDEN).first;
        const float2 sums = total(local);
        own[0] += sums.x, own[1] += sums.y;
        uint32_t* to = of_layer(phase == O ? step.after_attention : step.after_mlp, HIDDEN, layer);
        store_word(to + place_of(token, row), pack(own[0], own[1]));
        return;
    }
    const float factor = norm_factor(token, step.eps);
    if (phase == GATE_UP) {
        const int of_gate = local / ROWS * 2 * ROWS + local % ROWS;
        const float2 gate = total(of_gate), up = total(of_gate + ROWS);
        store_word(of_layer(step.activation, INTERMEDIATE, layer) + place_of(token, row),
                   pack(swiglu(gate.x * factor, up.x * factor), swiglu(gate.y * factor, up.y * factor)));
        return;
    }
    const float2 sums = total(local);
    if (phase == QKV) {
        publish(step.qkv + (token * QKV_SIZE + row) / 2, pack(sums.x * factor, sums.y * factor), layer + 1);
    } else {
        float* logits = step.logits + static_cast<int64_t>(token) * step.vocab_size + row;
        logits[0] = sums.x * factor;
        if (row + 1 < step.vocab_size) logits[1] = sums.y * factor;
    }
}

// The phase at an index of the loop over all phases of a step.
__device__ inline int phase_of(int i) { return i < 4 * LAYERS ? i % 4 : LM_HEAD; }

// The kernel. All phases share one loop, which keeps the code small.
__global__ void __launch_bounds__(THREADS, 1) decode_step(const Step step) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(shared().full + i)), "n"(PRODUCERS * 32));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(shared().empty + i)), "n"(WARPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = threadIdx.x; i < LAYERS; i += THREADS) shared().layers[i] = step.layers[i];
    const Split split(step);
    __syncthreads();

    const uint32_t count = *step.count;
    if (threadIdx.x >= CONSUMERS + PRODUCERS * 32) {
#pragma unroll 1
        for (int i = 0; i < LAYERS; i++) wait_for_start(), empty_words(step, count * LAYERS + i), end_emptying();
        return;
    }
    if (threadIdx.x >= CONSUMERS) {
        Producer producer;
#pragma unroll 1
        for (int i = 0; i <= 4 * LAYERS; i++) {
            const int phase = phase_of(i);
            const Layer& layer = shared().layers[min(i / 4, LAYERS - 1)];
            if (phase == O) producer.stream(step, layer, split);
            producer.stream(phase == LM_HEAD ? step.lm_head : layer.weights[phase], Matrix(phase, step));
        }
        return;
    }

    for (int i = threadIdx.x; i < TOKENS * (HEAD_DIM / 2); i += CONSUMERS)
        sincosf(step.position[i / (HEAD_DIM / 2)] * step.inv_freq[i % (HEAD_DIM / 2)], shared().sine[0] + i, shared().cosine[0] + i);
    const auto embedding_of = [&](int token) {
        const int64_t source = step.token_source[token], id = source < 0 ? step.token_id[token] : step.last_token[source];
        return step.embedding + id * HIDDEN;
    };
    const bf16* embedded = embedding_of(min(lane_token(), TOKENS - 1));
    const Share held(HIDDEN);
#pragma unroll 1
    for (int token = threadIdx.x / 32; token < TOKENS; token += WARPS)
        for (int i = held.first + threadIdx.x % 32; i < held.end; i += 32)
            shared().residual[token][i - held.first] = __bfloat162float(embedding_of(token)[i]);
    Product product;
#pragma unroll 1
    for (int i = 0; i <= 4 * LAYERS; i++) {
        const int phase = phase_of(i);
        const Layer& layer = shared().layers[min(i / 4, LAYERS - 1)];
        const uint32_t index = count * LAYERS + i / 4;  // of the layer, since the first step
        const Matrix matrix(phase, step);
        if (phase == O) {
            start_emptying();
            if (split.has_work) attend(step, layer, split, index + 1, product.next);
            pass(i, ATTENDED);
        }
        product.begin(matrix.buffers_at(matrix.own.first));  // before the wait for their vectors
        const uint32_t* from = nullptr;
        if (phase == O) {
            uint32_t* attention = of_layer(step.attention, Q_SIZE, index);
            merge(step, attention, index + 1);
            pass(i, MERGED);
            from = attention;
        } else if (phase == DOWN) {
            from = of_layer(step.activation, INTERMEDIATE, index);
        } else {
            const bf16* norm = phase == QKV ? layer.input_norm : phase == GATE_UP ? layer.mlp_norm : step.final_norm;
            const uint32_t* residual = phase == GATE_UP ? of_layer(step.after_attention, HIDDEN, index)
                                                        : of_layer(step.after_mlp, HIDDEN, index - 1);
            normalize(norm, embedded, i == 0 ? nullptr : residual);
            pass(i, RECEIVED);
        }
#pragma unroll 1
        for (int begin = matrix.own.first; begin < matrix.own.end; begin += FLUSH / matrix.parts) {
            const int buffers = matrix.buffers_at(begin), after = begin + FLUSH / matrix.parts;
            float sums[STRIPS][4] = {};
            if (from) product.multiply_received(sums, from, matrix.columns / COLUMNS, buffers, i);
            else product.multiply_shared(sums, buffers, after < matrix.own.end ? matrix.buffers_at(after) : 0);
            sync_consumers();  // until the last sums, or the attention states, have been read
            product.store(sums, buffers);
            if (phase == O) wait_for_end();  // what the block publishes from now on is behind the fence
            else sync_consumers();
            finish(step, phase, begin, matrix.rows_at(begin), index);
        }
        pass(i, PUBLISHED);
    }
    // Every block has read the count by now, because this block has received values from all of them.
    if (blockIdx.x == 0 && threadIdx.x == 0) *step.count = count + 1;
}

// Launch the kernel, and return a CUDA error or 0. A cooperative launch guarantees that all blocks run at the same time;
// otherwise they could wait for a block that has not started.
extern "C" int launch_decode_step(const Step* step, void* stream) {
    const int bytes = STAGES * STAGE_BYTES + static_cast<int>(sizeof(Shared));
    if (cudaError_t error = cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return error;
    void* arguments[] = {const_cast<Step*>(step)};
    return cudaLaunchCooperativeKernel(
        reinterpret_cast<const void*>(decode_step), dim3(BLOCKS), dim3(THREADS), arguments, bytes,
        static_cast<cudaStream_t>(stream));
}
