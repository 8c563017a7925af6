// A decode step of one request in one kernel: all layers and the LM head, for Llama and Qwen3.
//
// At most one thread block runs on each SM, and it stays there for the whole step. A layer has four matrix products. Each block
// computes some of the rows of every product, but the next phase needs all of them. So the blocks exchange vectors between the
// phases.
//
// Weights. One warp of each block, the producer, copies the block's rows of all weights into a ring of buffers in shared
// memory. It copies them in the order in which they are needed, as far ahead as the ring has room. Eight other warps, the
// consumers, multiply. While the consumers wait for other blocks, the producer keeps copying until the ring is full.
//
// Exchange. Blocks exchange vectors through global memory, without a barrier over the grid. A value and a tag are stored
// together, in one 8-byte store. The tag says which layer of which step wrote the value. A reader repeats its load until the
// tag is right (NCCL's "LL" protocol works in this way). Every layer uses the same buffers. Overwriting them is safe: before a
// block writes to a buffer again, it has received values that all other blocks published after they had read the buffer.
// This needs some rows of QKV and of gate and up for each block. With quantized weights, O and DOWN may have too few strips of 16
// rows for all blocks. A block without a strip still receives the phase's vector.
//
// Waiting. A product cannot start before its vector has arrived. So a warp first loads the weights that it will multiply first
// from shared memory into registers, and waits after that. Every lane repeats the load of its own values until they are there.
// The results of attention are an exception: they are several times as many values, and the wait for them is the longest. If
// all threads of all blocks repeated their loads, these would compete with the stores that they wait for. There, only one lane
// of each warp repeats a load, until the first value is there.
//
// Attention. The keys of each KV head are split among several blocks. If a head has few splits, every block receives the
// results of all splits and merges them itself. If it has many, each block merges its share of the dimensions, and the blocks
// exchange the merged shares.
//
// Keys in e4m3. The new key and value are rounded from float32, and attention uses them as they are stored. The tensor cores
// multiply in float16, which holds every number of e4m3 exactly; queries and softmax weights are rounded to it. A tile has half
// the bytes, so each warp keeps two tiles in flight. The scores are multiplied by the scale of the keys, and the outputs by that
// of the values.
//
// Quantized weights. The ring holds them as they are stored. When a warp loads them into registers, it converts them to bf16,
// and the tensor cores multiply bf16 in any case. Converting takes longer than multiplying. So while a warp waits for a vector,
// it converts as many of the phase's rows as its registers hold: two buffers, or all buffers of half a strip (`HALVES`).
#include <cuda_bf16.h>
#include <cstdint>
#include <type_traits>
#include "persistent.cuh"
#include "quantized.cuh"

// The host compiles this file with the sizes of a model: LAYERS, HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, PAGE_SIZE,
// and BLOCKS, the number of thread blocks; and with the format of the layers' weights and of the LM head's: LAYER_KIND and
// HEAD_KIND are a `Kind` or DENSE, and LAYER_GROUP and HEAD_GROUP the number of columns that share a scale (0: the whole row).
// KV_IS_E4M3 is 1 if keys and values are stored in e4m3, and 0 if they are stored in bf16.

// GROUP query heads share a KV head. VECTOR is the size of the longest vector that a phase multiplies.
constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int GROUP = Q_HEADS / KV_HEADS, Q_SIZE = Q_HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_HEADS * HEAD_DIM;
constexpr int LARGEST = INTERMEDIATE > Q_SIZE ? INTERMEDIATE : Q_SIZE, VECTOR = LARGEST > HIDDEN ? LARGEST : HIDDEN;

// A buffer (stage) of the ring holds 1,024 columns of eight rows in bf16, or of a strip of 16 quantized rows. A strip of gate and
// up has eight rows of each. The padding after a row shifts the next row to other banks.
constexpr int ROWS = 8, COLUMNS = 1024, PADDING = 64, STRIP = TILE_ROWS;
constexpr int DENSE = 3;         // a format of weights, besides the kinds in quantized.cuh
constexpr bool HAS_QUANTIZED = LAYER_KIND != DENSE || HEAD_KIND != DENSE;
constexpr int FLUSH = HAS_QUANTIZED ? 4 * STRIP : 6 * ROWS;  // rows whose sums `partial` holds at a time
static_assert(FLUSH / ROWS % 2 == 0 && (!HAS_QUANTIZED || FLUSH / STRIP % 2 == 0), "pairs of buffers");
constexpr int IN_FLIGHT = 6;     // most buffers being copied at a time; more could delay exchanges
static_assert(HIDDEN % COLUMNS == 0 && Q_SIZE % COLUMNS == 0 && INTERMEDIATE % COLUMNS == 0, "whole buffers in each row");

