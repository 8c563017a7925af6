// Quantized weights as the tensor cores take them (`mma.m16n8k16`, first operand), and their conversion to bfloat16.
//
// A tile is 16 rows of a matrix times 64 columns. The tiles of 16 rows follow each other in memory, so what a warp multiplies
// is one piece of memory. Lane 4 g + t has rows g and g + 8 of a tile, and of each the 16 columns from 16 t
// (`quantized_products.pack`):
//
//     8 bits: 32 bytes for each lane. The 16 columns of row g, then those of row g + 8. Of every four columns, the second and
//             the third have changed places: bytes 0 and 2 are columns 0 and 1.
//     4 bits: 16 bytes for each lane. Two words of 8 columns of row g, then two of row g + 8. The lower four bits of the halves
//             of a word are columns 0 and 1, the next four bits columns 2 and 3. Numbers are stored as q + 8.
//
// The tensor cores add up 16 columns at once, in any order, as long as both operands have the same. In step s of a tile, a
// lane's part is columns 4 s to 4 s + 3 of its 16, of the weight as of the tokens. So the tokens need no other order, either.
#pragma once
#include <cstdint>

enum Kind { FP8, INT8, INT4 };

constexpr int TILE_ROWS = 16, TILE_COLUMNS = 64, STEPS_OF_TILE = TILE_COLUMNS / 16;

// FP8 becomes bfloat16 by a shift of its bits, which leaves it 2^-120 times too small. A pair of 2^120:
constexpr uint32_t FP8_FACTOR = 0x7b807b80u;
// INT4 becomes n + 128 = q + 136 at first.
constexpr float INT4_BIAS = 136;

// Operations on pairs of bfloat16, rounded to nearest.
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// (a & b) | c in one instruction. (The compiler makes two of it if b and c are constants.)
__device__ inline uint32_t mask_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ inline uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Convert bytes 0 and 2, and bytes 1 and 3.
template <Kind KIND> __device__ inline void convert_word(uint32_t word, uint32_t& first, uint32_t& second) {
    if constexpr (KIND == FP8) {
        // e4m3 has the sign, four bits of exponent and three of mantissa: a bfloat16 has them four bits further right.
        first = mask_or(word << 8, 0x80008000u, word << 4 & 0x07f007f0u);
        second = mask_or(word, 0x80008000u, word >> 4 & 0x07f007f0u);
    } else {
        // 0x4300 is 128, and the last bit of its mantissa is 1. The sign bit of a number counts -128: 0x4380 is 256.
        const uint32_t next = word >> 8;
        first = subtract_pairs(mask_or(word, 0x007f007fu, 0x43004300u), mask_or(word, 0x00800080u, 0x43004300u));
        second = subtract_pairs(mask_or(next, 0x007f007fu, 0x43004300u), mask_or(next, 0x00800080u, 0x43004300u));
    }
}

// A lane's part of a tile.
template <Kind KIND> struct Tile {
    static constexpr int BYTES = KIND == INT4 ? 16 : 32, VECTORS = BYTES / 16;
    uint4 vectors[VECTORS];

    // Convert step s: rows g, g + 8, g, g + 8 of columns 4 s and 4 s + 1, then 4 s + 2 and 4 s + 3. If BIASED, numbers of INT4 stay
    // INT4_BIAS too large, which saves an instruction.
    template <bool BIASED = false> __device__ void convert(int step, uint32_t (&a)[4]) const {
        const auto word = [&](int i) {
            const uint4& v = vectors[i / 4];
            return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
        };
        if constexpr (KIND == INT4) {
#pragma unroll
            for (int i = 0; i < 4; i++) {  // 0x4300 | n is 128 + n, and q is n - 8
                const uint32_t pair = word(i % 2 * 2 + step / 2) >> (step % 2 * 8 + i / 2 * 4);
                a[i] = mask_or(pair, 0x000f000fu, 0x43004300u);
                if constexpr (!BIASED) a[i] = subtract_pairs(a[i], 0x43084308u);
            }
        } else {
            convert_word<KIND>(word(step), a[0], a[2]);
            convert_word<KIND>(word(4 + step), a[1], a[3]);
        }
    }
};
