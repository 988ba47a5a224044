// The unnormalised 128-point Hadamard transform of a row spread over a warp: lane i holds elements 4i .. 4i + 3.
#pragma once

#define RSQRT_128 0.088388347648f

__device__ __forceinline__ void hadamard_128(float (&v)[4]) {
    float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], lanes));
    }
}
