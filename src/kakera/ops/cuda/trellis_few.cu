// y = x W for 1 .. 8 * GROUPS rows of x, W trellis-coded and decoded in registers.
//
// A lane holds a quarter of a tile: 64 weights, 16 k's of the columns 2a + {0, 1, 8, 9}. Weights are the A operand of
// m16n8k16 (rows = columns of W), x is B. For mcg and 3inst a weight is lo + hi, and its word (lo, hi) is used as two
// consecutive k's with x doubled: sum x (lo + hi) = sum x lo + sum x hi, accumulated in fp32. Four lanes of a row hold
// four k-neighbouring tiles, eight rows two column-neighbouring ones: a warp's load is 2 x 4 tiles, 32 columns x 64 k.
//
// The work is a list of units, 128 columns x 64 k each, tiles of 128 columns behind each other, cut over the blocks of
// the grid by cost (more bits cost more). The sum of a tile that was cut is put together by the block that finishes
// last, in the order of k, so the bits do not depend on who that is.
//
// -DGROUPS=1|2|4 (of 8 rows of x), -DCODEBOOK=MCG|INST3|MUL1, -DEACH_RATE="X(4) X(5)" (half bits a weight: 2 and 2.5),
// -DBF16: y is bf16
#include "hadamard.cuh"
#include "trellis.cuh"

// More rows leave fewer registers for columns: 2 strips of 32 columns a warp, or 1. (4 strips at 8 rows need 128
// registers and spill: 7.7 ms for the linears of the 27B at one row instead of 7.1.)
constexpr int STRIPS = GROUPS == 4 ? 1 : 2, WARPS = 8, WARPS_N = 4 / STRIPS, WARPS_K = WARPS / WARPS_N;
constexpr bool X_AHEAD = GROUPS == 1;  // load x a step ahead: registers allow it for 8 rows only
constexpr int ROWS = 8 * GROUPS, STRIDE = 132;
constexpr int BUFFERS = GROUPS == 1 ? 2 : 1;  // for the sums of a tile: with two, nobody waits for their reader
constexpr int X_WORDS = 8;                    // of a row's 16 k's

struct Part {  // one linear of those that share a launch
    const u32 *code;
    const u32 *x;  // [rows, in]: transformed by the linear's own input scale
    const float *out_scale;
    u16 *y;                       // [rows, row_stride], activations
    int tiles, rate, row_stride;  // rate: half bits a weight
    u32 cost, cost_before;        // of a unit; of all units of the parts in front
    int pad;
};

struct Launch {
    Part parts[4];
    int rows, in, count;  // parts
    u32 cost;             // of all units
    u32 mask, pad;
    float *partial;  // [2 * blocks, rows, 128]
    u32 *arrived;    // [tiles, 32], 0 between launches: blocks that have left their part of a row
};

// A quarter of a tile, 64 weights: as many words as a weight has half bits.
template <int RATE> struct Quarter {
    u32 words[RATE];
    __device__ __forceinline__ void load(const u32 *from) {
        if (RATE % 4 == 0) {
#pragma unroll
            for (int i = 0; i < RATE; i += 4)
                asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                             : "l"(from + i));
        } else if (RATE % 2 == 0) {  // 8-byte loads leave sectors half read: L1 keeps them for the next
#pragma unroll
            for (int i = 0; i < RATE; i += 2)
                asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                             : "=r"(words[i]), "=r"(words[i + 1])
                             : "l"(from + i));
        } else {  // a quarter of 3, 5 or 7 words is aligned to one
#pragma unroll
            for (int i = 0; i < RATE; i++) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(words[i]) : "l"(from + i));
        }
    }
};

struct Sums {
    float c[STRIPS][2][GROUPS][4];  // [32 columns][the lower or the upper column of a pair][8 rows]
};

