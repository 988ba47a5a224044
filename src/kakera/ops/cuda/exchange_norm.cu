// Two cards without peer-to-peer: sum = x + (delta of rank 0 + delta of rank 1), y = RMS norm of it times scale. The
// deltas cross through pinned host memory that both cards see. One thread block a row, each warp a lane of its own.
// -DVECTORS: eights of channels of a thread, -DBF16
//
// Protocol of a lane. Its n-th exchange has epoch n, counted on the device, so that a replayed graph needs no host. It
// writes its part into slot n % 2, publishes the epoch, waits until the other lane has published it too, and reads.
// Two slots are enough: a lane writes epoch n + 2 over epoch n only after it saw the other's n + 1, which that one
// published after it had read n. Epochs are never reset, so a stale one is never taken for a fresh one.
//
// The flag is released and acquired at system scope, in a line of its own. Tried instead, and dropped: the epoch inside
// the data (8-byte pairs of 4 bytes and the epoch, polled by every thread), which needs no fence and one trip less. Two
// H200, one row of 5,120: 19.8 us instead of 8.2; 64 rows: 173 instead of 32 (30 Nov 2026). Polls of all threads storm.
//
// A lane that waits longer than the limit, or sees that the host gave up, marks the exchange dead and leaves; nothing
// is written then, and every later exchange leaves at once. Never launch this on one rank alone.
#include "rms_norm.cuh"

constexpr int LINE = 16;               // 32-bit words from one flag to the next: a cache line each
constexpr int ABORT = 0, HUNG = LINE;  // words of the control page: the host's, and ours (epoch, row, reason)
constexpr int PATIENT_POLLS = 256;     // before a waiting lane sleeps between polls
constexpr int CHECK_POLLS = 1024;      // between looks at the clock and at the control page

struct Launch {
    const u16 *x, *delta;
    const float *scale;
    u16 *sum, *y;        // [rows, channels] like x and delta
    uint4 *mine;         // host: [2][most_rows][eights] of this rank
    const uint4 *other;  // host: the same of the other rank
    u32 *my_flags;       // host: [2][most_rows][WARPS] lines
    const u32 *other_flags;
    u32 *epochs;   // device: [most_rows][WARPS]
    u32 *dead;     // device: 1 once an exchange has failed
    u32 *control;  // host: the control page
    float eps;
    int channels, most_rows;
    u32 limit_us;
};

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ u32 acquire(const u32 *at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void release(u32 *at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_word(const u32 *at) {
    u32 value;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_host(const uint4 *at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_host(uint4 *at, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// How long a lane has waited, and whether it should go on.
struct Patience {
    u32 polls = 0;
    unsigned long long began = 0;

    __device__ __forceinline__ bool ends(const Launch &launch) {
        if (++polls <= PATIENT_POLLS) return false;
        __nanosleep(64);
        if (began == 0) began = nanoseconds();
        if (polls % CHECK_POLLS) return false;
        return load_word(launch.control + ABORT) || nanoseconds() - began > 1000ull * launch.limit_us;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) exchange_norm(const __grid_constant__ Launch launch) {
    __shared__ float warps[WARPS];
    int eights = launch.channels / 8, warp = threadIdx.x / 32, row = blockIdx.x;
    long long first = (long long)row * eights;
    launch_dependents();
    wait_for_previous();
    u32 *counter = launch.epochs + row * WARPS + warp;
    u32 epoch = *counter + 1;
    if (*launch.dead) return;
    uint4 part[VECTORS], mine[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at < eights) mine[i] = ((const uint4 *)launch.delta)[first + at];
    }
    long long slot = (long long)(epoch & 1) * launch.most_rows + row;
    bool here = true;
    uint4 *to = launch.mine + slot * eights;
    const uint4 *from = launch.other + slot * eights;
    long long flag = (slot * WARPS + warp) * LINE;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at < eights) store_host(to + at, mine[i].x, mine[i].y, mine[i].z, mine[i].w);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        release(launch.my_flags + flag, epoch);
        Patience patience;
        while (here && acquire(launch.other_flags + flag) != epoch) here = !patience.ends(launch);
    }
    here = __shfl_sync(~0u, here, 0);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at < eights) part[i] = load_host(from + at);
    }
    u32 v[VECTORS][4];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= eights) break;
        uint4 x = ((const uint4 *)launch.x)[first + at];
        u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {mine[i].x, mine[i].y, mine[i].z, mine[i].w},
            c[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[i][j] = add_pair(a[j], from_activation(b[j] & 0xFFFF) + from_activation(c[j] & 0xFFFF),
                               from_activation(b[j] >> 16) + from_activation(c[j] >> 16), squares);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) {
        warps[warp] = squares;
        *counter = epoch;
    }
    if (!__syncthreads_and(here)) {
        if (threadIdx.x == 0) {
            *launch.dead = 1;
            launch.control[HUNG + 1] = row;
            release(launch.control + HUNG, epoch);
        }
        return;
    }
    float factor = rms_factor(warps, launch.channels, launch.eps);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= eights) break;
        ((uint4 *)launch.sum)[first + at] = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
        ((uint4 *)launch.y)[first + at] = normed(v[i], factor, launch.scale, at);
    }
}
