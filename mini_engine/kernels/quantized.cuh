// Quantized weights in the order in which the tensor cores take them (`mma.m16n8k16`, first operand), and their conversion.
//
// A tile is 16 rows of a matrix times 64 columns. The tiles of 16 rows follow each other in memory, so a warp that multiplies
// these rows reads one piece of memory from its beginning to its end. Lane 4 g + t of the warp has rows g and g + 8 of a tile,
// and of each the 16 columns from 16 t. `quantized_products.pack` writes this order:
//
//     8 bits: 32 bytes for each lane. The 16 columns of row g, then those of row g + 8. Of every four columns, the second and
//             the third have changed places: bytes 0 and 2 are columns 0 and 1.
//     4 bits: 16 bytes for each lane. Two words of 8 columns of row g, then two of row g + 8. The lower four bits of the halves
//             of a word are columns 0 and 1, the next four bits columns 2 and 3. Numbers are stored as q + 8.
//
// The tensor cores add up 16 columns at once, in any order, as long as both operands have the same. In step s of a tile, this
// lane's part is columns 4 s to 4 s + 3 of its 16, of the weight as of the tokens. So tokens need no other order, either.
#pragma once
#include <cstdint>

enum Kind { FP8, INT8, INT4 };

constexpr int TILE_ROWS = 16, TILE_COLUMNS = 64, STEPS_OF_TILE = 4;

template <Kind KIND> struct Numbers {
    static constexpr int LANE_BYTES = KIND == INT4 ? 16 : 32, TILE_BYTES = 32 * LANE_BYTES, VECTORS = LANE_BYTES / 16;
    // FP8 numbers become bfloat16 by a shift of their bits, which leaves them 2^-120 times too small. Tokens are multiplied by
    // 2^104 before the product, and sums by 2^16 after it. So neither is too large or too small for its format.
    static constexpr float TOKEN_FACTOR = KIND == FP8 ? 0x1p104f : 1.0f, SUM_FACTOR = KIND == FP8 ? 0x1p16f : 1.0f;
};

// Operations on pairs of bfloat16, rounded to nearest.
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ inline uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Convert four numbers of 8 bits to bfloat16: columns 0 and 1, and columns 2 and 3.
template <Kind KIND> __device__ inline void convert_word(uint32_t word, uint32_t& first, uint32_t& second) {
    if constexpr (KIND == FP8) {
        // e4m3 has the sign, four bits of exponent and three of mantissa: the same places of a bfloat16, four bits further right.
        first = word << 8 & 0x80008000u | word << 4 & 0x07f007f0u;
        second = word & 0x80008000u | word >> 4 & 0x07f007f0u;
    } else {
        // 0x4300 is 128, and the last bit of its mantissa is 1. The sign bit of a number counts -128: 0x4380 is 256.
        const uint32_t next = word >> 8;
        first = subtract_pairs(word & 0x007f007fu | 0x43004300u, word & 0x00800080u | 0x43004300u);
        second = subtract_pairs(next & 0x007f007fu | 0x43004300u, next & 0x00800080u | 0x43004300u);
    }
}

// A lane's part of a tile.
template <Kind KIND> struct Tile {
    uint4 vectors[Numbers<KIND>::VECTORS];

    __device__ void load(const uint4* tile) {  // weights are read once
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < Numbers<KIND>::VECTORS; i++) {
            const uint4* from = tile + lane * Numbers<KIND>::VECTORS + i;
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(vectors[i].x), "=r"(vectors[i].y), "=r"(vectors[i].z), "=r"(vectors[i].w) : "l"(from));
        }
    }

    // Convert this lane's part of step s: rows g, g + 8, g, g + 8 of columns 4 s and 4 s + 1, then 4 s + 2 and 4 s + 3.
    __device__ void convert(int step, uint32_t (&a)[4]) const {
        const auto word = [&](int i) { return reinterpret_cast<const uint32_t*>(vectors)[i]; };
        if constexpr (KIND == INT4) {
#pragma unroll
            for (int i = 0; i < 4; i++) {  // 0x4300 | n is 128 + n, and q = n - 8
                const uint32_t pair = word(i % 2 * 2 + step / 2) >> (step % 2 * 8 + i / 2 * 4);
                a[i] = subtract_pairs(pair & 0x000f000fu | 0x43004300u, 0x43084308u);
            }
        } else {
            convert_word<KIND>(word(step), a[0], a[2]);
            convert_word<KIND>(word(4 + step), a[1], a[3]);
        }
    }
};