// A number that the compiler takes for a new one. What is computed from it is computed again in every phase. Otherwise the
// compiler would compute it once for the whole step and keep it in registers, which quantized rows need.
__device__ __forceinline__ unsigned renewed(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ unsigned thread_index() { return HAS_QUANTIZED ? renewed(threadIdx.x) : threadIdx.x; }

// The formats of weights, and how a buffer of the ring holds them.
struct Dense {
    static constexpr int ROW_BYTES = COLUMNS * 2 + PADDING, STAGE_BYTES = ROWS * ROW_BYTES;
};

// INT4 and INT8 are stored tile by tile, and FP8 row by row. The scales of the rows follow. If HALF, the block needs 8 rows of the
// strip, and the tensor cores take them twice: as their rows 0 to 7 with the first 8 of a lane's 16 columns in a tile, and as
// rows 8 to 15 with the last 8.
template <Kind KIND, int GROUP, bool HALF = false> struct Quantized {
    static constexpr int ROW_BYTES = COLUMNS + PADDING, TILES = COLUMNS / TILE_COLUMNS;
    static constexpr int NUMBER_BYTES = KIND == FP8 ? STRIP * ROW_BYTES : TILES * 32 * Tile<KIND>::BYTES;
    static constexpr int SCALE_BYTES = STRIP * 4 * (GROUP ? COLUMNS / GROUP : 1), STAGE_BYTES = NUMBER_BYTES + SCALE_BYTES;
    static constexpr int COPIED = (KIND == FP8 ? STRIP * COLUMNS : NUMBER_BYTES) + SCALE_BYTES;  // without padding
    // Of a buffer: the number of `mma` of a warp, of vectors of eight columns that a lane multiplies, and of its rows.
    static constexpr int MMAS = HALF ? STEPS_OF_TILE : 2 * STEPS_OF_TILE, LOADS = MMAS / 2, LANE_ROWS = HALF ? 1 : 2;
    static constexpr int MOST = HALF ? LARGEST / COLUMNS : 2;  // buffers in registers at a time
    // Of the 128 columns that a warp multiplies: the number of scales. Each lane has one: lane % 4 % GROUPS.
    static constexpr int GROUPS = GROUP && GROUP < COLUMNS / WARPS ? COLUMNS / WARPS / GROUP : 1;
    static constexpr bool BIASED = KIND == INT4;  // converted numbers are too large; this is corrected as offsets are added
    static constexpr bool HAS_OFFSETS = BIASED || (GROUP && KIND != FP8);
    static_assert(GROUPS <= 4 && COLUMNS % (GROUP ? GROUP : 1) == 0, "groups of 32 to 1,024 columns");

    // Load a lane's part of a tile. If HALF, the words of its first eight columns take the place of row g, and those of its last
    // eight columns the place of row g + 8.
    __device__ static Tile<KIND> load(const unsigned char* stage, int tile, int lane, int half) {
        const unsigned char* from = stage + (KIND == FP8 ? lane / 4 * ROW_BYTES + tile * TILE_COLUMNS + lane % 4 * 16
                                                         : (tile * 32 + lane) * Tile<KIND>::BYTES);
        const int next_row = KIND == FP8 ? ROWS * ROW_BYTES : Tile<KIND>::BYTES / 2;  // from row g to row g + 8
        Tile<KIND> own;
        if constexpr (HALF && KIND == INT4) {
            const uint2 row = *reinterpret_cast<const uint2*>(from + half * next_row);
            own.vectors[0] = make_uint4(row.x, 0, row.y, 0);
        } else if constexpr (HALF) {
            const uint4 row = *reinterpret_cast<const uint4*>(from + half * next_row);
            own.vectors[0] = make_uint4(row.x, row.y, 0, 0), own.vectors[1] = make_uint4(row.z, row.w, 0, 0);
        } else {
#pragma unroll
            for (int i = 0; i < Tile<KIND>::VECTORS; i++) own.vectors[i] = *reinterpret_cast<const uint4*>(from + i * next_row);
        }
        return own;
    }
    // Convert a tile for the tensor cores.
    __device__ static void convert(const Tile<KIND>& tile, uint32_t (*rows)[4]) {
#pragma unroll
        for (int i = 0; i < MMAS / 2; i++) tile.template convert<BIASED>(i, rows[i]);
    }
    // Arrange the vector as `convert` does the numbers. FP8 numbers are 2^-120 times too small. The vector is multiplied by 2^104,
    // and sums by 2^16. So neither is too large or too small for its format.
    __device__ static uint4 arrange(uint4 x) {
        if constexpr (KIND != FP8) return x;
        const auto pair = [](uint32_t a, uint32_t b, int order) { return multiply_pairs(__byte_perm(a, b, order), 0x73807380u); };
        return make_uint4(pair(x.x, x.y, 0x5410), pair(x.x, x.y, 0x7632), pair(x.z, x.w, 0x5410), pair(x.z, x.w, 0x7632));
    }
    // A row is its numbers times its scale, plus its offset. So its product with the vector is (x) the first factor times the
    // product of the numbers, plus (y) the second factor times the sum of the vector.
    __device__ static float2 factors(uint32_t scale) {
        const float own = (GROUP ? low_of(scale) : __uint_as_float(scale)) * (KIND == FP8 ? 0x1p16f : 1);
        return make_float2(own, (GROUP && HAS_OFFSETS ? high_of(scale) : 0) - (BIASED ? INT4_BIAS * own : 0));
    }
};

template <int KIND, int GROUP, bool HALF = false>
using FormatOf = std::conditional_t<KIND == DENSE, Dense, Quantized<static_cast<Kind>(KIND), GROUP, HALF>>;
using OfLayers = FormatOf<LAYER_KIND, LAYER_GROUP>;
using OfHead = FormatOf<HEAD_KIND, HEAD_GROUP>;
// If O and DOWN have strips for only half of the blocks, two blocks share a strip. Both copy it, one of them from the L2 cache.
// Then a block has at most half a strip, and its registers hold all columns.
constexpr bool HALVES = LAYER_KIND != DENSE && HIDDEN / STRIP < BLOCKS && HIDDEN / ROWS <= BLOCKS && LARGEST <= 4 * COLUMNS;
using OfHalves = FormatOf<LAYER_KIND, LAYER_GROUP, HALVES>;
constexpr int LARGER = OfLayers::STAGE_BYTES > OfHead::STAGE_BYTES ? OfLayers::STAGE_BYTES : OfHead::STAGE_BYTES;
constexpr int STAGE_BYTES = (LARGER + 127) / 128 * 128;  // `Shared` follows the ring, and attention needs its tiles aligned
static_assert(LAYER_KIND == DENSE || (QKV_SIZE >= STRIP * BLOCKS && INTERMEDIATE >= ROWS * BLOCKS), "strips for all blocks");
constexpr int RESIDUAL_UNIT = LAYER_KIND == DENSE ? 2 : HALVES ? ROWS : STRIP;  // neighbors that one block has
constexpr int RESIDUAL_ROWS = LAYER_KIND == DENSE ? HIDDEN / BLOCKS + 2 : (HIDDEN / RESIDUAL_UNIT + BLOCKS - 1) / BLOCKS * RESIDUAL_UNIT;

using Stored = std::conditional_t<KV_IS_E4M3, uint8_t, bf16>;                // a number of the cache
constexpr int TILE = 16, TILE_BYTES = TILE * HEAD_DIM * sizeof(Stored);      // keys in a tile
constexpr int CHUNK = 16 / sizeof(Stored), CHUNKS = HEAD_DIM / CHUNK;        // numbers in a 16-byte chunk; chunks in a key
constexpr int BUFFERS = KV_IS_E4M3 ? 2 : 1;                                  // tiles of keys and values that a warp has in flight
constexpr int QUERY_SIZE = HEAD_DIM + 8, STATE_SIZE = HEAD_DIM + 4;  // padded, so that rows start in different banks
constexpr int MAX_SPLITS = 16;  // most splits of a KV head; a warp merges them, one lane for each
constexpr int FEW_SPLITS = 8;   // up to this many splits, every block merges all of them
static_assert(GROUP <= 8, "queries are the columns of one tile of the tensor cores");
static_assert(GROUP * STATE_SIZE * 4 <= BUFFERS * 2 * TILE_BYTES, "a warp's state takes the place of its tiles");

// The factors of stored keys and values, and their inverses. A cache in bf16 stores the numbers themselves.
struct Scaled {
    float k_scale, v_scale, k_inverse, v_inverse;
};
struct Unscaled {
    static constexpr float k_scale = 1, v_scale = 1, k_inverse = 1, v_inverse = 1;
};

// The addresses of a layer's weights and cache. `_pointers` in persistent_decode.py fills it.
struct Layer : std::conditional_t<KV_IS_E4M3, Scaled, Unscaled> {
    const void *weights[4], *scales[4];  // of the phases QKV, O, GATE_UP and DOWN
    const bf16 *input_norm, *mlp_norm, *q_norm, *k_norm;
    Stored *k_cache, *v_cache;
};

// The arguments of the kernel. `_Step` in persistent_decode.py has the same fields.
struct Step {
    const Layer* layers;
    const bf16 *embedding, *final_norm;
    const void *lm_head, *lm_head_scales;
    const float* inv_freq;    // [HEAD_DIM / 2]
    const int64_t *token_id, *token_source, *last_token;  // last_token[token_source], or token_id if that is -1
    const int64_t* position;
    const int32_t* pages;     // the request's pages, in the order of its keys
    int64_t page_stride, token_stride, head_stride;  // strides of the cache, in elements
    Tagged *qkv, *splits, *lse, *attention, *after_attention, *activation, *after_mlp;  // the vectors that blocks exchange
    uint32_t* count;          // number of steps so far
    float* logits;
    float scale, eps;
    int vocab_size;
};

// A row's product with the vector, as one partial sum per warp: each warp has some of the columns.
using Sums = float[WARPS];

// What the threads of a block share, apart from the ring.
struct Shared {
    __align__(128) unsigned char tiles[WARPS][BUFFERS * 2 * TILE_BYTES];  // a warp's tiles of keys and values; later its attention state
    bf16 vector[VECTOR];                   // the vector that the phase multiplies
    __align__(16) bf16 q[GROUP][QUERY_SIZE];             // the queries of the block's KV head; in float16 if keys are in e4m3
    __align__(16) Stored fresh[2][HEAD_DIM];             // the new key and value
    float maxima[GROUP][WARPS], sums[GROUP][WARPS];      // of the warps' attention states
    __align__(16) Sums partial[2][FLUSH];                // two, so that one is written while the other is read
    __align__(16) float squares[WARPS];                  // sum of squares of each warp's part of the residual stream
    float residual[RESIDUAL_ROWS];         // the block's rows of the residual stream, in float32
    float cosine[HEAD_DIM / 2], sine[HEAD_DIM / 2];  // of the position's angles, for the rotation
    Layer layers[LAYERS];
    uint64_t full[16], empty[16];  // mbarriers of each buffer: it has been filled; all warps have read it
};

constexpr int STAGES_THAT_FIT = (227 * 1024 - static_cast<int>(sizeof(Shared))) / STAGE_BYTES;
constexpr int STAGES = STAGES_THAT_FIT < 16 ? STAGES_THAT_FIT : 16;
static_assert(STAGES >= IN_FLIGHT, "too large");
static_assert(STAGES * STAGE_BYTES % alignof(Shared) == 0 && alignof(Shared) == 128, "aligned tiles");

extern __shared__ __align__(128) unsigned char memory[];  // the ring, followed by what the threads share

// The buffer at a position. Positions count the buffers that have been used since the start of the step.
__device__ inline unsigned char* stage(int position) { return memory + position % STAGES * STAGE_BYTES; }
__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(memory + STAGES * STAGE_BYTES); }

