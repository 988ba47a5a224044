// x'[part][row] = f16(H128(x[row] * in_scale[part]) / sqrt(128)): the inputs of the linears that share a launch.
// One warp a block of 128 channels, 4 a lane; blockIdx.y is the part. -DBF16: x is bf16.
#include "hadamard.cuh"
#include "numbers.cuh"

struct Launch {
    const u16 *x;
    const float *in_scale[4];
    u16 *to;  // [parts, rows, in], fp16
    int rows, in, row_stride, pad;
};

extern "C" __global__ void __launch_bounds__(128) rotate(const __grid_constant__ Launch launch) {
    int warp = blockIdx.x * 4 + threadIdx.x / 32, blocks = launch.in / 128;
    int block = warp % blocks, row = warp / blocks;
    launch_dependents();
    wait_for_previous();
    if (row >= launch.rows) return;
    int channel = block * 128 + threadIdx.x % 32 * 4;
    ushort4 x = *(const ushort4 *)(launch.x + (long long)row * launch.row_stride + channel);
    int part = blockIdx.y;
    float4 scale = *(const float4 *)(launch.in_scale[part] + channel);
    float v[4] = {from_activation(x.x) * scale.x, from_activation(x.y) * scale.y, from_activation(x.z) * scale.z,
                  from_activation(x.w) * scale.w};
    hadamard_128(v);
    for (int i = 0; i < 4; i++) v[i] *= RSQRT_128;
    long long at = ((long long)part * launch.rows + row) * launch.in + channel;
    *(uint2 *)(launch.to + at) = make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
}
