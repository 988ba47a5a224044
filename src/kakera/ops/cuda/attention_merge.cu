// The end of decode attention: what the thread blocks of attention_decode.cu left of one query token and head is
// summed, turned back into the model's own frame (y = H o / sqrt(DIM) + centre) and gated. One thread block a token and
// head.
//
// -DDIM=256|128, -DCODES=1|0 (how the work was shared out), -DTURN=1|0: 0 leaves the keys' frame to the caller,
// -DBF16: y and gate are bf16, else fp16.
#include "decode_work.cuh"
#include "numbers.cuh"

constexpr int THREADS = 256, LANES = DIM / 4, EVERY = THREADS / LANES;  // a thread sums four dims of every EVERY-th
constexpr int EACH = DIM / 32;

struct Launch {
    Rows rows;
    const float *partial;       // [blocks + rows K tiles, 8, DIM]
    const float2 *stats;        // [the same, 8]: max, sum
    const float *centre;        // [K, DIM], or null
    const u16 *gate;            // [tokens, K, group, DIM], or null
    u16 *y;                     // [tokens, K, group, DIM]
    int gate_stride, y_stride;  // of a token
};

__device__ __forceinline__ void hadamard(float (&v)[EACH]) {  // lane i holds elements EACH i ..
#pragma unroll
    for (int apart = 1; apart < EACH; apart *= 2)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (!(i & apart)) {
                float a = v[i], b = v[i + apart];
                v[i] = a + b, v[i + apart] = a - b;
            }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], lanes));
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) v[i] *= DIM == 256 ? 0.0625f : 0.088388347648f;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_merge(const __grid_constant__ Launch launch) {
    __shared__ int before[MOST_ROWS + 1];
    __shared__ float4 sums[EVERY][LANES];
    __shared__ float denominators[EVERY];
    const Rows &rows = launch.rows;
    int token = blockIdx.x, head = blockIdx.y / rows.group, thread = threadIdx.x;
    launch_dependents();
    wait_for_previous();
    if (thread < 32) sum_costs(rows, before);
    __syncthreads();
    int r = 0;
    while (rows.offsets[r + 1] <= token) r++;
    Row row = row_of(rows, r);
    int column = (token - rows.offsets[r]) * rows.group + blockIdx.y % rows.group, tile = column / 8;
    int total = before[rows.rows], blocks = min(rows.blocks, total), cost = row.cost();
    int begin = before[r] + (head * row.tiles + tile) * cost;
    int first = owner(total, blocks, begin), last = owner(total, blocks, begin + cost - 1);
    long long segment = (long long)r * rows.kv_heads * rows.tiles + head * rows.tiles + tile;
    const float2 *stats = launch.stats + segment * 8 + column % 8;

    float top = -1e30f;
    for (int block = first; block <= last; block++) top = fmaxf(top, stats[block * 8].x);
    float4 sum = make_float4(0, 0, 0, 0);
    float denominator = 0;
    const float4 *partial = (const float4 *)(launch.partial + (segment * 8 + column % 8) * DIM) + thread % LANES;
#pragma unroll 8
    for (int block = first + thread / LANES; block <= last; block += EVERY) {
        float2 stat = stats[block * 8];
        float4 x = partial[(long long)block * 8 * LANES];
        float weight = exp2f(stat.x - top);
        denominator += weight * stat.y;
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
    }
    sums[thread / LANES][thread % LANES] = sum;
    if (thread % LANES == 0) denominators[thread / LANES] = denominator;
    __syncthreads();
    if (thread >= 32) return;
    float v[EACH] = {};
    denominator = 0;
#pragma unroll
    for (int part = 0; part < EVERY; part++) {
        denominator += denominators[part];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 x = sums[part][thread * (EACH / 4) + i / 4];
            v[i] += x.x, v[i + 1] += x.y, v[i + 2] += x.z, v[i + 3] += x.w;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) v[i] /= denominator;
    if (TURN) hadamard(v);
    int dim = thread * EACH;
    if (launch.centre)
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] += launch.centre[head * DIM + dim + i];
    if (launch.gate)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float gate =
                from_activation(launch.gate[(long long)token * launch.gate_stride + blockIdx.y * DIM + dim + i]);
            v[i] *= 1.f / (1.f + exp2f(-1.44269504f * gate));
        }
    u32 *y = (u32 *)(launch.y + (long long)token * launch.y_stride + blockIdx.y * DIM + dim);
#pragma unroll
    for (int i = 0; i < EACH; i += 2) y[i / 2] = to_activations(v[i], v[i + 1]);
}
