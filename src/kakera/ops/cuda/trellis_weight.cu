// W_eff = diag(in_scale) H W H diag(out_scale) / 128 for a block of 128 x 128 weights: what a long prefill multiplies
// by.
//
// H128 = H8 x H16 on either side. A warp decodes a strip of 8 tiles, 128 k x 16 columns: a lane's 8 weights of a tile
// are the B operand of m16n8k16, so H16 along k is two products a tile, H8 along k sums between tiles of a lane, and
// the result the A operand of H16 along the columns. H8 along the columns crosses warps, in shared memory. Sums are
// half2: they take half the registers and operations of fp32, so that four blocks fit an SM, and cost 5e-4 of W_eff.
//
// -DCODEBOOK=..., -DRATE=2..16 (half bits a weight), -DBF16: W_eff is bf16
#include "hadamard.cuh"
#include "trellis.cuh"

constexpr int WORDS = 4 * RATE;  // of a tile
constexpr int LANE_BITS = bits_of<RATE>(8), STRING = (LANE_BITS - bits_of<RATE>(1) + 16 + 31) / 32;
constexpr int STRIDE = 68;  // words of a row of 64 in shared memory: no bank twice

struct Launch {
    const u32 *code;  // first tile of the columns to decode
    const float *in_scale, *out_scale;
    u16 *to;                // [in, row_stride]
    int tiles, row_stride;  // tiles: 16 x 16 tiles in a row of the code
    u32 mask, pad;
};

__device__ __forceinline__ u32 sign_pair(int a, int b) {  // (H[a][b], H[a][b + 1]) as half2, b even
    u32 low = __popc(a & b) & 1, high = __popc(a & (b + 1)) & 1;
    return (0x3C00u | low << 15) | (0x3C00u | high << 15) << 16;
}

// v[8][N] *= H8 along the first index, half2.
template <int N> __device__ __forceinline__ void hadamard_8(u32 (&v)[8][N]) {
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (!(i & stride))
#pragma unroll
                for (int n = 0; n < N; n++) {
                    u32 a = v[i][n], b = v[i | stride][n];
                    v[i][n] = half2_add(a, b), v[i | stride][n] = half2_sub(a, b);
                }
}

// The lane's 8 weights of a tile: half2 of k = 2t, 2t + 1 and k = 2t + 8, 2t + 9, of column g, then of column g + 8.
__device__ __forceinline__ void decode(u32 (&pairs)[4], const u32 *tile, u32 mask) {
    int last = LANE_BITS * (threadIdx.x % 32 + 1) - 1, word = last / 32, shift = 31 - last % 32;
    u32 string[STRING];
#pragma unroll
    for (int i = 0; i < STRING; i++)
        string[STRING - 1 - i] =
            __funnelshift_r(tile[(word - i + WORDS) % WORDS], tile[(word - i - 1 + WORDS) % WORDS], shift);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int end = STRING * 32 - 1 - LANE_BITS;
        pairs[i] = half2_values<CODEBOOK>(window(string, 0, end + bits_of<RATE>(2 * i + 1)),
                                          window(string, 0, end + bits_of<RATE>(2 * i + 2)), mask);
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) trellis_weight(const __grid_constant__ Launch launch) {
    constexpr int CODE_BYTES = 8 * 8 * WORDS * 4, BLOCK_BYTES = 128 * STRIDE * 4;
    __shared__ __align__(16) unsigned char shared[CODE_BYTES > BLOCK_BYTES ? CODE_BYTES : BLOCK_BYTES];
    u32(*code)[8 * WORDS] = (u32(*)[8 * WORDS]) shared;
    u32(*block)[STRIDE] = (u32(*)[STRIDE])shared;  // takes the code's place; half2 of two columns
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 *from = launch.code + ((long long)blockIdx.y * 8 * launch.tiles + blockIdx.x * 8) * WORDS;
    for (int i = threadIdx.x; i < 8 * 2 * WORDS; i += 256) {
        int row = i / (2 * WORDS), column = i % (2 * WORDS) * 4;
        *(uint4 *)&code[row][column] = *(const uint4 *)(from + row * (launch.tiles * WORDS) + column);
    }
    const u32 h[4] = {sign_pair(g, 2 * t), sign_pair(g + 8, 2 * t), sign_pair(g, 2 * t + 8),
                      sign_pair(g + 8, 2 * t + 8)};
    int pair = threadIdx.x % 8, row = threadIdx.x / 8, in = blockIdx.y * 128 + row,
        column = blockIdx.x * 128 + 2 * pair;
    __syncthreads();

    u32 strip[8][4];  // [tile][half2: row g, row g + 8, then the same of columns 8-15]
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        u32 pairs[4];
        decode(pairs, &code[tile][warp * WORDS], launch.mask);
#pragma unroll
        for (int right = 0; right < 2; right++) {
            float sums[4] = {};
            mma(sums, h[0], h[1], h[2], h[3], pairs[2 * right], pairs[2 * right + 1]);
            strip[tile][2 * right] = pack_half2(sums[0], sums[1]),
                            strip[tile][2 * right + 1] = pack_half2(sums[2], sums[3]);
        }
    }
    hadamard_8(strip);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const u32(&a)[4] = strip[tile];
#pragma unroll
        for (int right = 0; right < 2; right++) {
            float sums[4] = {};
            mma(sums, a[0], a[1], a[2], a[3], h[right], h[right + 2]);
            block[tile * 16 + g][warp * 8 + right * 4 + t] = pack_half2(sums[0], sums[1]);
            block[tile * 16 + g + 8][warp * 8 + right * 4 + t] = pack_half2(sums[2], sums[3]);
        }
    }
    __syncthreads();

    float in_scale[4];
#pragma unroll
    for (int i = 0; i < 4; i++) in_scale[i] = launch.in_scale[in + 32 * i] / 128;
    float2 out_scale[8];
#pragma unroll
    for (int tile = 0; tile < 8; tile++) out_scale[tile] = *(const float2 *)(launch.out_scale + column + tile * 16);
    u16 *to = launch.to + (long long)in * launch.row_stride + column;
#pragma unroll
    for (int i = 0; i < 4; i++, row += 32, to += 32 * launch.row_stride) {
        u32 v[8][1];
#pragma unroll
        for (int tile = 0; tile < 8; tile++) v[tile][0] = block[row][tile * 8 + pair];
        hadamard_8(v);
#pragma unroll
        for (int tile = 0; tile < 8; tile++) {
            float2 both = unpack_half2(v[tile][0]);
            *(u32 *)(to + tile * 16) =
                to_activations(both.x * in_scale[i] * out_scale[tile].x, both.y * in_scale[i] * out_scale[tile].y);
        }
    }
}
