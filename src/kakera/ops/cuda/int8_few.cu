// y[row][o] = scale[o] * sum over i of x[row][i] w[o][i], w int8 rows, for 1 .. 8 * GROUPS rows of x.
//
// A warp takes 16 output channels (32 for more than 16 rows, which halves how often x is read) over all of i. Weights
// are the A operand of m16n8k16; which i is which k is free, so a lane loads 16 bytes in a row, 4 products' worth, and
// x as it lies. A byte becomes fp16 exactly: 0x6400 | (w ^ 0x80) is 1152 + w. -DGROUPS=1|2|4, -DBF16: x and y are bf16,
// x rounded to fp16 on its way in
#include "numbers.cuh"

struct Launch {
    const u16 *x;
    const u32 *weight;  // int8 [out, in]
    const u16 *scale;   // fp16 [out]
    u16 *y;
    int rows, in, out, x_stride;
    int y_stride, pad;
};

__device__ __forceinline__ u32 half2_of_bytes(u32 flipped, int selector) {       // bytes already xor 0x80
    return half2_add(__byte_perm(flipped, 0x64646464u, selector), 0xE480E480u);  // -1152
}

__device__ __forceinline__ u32 half2_of_activations(u32 pair) {
#ifdef BF16
    return pack_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#else
    return pair;
#endif
}

struct Step {  // 64 i's of 16 output channels: the lane's 16 of channel g and of channel g + 8
    uint4 low, high;
    __device__ __forceinline__ void load(const u32 *from, int eight_rows) {
        // the hint fetches four steps at the first: with single steps of 64 bytes a row DRAM gives half its speed
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(low.x), "=r"(low.y), "=r"(low.z), "=r"(low.w)
                     : "l"(from));
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(high.x), "=r"(high.y), "=r"(high.z), "=r"(high.w)
                     : "l"(from + eight_rows));
    }
};

constexpr int TILES = GROUPS == 4 ? 2 : 1;  // of 16 channels a warp
constexpr int AHEAD = 4 / TILES;            // steps in flight: 4 KB a warp

extern "C" __global__ void __launch_bounds__(128) int8_few(const __grid_constant__ Launch launch) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, channel = (blockIdx.x * 4 + threadIdx.x / 32) * 16 * TILES;
    if (channel >= launch.out) return;
    const u32 *weight[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)  // a tile behind the last channel reads the last one again
        weight[tile] =
            launch.weight + (long long)(min(channel + tile * 16, launch.out - 16) + g) * (launch.in / 4) + t * 4;
    int steps = launch.in / 64;
    Step ahead[AHEAD][TILES];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            ahead[i][tile].load(weight[tile] + min(i, steps - 1) * 16, launch.in * 2);
    float sums[TILES][GROUPS][4] = {};
    for (int first = 0; first < steps; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int step = first + i;
            if (step >= steps) break;
            u32 x[GROUPS][8];
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                int row = min(group * 8 + g, launch.rows - 1);
                const uint4 *from = (const uint4 *)(launch.x + (long long)row * launch.x_stride + step * 64 + t * 16);
                uint4 a = from[0], b = from[1];
                x[group][0] = a.x, x[group][1] = a.y, x[group][2] = a.z, x[group][3] = a.w;
                x[group][4] = b.x, x[group][5] = b.y, x[group][6] = b.z, x[group][7] = b.w;
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const Step now = ahead[i][tile];
                ahead[i][tile].load(weight[tile] + min(step + AHEAD, steps - 1) * 16, launch.in * 2);
                const u32 low[4] = {now.low.x, now.low.y, now.low.z, now.low.w};
                const u32 high[4] = {now.high.x, now.high.y, now.high.z, now.high.w};
#pragma unroll
                for (int word = 0; word < 4; word++) {
                    u32 p = low[word] ^ 0x80808080u, q = high[word] ^ 0x80808080u;
                    u32 a0 = half2_of_bytes(p, 0x4140), a1 = half2_of_bytes(q, 0x4140);
                    u32 a2 = half2_of_bytes(p, 0x4342), a3 = half2_of_bytes(q, 0x4342);
#pragma unroll
                    for (int group = 0; group < GROUPS; group++)
                        mma(sums[tile][group], a0, a1, a2, a3, half2_of_activations(x[group][2 * word]),
                            half2_of_activations(x[group][2 * word + 1]));
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = group * 8 + t * 2 + i % 2, out = channel + tile * 16 + g + i / 2 * 8;
                if (row >= launch.rows || out >= launch.out) continue;
                float scale;
                asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"(launch.scale[out]));
                launch.y[(long long)row * launch.y_stride + out] =
                    (u16)to_activations(sums[tile][group][i] * scale, 0.f);
            }
}
