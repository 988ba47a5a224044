// Queries, keys and values of one layer, from the projection to the cache in one pass: QK-norm, rotary embedding,
// centre, Hadamard rotation, rounding to bf16, 2-bit codes, and the stores.
//
// -DDIM=128|256: channels of a head. -DROTARY=DIM/4|DIM/2|DIM: those that turn with the position. -DGROUP: dims that
// share a scale; 0 stores bf16 rows without centre, rotation and codes. -DBF16: activations are bf16.
//
// A lane holds the dims 8 l .. 8 l + 7 of each quarter of a row, so that bytes of codes (one dim of each quarter) are
// made inside a lane and every load and store is 8 or 16 bytes of a full line; D / 32 lanes make a row, and the rows of
// a warp are the same head of consecutive tokens. Against a whole warp a row that takes 3 instead of 5 exchanges for a
// transform or a sum, each of them for 4 rows: 24 shuffles a row instead of 40, whose pipe would be the bottleneck.
#include "int2.cuh"

#define D DIM
#define QUARTER (D / 4)
#define LANES (D / 32)
#define TOKENS (32 / LANES)  // of a warp

struct Launch {
    const u16 *q, *k, *v;                         // [tokens, heads or kv_heads, D]; row_stride between tokens
    const float *q_scale, *k_scale;               // [D]
    const float *cos, *sin;                       // [tokens, ROTARY / 2]
    const float *k_centre, *v_centre;             // [kv_heads, D]; of coded pages
    const int *pages, *halves, *sinks, *offsets;  // [tokens]; a negative page: not stored there
    u16 *q_to;                                    // fp16 [tokens, heads, D]
    unsigned char *codes;                         // [pages, 2, kv_heads, 64, D / 4]
    u16 *params;                                  // fp16 [pages, 2, kv_heads, 2 (scale, minimum), D / GROUP, 64]
    u16 *halves_to, *sinks_to;                    // bf16 [pages, 2, kv_heads, 64, D]
    float eps;
    int tokens, heads, kv_heads, row_stride, pad;
};

__device__ __forceinline__ int lane_of_row() { return threadIdx.x % LANES; }

__device__ __forceinline__ float2 unpack(u32 pair) {
#ifdef BF16
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#else
    return unpack_half2(pair);
#endif
}

__device__ __forceinline__ void load8(float *to, const float *from) {
    float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ __forceinline__ void load_row(float (&v)[32], const u16 *row) {
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        int dim = quarter * QUARTER + lane_of_row() * 8;
        uint4 x = *(const uint4 *)(row + dim);
        u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 both = unpack(pairs[i]);
            v[quarter * 8 + i * 2] = both.x, v[quarter * 8 + i * 2 + 1] = both.y;
        }
    }
}

__device__ __forceinline__ void store_row(u16 *row, const u32 (&pairs)[16]) {
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        const u32 *four = pairs + quarter * 4;
        *(uint4 *)(row + quarter * QUARTER + lane_of_row() * 8) = make_uint4(four[0], four[1], four[2], four[3]);
    }
}

__device__ __forceinline__ void round_to_activation(float &low, float &high) {
    float2 both = unpack(to_activations(low, high));
    low = both.x, high = both.y;
}

// x / sqrt(mean(x^2) + eps) scale, rounded to the activations' format as ops/norm.py leaves it.
__device__ __forceinline__ void norm(float (&v)[32], const float *scale, float eps) {
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i % 2] = fmaf(v[i], v[i], sum[i % 2]);
    float factor = rsqrtf(sum_lanes<LANES>(sum[0] + sum[1]) / D + eps);
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        float weight[8];
        load8(weight, scale + quarter * QUARTER + lane_of_row() * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) v[quarter * 8 + i] = v[quarter * 8 + i] * factor * weight[i];
#pragma unroll
        for (int i = 0; i < 8; i += 2) round_to_activation(v[quarter * 8 + i], v[quarter * 8 + i + 1]);
    }
}

// (a, b) -> (a cos - b sin, b cos + a sin) without a fused multiply, then rounded: the bits of ops/rotary.py.
__device__ __forceinline__ void turn(float a, float b, float cos, float sin, float &to) {
    to = __fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
}

__device__ __forceinline__ void rotary(float (&v)[32], const float *cos, const float *sin) {
    float c[8], s[8];
    if (ROTARY == D / 4) {  // both halves in the first quarter: the partner is another lane's
        int angle = lane_of_row() % (LANES / 2) * 8;
        float sign = lane_of_row() < LANES / 2 ? -1.f : 1.f;
        load8(c, cos + angle), load8(s, sin + angle);
#pragma unroll
        for (int i = 0; i < 8; i++) turn(v[i], sign * __shfl_xor_sync(~0u, v[i], LANES / 2), c[i], s[i], v[i]);
#pragma unroll
        for (int i = 0; i < 8; i += 2) round_to_activation(v[i], v[i + 1]);
        return;
    }
#pragma unroll
    for (int quarter = 0; quarter < ROTARY / 2 / QUARTER; quarter++) {
        load8(c, cos + quarter * QUARTER + lane_of_row() * 8), load8(s, sin + quarter * QUARTER + lane_of_row() * 8);
        float *a = v + quarter * 8, *b = a + ROTARY / 2 / QUARTER * 8;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float was = a[i];
            turn(was, -b[i], c[i], s[i], a[i]), turn(b[i], was, c[i], s[i], b[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) round_to_activation(a[i], a[i + 1]), round_to_activation(b[i], b[i + 1]);
    }
}

__device__ __forceinline__ void subtract(float (&v)[32], const float *centre) {
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        float c[8];
        load8(c, centre + quarter * QUARTER + lane_of_row() * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) v[quarter * 8 + i] -= c[i];
    }
}

