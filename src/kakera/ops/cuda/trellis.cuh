// The trellis of the EXL3 / Escha tile format in registers: windows of the bit stream, and what a state is worth.
#pragma once

#include "numbers.cuh"

enum Codebook { MCG, INST3, MUL1 };

// Stream bits of the first `weights` of a tile, or of any even place in it, at so many half bits a weight: of a rate
// with a half, every second weight adds the bit more.
template <int HALF_BITS> __host__ __device__ constexpr int bits_of(int weights) { return weights * HALF_BITS / 2; }

// 16 stream bits whose last one is bit `last` of `words` (bit 0 = most significant bit of words[0]); `before` is the
// word in front of them. `last` is a constant after unrolling. Costs one PRMT, plus a left shift where the window does
// not start at a byte, plus one PRMT a word for the windows that straddle two. (The shift is an IMAD, on another pipe.)
__device__ __forceinline__ u32 window(const u32 *words, u32 before, int last) {
    int word = last / 32, low = 31 - last % 32;
    u32 bits = words[word];
    if (low > 16) {  // the upper bits lie in the word in front
        bits = __byte_perm(bits, word ? words[word - 1] : before, 0x5432);
        low -= 16;
    }
    int shift = (8 - low % 8) % 8, byte = (low + shift) / 8;
    return __byte_perm(bits << shift, 0, 0x4400 | (byte + 1) << 4 | byte);
}

// mcg and 3inst: a state is worth the sum of the two fp16 halves of the word returned.
template <int CODEBOOK> __device__ __forceinline__ u32 halves(u32 state, u32 mask) {
    u32 x = CODEBOOK == MCG ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
    u32 word;  // one LOP3, (x & a) ^ b: with both constants known, the compiler makes two of it
    asm("lop3.b32 %0, %1, %2, 0x3B603B60, 0x6A;" : "=r"(word) : "r"(x), "r"(mask));
    return word;
}

// Two states as one half2, rounded as the format says.
template <int CODEBOOK> __device__ __forceinline__ u32 half2_values(u32 first, u32 second, u32 mask) {
    if (CODEBOOK == MUL1) {
        u32 values, a = __dp4a(first * 0x83DCD12Du, 0x01010101u, 0x6400u);  // 1024 + the sum of the bytes, as fp16
        u32 b = __dp4a(second * 0x83DCD12Du, 0x01010101u, 0x6400u);
        asm("fma.rn.f16x2 %0, %1, %2, %3;"
            : "=r"(values)
            : "r"(__byte_perm(a, b, 0x5410)), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
        return values;
    }
    u32 a = halves<CODEBOOK>(first, mask), b = halves<CODEBOOK>(second, mask);
    return half2_add(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}
