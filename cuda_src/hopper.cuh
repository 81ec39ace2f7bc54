// hopper.cuh: what sm_90a alone has and the prompt kernels use: bulk copies into shared memory, mbarriers, and
// wgmma with weights in registers and rows in shared memory.  Every caller has a second form with the same bytes
// for all other machines: a wgmma gives the bytes of the mma.sync of its 16-output rows (receipts: case hashes of
// deep_linear).
#pragma once
#include "prelude.cuh"

#ifdef FN_HOPPER

FN_DEVICE u32 fn_shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Of a whole warpgroup: registers a thread (a multiple of 8) from now on.
template <int N> FN_DEVICE void fn_registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> FN_DEVICE void fn_registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// __syncthreads of `threads` threads of the block (whole warps); id 1..15.
FN_DEVICE void fn_named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- mbarriers --------------------------------------------------------------------------------------------

FN_DEVICE void fn_barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(fn_shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
// After the inits, before other threads or copies use them (a __syncthreads follows).
FN_DEVICE void fn_barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
FN_DEVICE void fn_barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(fn_shared_address(barrier)) : "memory");
}
// Arrive, and expect this many bytes of bulk copies in the present phase.
FN_DEVICE void fn_barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(fn_shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Until the phase of this parity is complete.
FN_DEVICE void fn_barrier_wait(u64* barrier, u32 parity) {
    u32 done, at = fn_shared_address(barrier);
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

// bytes: a multiple of 16; both addresses aligned to 16.  Completes on the barrier.
FN_DEVICE void fn_bulk_copy(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            fn_shared_address(shared)),
        "l"(global), "r"(bytes), "r"(fn_shared_address(barrier))
        : "memory");
}

// Asks for the line of 128 bytes around an address to be brought into L2: each thread for its own, which costs a load's
// start, while a bulk prefetch of a line costs a copy's.
FN_DEVICE void fn_ask_for_line(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// ---- wgmma ------------------------------------------------------------------------------------------------

FN_DEVICE void fn_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FN_DEVICE void fn_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> FN_DEVICE void fn_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving the accumulators' registers across this point.
template <int TILES> FN_DEVICE void fn_hold(float (&d)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(d[j][i])::"memory");
}

// An A operand's registers are still its own here.  ptxas gives them away once the wgmma is issued, while it still
// reads them; an instruction behind the wait that could read them, and never does, holds them until then.
FN_DEVICE void fn_keep(const u32 (&a)[4], bool never, void* shared) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n@p st.shared.v4.b32 [%5], {%0, %1, %2, %3};\n}" ::"r"(a[0]),
        "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"((u32)never), "r"(fn_shared_address(shared))
        : "memory");
}

// A tile image in shared memory (rows of 128 bytes, 128-byte swizzle, K-major) as an operand: start / 16; 8 rows
// = 1024 bytes; swizzle mode 1.  A k step further is + 2 (32 bytes).
FN_DEVICE u64 fn_tile_descriptor(const void* image) {
    return (u64)(fn_shared_address(image) >> 4 & 0x3fffu) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// d += A B, or d = A B unless `more`: A 64 x 16 f16 in the registers of the warpgroup (a warp's 16 rows of d as of
// mma.m16n8k16), B 16 x 8 TILES in shared memory.  A is read while the product runs: fn_keep it behind the wait.  It
// is named as written too, so that what is kept is these registers and not a copy made before.
#define FN_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FN_A4 "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])
FN_DEVICE void fn_wgmma(float (&d)[8][4], u32 (&a)[4], u64 b, u32 more) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : FN_D4(0), FN_D4(1), FN_D4(2), FN_D4(3), FN_D4(4), FN_D4(5), FN_D4(6), FN_D4(7), FN_A4
        : "l"(b), "r"(more));
}

FN_DEVICE void fn_wgmma(float (&d)[16][4], u32 (&a)[4], u64 b, u32 more) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
        : FN_D4(0), FN_D4(1), FN_D4(2), FN_D4(3), FN_D4(4), FN_D4(5), FN_D4(6), FN_D4(7), FN_D4(8), FN_D4(9),
          FN_D4(10), FN_D4(11), FN_D4(12), FN_D4(13), FN_D4(14), FN_D4(15), FN_A4
        : "l"(b), "r"(more));
}

#undef FN_A4
#undef FN_D4
#endif  // FN_HOPPER
