// prelude.cuh: the language that kernel text is written in.  The same text is compiled by NVRTC (cubins) and,
// with FN_SIM, by g++ or clang++ (simulator).  Types, kernel and shared-memory declarations, scalar
// arithmetic with one rounding per call, conversions, bit tools, integer atomics, loads.  Elementary
// functions: math.cuh (included here).
//
// What must stay true: every float function here is one correctly rounded operation or is made of them, so
// both sides give the same bytes (NVRTC --fmad=false --prec-div=true --prec-sqrt=true --ftz=false; g++
// -ffp-contract=off). NaN bits may differ between the sides (the GPU writes 0x7fffffff, x86 keeps payloads):
// compare NaNs as one value. Macros that the build sets for each kernel: FN_NAME, FN_NAMESPACE, FN_THREADS,
// FN_BLOCKS_PER_SM, FN_SHARED_BYTES, FN_SHARED_KIND.  FN_HOPPER is 1 in sm_90a images and undefined elsewhere,
// in the simulator too: for text that needs wgmma, bulk copies or mbarriers.
#pragma once

#ifdef FN_SIM
#include "sim/shim.h"
#else

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FN_HOPPER 1
#endif

#define FN_DEVICE __device__ __forceinline__
#define FN_KERNEL(params) \
    extern "C" __global__ void __launch_bounds__(FN_THREADS, FN_BLOCKS_PER_SM) FN_NAME params
// The struct is the block's own memory up to 48 KiB, above that what the launch asks for; FN_SHARED_KIND says
// which: STATIC or DYNAMIC.  A kernel with dynamic memory has no other, so the struct begins where the block's
// memory does, at a multiple of 1024 bytes (the period of wgmma's 128-byte swizzle; probe/shared_wide.cu looks).
// The array does not say so: its alignment pads the static memory of every kernel of the image.
#define FN_SHARED(Type, name)                                                                       \
    static_assert(sizeof(Type) == FN_SHARED_BYTES, "the declaration's shared_bytes is not sizeof"); \
    FN_SHARED_AS(FN_SHARED_KIND, Type, name)
#define FN_SHARED_AS(kind, Type, name) FN_SHARED_AS2(kind, Type, name)
#define FN_SHARED_AS2(kind, Type, name) FN_SHARED_##kind(Type, name)
#define FN_SHARED_STATIC(Type, name)                                                   \
    static_assert(sizeof(Type) <= 49152, "static shared memory is limited to 48 KiB"); \
    __shared__ __align__(16) Type name
#define FN_SHARED_DYNAMIC(Type, name)                                         \
    static_assert(alignof(Type) <= 1024, "the memory has no more alignment"); \
    extern __shared__ __align__(4) u8 fn_dynamic_shared[];                    \
    Type& name = *reinterpret_cast<Type*>(fn_dynamic_shared)

FN_DEVICE float fn_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FN_DEVICE float fn_mul(float a, float b) { return __fmul_rn(a, b); }
FN_DEVICE float fn_add(float a, float b) { return __fadd_rn(a, b); }
FN_DEVICE float fn_sub(float a, float b) { return __fsub_rn(a, b); }
FN_DEVICE float fn_div(float a, float b) { return __fdiv_rn(a, b); }
// 1 / d to nearest for d in [1, 2] or NaN: on a GPU the steps of __frcp_rn's middle range without its branches.
FN_DEVICE float fn_rcp_1to2(float d) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return fn_fma(r, fn_fma(-d, r, 1.f), r);
}
// a / d for d = 1 + t with 0 <= t <= 1 as sigmoid and silu meet it, r = fn_rcp_1to2(d): a quotient from a reciprocal,
// rounded to nearest by one remainder (Markstein), without a division's branches, which would keep the chains of
// neighbouring values from overlapping.  Where nothing remains, or inf - inf, the quotient stands, with the sign of its
// zero; subnormal a have d == 1 or 2, where every step is exact.
FN_DEVICE float fn_div_1to2(float a, float d, float r) {
    float q = fn_mul(a, r);
    asm("{\n.reg .pred some;\nsetp.ne.f32 some, %1, 0f00000000;\n@some fma.rn.f32 %0, %1, %2, %0;\n}"
        : "+f"(q)
        : "f"(fn_fma(-q, d, a)), "f"(r));
    return q;
}
// x, but at least `least`, a number other than 0; NaN for NaN.
FN_DEVICE float fn_at_least(float x, float least) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least));
    return x;
}
// -|x|, NaN for NaN: no instruction of its own where another takes it.
FN_DEVICE float fn_minus_abs(float x) {
    asm("abs.f32 %0, %0;\nneg.f32 %0, %0;" : "+f"(x));
    return x;
}
FN_DEVICE float fn_sqrt(float a) { return __fsqrt_rn(a); }
FN_DEVICE double fn_dfma(double a, double b, double c) { return __fma_rn(a, b, c); }
FN_DEVICE double fn_dmul(double a, double b) { return __dmul_rn(a, b); }
FN_DEVICE double fn_dadd(double a, double b) { return __dadd_rn(a, b); }
FN_DEVICE double fn_dsub(double a, double b) { return __dsub_rn(a, b); }
FN_DEVICE double fn_ddiv(double a, double b) { return __ddiv_rn(a, b); }

