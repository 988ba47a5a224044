// The last step of prefill attention, for all query tokens and heads: a warp each.
// -DDIM=256|128, -DTURN=1|0, -DBF16
#include "attention_finish.cuh"

struct Launch {
    const u16 *o;  // fp16 [tokens, K, group, DIM]
    Finish finish;
    int tokens, heads, group, pad;
};

extern "C" __global__ void __launch_bounds__(256) attention_finish(const __grid_constant__ Launch launch) {
    int row = blockIdx.x * 8 + threadIdx.x / 32, token = row / launch.heads, head = row % launch.heads;
    launch_dependents();
    wait_for_previous();
    if (token >= launch.tokens) return;
    const u32 *from = (const u32 *)(launch.o + (long long)row * DIM + threadIdx.x % 32 * EACH);
    float o[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        float2 two = unpack_half2(from[i / 2]);
        o[i] = two.x, o[i + 1] = two.y;
    }
    launch.finish(o, token, head, head / launch.group);
}
