// What a warp of decode attention has seen: the softmax of eight columns (query tokens and heads of one KV group) and
// the values mixed so far. Lane (g, t) = (lane / 4, lane % 4) has columns 2t and 2t + 1.
#pragma once
#include "numbers.cuh"

constexpr int TILES = DIM / 16;  // of 16 dims
constexpr int VW = DIM / 128;    // words of codes of a value that a lane of eight holds
constexpr float LOG2E = 1.44269504f;
constexpr float CODE_UNIT = 16777216.f;  // 2^24: a level in the low bits of an fp16 is level 2^-24
constexpr float SLACK = 4;  // in units of log 2: how far a logit may pass the maximum before all is rescaled
constexpr float LIFT = 64;  // of P, which ends at 6e-8 in fp16; 2^SLACK LIFT scale must be below 65,504
#define NOTHING __int_as_float(0xFF800000)  // minus infinity: exp2 of it is 0

__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Columns {
    const u16 *q;     // of column g, [DIM] fp16
    int position[2];  // of columns 2t, 2t + 1
    int window[2];    // first page that they read in 16 bit
};

struct Softmax {
    // o[word 4 + quarter]: dims quarter DIM / 4 + 4 VW g + 2 word (o0, o1: the two columns) and + 1 (o2, o3), in units
    // of 4^quarter / CODE_UNIT lift; offset: what minima add to all dims of a group
    float o[TILES][4], top[2], total[2], offset[GROUPS][2], lift;

    __device__ __forceinline__ void start() {
        *this = {};
        top[0] = top[1] = -1e30f, lift = LIFT;
    }

    __device__ __forceinline__ void scale_values(float first, float second) {
#pragma unroll
        for (int m = 0; m < TILES; m++) o[m][0] *= first, o[m][1] *= second, o[m][2] *= first, o[m][3] *= second;
    }

    // s: logits of COUNT x 2 tokens and 2 columns in units of log 2; becomes exp2(s - top)
    template <int COUNT> __device__ __forceinline__ void take(float (&s)[COUNT][4]) {
        float now[2] = {s[0][0], s[0][1]};
#pragma unroll
        for (int tile = 0; tile < COUNT; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) now[i % 2] = fmaxf(now[i % 2], s[tile][i]);
        if (__any_sync(~0u, now[0] > top[0] + SLACK || now[1] > top[1] + SLACK)) {
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                now[i] = fmaxf(now[i], top[i]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) now[i] = fmaxf(now[i], __shfl_xor_sync(~0u, now[i], lanes));
                shrink[i] = exp2_fast(top[i] - now[i]);
                total[i] *= shrink[i], top[i] = now[i];
#pragma unroll
                for (int group = 0; group < GROUPS; group++) offset[group][i] *= shrink[i];
            }
            scale_values(shrink[0], shrink[1]);
        }
#pragma unroll
        for (int tile = 0; tile < COUNT; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[tile][i] = exp2_fast(s[tile][i] - top[i % 2]), total[i % 2] += s[tile][i];
    }
};
