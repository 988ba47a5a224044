// y[row] = table[tokens[row]], the table in host memory that the card sees: a thread block a row, 16 bytes a load, all
// of them on their way at once. The bus takes some microseconds, whatever the number of rows up to a few.
// -DCODED: int8 rows with an fp16 scale each, rounded to fp16 as the format says; else 16-bit values, copied. -DBF16: y
#include "numbers.cuh"

constexpr int THREADS = 256;

struct Launch {
    const uint4 *rows;  // [vocabulary, channels]
    const u16 *scale;   // fp16 [vocabulary], on the card; coded only
    const long long *tokens;
    uint4 *y;  // [tokens, channels]
    int channels, vocabulary;
};

__device__ __forceinline__ u32 decoded_pair(u32 word, int at, float scale) {  // bytes at, at + 1 of four
    u32 halves =
        pack_half2((float)(signed char)(word >> 8 * at) * scale, (float)(signed char)(word >> 8 * (at + 1)) * scale);
#ifdef BF16
    float2 both = unpack_half2(halves);
    return pack_bf162(both.x, both.y);
#else
    return halves;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) host_rows(const __grid_constant__ Launch launch) {
    long long token = launch.tokens[blockIdx.x];
    token = token < 0 ? 0 : token >= launch.vocabulary ? launch.vocabulary - 1 : token;  // nothing else of the host
#ifdef CODED
    int vectors = launch.channels / 16;
    const uint4 *from = launch.rows + token * vectors;
    uint4 *to = launch.y + (long long)blockIdx.x * vectors * 2;
    float scale;
    asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"(launch.scale[token]));
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
        uint4 q = from[i];
        to[2 * i] = make_uint4(decoded_pair(q.x, 0, scale), decoded_pair(q.x, 2, scale), decoded_pair(q.y, 0, scale),
                               decoded_pair(q.y, 2, scale));
        to[2 * i + 1] = make_uint4(decoded_pair(q.z, 0, scale), decoded_pair(q.z, 2, scale),
                                   decoded_pair(q.w, 0, scale), decoded_pair(q.w, 2, scale));
    }
#else
    int vectors = launch.channels / 8;
    const uint4 *from = launch.rows + token * vectors;
    uint4 *to = launch.y + (long long)blockIdx.x * vectors;
    for (int i = threadIdx.x; i < vectors; i += THREADS) to[i] = from[i];
#endif
}