// Wait for all consumers of the block. `__syncthreads` would wait for the producer, too.
__device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// The part of `all` items that belongs to this block.
struct Share {
    int first, end;
    __device__ explicit Share(int all) : Share(all, HAS_QUANTIZED ? renewed(blockIdx.x) : blockIdx.x) {}
    __device__ Share(int all, unsigned block) : first(all * block / BLOCKS), end(all * (block + 1) / BLOCKS) {}
};

// The rows of a matrix that belong to this block. `unit` neighbors are never divided.
struct Rows {
    int first, end;
    __device__ Rows(int all, int unit)
        : first(Share((all + unit - 1) / unit).first * unit), end(min(Share((all + unit - 1) / unit).end * unit, all)) {}
};

// The four phases of a layer, and the last phase of a step. Each multiplies the rows of one matrix by a vector.
enum Phase { QKV, O, GATE_UP, DOWN, LM_HEAD };

// Call a function with the format of a phase's matrix.
template <class Function> __device__ inline void with_format(int phase, const Function& function) {
    if (HALVES && (phase == O || phase == DOWN)) function(OfHalves{});
    else if constexpr (std::is_same_v<OfLayers, OfHead>) function(OfLayers{});
    else if (phase == LM_HEAD) function(OfHead{});
    else function(OfLayers{});
}

// The size of a phase's matrix. `parts` matrices of this size are stacked: two for gate and up.
struct Matrix {
    int rows, columns, parts;
    bool is_dense;
    int unit;  // pairs, because two bf16 are published together; or the rows of a part in a strip, or half of a strip

    __device__ Matrix(int phase, const Step& step)
        : rows(phase == QKV ? QKV_SIZE : phase == GATE_UP ? INTERMEDIATE : phase == LM_HEAD ? step.vocab_size : HIDDEN),
          columns(phase == O ? Q_SIZE : phase == DOWN ? INTERMEDIATE : HIDDEN),
          parts(phase == GATE_UP ? 2 : 1),
          is_dense(phase == LM_HEAD ? HEAD_KIND == DENSE : LAYER_KIND == DENSE),
          unit(is_dense ? 2 : phase == O || phase == DOWN ? RESIDUAL_UNIT : STRIP / parts) {}
    __device__ Rows own() const { return Rows(rows, unit); }
    // Number of buffers that hold 1,024 columns of some rows.
    __device__ int buffers(int rows) const { return is_dense ? (rows + ROWS - 1) / ROWS * parts : (rows + unit - 1) / unit; }
    // Number of buffers that hold this block's rows.
    __device__ int buffers() const { return buffers(own().end - own().first) * (columns / COLUMNS); }
};

// The block's rows of the residual stream.
__device__ inline Rows residual_rows() { return Rows(HIDDEN, RESIDUAL_UNIT); }

// --- the ring of weights -----------------------------------------------------------------------------------------------

// Tell the producer that this warp has read a buffer. The buffer is empty when all warps have.
__device__ inline void release(int position) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(shared().empty + position % STAGES)) : "memory");
}

// The state of the warp that fills the ring. Its lanes copy different rows.
struct Producer {
    int position = 0;  // of the next buffer to fill
    const int lane = threadIdx.x % 32;

    // Begin to fill the next buffer, once it is empty. The barrier `full` completes when so many bytes have arrived.
    __device__ uint32_t begin(int bytes) {
        const uint32_t full = shared_address(shared().full + position % STAGES);
        const int earlier = position - IN_FLIGHT;
        if (lane == 0) {
            if (earlier >= 0) wait(shared().full + earlier % STAGES, earlier / STAGES & 1);
            wait(shared().empty + position % STAGES, position / STAGES & 1 ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
        }
        __syncwarp();
        return full;
    }
    __device__ void copy(uint32_t to, const void* from, int bytes, uint32_t full) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                     "r"(bytes), "r"(full) : "memory");
    }

    // Copy the block's share of a matrix: eight rows of each part, then the next eight rows of each part.
    __device__ void stream(Dense, const void* weights, const void*, const Matrix& matrix) {
        const Rows own = matrix.own();
#pragma unroll 1
        for (int row = own.first; row < own.end; row += ROWS)
#pragma unroll 1
            for (int part = 0; part < matrix.parts; part++)
#pragma unroll 1
                for (int column = 0; column < matrix.columns; column += COLUMNS) {
                    const int rows = min(ROWS, own.end - row);
                    const uint32_t full = begin(rows * COLUMNS * 2), to = shared_address(stage(position));
                    const int64_t first = static_cast<int64_t>(part * matrix.rows + row + lane) * matrix.columns + column;
                    if (lane < rows) copy(to + lane * Dense::ROW_BYTES, static_cast<const bf16*>(weights) + first, COLUMNS * 2, full);
                    position++;
                }
    }

    // Copy the block's strips of a matrix, with their scales.
    template <Kind KIND, int GROUP>
    __device__ void stream(Quantized<KIND, GROUP>, const void* weights, const void* scales, const Matrix& matrix) {
        using Format = Quantized<KIND, GROUP>;
        const Rows own = matrix.own();
        const int half = matrix.parts == 2 ? matrix.rows : ROWS;  // from a row of a strip's first half to that of its second half
        const auto* numbers = static_cast<const unsigned char*>(weights);
        const auto* factors = static_cast<const float*>(scales);
#pragma unroll 1
        for (int row = own.first; row < own.end; row += matrix.unit) {
            const int strip = row * matrix.parts / STRIP, first = strip * STRIP / matrix.parts;
#pragma unroll 1
            for (int column = 0; column < matrix.columns; column += COLUMNS) {
                const uint32_t full = begin(Format::COPIED), to = shared_address(stage(position));
                const int64_t buffer = (static_cast<int64_t>(strip) * matrix.columns + column) / COLUMNS;  // buffers are adjacent
                if constexpr (KIND == FP8) {
                    // Rows after the last one are not used.
                    const int from = min(first + lane / ROWS * half + lane % ROWS, matrix.parts * matrix.rows - 1);
                    if (lane < STRIP) copy(to + lane * Format::ROW_BYTES, numbers + static_cast<int64_t>(from) * matrix.columns + column, COLUMNS, full);
                } else if (lane == 0) {
                    copy(to, numbers + buffer * Format::NUMBER_BYTES, Format::NUMBER_BYTES, full);
                }
                if constexpr (GROUP) {
                    if (lane == 0) copy(to + Format::NUMBER_BYTES, factors + buffer * (Format::SCALE_BYTES / 4), Format::SCALE_BYTES, full);
                } else if (lane < 2) {
                    copy(to + Format::NUMBER_BYTES + lane * ROWS * 4, factors + first + lane * half, ROWS * 4, full);
                }
                position++;
            }
        }
    }
};

// Multiplies the rows in the ring by the vector. A warp has 128 of every 1,024 columns.
//
// One `mma` takes a tile of 16 rows: a strip, or in bf16 the eight rows of one buffer followed by the eight rows of the next
// buffer. These two buffers may hold different columns, and then each needs a different part of the vector. The other operand has
// eight columns: the even ones hold the part for the first buffer, and the odd ones the part for the second. The products of a
// buffer with the other buffer's part are ignored.
//
// A thread loads several adjacent elements at once. The instruction assigns other columns to the thread, but the order of the
// columns does not change a sum, as long as it is the same in the rows and in the vector.
//
// The next tiles are always loaded into registers ahead of time. For a phase's first ones, this is done before its vector has
// arrived.
struct Product {
    static constexpr int LOADS = COLUMNS / WARPS / 32;
    int position = 0, end = 0;            // of the first buffer in registers; the end of the matrix
    int buffer = 0;                       // which half of `partial` is written
    uint32_t rows[4 * LOADS][4];          // the thread's elements of the next 16 rows; quantized: of all buffers in registers
    float2 factors[4];                    // quantized: of each of the thread's rows in these buffers

