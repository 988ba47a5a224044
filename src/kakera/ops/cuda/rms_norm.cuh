// A sum and its RMS norm, a thread block a row: VECTORS eights of channels of a thread stay in its registers.
#pragma once
#include "numbers.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// x + (low, high), rounded to activations; the squares of both are added to `squares`.
__device__ __forceinline__ u32 add_pair(u32 x, float low, float high, float &squares) {
    u32 sum = to_activations(from_activation(x & 0xFFFF) + low, from_activation(x >> 16) + high);
    low = from_activation(sum & 0xFFFF), high = from_activation(sum >> 16);
    squares += low * low + high * high;
    return sum;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) v += __shfl_xor_sync(~0u, v, lanes);
    return v;
}

// What the row is multiplied by, of its warps' sums of squares.
__device__ __forceinline__ float rms_factor(const float (&warps)[WARPS], int channels, float eps) {
    float squares = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) squares += warps[warp];
    return rsqrtf(squares / channels + eps);
}

// Eight channels, the `at`-th of the row, times the factor and the norm's scale.
__device__ __forceinline__ uint4 normed(const u32 (&v)[4], float factor, const float *scale_of_row, int at) {
    float4 low = ((const float4 *)scale_of_row)[2 * at], high = ((const float4 *)scale_of_row)[2 * at + 1];
    float scale[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    u32 y[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        y[j] = to_activations(from_activation(v[j] & 0xFFFF) * factor * scale[2 * j],
                              from_activation(v[j] >> 16) * factor * scale[2 * j + 1]);
    return make_uint4(y[0], y[1], y[2], y[3]);
}
