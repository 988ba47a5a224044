// An INT2 page for decode attention, without decoding it: (word & 0x00030003 << 2 quarter) is a pair of fp16
// subnormals, level times 4^quarter 2^-24, with 4^-quarter in q. A key is scale level + minimum, so S = scale (q .
// level) + minimum sum(q); the scale of a value goes into P. Keys and values are the A operands, so that eight columns
// cost one product.
#pragma once
#include "decode_softmax.cuh"
#include "decode_work.cuh"

constexpr int Q = DIM / 64;  // words of codes of a key that a lane of four holds

// Eight fp16 of a lane's tokens 8g .. 8g + 7: tokens 8g + 2 tile and + 1 are rows g and g + 8 of a tile.
struct EightHalves {
    u32 pairs[4];
    __device__ __forceinline__ void load(const u16 *from) { *(uint4 *)pairs = *(const uint4 *)from; }
    __device__ __forceinline__ float2 tile(int i) const { return unpack_half2(pairs[i]); }
};

// Scales and minima of a lane's tokens. Those of a single group are kept from the start; more have no registers left.
struct Parameters {
#if GROUPS == 1
    EightHalves scales, minima;
    __device__ __forceinline__ void load(const u16 *from) { scales.load(from), minima.load(from + PAGE); }
    __device__ __forceinline__ EightHalves scale(int) const { return scales; }
    __device__ __forceinline__ EightHalves minimum(int) const { return minima; }
#else
    const u16 *from;
    __device__ __forceinline__ void load(const u16 *from_) { from = from_; }
    __device__ __forceinline__ EightHalves scale(int group) const { return read(group); }
    __device__ __forceinline__ EightHalves minimum(int group) const { return read(GROUPS + group); }
    __device__ __forceinline__ EightHalves read(int row) const {
        EightHalves halves;
        halves.load(from + row * PAGE);
        return halves;
    }
#endif
};

struct QueryCodes {  // the B operand: dims quarter DIM / 4 + 4 (Q t + j) + {0, 2} and {1, 3} of column g
    u32 q[Q][4][2];
    float sums[GROUPS][2];  // LOG2E times those of a group's dims, of columns 2t and 2t + 1

    __device__ __forceinline__ void load(const u16 *from) {
        float sum[GROUPS][4] = {};
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            const u32 one = 0x3C003C00u + quarter * 0x08000800u;  // fp16 4^quarter: undoes what is in q
            const float down = 1.f / (1 << 2 * quarter);
#pragma unroll
            for (int j = 0; j < Q; j++) {
                uint2 four = *(const uint2 *)(from + quarter * (DIM / 4) + (threadIdx.x % 4 * Q + j) * 4);
                float2 a = unpack_half2(four.x), b = unpack_half2(four.y);
                q[j][quarter][0] = pack_half2(a.x * down, b.x * down);
                q[j][quarter][1] = pack_half2(a.y * down, b.y * down);
                // the sum of what the products see, so that minimum and levels belong to the same q
                mma(sum[quarter * GROUPS / 4], one, one, one, one, q[j][quarter][0], q[j][quarter][1]);
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 2; i++) sums[group][i] = sum[group][i] * LOG2E;
    }
};

struct KeyCodes {
    u32 w[4][2][Q];  // of tokens 8g + 2 tile + half
    Parameters parameters;

