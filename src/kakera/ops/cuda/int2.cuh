// The 2-bit codec (kv/codec.py) for rows spread over a few lanes, bit for bit: same grid, same levels, same fp16
// numbers.
#pragma once
#include "numbers.cuh"

#define FP16_MAX 65504.f

// x * 2^-896 as a double: float bits moved to where a double has them, for zeros and denormals too. Two operations of
// the integer pipe, where a conversion takes the slow pipe (a 64th of the rate on GeForce cards). Sums undo it by WIDE.
#define WIDE 0x1p896
__device__ __forceinline__ double widen(float x) {
    return __hiloint2double((__float_as_int(x) >> 3) & 0x8FFFFFFF, __float_as_int(x) << 29);
}

template <int LANES, typename T> __device__ __forceinline__ T sum_lanes(T x) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ __forceinline__ u16 to_half(double x) {  // by way of float, as torch does
    return (u16)pack_half2(__double2float_rn(x), 0.f);
}

// Four equidistant levels, scale and minimum as fp16 has them. A level is floor((x - minimum) / scale + 1/2) in 0 .. 3,
// rounded by fp32 after each step. That is monotone in x - minimum, so three borders say the same without a division:
// 3/2 and 5/2 of the scale, and 1/2 of it or the number below, which the rounding of quotient and sum lifts to 1 if the
// scale's significand is above 4/3, or 1, where numbers below lie twice as close.
struct Grid {
    float scale, minimum, border[3];

    __device__ __forceinline__ Grid(double scale_, double minimum_) {
        scale = unpack_half2(to_half(fmin(fmax(scale_, 0x1p-24), (double)FP16_MAX))).x;
        minimum = unpack_half2(to_half(fmin(fmax(minimum_, -(double)FP16_MAX), (double)FP16_MAX))).x;
        int below = (__float_as_uint(scale) & 0x7FFFFF) - 1 >= 0x2AAAAA;  // wraps for a power of two
        border[0] = __int_as_float(__float_as_int(0.5f * scale) - below);
        border[1] = 1.5f * scale, border[2] = 2.5f * scale;
    }

    __device__ __forceinline__ float level(float x) const {
        float above = x - minimum;
        return (above >= border[0] ? 1.f : 0.f) + (above >= border[1] ? 1.f : 0.f) + (above >= border[2] ? 1.f : 0.f);
    }
};

// Codes a group of SIZE dims, of which LANES lanes hold COUNT each, x[FIRST] ..; x[8 i + j] belongs to quarter i, byte
// j. byte[j] gets 4^i times the level added; returns scale | minimum << 16 in fp16, in each of the lanes. The order and
// rounding of every step are those of codec.encode; sums of levels are small integers, exact in fp32.
template <int SIZE, int LANES, int FIRST, int COUNT>
__device__ __forceinline__ u32 encode_group(const float (&x)[32], float (&byte)[8]) {
    double sum_x = 0, sum_xx = 0;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; i++) sum_x += widen(x[i]), sum_xx += widen(x[i] * x[i]);
    sum_x = WIDE * sum_lanes<LANES>(sum_x), sum_xx = WIDE * sum_lanes<LANES>(sum_xx);
    double mean = sum_x / SIZE;
    double deviation = __dsqrt_rn(fmax(__dsub_rn(sum_xx / SIZE, __dmul_rn(mean, mean)), 0.));
    double step = __dmul_rn(0.9957, deviation);
    Grid first(step, __dsub_rn(mean, __dmul_rn(1.5, step)));

    float sum_l = 0, sum_ll = 0;
    double sum_lx = 0;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; i++) {
        float level = first.level(x[i]);
        sum_l += level, sum_ll += level * level, sum_lx += widen(level * x[i]);
    }
    sum_l = sum_lanes<LANES>(sum_l), sum_ll = sum_lanes<LANES>(sum_ll), sum_lx = WIDE * sum_lanes<LANES>(sum_lx);
    double spread = fmaxf(sum_ll - sum_l * sum_l / SIZE, 0.5f);
    step = __ddiv_rn(fmax(__dsub_rn(sum_lx, __dmul_rn(sum_l, mean)), 0.), spread);
    Grid grid(step, __dsub_rn(mean, __dmul_rn(step, sum_l) / SIZE));

    sum_lx = 0;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; i++) {
        float level = grid.level(x[i]);
        sum_lx += widen(level * x[i]);
        byte[i % 8] = fmaf(level, (float)(1 << i / 8 * 2), byte[i % 8]);
    }
    sum_lx = WIDE * sum_lanes<LANES>(sum_lx);
    double overlap = __dadd_rn(__dmul_rn(grid.scale, sum_lx), __dmul_rn(grid.minimum, sum_x));
    double stretch = fmin(fmax(__ddiv_rn(__dadd_rn(sum_xx, 1e-30), __dadd_rn(overlap, 1e-30)), 0.8), 1.25);
    double scale = fmin(__dmul_rn(stretch, grid.scale), (double)FP16_MAX);
    double minimum = fmin(fmax(__dmul_rn(stretch, grid.minimum), -(double)FP16_MAX), (double)FP16_MAX);
    return to_half(scale) | to_half(minimum) << 16;
}

// The low bytes of four floats that lie from 2^23 on.
__device__ __forceinline__ u32 low_bytes(const float *x) {
    u32 low = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x0040);
    u32 high = __byte_perm(__float_as_uint(x[2]), __float_as_uint(x[3]), 0x0040);
    return __byte_perm(low, high, 0x5410);
}
