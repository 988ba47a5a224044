// A Gated DeltaNet layer between its projections, for the few tokens of each decode row: convolution, SiLU, L2 norms,
// gates, recurrence, gated norm. One thread block a row and value head; the head's state, K x D, lies in its registers.
//
// Tokens go one by one. The state behind the first `commits` of them is stored, so that a caller who does not know yet
// which tokens will stay can hand them in again (speculation); every token's output is written.
// `slots` is older than the kernel in front: it is read before that one has ended.
// -DGROUP: value heads of a key head, -DSTATE16: states are fp16 in memory, -DBF16: activations and conv columns
#include "numbers.cuh"

constexpr int K = 128, D = 128, TAPS = 4, WARPS = 16, THREADS = 32 * WARPS, EACH = K / WARPS;
constexpr float L2_EPS = 1e-6f, SOFTPLUS_LINEAR = 20.f;

#ifdef STATE16
typedef uint2 Four;
__device__ __forceinline__ float4 widen(uint2 v) {
    float2 low = unpack_half2(v.x), high = unpack_half2(v.y);
    return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ uint2 narrow(float4 v) { return make_uint2(pack_half2(v.x, v.y), pack_half2(v.z, v.w)); }
#else
typedef float4 Four;
__device__ __forceinline__ float4 widen(float4 v) { return v; }
__device__ __forceinline__ float4 narrow(float4 v) { return v; }
#endif

struct Launch {
    const u16 *mixed;                      // [tokens, row_stride]: q | k | v | z | b | a
    const float *conv;                     // [TAPS, channels]
    const float *rate, *bias;              // [V]: g = rate softplus(a + bias)
    const float *scale;                    // [D], of the gated norm
    Four *state;                           // [slots, V, K, D]
    u16 *columns;                          // [slots, TAPS - 1, channels]
    const int *offsets, *slots, *commits;  // [rows + 1], [rows], [rows]
    int *arrived;                          // [rows, key heads], 0 between launches
    u16 *y;                                // [tokens, V, D]
    float eps;
    int row_stride, key_heads, pad;
};

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float4 load_four(const u16 *from) {
    ushort4 x = *(const ushort4 *)from;
    return make_float4(from_activation(x.x), from_activation(x.y), from_activation(x.z), from_activation(x.w));
}

__device__ __forceinline__ void store_four(u16 *to, float4 x) {
    *(uint2 *)to = make_uint2(to_activations(x.x, x.y), to_activations(x.z, x.w));
}

__device__ __forceinline__ void add_product(float4 &sum, float4 a, float b) {
    sum.x = fmaf(a.x, b, sum.x), sum.y = fmaf(a.y, b, sum.y), sum.z = fmaf(a.z, b, sum.z), sum.w = fmaf(a.w, b, sum.w);
}

// silu(conv) of four channels; `before`: the TAPS - 1 columns in front of x, every 32nd, moved on by one.
__device__ __forceinline__ float4 convolve(const float *taps, int channels, float4 *before, float4 x) {
    float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
        float4 a = *(const float4 *)(taps + i * channels), b = i < TAPS - 1 ? before[i * 32] : x;
        y.x = fmaf(a.x, b.x, y.x), y.y = fmaf(a.y, b.y, y.y), y.z = fmaf(a.z, b.z, y.z), y.w = fmaf(a.w, b.w, y.w);
        if (i) before[(i - 1) * 32] = b;
    }
    return make_float4(y.x * sigmoid(y.x), y.y * sigmoid(y.y), y.z * sigmoid(y.z), y.w * sigmoid(y.w));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gdn_step(const __grid_constant__ Launch launch) {
    __shared__ float4 heads[3][32];         // q, k, v of the token
    __shared__ float4 parts[2][WARPS][32];  // S^T k and S^T q, of each warp's rows
    __shared__ float read[2][D];
    __shared__ float gates[2], overlap;         // decay, beta; k . q
    __shared__ float4 before[3][TAPS - 1][32];  // columns in front of the token
    __shared__ float4 kept[3][TAPS - 1][32];    // and in front of the first whose state is not stored
    __shared__ int last;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int head = blockIdx.x, heads_v = gridDim.x, row = blockIdx.y, key = head / GROUP;
    int channels = (2 * launch.key_heads + heads_v) * K;
    int channel = (warp < 2 ? warp * launch.key_heads + key : 2 * launch.key_heads + head) * K + lane * 4;
    launch_dependents();
    int slot = launch.slots[row];
    Four *state = launch.state + ((long long)slot * heads_v + head) * (K * D / 4) + warp * 32 + lane;
    if (lane % (128 / sizeof(Four)) == 0)  // into L2 already; what an earlier step still writes is seen there
#pragma unroll
        for (int i = 0; i < EACH; i++) asm volatile("prefetch.global.L2 [%0];" ::"l"(state + i * WARPS * 32));
    wait_for_previous();
    int begin = launch.offsets[row], end = launch.offsets[row + 1];
    if (begin == end) return;
    int commit = begin + launch.commits[row];

    float4 s[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = widen(state[i * WARPS * 32]);
    u16 *columns = launch.columns + (long long)slot * (TAPS - 1) * channels;
    if (warp < 3)
        for (int i = 0; i < TAPS - 1; i++) before[warp][i][lane] = load_four(columns + i * channels + channel);

    for (int token = begin; token < end; token++) {
        const u16 *mixed = launch.mixed + (long long)token * launch.row_stride;
        if (warp < 3) {
            float4 x = convolve(launch.conv + channel, channels, &before[warp][0][lane], load_four(mixed + channel));
            if (token + 1 == commit)
                for (int i = 0; i < TAPS - 1; i++) kept[warp][i][lane] = before[warp][i][lane];
            if (warp < 2) {
                float norm = rsqrtf(sum_of_warp(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) + L2_EPS);
                if (warp == 0) norm *= 0.08838834764831845f;  // K^-0.5
                x.x *= norm, x.y *= norm, x.z *= norm, x.w *= norm;
            }
            heads[warp][lane] = x;
        } else if (warp == 3 && lane == 0) {
            const u16 *gate = mixed + channels + heads_v * D + head;
            float a = from_activation(gate[heads_v]) + launch.bias[head];
            gates[0] = expf(launch.rate[head] * (a > SOFTPLUS_LINEAR ? a : log1pf(expf(a))));
            gates[1] = sigmoid(from_activation(gate[0]));
        }
        __syncthreads();
        const float *q = (const float *)heads[0], *k = (const float *)heads[1];
        float4 by_k = make_float4(0, 0, 0, 0), by_q = by_k;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            add_product(by_k, s[i], k[i * WARPS + warp]);
            add_product(by_q, s[i], q[i * WARPS + warp]);
        }
        parts[0][warp][lane] = by_k, parts[1][warp][lane] = by_q;
        if (warp == 0) {
            float4 a = heads[0][lane], b = heads[1][lane];
            float dot = sum_of_warp(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w);
            if (lane == 0) overlap = dot;
        }
        __syncthreads();
        if (threadIdx.x < 2 * D) {
            int which = threadIdx.x / D, d = threadIdx.x % D;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += ((const float *)parts[which][w])[d];
            read[which][d] = sum;
        }
        __syncthreads();
        float decay = gates[0], beta = gates[1];
        float4 v = heads[2][lane], known = ((const float4 *)read[0])[lane];
        float4 right = make_float4(beta * (v.x - decay * known.x), beta * (v.y - decay * known.y),
                                   beta * (v.z - decay * known.z), beta * (v.w - decay * known.w));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
            add_product(s[i], right, k[i * WARPS + warp]);
        }
        if (token + 1 == commit)
#pragma unroll
            for (int i = 0; i < EACH; i++) state[i * WARPS * 32] = narrow(s[i]);
        if (warp == 4) {
            float4 o = ((const float4 *)read[1])[lane];
            o.x *= decay, o.y *= decay, o.z *= decay, o.w *= decay;
            add_product(o, right, overlap);
            float norm = sum_of_warp(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
            norm = rsqrtf(norm / D + launch.eps);
            float4 z = load_four(mixed + channels + head * D + lane * 4), scale = ((const float4 *)launch.scale)[lane];
            // rounded before the scale, as the published model does
            u32 low = to_activations(o.x * norm, o.y * norm), high = to_activations(o.z * norm, o.w * norm);
            float4 y = make_float4(from_activation(low & 0xFFFF), from_activation(low >> 16),
                                   from_activation(high & 0xFFFF), from_activation(high >> 16));
            y.x *= z.x * sigmoid(z.x) * scale.x, y.y *= z.y * sigmoid(z.y) * scale.y;
            y.z *= z.z * sigmoid(z.z) * scale.z, y.w *= z.w * sigmoid(z.w) * scale.w;
            store_four(launch.y + ((long long)token * heads_v + head) * D + lane * 4, y);
        }
        __syncthreads();  // before the next token's q, k, v
    }

    if (commit == begin) return;
    // all value heads of a key head read its columns: the last of them to get here stores what comes next
    if (threadIdx.x == 0) {
        int *arrived = launch.arrived + row * launch.key_heads + key;
        last = atomicAdd(arrived, 1) == GROUP - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    if (warp == 2 || (warp < 2 && last))
        for (int i = 0; i < TAPS - 1; i++) store_four(columns + i * channels + channel, kept[warp][i][lane]);
}
