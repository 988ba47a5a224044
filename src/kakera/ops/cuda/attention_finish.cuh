// The last step of attention for one query token and head, spread over a warp: back from the values' frame (y = H o /
// sqrt(DIM) + centre) and gated. -DTURN=1|0: 0 leaves the frame to the caller, -DBF16: y and gate are bf16, else fp16
#pragma once
#include "numbers.cuh"

constexpr int EACH = DIM / 32;  // dims of a lane, one behind the other

struct Finish {
    const float *centre;        // [K, DIM], or null
    const u16 *gate;            // [tokens, K, group, DIM], or null
    u16 *y;                     // [tokens, K, group, DIM]
    int gate_stride, y_stride;  // of a token

    __device__ __forceinline__ void operator()(float (&o)[EACH], int token, int head, int kv_head) const {
        if (TURN) hadamard(o);
        int dim = threadIdx.x % 32 * EACH;
        if (centre)
#pragma unroll
            for (int i = 0; i < EACH; i++) o[i] += centre[kv_head * DIM + dim + i];
        if (gate)
#pragma unroll
            for (int i = 0; i < EACH; i += 2) {
                u32 pair = *(const u32 *)(gate + (long long)token * gate_stride + head * DIM + dim + i);
                o[i] *= sigmoid(from_activation(pair & 0xFFFF)), o[i + 1] *= sigmoid(from_activation(pair >> 16));
            }
        u32 *to = (u32 *)(y + (long long)token * y_stride + head * DIM + dim);
#pragma unroll
        for (int i = 0; i < EACH; i += 2) to[i / 2] = to_activations(o[i], o[i + 1]);
    }

    static __device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exp2f(-1.44269504f * x)); }

    static __device__ __forceinline__ void hadamard(float (&v)[EACH]) {
#pragma unroll
        for (int apart = 1; apart < EACH; apart *= 2)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (!(i & apart)) {
                    float a = v[i], b = v[i + apart];
                    v[i] = a + b, v[i + apart] = a - b;
                }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
            for (int i = 0; i < EACH; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], lanes));
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] *= DIM == 256 ? 0.0625f : 0.088388347648f;
    }
};
