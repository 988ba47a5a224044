// Sixteen tokens of bf16 keys and values for decode attention, as they lie: q and P are split into two bf16 each.
#pragma once
#include "decode_softmax.cuh"
#include "decode_work.cuh"

// Two numbers as two bf16 each: x = high + low to 16 bits.
__device__ __forceinline__ void split(float first, float second, u32 &high, u32 &low) {
    high = pack_bf162(first, second);
    low = pack_bf162(first - __uint_as_float(high << 16), second - __uint_as_float(high & 0xFFFF0000u));
}

// keys: of the sixteen, [16, DIM]; values_apart: from keys to values; `position` of the first; `valid` of them exist.
__device__ __forceinline__ void half_tokens(const u16 *keys, int values_apart, int position, int valid,
                                            const Columns &columns, Softmax &softmax) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int CHUNKS = DIM / 32;
    uint4 k[CHUNKS][2];   // of tokens 2g and 2g + 1: a lane's eight dims are 8 k's, which is which is free
    u32 v[4][4][2 * VW];  // of tokens 4t + {0, 2} (k = 2t, 2t + 1) and + 1 (k + 8), by quarters
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            k[chunk][half] = *(const uint4 *)(keys + (2 * g + half) * DIM + chunk * 32 + 8 * t);
    float s[1][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        uint4 q = *(const uint4 *)(columns.q + chunk * 32 + 8 * t);
        const u32 pairs[4] = {q.x, q.y, q.z, q.w};
        u32 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 two = unpack_half2(pairs[i]);
            split(two.x * LOG2E, two.y * LOG2E, high[i], low[i]);
        }
        const uint4 &a = k[chunk][0], &b = k[chunk][1];
        mma_bf16(s[0], a.x, b.x, a.y, b.y, high[0], high[1]);
        mma_bf16(s[0], a.z, b.z, a.w, b.w, high[2], high[3]);
        mma_bf16(s[0], a.x, b.x, a.y, b.y, low[0], low[1]);
        mma_bf16(s[0], a.z, b.z, a.w, b.w, low[2], low[3]);
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = 4 * t + i % 2 * 2 + i / 2;
            const u16 *from = keys + values_apart + token * DIM + quarter * (DIM / 4) + g * 4 * VW;
#pragma unroll
            for (int word = 0; word < 2 * VW; word++) v[quarter][i][word] = 0;  // 0 times NaN is NaN
            if (token < valid) {
                if (VW == 2)
                    *(uint4 *)v[quarter][i] = *(const uint4 *)from;
                else
                    *(uint2 *)v[quarter][i] = *(const uint2 *)from;
            }
        }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = position + 2 * g + i / 2, page = at / PAGE;
        bool seen = at <= columns.position[i % 2] && (page == 0 || page >= columns.window[i % 2]);
        s[0][i] = seen ? s[0][i] : NOTHING;
    }
    softmax.take(s);
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        float unit = softmax.lift / CODE_UNIT * (1 << 2 * quarter);  // as the values of codes are until the end
        u32 high[2], low[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            split(s[0][2 * half] * unit, s[0][2 * half + 1] * unit, high[half], low[half]);
            high[half] = transposed(high[half]), low[half] = transposed(low[half]);
        }
        const u32(&w)[4][2 * VW] = v[quarter];
#pragma unroll
        for (int word = 0; word < 2 * VW; word++) {
            u32 a = __byte_perm(w[0][word], w[1][word], 0x5410), b = __byte_perm(w[0][word], w[1][word], 0x7632);
            u32 c = __byte_perm(w[2][word], w[3][word], 0x5410), d = __byte_perm(w[2][word], w[3][word], 0x7632);
            mma_bf16(softmax.o[word * 4 + quarter], a, b, c, d, high[0], high[1]);
            mma_bf16(softmax.o[word * 4 + quarter], a, b, c, d, low[0], low[1]);
        }
    }
}