// Sylvester's matrix without its factor 1 / sqrt(D).
__device__ __forceinline__ void hadamard(float (&v)[32]) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (!(i & step)) {
                float a = v[i], b = v[i + step];
                v[i] = a + b, v[i + step] = a - b;
            }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 32; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(~0u, v[i], lanes));
    }
}

#if GROUP
#define IN_LANE (GROUP * 4 >= D ? 32 * GROUP / D : 8)  // dims of a lane in a group
#define GROUP_LANES (GROUP / IN_LANE)                  // that share a group
#define LANE_GROUPS (32 / IN_LANE)                     // of a lane

template <int I> __device__ __forceinline__ void encode_from(const float (&x)[32], float (&byte)[8], u32 *grids) {
    if constexpr (I < LANE_GROUPS) {
        grids[I] = encode_group<GROUP, GROUP_LANES, I * IN_LANE, IN_LANE>(x, byte);
        encode_from<I + 1>(x, byte, grids);
    }
}

// `place` counts pages, K or V, and heads.
__device__ __forceinline__ void store_codes(const Launch &launch, long long place, int offset, const u32 (&pairs)[16],
                                            bool stored) {
    float x[32], byte[8];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 bits = i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16;
        x[i] = fminf(fmaxf(__uint_as_float(bits), -FP16_MAX), FP16_MAX);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) byte[i] = 0x1p23f;
    u32 grids[LANE_GROUPS];
    encode_from<0>(x, byte, grids);
    if (!stored) return;
    unsigned char *codes = launch.codes + (place * 64 + offset) * QUARTER + lane_of_row() * 8;
    *(uint2 *)codes = make_uint2(low_bytes(byte), low_bytes(byte + 4));
    if (lane_of_row() % GROUP_LANES) return;
    u16 *scales = launch.params + (place * 2 * (D / GROUP) + lane_of_row() / GROUP_LANES) * 64 + offset;
#pragma unroll
    for (int i = 0; i < LANE_GROUPS; i++) {
        u16 *to = scales + i * (LANES / GROUP_LANES) * 64;
        to[0] = (u16)grids[i], to[D / GROUP * 64] = (u16)(grids[i] >> 16);
    }
}
#endif

// A head of TOKENS consecutive tokens; the same kind of head for the whole warp.
__device__ __forceinline__ void write(const Launch &launch, int head, int first) {
    int heads = launch.heads, kv_heads = launch.kv_heads, token = first + threadIdx.x % 32 / LANES;
    bool stored = token < launch.tokens;
    if (!stored) token = launch.tokens - 1;  // idle lanes take part in the shuffles

    bool is_q = head < heads, is_v = head >= heads + kv_heads;
    int kv_head = is_v ? head - heads - kv_heads : head - heads;
    const u16 *from = is_q ? launch.q : is_v ? launch.v : launch.k;
    float v[32];
    load_row(v, from + (long long)token * launch.row_stride + (is_q ? head : kv_head) * D);
    if (!is_v) {
        norm(v, is_q ? launch.q_scale : launch.k_scale, launch.eps);
        long long angles = (long long)token * (ROTARY / 2);
        rotary(v, launch.cos + angles, launch.sin + angles);
    }
    const float rsqrt_d = D == 256 ? 0.0625f : 0.08838834764831845f;
#if GROUP
    if (!is_q) subtract(v, (is_v ? launch.v_centre : launch.k_centre) + kv_head * D);
    hadamard(v);
    float factor = is_q ? rsqrt_d * rsqrt_d : rsqrt_d;
#else
    float factor = is_q ? rsqrt_d : 1.f;
#endif
#pragma unroll
    for (int i = 0; i < 32; i++) v[i] *= factor;
    u32 pairs[16];
    if (is_q) {
#pragma unroll
        for (int i = 0; i < 16; i++) pairs[i] = pack_half2(v[i * 2], v[i * 2 + 1]);
        if (stored) store_row(launch.q_to + ((long long)token * heads + head) * D, pairs);
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) pairs[i] = pack_bf162(v[i * 2], v[i * 2 + 1]);
    int offset = launch.offsets[token], half = launch.halves[token], in_page = is_v * kv_heads + kv_head;
    if (stored && half >= 0) store_row(launch.halves_to + ((half * 2LL * kv_heads + in_page) * 64 + offset) * D, pairs);
#if GROUP
    int sink = launch.sinks[token], page = launch.pages[token];
    if (stored && sink >= 0) store_row(launch.sinks_to + ((sink * 2LL * kv_heads + in_page) * 64 + offset) * D, pairs);
    store_codes(launch, page * 2LL * kv_heads + in_page, offset, pairs, stored && page >= 0);
#endif
}

extern "C" __global__ void __launch_bounds__(256) kv_write(const __grid_constant__ Launch launch) {
    int all = launch.heads + 2 * launch.kv_heads, units = (launch.tokens + TOKENS - 1) / TOKENS * all;
    int warp = blockIdx.x * 8 + threadIdx.x / 32;
    launch_dependents();
    wait_for_previous();
    if (warp < units) write(launch, warp % all, warp / all * TOKENS);
}