FN_DEVICE u32 fn_f2u(float x) { return __float_as_uint(x); }
FN_DEVICE float fn_u2f(u32 x) { return __uint_as_float(x); }
FN_DEVICE u64 fn_d2u(double x) { return (u64)__double_as_longlong(x); }
FN_DEVICE double fn_u2d(u64 x) { return __longlong_as_double((i64)x); }

FN_DEVICE float fn_h2f(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
FN_DEVICE u16 fn_f2h(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
FN_DEVICE u16 fn_f2b(float f) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(f));
    return b;
}

FN_DEVICE u32 fn_popc(u32 x) { return (u32)__popc(x); }
FN_DEVICE u32 fn_clz(u32 x) { return (u32)__clz((int)x); }
FN_DEVICE u32 fn_ffs(u32 x) { return (u32)__ffs((int)x); }
FN_DEVICE u32 fn_brev(u32 x) { return __brev(x); }
FN_DEVICE u32 fn_umulhi(u32 a, u32 b) { return __umulhi(a, b); }
FN_DEVICE u64 fn_umulhi64(u64 a, u64 b) { return __umul64hi(a, b); }
FN_DEVICE u32 fn_dp4a_u8(u32 a, u32 b, u32 acc) { return __dp4a(a, b, acc); }
FN_DEVICE u32 fn_funnel_r(u32 lo, u32 hi, u32 shift) { return __funnelshift_r(lo, hi, shift); }
FN_DEVICE u32 fn_funnel_l(u32 lo, u32 hi, u32 shift) { return __funnelshift_l(lo, hi, shift); }
FN_DEVICE u32 fn_prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

FN_DEVICE u32 fn_atomic_add_u32(u32* p, u32 v) { return atomicAdd(p, v); }
FN_DEVICE u64 fn_atomic_add_u64(u64* p, u64 v) { return atomicAdd(p, v); }
FN_DEVICE u32 fn_atomic_min_u32(u32* p, u32 v) { return atomicMin(p, v); }
FN_DEVICE u64 fn_atomic_min_u64(u64* p, u64 v) { return atomicMin(p, v); }
FN_DEVICE u32 fn_atomic_max_u32(u32* p, u32 v) { return atomicMax(p, v); }
FN_DEVICE u64 fn_atomic_max_u64(u64* p, u64 v) { return atomicMax(p, v); }
FN_DEVICE u32 fn_atomic_or_u32(u32* p, u32 v) { return atomicOr(p, v); }

