// sum = x + delta, y = RMS norm of it times scale: one thread block a row, which stays in registers meanwhile.
// -DVECTORS: eights of channels of a thread, -DBF16
#include "rms_norm.cuh"

struct Launch {
    const u16 *x, *delta;
    const float *scale;
    u16 *sum, *y;  // [rows, channels] like x and delta
    float eps;
    int channels;
};

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(const __grid_constant__ Launch launch) {
    __shared__ float warps[WARPS];
    int eights = launch.channels / 8;
    long long first = (long long)blockIdx.x * eights;
    u32 v[VECTORS][4];
    float squares = 0;
    launch_dependents();
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= eights) break;
        uint4 x = ((const uint4 *)launch.x)[first + at], d = ((const uint4 *)launch.delta)[first + at];
        u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[i][j] = add_pair(a[j], from_activation(b[j] & 0xFFFF), from_activation(b[j] >> 16), squares);
        ((uint4 *)launch.sum)[first + at] = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
    __syncthreads();
    float factor = rms_factor(warps, launch.channels, launch.eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= eights) break;
        ((uint4 *)launch.y)[first + at] = normed(v[i], factor, launch.scale, at);
    }
}
