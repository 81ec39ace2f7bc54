// shim.h: the simulator's side of prelude.cuh.  Kernel text compiled by g++ or clang++ finds here the types,
// the kernel and shared-memory declarations, thread indices, barriers and scalar operations that NVRTC has
// built in. Compiled with -ffp-contract=off: a * b + c stays two roundings.  No library call reaches a float.
#pragma once
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define FN_DEVICE inline __attribute__((always_inline))
#define FN_SIM_CAT2(a, b) a##b
#define FN_SIM_CAT(a, b) FN_SIM_CAT2(a, b)
#define FN_SIM_STR2(a) #a
#define FN_SIM_STR(a) FN_SIM_STR2(a)

#include "executor.h"

// The kernel is a plain function; the registration record carries what the declaration says (FN_SIM_RIGHTS:
// one letter an argument, r w b for pointers, - for values) and checks the parameter sizes against it.
#define FN_KERNEL(params)                                                                              \
    static void FN_SIM_CAT(body_, FN_NAME) params;                                                     \
    static void FN_SIM_CAT(entry_, FN_NAME)(void** a) { fnsim::call<&FN_SIM_CAT(body_, FN_NAME)>(a); } \
    static_assert(fnsim::fits(&FN_SIM_CAT(body_, FN_NAME), FN_SIM_KINDS),                              \
                  "kernel " FN_SIM_STR(FN_NAME) ": parameters differ from the declaration");           \
    static const fnsim::Kernel FN_SIM_CAT(record_, FN_NAME)(                                           \
        FN_SIM_FAMILY, FN_SIM_STR(FN_NAME), &FN_SIM_CAT(entry_, FN_NAME), FN_SIM_KINDS, FN_SIM_RIGHTS, \
        FN_THREADS, FN_BLOCKS_PER_SM, FN_SHARED_BYTES, FN_SIM_FENCE);                                  \
    static void FN_SIM_CAT(body_, FN_NAME) params
#define FN_SHARED(Type, name)                                                                       \
    static_assert(sizeof(Type) == FN_SHARED_BYTES, "the declaration's shared_bytes is not sizeof"); \
    Type& name = *reinterpret_cast<Type*>(fnsim::T.shared)

#define threadIdx (fnsim::Dim{(u32)fnsim::T.current->tid, 0, 0})
#define blockIdx (fnsim::T.block)
#define blockDim (fnsim::Dim{(u32)fnsim::T.n_threads, 1, 1})
#define gridDim (fnsim::T.grid)
static inline void __syncthreads() { fnsim::block_barrier(); }
static inline void __syncwarp() { fnsim::warp_barrier(); }
static inline void fn_wait_prior() { fnsim::wait_prior(); }
static inline void fn_let_next() {}
static inline void fn_prefetch_l2(u64, u32) {}

FN_DEVICE float fn_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FN_DEVICE float fn_mul(float a, float b) { return a * b; }
FN_DEVICE float fn_add(float a, float b) { return a + b; }
FN_DEVICE float fn_sub(float a, float b) { return a - b; }
FN_DEVICE float fn_div(float a, float b) { return a / b; }
FN_DEVICE float fn_rcp_1to2(float d) { return fn_div(1.f, d); }
FN_DEVICE float fn_div_1to2(float a, float d, float) { return fn_div(a, d); }
FN_DEVICE float fn_at_least(float x, float least) { return x < least ? least : x; }
FN_DEVICE float fn_minus_abs(float x) { return x != x ? x : -__builtin_fabsf(x); }
FN_DEVICE float fn_sqrt(float a) { return __builtin_sqrtf(a); }
FN_DEVICE double fn_dfma(double a, double b, double c) { return __builtin_fma(a, b, c); }
FN_DEVICE double fn_dmul(double a, double b) { return a * b; }
FN_DEVICE double fn_dadd(double a, double b) { return a + b; }
FN_DEVICE double fn_dsub(double a, double b) { return a - b; }
FN_DEVICE double fn_ddiv(double a, double b) { return a / b; }

template <class To, class From>
FN_DEVICE To fn_sim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
FN_DEVICE u32 fn_f2u(float x) { return fn_sim_bits<u32>(x); }
FN_DEVICE float fn_u2f(u32 x) { return fn_sim_bits<float>(x); }
FN_DEVICE u64 fn_d2u(double x) { return fn_sim_bits<u64>(x); }
FN_DEVICE double fn_u2d(u64 x) { return fn_sim_bits<double>(x); }