// 64 weights of the lane times x: 16 k's, of which a product takes two of a weight in halves, four otherwise.
template <int RATE>
__device__ __forceinline__ void multiply(float (&c)[2][GROUPS][4], const u32 *words, u32 before,
                                         const u32 (&x)[GROUPS][8], u32 mask) {
    // weights in stream order: [column pair 2][k pair 4][column 0, 8][k 0, 8][k 0, 1]
    auto state = [&](int column, int pair, int j) {
        return window(words, before, bits_of<RATE>((column * 4 + pair) * 8 + j + 1) - 1);
    };
#pragma unroll
    for (int high = 0; high < 2; high++)
#pragma unroll
        for (int pair = 0; pair < 4; pair += CODEBOOK == MUL1 ? 2 : 1)
#pragma unroll
            for (int column = 0; column < 2; column++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {  // i: 1 is the other row, 2 the second half of k
                    int j = 2 * high + i % 2 * 4;
                    if (CODEBOOK == MUL1)
                        a[i] = half2_values<MUL1>(state(column, pair + i / 2, j), state(column, pair + i / 2, j + 1),
                                                  mask);
                    else
                        a[i] = halves<CODEBOOK>(state(column, pair, j + i / 2), mask);
                }
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    u32 now = x[group][pair + 4 * high];
                    if (CODEBOOK == MUL1)
                        mma(c[column][group], a[0], a[1], a[2], a[3], now, x[group][(pair + 1) % 4 + 4 * high]);
                    else
                        mma(c[column][group], a[0], a[1], a[2], a[3], twice<0>(now), twice<1>(now));
                }
            }
}

__device__ __forceinline__ void load_x(u32 (&x)[GROUPS][X_WORDS], const u32 *from, const Launch &launch) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const uint4 *row = (const uint4 *)(from + group * 8 * (launch.in / 2));
#pragma unroll
        for (int i = 0; i < X_WORDS / 4; i++) {
            uint4 four = row[i];
            u32 *to = x[group] + 4 * i;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    }
}

// Adds every WARPS_K-th 64 rows of W in [64 * first, 64 * end) to the warp's sums, for 128 columns of the part.
template <int RATE>
__device__ __forceinline__ void accumulate(Sums &sums, const Part &part, const Launch &launch, int tile, int first,
                                           int end) {
    int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N;
    int k_tile = lane % 4, column = lane / 4;
    u32 row_words = part.tiles * 8 * 4 * RATE;  // of one row of tiles
    const u32 *code = part.code + (long long)(first * 4 + k_tile) * row_words +
                      (tile * 8 + warp_n * STRIPS * 2 + column / 4) * (4 * RATE) + column % 4 * RATE;
    // rows behind the last one are read too, whatever is there: a column of a product touches no other
    const u32 *x_at = part.x + column * (launch.in / 2) + (first * 4 + k_tile) * X_WORDS;
    int in_front = (column & ~3 | (column - 1) & 3) * 4 + k_tile;  // lane of the quarter in front, cyclic in a tile

    Quarter<RATE> next[STRIPS];
    if (first < end)
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) next[strip].load(code + strip * 8 * RATE);
    wait_for_previous();
    u32 x_next[GROUPS][X_WORDS];
    if (X_AHEAD && first < end) load_x(x_next, x_at, launch);
    for (int k = first; k < end; k += WARPS_K) {
        bool more = k + WARPS_K < end;
        u32 x[GROUPS][X_WORDS];
        if (X_AHEAD) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int i = 0; i < X_WORDS; i++) x[group][i] = x_next[group][i];
        } else
            load_x(x, x_at, launch);
        x_at += 4 * WARPS_K * X_WORDS;
        if (X_AHEAD && more) load_x(x_next, x_at, launch);
        code += 4 * WARPS_K * row_words;
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            Quarter<RATE> now = next[strip];
            if (more) next[strip].load(code + strip * 8 * RATE);
            u32 before = __shfl_sync(~0u, now.words[RATE - 1], in_front);
            multiply<RATE>(sums.c[strip], now.words, before, x, launch.mask);
        }
    }
}

// The warps' sums to shared memory, [warp along k][row][column].
__device__ __forceinline__ void store_sums(float *shared, const Sums &sums, int rows) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    int column = lane / 4, row = lane % 4 * 2;
    float *to = shared + warp_k * ROWS * STRIDE + warp_n * STRIPS * 32 + column / 4 * 16 + column % 4 * 2;
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int r = group * 8 + row + i % 2;
                    if (r < rows) to[r * STRIDE + strip * 32 + pair + i / 2 * 8] = sums.c[strip][pair][group][i];
                }
}

__device__ __forceinline__ void finish(float (&v)[4], const Part &part, int tile, int row) {
    int column = tile * 128 + threadIdx.x % 32 * 4;
    hadamard_128(v);
    float4 scale = *(const float4 *)(part.out_scale + column);
    v[0] *= RSQRT_128 * scale.x, v[1] *= RSQRT_128 * scale.y, v[2] *= RSQRT_128 * scale.z, v[3] *= RSQRT_128 * scale.w;
    *(uint2 *)(part.y + (long long)row * part.row_stride + column) =
        make_uint2(to_activations(v[0], v[1]), to_activations(v[2], v[3]));
}