    // Load the first rows of a phase's matrix.
    __device__ void begin(int phase, const Step& step) {
        end = position + Matrix(phase, step).buffers();
        if constexpr (HALVES)  // the same number, but so the compiler needs fewer registers
            if (phase == O) end = position + min(Matrix(phase, step).buffers(), Q_SIZE / COLUMNS);
        if (HAS_QUANTIZED) clear();
        with_format(phase, [&](auto format) { load(format); });
    }
    // Forget the rows. Then the compiler knows that no registers hold them until the next ones are loaded.
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * LOADS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) rows[i][j] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) factors[i] = float2{};
    }
    // Load the buffers at `position` and `position + 1` into registers, and release them.
    __device__ void load(Dense) {
        if (position >= end) return;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int other = min(position + 1, end - 1);  // at the end of a matrix, the last buffer may be loaded twice
        const int offset = lane / 4 * Dense::ROW_BYTES + warp * (COLUMNS / WARPS) * 2 + lane % 4 * 16;
        wait_for_both(shared().full + position % STAGES, position / STAGES & 1, shared().full + other % STAGES, other / STAGES & 1);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint4 first = reinterpret_cast<const uint4*>(stage(position) + offset)[i * 4];
            const uint4 second = reinterpret_cast<const uint4*>(stage(other) + offset)[i * 4];
            uint32_t(&low)[4] = rows[2 * i], (&high)[4] = rows[2 * i + 1];
            low[0] = first.x, low[1] = second.x, low[2] = first.y, low[3] = second.y;
            high[0] = first.z, high[1] = second.z, high[2] = first.w, high[3] = second.w;
        }
        __syncwarp();
        if (lane < 2 && position + lane < end) release(position + lane);
    }
    // Load as many buffers as the registers hold, from `position` on. Release them, and convert their numbers.
    template <Kind KIND, int GROUP, bool HALF> __device__ void load(Quantized<KIND, GROUP, HALF>) {
        using Format = Quantized<KIND, GROUP, HALF>;
        constexpr int MOST = Format::MOST, LANE_ROWS = Format::LANE_ROWS;
        const int count = min(MOST, end - position);
        if (count <= 0) return;
        const unsigned thread = thread_index();
        const int lane = thread % 32, warp = thread / 32;
        const int half = HALF ? residual_rows().first / ROWS % 2 : 0;  // which half of its strip the block has
        const int group = (GROUP ? warp * (COLUMNS / WARPS) / (GROUP ? GROUP : 1) : 0) + lane % 4 % Format::GROUPS;
        const int of_row = group * STRIP + half * ROWS + lane / 4;  // index of the first row's scale
        // Numbers of 4 bits are all loaded before the first are converted. Those of 8 bits would take too many registers.
        constexpr int AT_ONCE = KIND == INT4 ? MOST : 1;
#pragma unroll
        for (int begin = 0; begin < MOST; begin += AT_ONCE) {
            Tile<KIND> tiles[AT_ONCE][2] = {};  // without values from the start, registers would be reserved in the whole kernel
            uint32_t scales[AT_ONCE][LANE_ROWS] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int from = position + begin + i;
                if (begin + i > 0 && begin + i >= count) continue;
                const auto* of_lane = reinterpret_cast<const uint32_t*>(stage(from) + Format::NUMBER_BYTES) + of_row;
                wait(shared().full + from % STAGES, from / STAGES & 1);
#pragma unroll
                for (int j = 0; j < 2; j++) tiles[i][j] = Format::load(stage(from), 2 * warp + j, lane, half);
#pragma unroll
                for (int j = 0; j < LANE_ROWS; j++) scales[i][j] = of_lane[j * ROWS];
            }
            __syncwarp();
            if (lane < AT_ONCE && begin + lane < count) release(position + begin + lane);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (begin + i > 0 && begin + i >= count) continue;
#pragma unroll
                for (int j = 0; j < 2; j++) Format::convert(tiles[i][j], rows + (begin + i) * Format::MMAS + j * Format::MMAS / 2);
#pragma unroll
                for (int j = 0; j < LANE_ROWS; j++) factors[(begin + i) * LANE_ROWS + j] = Format::factors(scales[i][j]);
            }
        }
    }

    // Multiply 16 rows by the thread's part of the vector.
    __device__ static void multiply(float (&sums)[LOADS][4], const uint32_t (&rows)[4 * LOADS][4], const uint4 (&x)[LOADS]) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            multiply_accumulate(sums[i], rows[2 * i], x[i].x, x[i].y);
            multiply_accumulate(sums[i], rows[2 * i + 1], x[i].z, x[i].w);
        }
    }

    // Multiply the next `row_blocks` blocks of eight rows. Write the warp's sum of each row to `partial[buffer]`.
    template <class Function> __device__ void accumulate(Dense, int columns, int row_blocks, const Function&) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int per_row = columns / COLUMNS, stop = position + row_blocks * per_row;
        const bf16* mine = shared().vector + warp * (COLUMNS / WARPS) + lane % 4 * 8;
        float* to = shared().partial[buffer][lane / 4] + warp;
        float sum = 0;
        int part = 0;  // number of the row's buffers that are in `sum`
        const auto add = [&](float value) {
            sum += value;
            if (++part < per_row) return;
            if (lane % 4 == 0) *to = sum;
            to += ROWS * WARPS, sum = 0, part = 0;
        };
        uint4 x[LOADS];
#pragma unroll 1
        for (bool loaded = false; position < stop; loaded = true) {
            if (!loaded || per_row > 1) {
                const int own = lane / 4 % 2 == 0 ? part : part + 1 < per_row ? part + 1 : 0;
#pragma unroll
                for (int i = 0; i < LOADS; i++) x[i] = reinterpret_cast<const uint4*>(mine + own * COLUMNS)[i * 4];
            }
            float sums[LOADS][4] = {};
            multiply(sums, rows, x);
            const bool two = position + 1 < stop;
            position += two ? 2 : 1;
            load(Dense{});
            float of_first = 0, of_second = 0;
#pragma unroll
            for (int i = 0; i < LOADS; i++) of_first += sums[i][0], of_second += sums[i][3];
            add(of_first);
            if (two) add(of_second);
        }
    }

    // Sum the vector in the warp's 128 columns. `x` are these columns. The first operand is all ones, and each column of the second
    // has eight of a lane's columns in one tile. So `sums` are those of one tile, or of one group of 32.
    template <int GROUPS> __device__ static void add_up(float (&sums)[4], const bf16* x, int lane) {
        constexpr uint32_t ONES = 0x3f803f80;  // a pair of 1
        const int t = lane % 4, n = lane / 4, tile = GROUPS == 4 ? n / 4 : n / 2 % 2;
        uint4 own = *reinterpret_cast<const uint4*>(x + tile * TILE_COLUMNS + t * 16 + n % 2 * 8);
        if (GROUPS == 4 && t / 2 != n / 2 % 2) own = uint4{};
        multiply_accumulate(sums, {ONES, ONES, ONES, ONES}, own.x, own.y);
        multiply_accumulate(sums, {ONES, ONES, ONES, ONES}, own.z, own.w);
    }

    // Multiply the next strips, or halves of strips, and call `meanwhile` once while the tensor cores are busy.
    //
    // The other operand has eight columns. With one group, all hold the same part of the vector. With several, columns 2 t and
    // 2 t + 1 hold only what belongs to group t % GROUPS, and lanes t of the result have the sums of this group. With halves, the
    // even columns hold the first 8 of a lane's 16 columns, and the odd ones the last 8.
    template <Kind KIND, int GROUP, bool HALF, class Function>
    __device__ void accumulate(Quantized<KIND, GROUP, HALF> format, int columns, int strips, const Function& meanwhile) {
        using Format = Quantized<KIND, GROUP, HALF>;
        constexpr int MOST = Format::MOST, LANE_ROWS = Format::LANE_ROWS, GROUPS = Format::GROUPS;
        const unsigned thread = thread_index();
        const int lane = thread % 32, warp = thread / 32;
        const int per_row = columns / COLUMNS, stop = position + strips * per_row;
        const bf16* of_warp = shared().vector + warp * (COLUMNS / WARPS);
        const bf16* mine = of_warp + lane % 4 * 16 + (HALF ? lane / 4 % 2 * 8 : 0);
        float* to = shared().partial[buffer][lane / 4] + warp;
        float sum[LANE_ROWS] = {};
        int part = 0;  // number of the rows' buffers that are in `sum`
        float all[MOST] = {};  // the sums of the vector in the columns that share the lane's scale, if there are offsets
#pragma unroll 1
        for (bool is_first = true; position < stop; is_first = false) {
            const int count = min(MOST, stop - position);
            uint4 x[MOST][Format::LOADS];
            const bool sums_vector = Format::HAS_OFFSETS && (is_first || per_row > 1);
            float sums[MOST][2][4] = {}, vector_sums[MOST][4] = {};
            const auto load_vector = [&](int i, int part) {
#pragma unroll
                for (int j = 0; j < Format::LOADS; j++) {
                    const int tile = j / (Format::LOADS / 2), group = GROUPS == 4 ? 2 * tile + lane % 4 / 2 : GROUPS == 2 ? tile : 0;
                    const bf16* own = mine + part * COLUMNS + tile * TILE_COLUMNS + (HALF ? 0 : j % 2 * 8);
                    if (GROUPS > 1) x[i][j] = uint4{};
                    if (group == lane / 8 % GROUPS) x[i][j] = Format::arrange(*reinterpret_cast<const uint4*>(own));
                }
            };
            if (HALF) {  // this vector is short enough for the registers
#pragma unroll
                for (int i = 0; i < MOST; i++) load_vector(i, min(i, per_row - 1));
            }
#pragma unroll
            for (int i = 0, from = part; i < MOST; i++, from = from + 1 < per_row ? from + 1 : 0) {
                if (i > 0 && i >= count) continue;
                if (!HALF) load_vector(i, from);
#pragma unroll
                for (int j = 0; j < Format::LOADS; j++) {
                    const uint32_t(*own)[4] = rows + i * Format::MMAS + 2 * j;
                    multiply_accumulate(sums[i][0], own[0], x[i][j].x, x[i][j].y);
                    multiply_accumulate(sums[i][1], own[1], x[i][j].z, x[i][j].w);
                }
                if (sums_vector) add_up<GROUPS>(vector_sums[i], of_warp + from * COLUMNS, lane);
            }
            if (is_first) meanwhile();
            float2 own[MOST * LANE_ROWS];
#pragma unroll
            for (int i = 0; i < MOST * LANE_ROWS; i++) own[i] = factors[i];
            position += count;
            if (!HALF) load(format);  // all columns of a half strip are in registers
            if (sums_vector) {
#pragma unroll
                for (int i = 0; i < MOST; i++) {
                    all[i] = vector_sums[i][0] + vector_sums[i][1];
                    if (GROUPS == 1) all[i] += __shfl_xor_sync(~0u, all[i], 1);  // the other tile
                }
            }
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                if (i > 0 && i >= count) continue;
#pragma unroll
                for (int j = 0; j < LANE_ROWS; j++) {
                    float product = sums[i][0][2 * j] + sums[i][1][2 * j];
                    if (HALF) product += sums[i][0][3] + sums[i][1][3];
                    sum[j] += own[i * LANE_ROWS + j].x * product;
                    if (Format::HAS_OFFSETS) sum[j] += own[i * LANE_ROWS + j].y * all[i];
                }
                if (++part < per_row) continue;
#pragma unroll
                for (int j = 0; j < LANE_ROWS; j++) {
                    if (GROUPS > 1) sum[j] = ::sum<GROUPS / 2, 1>(sum[j]);
                    if (lane % 4 == 0) to[j * ROWS * WARPS] = sum[j];
                    sum[j] = 0;
                }
                to += LANE_ROWS * ROWS * WARPS, part = 0;
            }
        }
    }
};

