// Number formats in registers, and the tensor core product they go to. Headerless, so that NVRTC needs no CUDA toolkit.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;

// Programmatic dependent launch (Hopper on): the next kernel of the stream may start, and waits where it needs us.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {  // until the kernels in front are complete and their writes seen
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// m16n8k16: c += a b. Lane (g, t) = (lane / 4, lane % 4) holds, of a, rows g and g + 8 at k = 2t, 2t + 1 (a0, a1) and
// k = 2t + 8, 2t + 9 (a2, a3); of b, column g at the same k's; of c, rows g and g + 8 at columns 2t, 2t + 1.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of bf16.
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 half2_add(u32 a, u32 b) {
    u32 sum;
    asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ u32 half2_sub(u32 a, u32 b) {
    u32 difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The half `which` (0 or 1) of a pair, twice. As a product with 1, because that is one operation of the multipliers'
// pipe, which picks halves for nothing, where a byte permutation would be one of the busier integer pipe.
template <int WHICH> __device__ __forceinline__ u32 twice(u32 pair) {
    u32 result;
    if (WHICH)
        asm("{.reg .b16 a, b; .reg .b32 c; mov.b32 {a, b}, %1; mov.b32 c, {b, b}; fma.rn.f16x2 %0, c, %2, %3;}"
            : "=r"(result)
            : "r"(pair), "r"(0x3C003C00u), "r"(0x80008000u));
    else
        asm("{.reg .b16 a, b; .reg .b32 c; mov.b32 {a, b}, %1; mov.b32 c, {a, a}; fma.rn.f16x2 %0, c, %2, %3;}"
            : "=r"(result)
            : "r"(pair), "r"(0x3C003C00u), "r"(0x80008000u));
    return result;
}

__device__ __forceinline__ float2 unpack_half2(u32 pair) {
    float2 both;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(both.x), "=f"(both.y)
        : "r"(pair));
    return both;
}

// Activations are fp16 or bf16 (-DBF16), as the model runs.
__device__ __forceinline__ float from_activation(u16 value) {
#ifdef BF16
    return __uint_as_float((u32)value << 16);
#else
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
#endif
}

__device__ __forceinline__ u32 pack_bf162(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u32 to_activations(float low, float high) {
#ifdef BF16
    return pack_bf162(low, high);
#else
    return pack_half2(low, high);
#endif
}