// Two f16 in a word, each a * b + c (a + b) rounded once, subnormals kept.
FN_DEVICE u32 fn_hfma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
FN_DEVICE u32 fn_hadd2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Programmatic dependent launch.  A kernel launched with the attribute may start while launches before it on
// its stream still run.  fn_let_next, first in the kernel, allows that to the launch after it.  fn_wait_prior
// waits for all launches before, writes included: every thread calls it once, and before it nothing is written, and
// nothing is read but what no launch may still be writing: constants, and what launches ahead of the last fence
// wrote (KernelSpec.constants, .settled).  Behind it other bytes are read by fn_ld or fn_ld_here, not by fn_ldg:
// the read-only path may be moved ahead of the wait.  In a launch without the attribute, and before sm_90, both do
// nothing.
FN_DEVICE void fn_wait_prior() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
FN_DEVICE void fn_let_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Asks for `bytes` (a multiple of 16) from a global address on (likewise) to be brought into the L2 cache, where a
// launch may start early: for bytes that will be read behind fn_wait_prior.  For one thread.
FN_DEVICE void fn_prefetch_l2(u64 address, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

// T: 1, 2, 4, 8 or 16 bytes, naturally aligned.
template <class T>
FN_DEVICE T fn_ld(const T* p) {
    return *p;
}

template <int Bytes>
struct FnWord;
template <>
struct FnWord<1> {
    typedef u8 type;
};
template <>
struct FnWord<2> {
    typedef u16 type;
};
template <>
struct FnWord<4> {
    typedef u32 type;
};
template <>
struct FnWord<8> {
    typedef u64 type;
};
template <>
struct FnWord<16> {
    typedef uint4 type;
};

// The same through the read-only path: for bytes that no thread of this launch writes, and in a kernel that may
// start early (fn_wait_prior) none of the launches before it.
template <class T>
FN_DEVICE T fn_ldg(const T* p) {
    typedef typename FnWord<sizeof(T)>::type Word;
    Word w = __ldg(reinterpret_cast<const Word*>(p));
    T v;
    memcpy(&v, &w, sizeof(T));
    return v;
}

// The same where it stands: neither moved over fn_wait_prior nor left to the place of its first use, and from
// global memory also where the address comes out of a table.  For bytes that no thread of this launch writes.
FN_DEVICE u8 fn_global_word(const u8* p) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return (u8)v;
}
FN_DEVICE u16 fn_global_word(const u16* p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
FN_DEVICE u32 fn_global_word(const u32* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
FN_DEVICE u64 fn_global_word(const u64* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return (u64)v.y << 32 | v.x;
}
FN_DEVICE uint4 fn_global_word(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
template <class T>
FN_DEVICE T fn_ld_here(const T* p) {
    typedef typename FnWord<sizeof(T)>::type Word;
    Word w = fn_global_word(reinterpret_cast<const Word*>(p));
    T v;
    memcpy(&v, &w, sizeof(T));
    return v;
}
// One store of 16 bytes to global memory, also where the compiler would make four of it.
FN_DEVICE void fn_store_global(float* p, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
#endif

FN_DEVICE float fn_nan() { return fn_u2f(0x7fffffffu); }
FN_DEVICE float fn_b2f(u16 b) { return fn_u2f((u32)b << 16); }
FN_DEVICE float fn_u32_to_f32(u32 x) { return (float)x; }
FN_DEVICE u32 fn_pack_h2(u16 lo, u16 hi) { return (u32)lo | (u32)hi << 16; }
FN_DEVICE u32 fn_pack_h2(float lo, float hi) { return fn_pack_h2(fn_f2h(lo), fn_f2h(hi)); }
FN_DEVICE u32 fn_min_u32(u32 a, u32 b) { return a < b ? a : b; }
FN_DEVICE u32 fn_max_u32(u32 a, u32 b) { return a > b ? a : b; }
FN_DEVICE i32 fn_min_i32(i32 a, i32 b) { return a < b ? a : b; }
FN_DEVICE i32 fn_max_i32(i32 a, i32 b) { return a > b ? a : b; }

// Larger of two, a NaN if either is one (as 0x7fffffff), -0 < +0.  Equal values differ at most in the zero's
// sign, so the AND of their bits is the larger.  Symmetric and associative in bytes: trees of it need no
// order.
FN_DEVICE float fn_max(float a, float b) {
    if (a != a || b != b) return fn_nan();
    if (a == b) return fn_u2f(fn_f2u(a) & fn_f2u(b));
    return a > b ? a : b;
}

#include "math.cuh"