// Add the warps' sums of a row.
__device__ inline float total(const Sums& partial) {
    const float4 a = *reinterpret_cast<const float4*>(partial), b = *reinterpret_cast<const float4*>(partial + 4);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// --- exchange between blocks --------------------------------------------------------------------------------------------

// Receive a vector of N bf16 and write it to shared memory. A warp receives the same columns that it will multiply, so it does
// not have to wait for the other warps.
template <int N> __device__ inline void gather(const Tagged* from, uint32_t tag) {
    constexpr int EACH = N / (4 * CONSUMERS);
    const unsigned thread = thread_index();
    uint32_t pairs[2 * EACH];
    receive<EACH>(from + 2 * thread, 2 * CONSUMERS, tag, pairs);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        *reinterpret_cast<uint2*>(shared().vector + 4 * (thread + i * CONSUMERS)) = make_uint2(pairs[2 * i], pairs[2 * i + 1]);
    __syncwarp();
}

// --- RMSNorm ----------------------------------------------------------------------------------------------------------------

// A thread's part of the residual stream, and of the weights of the RMSNorm that follows: four of every 1,024 dimensions.
struct Residual {
    static constexpr int EACH = HIDDEN / (4 * CONSUMERS);
    const unsigned thread = thread_index();
    uint2 weights[EACH];
    float x[4 * EACH];

    __device__ explicit Residual(const bf16* norm) {  // `asm volatile` keeps the loads here, before the wait
#pragma unroll
        for (int i = 0; i < EACH; i++)
            asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                         : "=r"(weights[i].x), "=r"(weights[i].y) : "l"(norm + 4 * (thread + i * CONSUMERS)));
    }
    // Take the embedding of the step's token, before the first layer.
    __device__ void embed(const bf16* embedding) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) x[4 * i + j] = __bfloat162float(embedding[4 * (thread + i * CONSUMERS) + j]);
    }
    // Receive the residual stream from the other blocks.
    __device__ void gather(const Tagged* from, uint32_t tag) {
        uint32_t pairs[2 * EACH];
        receive<EACH>(from + 2 * thread, 2 * CONSUMERS, tag, pairs);
#pragma unroll
        for (int i = 0; i < 2 * EACH; i++) x[2 * i] = low_of(pairs[i]), x[2 * i + 1] = high_of(pairs[i]);
    }
    // Write the vector, multiplied by the norm's weights, to shared memory, and return the thread's sum of squares. The other factor
    // of RMSNorm is one number for the whole vector. It needs all warps' squares, so it is applied to the sums of the product (see
    // `norm_factor`).
    __device__ float normalize() const {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float* own = x + 4 * i;
            const uint2 pairs = make_uint2(pack(own[0] * low_of(weights[i].x), own[1] * high_of(weights[i].x)),
                                           pack(own[2] * low_of(weights[i].y), own[3] * high_of(weights[i].y)));
            *reinterpret_cast<uint2*>(shared().vector + 4 * (thread + i * CONSUMERS)) = pairs;
            squares += (own[0] * own[0] + own[1] * own[1]) + (own[2] * own[2] + own[3] * own[3]);
        }
        return squares;
    }
};

// Add the squares of a warp's threads, for `norm_factor`.
__device__ inline void add_squares(float squares) {
    squares = sum(squares);
    if (threadIdx.x % 32 == 0) shared().squares[threadIdx.x / 32] = squares;
}

// The factor of RMSNorm: 1 / (root mean square of the vector). Valid after `sync_consumers`.
__device__ inline float norm_factor(float eps) { return rsqrtf(total(shared().squares) / HIDDEN + eps); }

// --- attention ----------------------------------------------------------------------------------------------------------

