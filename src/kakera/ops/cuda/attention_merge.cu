// The end of decode attention: what the thread blocks of attention_decode.cu left of one query token and head is
// summed, turned back and gated. One thread block a token and head.
// -DDIM=256|128, -DCODES=1|0 (how the work was shared out), -DTURN=1|0, -DBF16 (attention_finish.cuh)
#include "attention_finish.cuh"
#include "decode_work.cuh"

constexpr int THREADS = 256, LANES = DIM / 4, EVERY = THREADS / LANES;  // a thread sums four dims of every EVERY-th

struct Launch {
    Rows rows;
    const float *partial;  // [blocks + rows K tiles, 8, DIM]
    const float2 *stats;   // [the same, 8]: max, sum
    Finish finish;
};

extern "C" __global__ void __launch_bounds__(THREADS) attention_merge(const __grid_constant__ Launch launch) {
    __shared__ int before[MOST_ROWS + 1];
    __shared__ float4 sums[EVERY][LANES];
    __shared__ float warps[THREADS / 32], denominators[EVERY];
    const Rows &rows = launch.rows;
    int token = blockIdx.x, head = blockIdx.y / rows.group, thread = threadIdx.x, part = thread / LANES;
    launch_dependents();
    wait_for_previous();
    if (thread < 32) sum_costs(rows, before);
    __syncthreads();
    int r = 0;
    while (r < rows.rows && rows.offsets[r + 1] <= token) r++;
    if (r == rows.rows) return;  // a graph's launch is for its most tokens
    Row row = row_of(rows, r);
    int column = (token - rows.offsets[r]) * rows.group + blockIdx.y % rows.group, tile = column / 8;
    int total = before[rows.rows], blocks = min(rows.blocks, total), cost = row.cost();
    int begin = before[r] + (head * row.tiles + tile) * cost;
    int first = owner(total, blocks, begin), count = owner(total, blocks, begin + cost - 1) - first + 1;
    long long left = ((long long)r * rows.kv_heads + head) * rows.tiles + tile + first;
    const float2 *stats = launch.stats + left * 8 + column % 8;
    const float4 *partial = (const float4 *)(launch.partial + (left * 8 + column % 8) * DIM) + thread % LANES;

    constexpr int AHEAD = DIM / 32;  // on their way while the maximum is found
    float4 ahead[AHEAD];
    float2 stat[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (part + i * EVERY < count) {
            ahead[i] = partial[(part + i * EVERY) * 8 * LANES];
            stat[i] = stats[(part + i * EVERY) * 8];
        }
    float top = -1e30f;
    for (int block = thread; block < count; block += THREADS) top = fmaxf(top, stats[block * 8].x);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    if (thread % 32 == 0) warps[thread / 32] = top;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) top = fmaxf(top, warps[warp]);

    float4 sum = make_float4(0, 0, 0, 0);
    float denominator = 0;
    auto add = [&](float2 of, float4 x) {
        float weight = exp2f(of.x - top);
        denominator += weight * of.y;
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (part + i * EVERY < count) add(stat[i], ahead[i]);
#pragma unroll 4
    for (int block = part + AHEAD * EVERY; block < count; block += EVERY)
        add(stats[block * 8], partial[(long long)block * 8 * LANES]);
    sums[part][thread % LANES] = sum;
    if (thread % LANES == 0) denominators[part] = denominator;
    __syncthreads();
    if (thread >= 32) return;
    float v[EACH] = {};
    denominator = 0;
#pragma unroll
    for (int of = 0; of < EVERY; of++) {
        denominator += denominators[of];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 x = sums[of][thread * (EACH / 4) + i / 4];
            v[i] += x.x, v[i + 1] += x.y, v[i + 2] += x.z, v[i + 3] += x.w;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) v[i] /= denominator;
    launch.finish(v, token, blockIdx.y, head);
}