#if defined(__F16C__) && !defined(FN_SIM_PORTABLE) && defined(__clang__)
FN_DEVICE float fn_h2f(u16 h) { return (float)fn_sim_bits<_Float16>(h); }
FN_DEVICE u16 fn_sim_f2h(float f) { return fn_sim_bits<u16>((_Float16)f); }
#elif defined(__F16C__) && !defined(FN_SIM_PORTABLE)
// the builtins behind <immintrin.h>, which would cost every kernel half a second to parse
typedef short fn_sim_v8hi __attribute__((vector_size(16)));
typedef float fn_sim_v4sf __attribute__((vector_size(16)));
typedef int fn_sim_v4si __attribute__((vector_size(16)));
#define FN_SIM_PAIRS 1
FN_DEVICE float fn_h2f(u16 h) {
    return __builtin_ia32_vcvtph2ps(fn_sim_v8hi{(short)h, 0, 0, 0, 0, 0, 0, 0})[0];
}
FN_DEVICE u16 fn_sim_f2h(float f) { return (u16)__builtin_ia32_vcvtps2ph(fn_sim_v4sf{f, 0, 0, 0}, 0)[0]; }
#else
FN_DEVICE float fn_h2f(u16 h) {
    u32 sign = (u32)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return fn_u2f(sign | 0x7f800000 | (m ? (m << 13 | 0x400000) : 0));
    if (e) return fn_u2f(sign | (e + 112) << 23 | m << 13);
    return fn_u2f(sign | fn_f2u((float)m * 0x1p-24f));
}
FN_DEVICE u16 fn_sim_f2h(float f) {
    u32 x = fn_f2u(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
    if (a >= 0x477ff000) return (u16)(sign | 0x7c00);  // from 65520 on: infinity
    if (a < 0x38800000) return (u16)(sign | (fn_f2u(fn_u2f(a) + 0.5f) - 0x3f000000));  // ulp of 0.5 is 2^-24
    return (u16)(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13));
}
#endif
FN_DEVICE u16 fn_f2h(float f) { return f != f ? (u16)0x7fff : fn_sim_f2h(f); }
FN_DEVICE u16 fn_f2b(float f) {
    u32 x = fn_f2u(f);
    return f != f ? (u16)0x7fff : (u16)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

FN_DEVICE u32 fn_popc(u32 x) { return (u32)__builtin_popcount(x); }
FN_DEVICE u32 fn_clz(u32 x) { return x ? (u32)__builtin_clz(x) : 32u; }
FN_DEVICE u32 fn_ffs(u32 x) { return (u32)__builtin_ffs((int)x); }
FN_DEVICE u32 fn_brev(u32 x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
FN_DEVICE u32 fn_umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
FN_DEVICE u64 fn_umulhi64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
FN_DEVICE u32 fn_dp4a_u8(u32 a, u32 b, u32 acc) {
    if (__builtin_constant_p(b) && b == 0x01010101) {  // a sum of bytes
        const u32 pairs = (a & 0x00ff00ff) + (a >> 8 & 0x00ff00ff);
        return acc + (pairs & 0xffff) + (pairs >> 16);
    }
    return acc + (a & 255) * (b & 255) + (a >> 8 & 255) * (b >> 8 & 255) + (a >> 16 & 255) * (b >> 16 & 255) +
           (a >> 24) * (b >> 24);
}
FN_DEVICE u32 fn_funnel_r(u32 lo, u32 hi, u32 shift) { return (u32)(((u64)hi << 32 | lo) >> (shift & 31)); }
FN_DEVICE u32 fn_funnel_l(u32 lo, u32 hi, u32 shift) {
    return (u32)(((u64)hi << 32 | lo) << (shift & 31) >> 32);
}
FN_DEVICE u32 fn_sim_two(u64 bytes, u32 selector) {  // neighbours in one piece: selectors are constants, nearly all
    const u32 low = selector & 7, high = selector >> 4 & 7;
    if (high == low + 1) return (u32)(bytes >> 8 * low) & 0xffff;
    return ((u32)(bytes >> 8 * low) & 255) | ((u32)(bytes >> 8 * high) & 255) << 8;
}
FN_DEVICE u32 fn_prmt(u32 a, u32 b,
                      u32 selector) {  // byte i of the result: byte (selector >> 4 i & 7) of b:a
    u64 bytes = (u64)b << 32 | a;
    return fn_sim_two(bytes, selector) | fn_sim_two(bytes, selector >> 8) << 16;
}
// One f16 rounding of the exact a * b + c: the product is exact in f32; the sum is rounded to odd with the
// exact error of the addition (two-sum), and 24 >= 11 + 2 bits, so the conversion rounds like the exact
// value.
FN_DEVICE u16 fn_sim_hfma(u16 a, u16 b, u16 c) {
    float p = fn_h2f(a) * fn_h2f(b), z = fn_h2f(c), s = p + z, from_p = s - z;
    float error = (p - from_p) + (z - (s - from_p));
    u32 bits = fn_f2u(s);
    if (error == error && error != 0.f && !(bits & 1)) bits += (error > 0.f) == (s > 0.f) ? 1u : ~0u;
    return fn_f2h(fn_u2f(bits));
}
#ifdef FN_SIM_PAIRS
FN_DEVICE u32 fn_sim_round2(fn_sim_v4sf x) {  // the NaN that fn_f2h gives is what this one rounds to
    const fn_sim_v4si nan = x != x;
    x = (fn_sim_v4sf)(((fn_sim_v4si)x & ~nan) | (nan & 0x7fffffff));
    return (u32)((fn_sim_v4si)__builtin_ia32_vcvtps2ph(x, 0))[0];
}
FN_DEVICE fn_sim_v4sf fn_sim_floats(u32 h2) {
    return __builtin_ia32_vcvtph2ps((fn_sim_v8hi)fn_sim_v4si{(int)h2, 0, 0, 0});
}
FN_DEVICE u32 fn_hfma2(u32 a, u32 b, u32 c) {  // fn_sim_hfma of both halves
    const fn_sim_v4sf p = fn_sim_floats(a) * fn_sim_floats(b), z = fn_sim_floats(c), s = p + z, from_p = s - z;
    const fn_sim_v4sf error = (p - from_p) + (z - (s - from_p)), none = {};
    fn_sim_v4si bits = (fn_sim_v4si)s;
    const fn_sim_v4si odd = (error == error) & (error != none) & ((bits & 1) == 0);
    const fn_sim_v4si away = (error > none) == (s > none);
    bits += odd & ((away & 2) - 1);
    return fn_sim_round2((fn_sim_v4sf)bits);
}
FN_DEVICE u32 fn_hadd2(u32 a, u32 b) { return fn_sim_round2(fn_sim_floats(a) + fn_sim_floats(b)); }
#else
FN_DEVICE u32 fn_hfma2(u32 a, u32 b, u32 c) {
    return (u32)fn_sim_hfma((u16)a, (u16)b, (u16)c) |
           (u32)fn_sim_hfma((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}
// The f32 sum of two f16 has 24 >= 2 * 11 + 2 bits: rounding it again is rounding once.
FN_DEVICE u32 fn_hadd2(u32 a, u32 b) {
    return (u32)fn_f2h(fn_h2f((u16)a) + fn_h2f((u16)b)) |
           (u32)fn_f2h(fn_h2f((u16)(a >> 16)) + fn_h2f((u16)(b >> 16))) << 16;
}
#endif

// Blocks may run on several host threads, so these are atomic there too.
template <class T>
FN_DEVICE T fn_sim_atomic_add(T* p, T v) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
template <class T>
FN_DEVICE T fn_sim_atomic_min(T* p, T v) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
template <class T>
FN_DEVICE T fn_sim_atomic_max(T* p, T v) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v > old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
FN_DEVICE u32 fn_atomic_add_u32(u32* p, u32 v) { return fn_sim_atomic_add(p, v); }
FN_DEVICE u64 fn_atomic_add_u64(u64* p, u64 v) { return fn_sim_atomic_add(p, v); }
FN_DEVICE u32 fn_atomic_min_u32(u32* p, u32 v) { return fn_sim_atomic_min(p, v); }
FN_DEVICE u64 fn_atomic_min_u64(u64* p, u64 v) { return fn_sim_atomic_min(p, v); }
FN_DEVICE u32 fn_atomic_max_u32(u32* p, u32 v) { return fn_sim_atomic_max(p, v); }
FN_DEVICE u64 fn_atomic_max_u64(u64* p, u64 v) { return fn_sim_atomic_max(p, v); }
FN_DEVICE u32 fn_atomic_or_u32(u32* p, u32 v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }

// A GPU faults on a misaligned load; so does this.
template <class T>
FN_DEVICE T fn_ld(const T* p) {
    if (__builtin_expect(((size_t)p & (sizeof(T) - 1)) != 0, 0)) fnsim::misaligned(p, sizeof(T));
    return *p;
}
template <class T>
FN_DEVICE T fn_ldg(const T* p) {
    return fn_ld(p);
}
template <class T>
FN_DEVICE T fn_ld_here(const T* p) {
    return fn_ld(p);
}
FN_DEVICE void fn_store_global(float* p, float4 v) {
    if (__builtin_expect(((size_t)p & 15u) != 0, 0)) fnsim::misaligned(p, 16);
    *reinterpret_cast<float4*>(p) = v;
}