// The tensor cores' product of keys or values: `multiply_accumulate`, or the same in float16 if they are stored in e4m3.
__device__ inline void multiply_stored(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (!KV_IS_E4M3) return multiply_accumulate(sums, a, b0, b1);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Round two floats to the dtype of this product's second operand, and pack them into 32 bits.
__device__ inline uint32_t pack_operand(float low, float high) {
    if constexpr (!KV_IS_E4M3) return pack(low, high);
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Round two floats to e4m3, and pack them into 16 bits. Those beyond its range become its largest numbers.
__device__ inline uint16_t pack_e4m3(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Convert four numbers of e4m3 to two pairs of float16, without rounding.
__device__ inline void widen(uint32_t& low, uint32_t& high, uint32_t four) {
    asm("{\n.reg .b16 two, others;\nmov.b32 {two, others}, %2;\ncvt.rn.f16x2.e4m3x2 %0, two;\ncvt.rn.f16x2.e4m3x2 %1, others;\n}\n"
        : "=r"(low), "=r"(high) : "r"(four));
}

// The offset of a chunk of a key or value in its tile, in bytes. Chunks are swizzled: the same chunk of eight adjacent keys is
// in different banks. With four chunks in a key, two adjacent keys fill all banks, so they need no different order.
__device__ inline int place_in_tile(int row, int chunk) { return (row * CHUNKS + (chunk ^ (CHUNKS == 4 ? row / 2 % 4 : row % 8))) * 16; }

// A block's share of the keys of one KV head, in tiles of 16 keys. It is the same in all layers. A warp has every eighth tile.
struct Split {
    int head, index, count, last;  // KV head; index of the split, and number of splits; the new key
    int first, end, warps;         // the warp's first key; the split's end; number of warps that have keys
    // In the cache: key `first + lane % 16`, the same key of the warp's second tile, and the new key.
    uint32_t places[BUFFERS], last_place;
    bool has_work;

    __device__ Split(const Step& step, int num_keys) {
        constexpr int PER_HEAD = BLOCKS / KV_HEADS;
        const int tiles = (num_keys + TILE - 1) / TILE;
        head = blockIdx.x / PER_HEAD, index = blockIdx.x % PER_HEAD, last = num_keys - 1;
        count = min(min(PER_HEAD, MAX_SPLITS), (tiles + WARPS - 1) / WARPS);
        has_work = head < KV_HEADS && index < count;
        const int begin = tiles * index / count, stop = tiles * (index + 1) / count;
        first = (begin + static_cast<int>(threadIdx.x) / 32) * TILE, end = has_work ? min(num_keys, stop * TILE) : 0;
        warps = min(WARPS, stop - begin);
        const int own = first + threadIdx.x % TILE, next = own + WARPS * TILE;
        places[0] = place_of(step, own, page_of(step, own)), last_place = place_of(step, last, page_of(step, last));
        if constexpr (BUFFERS > 1) places[BUFFERS - 1] = place_of(step, next, page_of(step, next));
    }
    // The page of a key; for keys after the last one, the last page.
    __device__ int page_of(const Step& step, int key) const { return step.pages[min(key, last) / PAGE_SIZE]; }
    // The offset of a key of the split's head in the cache, in chunks.
    __device__ uint32_t place_of(const Step& step, int key, int page) const {
        return (page * step.page_stride + key % PAGE_SIZE * step.token_stride + head * step.head_stride) / CHUNK;
    }
    // Start loading the warp's first tiles.
    __device__ void load_first(const Layer& layer) const {
        load(layer, first, places[0], 0), end_of_load();
        if constexpr (BUFFERS > 1) load(layer, first + WARPS * TILE, places[BUFFERS - 1], 1), end_of_load();
    }
    // Start loading the warp's tile that begins at key `begin`. `places` is the place of key `begin + lane % 16`. Keys that are
    // not in the cache become 0: those after the end, and the new key, which `attend` adds.
    __device__ void load(const Layer& layer, int begin, uint32_t places, int buffer) const {
        if (begin >= end) return;
        const int lane = thread_index() % 32, chunk = lane % CHUNKS;
        const uint32_t tile = shared_address(shared().tiles[thread_index() / 32]) + buffer * 2 * TILE_BYTES;
        const auto *keys = reinterpret_cast<const uint4*>(layer.k_cache) + chunk, *values = reinterpret_cast<const uint4*>(layer.v_cache) + chunk;
#pragma unroll 4
        for (int i = 0; i < TILE; i += 32 / CHUNKS) {
            const int row = i + lane / CHUNKS, bytes = begin + row < last && begin + row < end ? 16 : 0;
            const uint32_t from = __shfl_sync(~0u, places, row), to = tile + place_in_tile(row, chunk);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(keys + from), "r"(bytes) : "memory");
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + TILE_BYTES), "l"(values + from), "r"(bytes) : "memory");
        }
    }
    // With several buffers, the copies of a tile form a group, which is empty for a tile after the end.
    __device__ static void end_of_load() {
        if constexpr (BUFFERS > 1) asm volatile("cp.async.commit_group;" ::: "memory");
    }
    // Wait for all tiles but the BUFFERS - 1 last ones.
    __device__ static void wait_for_tile() {
        if constexpr (BUFFERS > 1) asm volatile("cp.async.wait_group %0;" ::"n"(BUFFERS - 1) : "memory");
        else asm volatile("cp.async.wait_all;" ::: "memory");
    }
};

// Receive the queries of the block's KV head. Normalize them (Qwen3 only), and rotate them. The split that has the new key also
// receives the new key and value, and stores them in the cache. Each warp takes one head at a time.
__device__ inline void receive_heads(const Step& step, const Layer& layer, const Split& split, uint32_t tag) {
    constexpr int EACH = HEAD_DIM / 32;  // dimensions of a lane
    const int lane = thread_index() % 32, at = lane * EACH, half = at % (HEAD_DIM / 2);
#pragma unroll 1
    for (int i = thread_index() / 32; i < (split.end > split.last ? GROUP + 2 : GROUP); i += WARPS) {
        const bool is_query = i < GROUP, is_value = i == GROUP + 1;
        const int head = is_query ? split.head * GROUP + i : Q_HEADS + (i - GROUP) * KV_HEADS + split.head;
        const bf16* norm = is_value ? nullptr : is_query ? layer.q_norm : layer.k_norm;
        float weights[EACH], x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) weights[j] = norm ? __bfloat162float(norm[at + j]) : 1;
        const Tagged* from = step.qkv + (head * HEAD_DIM + at) / 2;
        Tagged pairs[EACH / 2];
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) pairs[j] = load_one(from + j);
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) ready &= pairs[j] >> 32 == tag;
        } while (!ready);
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
            if (!is_value) x[j] = x[j] * shared().cosine[half + j] + (lane < 16 ? -other : other) * shared().sine[half + j];
        }
        if (KV_IS_E4M3 && !is_query) {
            const float inverse = is_value ? layer.v_inverse : layer.k_inverse;
            auto* to = reinterpret_cast<uint16_t*>(shared().fresh[i - GROUP] + at);
            Stored* cache = (is_value ? layer.v_cache : layer.k_cache) + static_cast<int64_t>(split.last_place) * CHUNK + at;
#pragma unroll
            for (int j = 0; j < EACH / 2; j++)
                reinterpret_cast<uint16_t*>(cache)[j] = to[j] = pack_e4m3(x[2 * j] * inverse, x[2 * j + 1] * inverse);
            continue;
        }
        auto* to = reinterpret_cast<uint32_t*>((is_query ? shared().q[i] : reinterpret_cast<bf16*>(shared().fresh[i - GROUP])) + at);
#pragma unroll
        for (int j = 0; j < EACH / 2; j++) to[j] = pack_operand(x[2 * j], x[2 * j + 1]);
        if (!is_query) {
            Stored* cache = (is_value ? layer.v_cache : layer.k_cache) + static_cast<int64_t>(split.last_place) * CHUNK + at;
#pragma unroll
            for (int j = 0; j < EACH / 2; j++) reinterpret_cast<uint32_t*>(cache)[j] = to[j];
        }
    }
    sync_consumers();
}