    __device__ __forceinline__ void load(const unsigned char *codes, const u16 *params) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        codes += 8 * g * (DIM / 4) + t * 4 * Q;
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (Q == 4)
                    *(uint4 *)w[tile][half] = *(const uint4 *)(codes + (2 * tile + half) * (DIM / 4));
                else
                    *(uint2 *)w[tile][half] = *(const uint2 *)(codes + (2 * tile + half) * (DIM / 4));
        parameters.load(params + 8 * g);
    }

    __device__ __forceinline__ void scores(const QueryCodes &query, float (&s)[4][4]) const {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            float products[4][4] = {};
#pragma unroll
            for (int quarter = group * 4 / GROUPS; quarter < (group + 1) * 4 / GROUPS; quarter++)
#pragma unroll
                for (int j = 0; j < Q; j++)
#pragma unroll
                    for (int tile = 0; tile < 4; tile++) {  // innermost, or each product would wait for the one before
                        u32 mask = 0x00030003u << 2 * quarter, a = w[tile][0][j], b = w[tile][1][j];
                        mma(products[tile], a & mask, b & mask, a >> 8 & mask, b >> 8 & mask, query.q[j][quarter][0],
                            query.q[j][quarter][1]);
                    }
            EightHalves scales = parameters.scale(group), minima = parameters.minimum(group);
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                float2 scale = scales.tile(tile), minimum = minima.tile(tile);
                constexpr float UNIT = CODE_UNIT * LOG2E;  // not in q, whose fp16 bits would be rounded once more
                float up[2] = {scale.x * UNIT, scale.y * UNIT}, least[2] = {minimum.x, minimum.y};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float part = products[tile][i] * up[i / 2] + least[i / 2] * query.sums[group][i % 2];
                    s[tile][i] = group ? s[tile][i] + part : part;
                }
            }
        }
    }
};

struct ValueCodes {
    u32 w[4][4][VW];  // of tokens 16 t + 2 tile + {0, 8} (k = 2t, 2t + 1) and + 1 (k + 8)
    Parameters parameters;

    __device__ __forceinline__ void load(const unsigned char *codes, const u16 *params) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        codes += 16 * t * (DIM / 4) + g * 4 * VW;
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned char *from = codes + (2 * tile + i % 2 * 8 + i / 2) * (DIM / 4);
                if (VW == 2)
                    *(uint2 *)w[tile][i] = *(const uint2 *)from;
                else
                    w[tile][i][0] = *(const u32 *)from;
            }
        parameters.load(params + 8 * g);
    }

    // e: exp2 of the logits of a lane's tokens
    __device__ __forceinline__ void mix(const float (&e)[4][4], Softmax &softmax) const {
        u32 p[4][GROUPS][2];
        float largest = 0;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                float2 scale = parameters.scale(group).tile(tile);
                largest = fmaxf(largest, fmaxf(scale.x, scale.y));
            }
        while (__any_sync(~0u, largest * softmax.lift > 4000.f)) {  // times 2^SLACK: P would be infinite in fp16
            softmax.lift *= 0.0625f;
            softmax.scale_values(0.0625f, 0.0625f);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            EightHalves scales = parameters.scale(group), minima = parameters.minimum(group);
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                float2 scale = scales.tile(tile), minimum = minima.tile(tile);
                softmax.offset[group][0] += e[tile][0] * minimum.x + e[tile][2] * minimum.y;
                softmax.offset[group][1] += e[tile][1] * minimum.x + e[tile][3] * minimum.y;
                scale.x *= softmax.lift, scale.y *= softmax.lift;
                p[tile][group][0] = transposed(pack_half2(e[tile][0] * scale.x, e[tile][1] * scale.x));
                p[tile][group][1] = transposed(pack_half2(e[tile][2] * scale.y, e[tile][3] * scale.y));
            }
        }
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int word = 0; word < VW; word++)
#pragma unroll
                for (int byte = 0; byte < 4; byte += 2) {
                    u32 even = byte | (4 + byte) << 8, odd = even + 0x0101;  // bytes 1 and 3 are masked off
                    const u32(&v)[4][VW] = w[tile];
                    u32 a = __byte_perm(v[0][word], v[1][word], even), b = __byte_perm(v[0][word], v[1][word], odd);
                    u32 c = __byte_perm(v[2][word], v[3][word], even), d = __byte_perm(v[2][word], v[3][word], odd);
#pragma unroll
                    for (int quarter = 0; quarter < 4; quarter++) {
                        u32 mask = 0x00030003u << 2 * quarter;
                        const u32(&of)[2] = p[tile][quarter * GROUPS / 4];
                        mma(softmax.o[(word * 2 + byte / 2) * 4 + quarter], a & mask, b & mask, c & mask, d & mask,
                            of[0], of[1]);
                    }
                }
    }
};