// The cost of all units in a row, cut into equal shares: a block has the units that begin in its share. No share is
// without a unit as long as it is no smaller than one.
__device__ __forceinline__ u32 block_of(const Part &part, u32 unit_of_part, const Launch &launch) {
    return (part.cost_before + unit_of_part * part.cost) * gridDim.x / launch.cost;
}

struct Position {
    int which, unit;  // part, and unit of the part
};

__device__ __forceinline__ Position start_of(u32 block, const Launch &launch) {
    u32 cost = (block * launch.cost + gridDim.x - 1) / gridDim.x;
    int which = 0;
    while (which + 1 < launch.count && cost + launch.parts[which].cost > launch.parts[which + 1].cost_before) which++;
    const Part &part = launch.parts[which];
    return {which, cost > part.cost_before ? (int)((cost - part.cost_before + part.cost - 1) / part.cost) : 0};
}

__device__ __forceinline__ u32 add_in_order(u32 *counter) {  // ours before it, others' behind it
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// A row of a tile, from the warps' sums in shared memory to y. If other blocks have parts of the tile, the row goes to
// `partial`, and the last of them adds up all parts in the order of k.
__device__ __forceinline__ void reduce(const float *sums, const Part &part, const Launch &launch, int tile, int number,
                                       int row, bool begins, bool whole) {
    int lane = threadIdx.x % 32;
    float v[4] = {};
#pragma unroll
    for (int k = 0; k < WARPS_K; k++) {
        float4 add = *(const float4 *)(sums + (k * ROWS + row) * STRIDE + lane * 4);
        v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
    }
    if (!whole) {
        auto slot = [&](u32 block, bool first) {
            return (float4 *)(launch.partial + ((2 * block + first) * launch.rows + row) * 128) + lane;
        };
        __stcg(slot(blockIdx.x, begins), make_float4(v[0], v[1], v[2], v[3]));
        int per_tile = launch.in / 64;
        u32 first = block_of(part, tile * per_tile, launch), last = block_of(part, (tile + 1) * per_tile - 1, launch);
        u32 *arrived = launch.arrived + number * 32 + row, before;
        __syncwarp();
        if (lane == 0) before = add_in_order(arrived);
        if (__shfl_sync(~0u, before, 0) != last - first) return;
        __syncwarp();
        v[0] = v[1] = v[2] = v[3] = 0;
        for (u32 at_once = first; at_once <= last; at_once += 8) {  // 8 loads in flight: one takes 0.4 us
            float4 add[8] = {};
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                if (at_once + i <= last) add[i] = __ldcg(slot(at_once + i, at_once + i == first));
#pragma unroll
            for (int i = 0; i < 8; i++) v[0] += add[i].x, v[1] += add[i].y, v[2] += add[i].z, v[3] += add[i].w;
        }
        if (lane == 0) *arrived = 0;
    }
    finish(v, part, tile, row);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) trellis_few(const __grid_constant__ Launch launch) {
    __shared__ float shared[BUFFERS][WARPS_K * ROWS * STRIDE];
    launch_dependents();
    int warp = threadIdx.x / 32, per_tile = launch.in / 64, segment = 0;
    Position at = start_of(blockIdx.x, launch), end = start_of(blockIdx.x + 1, launch);
    int tiles_before = 0;
    for (int i = 0; i < at.which; i++) tiles_before += launch.parts[i].tiles;
    while (at.which < end.which || at.which == end.which && at.unit < end.unit) {
        const Part &part = launch.parts[at.which];
        int units = part.tiles * per_tile, stop = at.which == end.which ? end.unit : units;
        int tile = at.unit / per_tile, from = at.unit % per_tile, to = min(per_tile, from + stop - at.unit);

        Sums sums = {};
        switch (part.rate) {
#define X(RATE)                                                                                                        \
    case RATE:                                                                                                         \
        accumulate<RATE>(sums, part, launch, tile, from + warp / WARPS_N, to);                                         \
        break;
            EACH_RATE
#undef X
        }
        if (BUFFERS == 1 && segment) __syncthreads();
        float *buffer = shared[segment++ % BUFFERS];
        store_sums(buffer, sums, launch.rows);
        __syncthreads();
        for (int row = warp; row < launch.rows; row += WARPS)
            reduce(buffer, part, launch, tile, tiles_before + tile, row, from == 0, from == 0 && to == per_tile);
        at.unit += to - from;
        if (at.unit == units) {
            tiles_before += part.tiles;
            at = {at.which + 1, 0};
        }
    }
}