// A warp's attention state: an online softmax over its keys, on tensor cores. The rows of the tiles are keys, or dimensions of
// the values. The columns are the queries of the group. If there are fewer than eight queries, the other columns repeat the
// last one, and their results are ignored. A thread has the queries 2 * (lane % 4) and 2 * (lane % 4) + 1. Of each of them, it
// has the rows lane / 4 and lane / 4 + 8 of every 16.
//
// With keys in e4m3, a thread gets four adjacent dimensions of a key from `load_matrices` instead of two. In the product they
// take the place of two dimensions and of the two that are eight further on, in the keys as in the queries. Of the values, it
// gets two adjacent dimensions of two keys from `load_transposed`, which become the rows lane / 4 and lane / 4 + 8.
struct State {
    static constexpr int STEPS = HEAD_DIM / 16, LOADS = HEAD_DIM / CHUNK / 2;  // of 16 dimensions; of two chunks
    uint32_t queries[STEPS][2];
    float out[STEPS][4] = {};  // rows are dimensions
    float best[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // running maximum of a query's scores; the thread's sum of weights

    // Load the queries into registers.
    __device__ State() {
        const int lane = thread_index() % 32;
        if constexpr (KV_IS_E4M3) {
            const auto* own = reinterpret_cast<const uint2*>(shared().q[min(lane / 4, GROUP - 1)]) + lane % 4;
#pragma unroll
            for (int i = 0; i < STEPS; i++) queries[i][0] = own[4 * i].x, queries[i][1] = own[4 * i].y;
            return;
        }
        const uint32_t from = shared_address(shared().q[min(lane % 8, GROUP - 1)]) + lane / 8 * 16;
#pragma unroll
        for (int i = 0; i < STEPS; i += 2) {
            uint32_t two[4];
            load_matrices(two, from + i * 32);
            queries[i][0] = two[0], queries[i][1] = two[1], queries[i + 1][0] = two[2], queries[i + 1][1] = two[3];
        }
    }
    // Attend to the first `num_keys` keys of the warp's tile in a buffer.
    __device__ void attend(int buffer, int num_keys, float scale) {
        const int lane = thread_index() % 32;
        const uint32_t tile = shared_address(shared().tiles[thread_index() / 32]) + buffer * 2 * TILE_BYTES;
        // Load i needs chunks 2 * i and 2 * i + 1. Because of the swizzle, an exclusive or moves from chunks 0 and 1 to these.
        const uint32_t keys = tile + place_in_tile(lane % 16, lane / 16);
        const uint32_t values = tile + TILE_BYTES + place_in_tile(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        float two[2][4] = {};  // even and odd steps have separate sums, so that they can overlap
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            uint32_t a[4];
            load_matrices(a, (keys ^ i % 4 * 32) + i / 4 * 128);
            if constexpr (KV_IS_E4M3) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint32_t wide[4];
                    widen(wide[0], wide[2], a[2 * j]), widen(wide[1], wide[3], a[2 * j + 1]);
                    multiply_stored(two[j], wide, queries[2 * i + j][0], queries[2 * i + j][1]);
                }
            } else {
                multiply_stored(two[i % 2], a, queries[i][0], queries[i][1]);
            }
        }
        float scores[2][2], shrink[2];  // scores[key half][query]; factor of each query's earlier sums
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i / 2][i % 2] = lane / 4 + i / 2 * 8 < num_keys ? (two[0][i] + two[1][i]) * scale : -INFINITY;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float most = fmaxf(best[j], maximum<16, 4>(fmaxf(scores[0][j], scores[1][j])));
            shrink[j] = exp2_of(best[j] - most), best[j] = most;
            scores[0][j] = exp2_of(scores[0][j] - most), scores[1][j] = exp2_of(scores[1][j] - most);
            sum[j] = sum[j] * shrink[j] + scores[0][j] + scores[1][j];
        }
        // The weights are in the layout of a result of `mma`. Transposing each 8 x 8 block gives that of its second operand.
        const uint32_t first = transpose(pack_operand(scores[0][0], scores[0][1])), second = transpose(pack_operand(scores[1][0], scores[1][1]));
        const auto accumulate = [&](int i, const uint32_t(&a)[4]) {
#pragma unroll
            for (int j = 0; j < 4; j++) out[i][j] *= shrink[j % 2];
            multiply_stored(out[i], a, first, second);
        };
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            uint32_t a[4];
            load_transposed(a, (values ^ i % 4 * 32) + i / 4 * 128);
            if constexpr (KV_IS_E4M3) {
#pragma unroll
                for (int j = 0; j < 2; j++) {  // bytes 0 and 2 are one dimension of two keys, and bytes 1 and 3 the next dimension
                    uint32_t wide[4];
                    widen(wide[0], wide[1], __byte_perm(a[j], 0, 0x3120)), widen(wide[2], wide[3], __byte_perm(a[j + 2], 0, 0x3120));
                    accumulate(2 * i + j, wide);
                }
            } else {
                accumulate(i, a);
            }
        }
    }
    // Write the state to shared memory, over the warp's tiles.
    __device__ void store() {
        const int lane = thread_index() % 32, warp = thread_index() / 32;
        sum[0] = ::sum<16, 4>(sum[0]), sum[1] = ::sum<16, 4>(sum[1]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int query = lane % 4 * 2 + j;
            if (query >= GROUP) continue;
            float* to = of_warp(warp) + query * STATE_SIZE + lane / 4;
            if constexpr (KV_IS_E4M3) {
#pragma unroll
                for (int i = 0; i < STEPS; i++) *reinterpret_cast<float2*>(to + lane / 4 + i * 16) = make_float2(out[i][j], out[i][2 + j]);
            } else {
#pragma unroll
                for (int i = 0; i < 2 * STEPS; i++) to[i * 8] = out[i / 2][i % 2 * 2 + j];
            }
            if (lane < 4) shared().maxima[query][warp] = best[j], shared().sums[query][warp] = sum[j];
        }
    }
    // The outputs that a warp has stored.
    __device__ static float* of_warp(int warp) { return reinterpret_cast<float*>(shared().tiles[warp]); }
};

// Attend to the keys of the block's split, and publish its outputs and log-sum-exps (to base 2).
__device__ inline void attend(const Step& step, const Layer& layer, const Split& split, uint32_t tag) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    receive_heads(step, layer, split, tag);
    if (split.first < split.end) {
        State state;
        int buffer = 0;
#pragma unroll 1
        for (int key = split.first; key < split.end; key += WARPS * TILE) {
            const int next = key + BUFFERS * WARPS * TILE, of_lane = next + lane % TILE;
            const int page = split.page_of(step, of_lane);  // this load overlaps with computing the current tile
            split.wait_for_tile();
            __syncwarp();
            const int row = split.last - key, matrix = lane / CHUNKS;
            if (row < TILE) {  // the tile ends with the new key, which is not in the cache yet
                if (matrix < 2)
                    *reinterpret_cast<uint4*>(shared().tiles[warp] + (2 * buffer + matrix) * TILE_BYTES + place_in_tile(row, lane % CHUNKS)) =
                        reinterpret_cast<const uint4*>(shared().fresh[matrix])[lane % CHUNKS];
                __syncwarp();
            }
            state.attend(buffer, row + 1, step.scale * layer.k_scale * 1.44269504f);  // log2(e), because the exponentials are to base 2
            __syncwarp();
            split.load(layer, next, split.place_of(step, of_lane, page), buffer), split.end_of_load();
            buffer = (buffer + 1) % BUFFERS;
        }
        state.store();
    }
    sync_consumers();
    // Merge the states of the warps that had keys. For a warp without keys, the state of the last warp that had some is read
    // and gets weight 0. This needs no branch, so the loads can overlap.
#pragma unroll 1
    for (int i = 2 * thread_index(); i < GROUP * HEAD_DIM; i += 2 * CONSUMERS) {
        const int g = i / HEAD_DIM, dimension = i % HEAD_DIM, head = split.head * GROUP + g;
        float weights[WARPS], sums[WARPS], most = -INFINITY, all = 0, low = 0, high = 0;
        float2 pairs[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int from = min(w, split.warps - 1);
            weights[w] = shared().maxima[g][from], sums[w] = shared().sums[g][from];
            pairs[w] = *reinterpret_cast<const float2*>(State::of_warp(from) + g * STATE_SIZE + dimension);
            most = fmaxf(most, weights[w]);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = w < split.warps ? exp2_of(weights[w] - most) : 0;
            all += weight * sums[w], low += weight * pairs[w].x, high += weight * pairs[w].y;
        }
        const float scale = __fdividef(layer.v_scale, all);
        publish(step.splits + (split.index * Q_SIZE + head * HEAD_DIM + dimension) / 2, pack(low * scale, high * scale), tag);
        if (dimension == 0) publish(step.lse + split.index * Q_HEADS + head, most + __log2f(all), tag);
    }
}

// Merge many splits: each block merges its share of the dimensions and publishes them. A warp takes two dimensions at a time,
// and each of its lanes has one split.
__device__ inline void merge(const Step& step, int num_splits, uint32_t tag) {
    const int lane = thread_index() % 32;
    const Share pairs(Q_SIZE / 2);
#pragma unroll 1
    for (int i = pairs.first + static_cast<int>(thread_index()) / 32; i < pairs.end; i += WARPS) {
        uint32_t pair = 0;
        float lse = -INFINITY;
        if (lane < num_splits) {
            Tagged of_lse, of_pair;
            do of_lse = load_one(step.lse + lane * Q_HEADS + 2 * i / HEAD_DIM), of_pair = load_one(step.splits + lane * (Q_SIZE / 2) + i);
            while (of_lse >> 32 != tag || of_pair >> 32 != tag);
            lse = __uint_as_float(static_cast<uint32_t>(of_lse)), pair = static_cast<uint32_t>(of_pair);
        }
        __syncwarp();
        const float weight = exp2_of(lse - maximum(lse)), all = sum(weight);
        const float low = sum(weight * low_of(pair)), high = sum(weight * high_of(pair));
        if (lane == 0) publish(step.attention + i, pack(__fdividef(low, all), __fdividef(high, all)), tag);
    }
}

