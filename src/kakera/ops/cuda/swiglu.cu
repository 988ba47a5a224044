// y = silu(gate) up, eight channels a thread; blockIdx.y is the row. -DBF16
#include "numbers.cuh"

constexpr int THREADS = 256;

struct Launch {
    const u16 *gate_up;  // [rows, row_stride]: gate | up
    u16 *y;              // [rows, channels]
    int channels, row_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) swiglu(const __grid_constant__ Launch launch) {
    int channel = (blockIdx.x * THREADS + threadIdx.x) * 8;
    launch_dependents();
    wait_for_previous();
    if (channel >= launch.channels) return;
    const u16 *gate = launch.gate_up + (long long)blockIdx.y * launch.row_stride + channel;
    uint4 a = *(const uint4 *)gate, b = *(const uint4 *)(gate + launch.channels);
    u32 g[4] = {a.x, a.y, a.z, a.w}, u[4] = {b.x, b.y, b.z, b.w}, y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float low = from_activation(g[j] & 0xFFFF), high = from_activation(g[j] >> 16);
        low = low / (1.f + expf(-low)) * from_activation(u[j] & 0xFFFF);
        high = high / (1.f + expf(-high)) * from_activation(u[j] >> 16);
        y[j] = to_activations(low, high);
    }
    *(uint4 *)(launch.y + (long long)blockIdx.y * launch.channels + channel) = make_uint4(y[0], y[1], y[2], y[3]);
}
