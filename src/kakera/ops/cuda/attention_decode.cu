// Decode attention over paged keys and values: a thread block takes an equal stretch of all rows' keys, its warps a
// page of codes or sixteen 16-bit tokens at a time, and leaves one partial result for each row, head and query tile it
// met. attention_merge.cu sums those.
//
// -DDIM=256|128, -DGROUPS=1|2|4: groups of dims with a scale, -DCODES=1|0: 0 has 16-bit pages only, -DWARPS=8.
#include "decode_coded.cuh"
#include "decode_half.cuh"

constexpr int BUFFERS = 4;  // of sums of warps, 8 KB each

struct Launch {
    Rows rows;
    const unsigned char *codes;  // [P, 2, K, 64, DIM / 4]
    const u16 *params;           // fp16 [P, 2, K, 2 (scale, minimum), GROUPS, 64]
    const u16 *halves;           // bf16 [..., 2, K, 64, DIM]: ring of slot s at s (R + 2), or the pages themselves
    const u16 *sink;             // bf16 [S, 2, K, 64, DIM]
    const u16 *q;                // fp16 [tokens, K, group, DIM], in the keys' frame, times DIM^-0.5
    float *partial;              // [blocks + rows K tiles, 8, DIM]: sums of exp2(s - max) v
    float2 *stats;               // [the same, 8]: max, and sum of exp2(s - max)
};

// What the warps of a thread block leave of one row, head and tile, as one partial result.
struct Leavings {
    float top[WARPS][8], total[WARPS][8];
    float4 buffers[BUFFERS][TILES][32];

    __device__ __forceinline__ void write(Softmax &softmax, int columns, float *to, float2 *stats) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                softmax.total[i] += __shfl_xor_sync(~0u, softmax.total[i], lanes);
#pragma unroll
                for (int group = 0; group < GROUPS; group++)
                    softmax.offset[group][i] += __shfl_xor_sync(~0u, softmax.offset[group][i], lanes);
            }
            if (g == 0) top[warp][2 * t + i] = softmax.top[i], total[warp][2 * t + i] = softmax.total[i];
        }
        __syncthreads();
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = top[0][2 * t + i], sum = 0;
            for (int w = 1; w < WARPS; w++) most = fmaxf(most, top[w][2 * t + i]);
            for (int w = 0; w < WARPS; w++) sum += total[w][2 * t + i] * exp2_fast(top[w][2 * t + i] - most);
            shrink[i] = exp2_fast(softmax.top[i] - most);
            if (warp == 0 && g == 0) stats[2 * t + i] = make_float2(most, sum);
        }
        for (int round = 0; round < WARPS; round += BUFFERS) {
            if (warp / BUFFERS == round / BUFFERS)
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    float unit = CODE_UNIT / (1 << 2 * (m % 4)) / softmax.lift, x[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        x[i] = (softmax.o[m][i] * unit + softmax.offset[m % 4 * GROUPS / 4][i % 2]) * shrink[i % 2];
                    float4 &sum = buffers[warp % BUFFERS][m][lane];
                    float4 before = round ? sum : make_float4(0, 0, 0, 0);
                    sum = make_float4(before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]);
                }
            __syncthreads();
        }
        const float *sums = (const float *)buffers;
        for (int i = threadIdx.x; i < columns * DIM; i += WARPS * 32) {
            int column = i / DIM, dim = i % DIM, in_quarter = dim % (DIM / 4), in_lane = in_quarter % (4 * VW);
            int m = in_lane / 2 * 4 + dim / (DIM / 4), from = in_quarter / (4 * VW) * 4 + column / 2;
            int at = (m * 32 + from) * 4 + in_lane % 2 * 2 + column % 2;
            float sum = 0;
#pragma unroll
            for (int buffer = 0; buffer < BUFFERS; buffer++) sum += sums[buffer * TILES * 128 + at];
            to[i] = sum;
        }
        __syncthreads();
    }
};

