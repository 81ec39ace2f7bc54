// executor.h: one fiber per CUDA thread.  A block runs on one host thread; its fibers are switched by hand at
// barriers and warp collectives and nowhere else.  Included by kernel text (through shim.h) and by the
// runtime.
//
// What must stay true: lanes, warps and blocks may run in any order (seed 0: rising; other seeds: shuffled),
// so a missing barrier changes bytes.  Threads that do not meet at the same barrier or collective are a
// launch failure.
#pragma once
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#define FN_SIM_HIDDEN __attribute__((visibility("hidden")))

namespace fnsim {

struct Dim {
    unsigned x, y, z;
};

struct Fiber {
    void* context;  // saved stack pointer, or a ucontext_t
    int tid, lane, warp;
};

// arrived: lanes waiting in the collective `op`; ready: lanes that can run; alive: lanes that have not
// exited. Slots are doubled by parity: a lane may enter the next exchange while slower ones still read this
// one, and no lane can enter the one after that before all have read.
struct alignas(64) Warp {
    unsigned arrived, alive, ready, op, parity, ballot[2];
    unsigned parked;                  // lanes in wait_prior of a block that runs early
    unsigned long long slot[2][32];   // exchanges: read by every lane
    unsigned long long input[32];     // reductions: read by the last lane only
    alignas(64) float values[4][32];  // hadamard, ldmatrix: in and out, transposed
    // mma: pairs of operands k, k + 1 of 16 outputs and of 8 rows, and the accumulators; each lane writes its
    // own
    alignas(64) unsigned mma_a[8][16], mma_b[8][8];
    alignas(64) float mma_c[8][16];
    unsigned long long result;
};

// What the running host thread executes.
struct Running {
    Fiber* current;
    Warp* warp;
    unsigned char* shared;
    Dim block, grid;
    Fiber* fibers;
    Warp* warps;
    int n_threads, n_warps, at_barrier, alive;
    void* host_context;
    bool inside, failed;
    bool early;   // the launches before are not done: wait_prior parks
    int waited;   // threads that called wait_prior
    unsigned long long random;
};
// __thread, not thread_local: that would call a wrapper at every access
extern __thread Running T FN_SIM_HIDDEN __attribute__((tls_model("initial-exec")));

enum Op : unsigned {
    OP_SYNC = 1,
    OP_SHUFFLE,
    OP_BALLOT,
    OP_SUM,
    OP_SUM_INT,
    OP_MAX,
    OP_HADAMARD,
    OP_MMA_F16,
    OP_MMA_BF16,
    OP_LDMATRIX
};

FN_SIM_HIDDEN void block_barrier();
FN_SIM_HIDDEN void wait_prior();
FN_SIM_HIDDEN void warp_barrier();
FN_SIM_HIDDEN bool warp_arrive(unsigned op);  // true in the last lane: do the work, then warp_release
FN_SIM_HIDDEN void warp_release();
FN_SIM_HIDDEN void mma(Warp& w, bool bf16);
[[noreturn]] FN_SIM_HIDDEN void misaligned(const void* address, size_t size_bytes);

typedef void (*Entry)(void** args);

// One compiled kernel.  kinds: one letter an argument: p pointer, u u32, i i32, q u64, f float.
struct Kernel {
    const char *family, *name;
    Entry entry;
    const char *kinds, *rights;
    unsigned block, blocks_per_sm, shared_bytes;
    bool fence;  // lets the next launch start only once it has waited itself
    // what launches must ask for: all above 48 KiB, else nothing; the same rule as KernelSpec.dynamic_on
    unsigned dynamic_bytes() const { return shared_bytes > 49152 ? shared_bytes : 0; }
    Kernel(const char* family, const char* name, Entry entry, const char* kinds, const char* rights,
           unsigned block, unsigned blocks_per_sm, unsigned shared_bytes, bool fence) FN_SIM_HIDDEN;
};

template <class T>
constexpr char kind_of() {
    if (std::is_pointer<T>::value) return 'p';
    if (std::is_same<T, unsigned>::value) return 'u';
    if (std::is_same<T, int>::value) return 'i';
    if (std::is_same<T, unsigned long long>::value) return 'q';
    if (std::is_same<T, float>::value) return 'f';
    return '?';
}
template <class... A>
constexpr bool fits(void (*)(A...), const char* kinds) {
    const char have[] = {kind_of<A>()..., 0};
    size_t i = 0;
    for (; have[i] && kinds[i]; i++)
        if (have[i] != kinds[i]) return false;
    return have[i] == kinds[i];
}
// Calls the kernel body with the launch's arguments; the body is a template argument so that it can be
// inlined.
template <auto F>
struct Unpack;
template <class... A, void (*F)(A...)>
struct Unpack<F> {
    template <size_t... I>
    static inline void go(void** a, std::index_sequence<I...>) {
        (void)a;
        F(*static_cast<typename std::remove_cv<A>::type*>(a[I])...);
    }
    static inline void go(void** a) { go(a, std::index_sequence_for<A...>{}); }
};
template <auto F>
static inline void call(void** a) {
    Unpack<F>::go(a);
}

}  // namespace fnsim
