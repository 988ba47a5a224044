// sum = x + delta, y = RMS norm of it times scale: one thread block a row, which stays in registers meanwhile.
// -DVECTORS: eights of channels of a thread, -DBF16
#include "numbers.cuh"

constexpr int THREADS = 256;

struct Launch {
    const u16 *x, *delta;
    const float *scale;
    u16 *sum, *y;  // [rows, channels] like x and delta
    float eps;
    int channels;
};

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(const __grid_constant__ Launch launch) {
    __shared__ float warps[THREADS / 32];
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
        for (int j = 0; j < 4; j++) {
            v[i][j] = to_activations(from_activation(a[j] & 0xFFFF) + from_activation(b[j] & 0xFFFF),
                                     from_activation(a[j] >> 16) + from_activation(b[j] >> 16));
            float low = from_activation(v[i][j] & 0xFFFF), high = from_activation(v[i][j] >> 16);
            squares += low * low + high * high;
        }
        ((uint4 *)launch.sum)[first + at] = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) squares += warps[warp];
    float norm = rsqrtf(squares / launch.channels + launch.eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= eights) break;
        float4 low = ((const float4 *)launch.scale)[2 * at], high = ((const float4 *)launch.scale)[2 * at + 1];
        float scale[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        u32 y[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            y[j] = to_activations(from_activation(v[i][j] & 0xFFFF) * norm * scale[2 * j],
                                  from_activation(v[i][j] >> 16) * norm * scale[2 * j + 1]);
        ((uint4 *)launch.y)[first + at] = make_uint4(y[0], y[1], y[2], y[3]);
    }
}