#if CODES
// Pages of the units unit, unit + WARPS ... of a segment; pages[unit] is a page's id.
__device__ __forceinline__ void coded_pages(const Launch &launch, const int *pages, int unit, int last, int head,
                                            const Row &row, const Columns &columns, Softmax &softmax) {
    QueryCodes query;
    query.load(columns.q);
    int heads = launch.rows.kv_heads;
    constexpr int CODE_BYTES = PAGE * DIM / 4, PARAMS = 2 * GROUPS * PAGE;
    long long at = (long long)pages[unit] * 2 * heads + head;
    KeyCodes keys;
    keys.load(launch.codes + at * CODE_BYTES, launch.params + at * PARAMS);
    int next = unit + WARPS < last ? pages[unit + WARPS] : 0;
    for (; unit < last; unit += WARPS) {
        ValueCodes values;  // on their way during the first product
        values.load(launch.codes + (at + heads) * CODE_BYTES, launch.params + (at + heads) * PARAMS);
        float s[4][4];
        keys.scores(query, s);
        if (unit + WARPS < last) {  // the next keys are on their way during the second
            at = (long long)next * 2 * heads + head;
            keys.load(launch.codes + at * CODE_BYTES, launch.params + at * PARAMS);
            if (unit + 2 * WARPS < last) next = pages[unit + 2 * WARPS];
        }
        int page = unit - row.halves + 1;
        bool hidden[2] = {page >= columns.window[0], page >= columns.window[1]};
        if (hidden[0] || hidden[1])  // a query reads this page in 16 bit: only where a row crosses a page border
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[tile][i] = hidden[i % 2] ? NOTHING : s[tile][i];
        softmax.take(s);
        values.mix(s, softmax);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attention_decode(const __grid_constant__ Launch launch) {
    __shared__ int before[MOST_ROWS + 1];
    __shared__ Leavings leavings;
    const Rows &rows = launch.rows;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, heads = rows.kv_heads;
    launch_dependents();
    wait_for_previous();
    if (warp == 0) sum_costs(rows, before);
    __syncthreads();
    int total = before[rows.rows], blocks = min(rows.blocks, total);
    if ((int)blockIdx.x >= blocks) return;
    int at = stretch_begin(total, blocks, blockIdx.x), end = stretch_begin(total, blocks, blockIdx.x + 1);
    for (int r = 0; at < end;) {
        while (before[r + 1] <= at) r++;
        Row row = row_of(rows, r);
        int cost = row.cost(), segment = (at - before[r]) / cost, first = at - before[r] - segment * cost;
        int last = min(cost, first + end - at), head = segment / row.tiles, tile = segment % row.tiles;
        int used = min(8, row.count * rows.group - tile * 8);  // columns; the others repeat the last
        Columns columns;
        int mine = tile * 8 + min(g, used - 1), token = rows.offsets[r] + mine / rows.group;
        columns.q = launch.q + ((token * heads + head) * rows.group + mine % rows.group) * DIM;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            columns.position[i] = row.start + (tile * 8 + min(2 * t + i, used - 1)) / rows.group;
            columns.window[i] = CODES ? columns.position[i] / PAGE - rows.window : 0;
        }
        Softmax softmax;
        softmax.start();
        const int *table = rows.tables + (long long)r * rows.table_stride;
        int unit = first + warp, slot = CODES ? rows.slots[r] : 0;
        for (; unit < min(last, row.halves); unit += WARPS) {
            int page = unit / PARTS + row.low, part = unit % PARTS;
            if (row.low > 0) page = unit < PARTS ? 0 : page - 1;
            bool sink = CODES && row.low > 0 && unit < PARTS;
            int place = !CODES ? table[page] : sink ? slot : slot * (rows.window + 2) + page % (rows.window + 2);
            const u16 *keys =
                (sink ? launch.sink : launch.halves) + ((long long)place * 2 * heads + head) * (PAGE * DIM);
            int position = page * PAGE + part * HALF_TOKENS;
            half_tokens(keys + part * HALF_TOKENS * DIM, heads * PAGE * DIM, position, row.start + row.count - position,
                        columns, softmax);
        }
#if CODES
        if (unit < last) coded_pages(launch, table + 1 - row.halves, unit, last, head, row, columns, softmax);
#endif
        long long left = blockIdx.x + ((long long)r * heads + head) * rows.tiles + tile;
        leavings.write(softmax, used, launch.partial + left * 8 * DIM, launch.stats + left * 8);
        at += last - first;
    }
}