// Merge up to MOST splits: every block receives the results of all of them and merges all dimensions. A thread merges four of
// every 1,024.
template <int MOST> __device__ inline void gather_splits(const Step& step, int num_splits, uint32_t tag) {
    constexpr int EACH = Q_SIZE / (4 * CONSUMERS), AT_ONCE = EACH % 2 == 0 && MOST <= 4 ? 2 : 1;
    const unsigned thread = thread_index();
    if (thread % 32 == 0) {  // only one lane waits for the warp's first value
        const Tagged* first = step.splits + (thread / 32 % num_splits * Q_SIZE + 4 * thread) / 2;
        while (load_one(first) >> 32 != tag) {}
    }
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < EACH; begin += AT_ONCE) {
        // A split that does not exist counts as arrived, and has weight 0.
        Tagged values[MOST][AT_ONCE][2], lse[MOST][AT_ONCE];
#pragma unroll
        for (int s = 0; s < MOST; s++)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const Tagged arrived = s < num_splits ? 0 : static_cast<Tagged>(tag) << 32;
                values[s][i][0] = values[s][i][1] = arrived, lse[s][i] = arrived | __float_as_uint(-INFINITY);
            }
        bool ready;
        do {
            ready = true;
#pragma unroll
            for (int s = 0; s < MOST; s++)
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const int at = 4 * (thread + (begin + i) * CONSUMERS);
                    load_missing(values[s][i], step.splits + (s * Q_SIZE + at) / 2, tag);
                    load_missing(lse[s][i], step.lse + s * Q_HEADS + at / HEAD_DIM, tag);
                }
#pragma unroll
            for (int s = 0; s < MOST; s++)
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    ready &= values[s][i][0] >> 32 == tag && values[s][i][1] >> 32 == tag && lse[s][i] >> 32 == tag;
        } while (!ready);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float weights[MOST], most = -INFINITY, all = 0, x[4] = {};
#pragma unroll
            for (int s = 0; s < MOST; s++) most = fmaxf(most, weights[s] = __uint_as_float(static_cast<uint32_t>(lse[s][i])));
#pragma unroll
            for (int s = 0; s < MOST; s++) all += weights[s] = exp2_of(weights[s] - most);
            const float scale = __fdividef(1, all);
#pragma unroll
            for (int s = 0; s < MOST; s++) {
                const float weight = weights[s] * scale;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const auto pair = static_cast<uint32_t>(values[s][i][j]);
                    x[2 * j] += weight * low_of(pair), x[2 * j + 1] += weight * high_of(pair);
                }
            }
            *reinterpret_cast<uint2*>(shared().vector + 4 * (thread + (begin + i) * CONSUMERS)) = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
        }
    }
    __syncwarp();
}

// --- the step -----------------------------------------------------------------------------------------------------------

__device__ inline float swiglu(float gate, float up) { return __fdividef(gate, 1 + __expf(-gate)) * up; }

// Complete a pair of rows: add the warps' sums, apply what follows the product (the residual stream, RMSNorm's factor,
// SwiGLU), and publish the values or write the logit. `local` is the index of `row` in `sums`.
__device__ inline void finish(const Step& step, int phase, int row, int local, const Sums* sums, uint32_t tag) {
    if (phase == O || phase == DOWN) {
        float* own = shared().residual + row - residual_rows().first;
        own[0] += total(sums[local]), own[1] += total(sums[local + 1]);
        publish((phase == O ? step.after_attention : step.after_mlp) + row / 2, pack(own[0], own[1]), tag);
        return;
    }
    const float factor = norm_factor(step.eps);
    if (phase == GATE_UP) {
        const Sums* gate = sums + local / ROWS * 2 * ROWS + local % ROWS;
        const Sums* up = gate + ROWS;
        publish(step.activation + row / 2,
                pack(swiglu(total(gate[0]) * factor, total(up[0]) * factor), swiglu(total(gate[1]) * factor, total(up[1]) * factor)),
                tag);
    } else if (phase == QKV) {
        publish(step.qkv + row / 2, pack(total(sums[local]) * factor, total(sums[local + 1]) * factor), tag);
    } else {
        step.logits[row] = total(sums[local]) * factor;
        if (row + 1 < step.vocab_size) step.logits[row + 1] = total(sums[local + 1]) * factor;
    }
}

// The phase at an index of the loop over all phases of a step.
__device__ inline int phase_of(int i) { return i < 4 * LAYERS ? i % 4 : LM_HEAD; }

// The kernel. All phases share one loop, which keeps the code small.
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
        Producer producer;
#pragma unroll 1
        for (int i = 0; i < 4 * LAYERS; i++) {
            const Layer& layer = shared().layers[i / 4];
            producer.stream(OfLayers{}, layer.weights[i % 4], layer.scales[i % 4], Matrix(i % 4, step));
        }
        producer.stream(OfHead{}, step.lm_head, step.lm_head_scales, Matrix(LM_HEAD, step));
        return;
    }

    const uint32_t count = *step.count;
    const int num_keys = static_cast<int>(*step.position) + 1;
    const Split split(step, num_keys);
    for (int i = threadIdx.x; i < HEAD_DIM / 2; i += CONSUMERS)
        sincosf((num_keys - 1) * step.inv_freq[i], shared().sine + i, shared().cosine + i);
    const int64_t token = *step.token_source < 0 ? *step.token_id : step.last_token[*step.token_source];
    const bf16* embedded = step.embedding + token * HIDDEN;
    const Rows held = residual_rows();
    for (int i = held.first + threadIdx.x; i < held.end; i += CONSUMERS) shared().residual[i - held.first] = __bfloat162float(embedded[i]);
    Product product;
    if (LAYER_KIND == DENSE) product.begin(QKV, step);
#pragma unroll 1
    for (int i = 0; i <= 4 * LAYERS; i++) {
        const int phase = phase_of(i);
        const Layer& layer = shared().layers[min(i / 4, LAYERS - 1)];
        const uint32_t tag = count * LAYERS + i / 4 + 1;
        const Matrix matrix(phase, step);
        float squares = 0;
        if (phase == O) {
            if (split.has_work) attend(step, layer, split, tag);
            if (LAYER_KIND != DENSE) product.begin(O, step);
            if (split.count <= FEW_SPLITS / 2) {  // fewer splits need fewer registers, so more loads are in flight at once
                gather_splits<FEW_SPLITS / 2>(step, split.count, tag);
            } else if (split.count <= FEW_SPLITS) {
                gather_splits<FEW_SPLITS>(step, split.count, tag);
            } else {
                merge(step, split.count, tag);
                gather<Q_SIZE>(step.attention, tag);
            }
        } else if (phase == DOWN) {
            if (LAYER_KIND != DENSE) product.begin(DOWN, step);
            gather<INTERMEDIATE>(step.activation, tag);
        } else {
            Residual residual(phase == QKV ? layer.input_norm : phase == GATE_UP ? layer.mlp_norm : step.final_norm);
            if (!matrix.is_dense) product.begin(phase, step);
            if (i == 0) residual.embed(embedded);
            else residual.gather(phase == GATE_UP ? step.after_attention : step.after_mlp, phase == GATE_UP ? tag : tag - 1);
            if (phase == QKV) split.load_first(layer);  // behind the loads that the product waits for
            squares = residual.normalize();
            if (matrix.is_dense) add_squares(squares);
            __syncwarp();
        }
        const Rows own = matrix.own();
#pragma unroll 1
        for (int begin = own.first; begin < own.end; begin += FLUSH / matrix.parts) {
            const int rows = min(FLUSH / matrix.parts, own.end - begin), local = 2 * thread_index();
            with_format(phase, [&](auto format) {
                product.accumulate(format, matrix.columns, matrix.buffers(rows), [&] {
                    if (phase != O && phase != DOWN && begin == own.first) add_squares(squares);
                });
            });
            sync_consumers();
            if (local < rows) finish(step, phase, begin + local, local, shared().partial[product.buffer], tag);
            product.buffer ^= 1;
        }
        // Load the next rows before the wait for their vector. Quantized ones take many registers, so attention comes first.
        if (phase != LM_HEAD && Matrix(phase_of(i + 1), step).is_dense) product.begin(phase_of(i + 1), step);
        else if (HAS_QUANTIZED) product.clear();
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
