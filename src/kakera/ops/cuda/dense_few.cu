// y[row][o] = sum over i of x[row][i] w[o][i] for few rows and few output channels of plain 16-bit weights (b and a of
// a Gated DeltaNet layer: 96 channels). A thread block takes one channel and ROWS rows, and has its weights before the
// kernels in front, which make x, have ended. -DROWS, -DVECTORS: eights of input channels of a thread, -DBF16
#include "numbers.cuh"

constexpr int THREADS = 128;

struct Launch {
    const uint4 *x, *weight;  // [rows, x_stride], [out, in]
    u16 *y;                   // [rows, y_stride]
    int rows, in, x_stride, y_stride;
};

__device__ __forceinline__ void unpack(float (&to)[8], uint4 from) {
    const u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[2 * i] = from_activation((u16)(pairs[i] & 0xFFFF)), to[2 * i + 1] = from_activation((u16)(pairs[i] >> 16));
}

extern "C" __global__ void __launch_bounds__(THREADS) dense_few(const __grid_constant__ Launch launch) {
    __shared__ float parts[THREADS / 32][ROWS];
    int vectors = launch.in / 8, first = blockIdx.y * ROWS, count = min(ROWS, launch.rows - first);
    uint4 weight[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int vector = i * THREADS + threadIdx.x;
        if (vector < vectors) weight[i] = launch.weight[(long long)blockIdx.x * vectors + vector];
    }
    launch_dependents();
    wait_for_previous();
    float sums[ROWS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int vector = i * THREADS + threadIdx.x;
        if (vector >= vectors) break;
        float w[8], x[8];
        unpack(w, weight[i]);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            // rows behind the last one are the last one again: a branch would cost more
            unpack(x, launch.x[(long long)(first + min(row, count - 1)) * (launch.x_stride / 8) + vector]);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[row] = fmaf(x[j], w[j], sums[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sums[row] += __shfl_xor_sync(~0u, sums[row], lanes);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][row] = sums[row];
    }
    __syncthreads();
    if (threadIdx.x < count) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) sum += parts[warp][threadIdx.x];
        launch.y[(long long)(first + threadIdx.x) * launch.y_stride + blockIdx.x] = (u16)to_activations(sum, 0.f);
    }
}
