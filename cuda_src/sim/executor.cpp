// executor.cpp: runs launches.  Owns fiber stacks, block scheduling, barriers, collectives, and the handlers
// that turn a fault inside a kernel into a launch failure.  Called by stream.cpp only.
//
// Over 500 lines: all of it shares the running fiber's state, which must stay in one file's thread locals.
#include "async.h"
#include "runtime.h"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if !defined(__x86_64__) && !defined(FN_SIM_UCONTEXT)
#define FN_SIM_UCONTEXT 1  // aarch64 and others: a system call a switch, but portable
#endif
#ifdef FN_SIM_UCONTEXT
#include <ucontext.h>
#endif

namespace fnsim {

__thread Running T;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kMaxThreads = 1024;
constexpr size_t kSharedBytes = 227 << 10, kSharedGuard = 256;

// ---- context switch ----
#ifdef FN_SIM_UCONTEXT
void switch_to(void** save, void* to) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}
#else
extern "C" FN_SIM_HIDDEN void fnsim_switch(void** save, void* to);
asm(R"(.text
.globl fnsim_switch
.hidden fnsim_switch
.type fnsim_switch,@function
fnsim_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
.size fnsim_switch,.-fnsim_switch
)");
inline void switch_to(void** save, void* to) { fnsim_switch(save, to); }
#endif

// Per host thread: stacks, fibers, warps, shared memory.  made: fibers whose stack is set up; a fiber stays
// in fiber_main between blocks, so a block costs one switch a thread and no set-up.
struct Bench {
    unsigned char *stacks, *shared;
    Fiber* fibers;
    Warp* warps;
    int made = 0;
    char text[512];
#ifdef FN_SIM_UCONTEXT
    ucontext_t contexts[kMaxThreads];
#endif
    Bench() {
        void* at = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) abort();
        stacks = static_cast<unsigned char*>(at);
        madvise(stacks, kStackBytes * kMaxThreads, MADV_HUGEPAGE);
        fibers = new Fiber[kMaxThreads];
        warps = static_cast<Warp*>(aligned_alloc(64, sizeof(Warp) * (kMaxThreads / 32)));
        memset(static_cast<void*>(warps), 0, sizeof(Warp) * (kMaxThreads / 32));
        shared = static_cast<unsigned char*>(aligned_alloc(1024, kSharedBytes + 1024));
    }
};
thread_local Bench* bench __attribute__((tls_model("initial-exec")));
std::vector<Bench*> spare_benches;  // of blocks that ran early
thread_local const Kernel* kernel __attribute__((tls_model("initial-exec")));
thread_local void** arguments __attribute__((tls_model("initial-exec")));

// Leaves the block from inside a fiber.  The stacks are given up and rebuilt by the next block.
[[noreturn]] void fail(const char* what) {
    const Dim& b = T.block;
    snprintf(bench->text, sizeof bench->text, "kernel %s block (%u,%u,%u) thread %d: %s", kernel->name, b.x,
             b.y, b.z, T.current->tid, what);
    T.failed = true;
    void* nowhere;
    switch_to(&nowhere, T.host_context);
    abort();
}

inline u64 draw() {  // xorshift
    u64 x = T.random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return T.random = x;
}
inline int nth_bit(unsigned mask, unsigned n) {
    while (n--) mask &= mask - 1;
    return __builtin_ctz(mask);
}

// The next fiber that can run; seed 0: the next lane of this warp, then the next warp.
Fiber* pick() {
    const int n = T.n_warps, here = (int)(T.warp - T.warps);
    if (__builtin_expect(T.random != 0, 0)) {
        const int first = (int)(draw() % (unsigned)n);
        for (int k = 0; k < n; k++) {
            const int i = (first + k) % n;
            if (unsigned r = T.warps[i].ready)
                return T.fibers + 32 * i + nth_bit(r, (unsigned)(draw() % (unsigned)__builtin_popcount(r)));
        }
        return nullptr;
    }
    if (unsigned r = T.warp->ready) {
        const int lane = T.current->lane;
        const unsigned above = lane == 31 ? 0 : r & (0xfffffffeu << lane);
        return T.fibers + 32 * here + __builtin_ctz(above ? above : r);
    }
    for (int k = 1; k < n; k++) {
        const int i = here + k < n ? here + k : here + k - n;
        if (unsigned r = T.warps[i].ready) return T.fibers + 32 * i + __builtin_ctz(r);
    }
    return nullptr;
}
inline void resume(Fiber* f) {
    Fiber* me = T.current;
    if (f == me) return;
    T.current = f;
    T.warp = T.warps + f->warp;
    switch_to(&me->context, f->context);
}
[[noreturn]] void report_deadlock() {
    char what[320];
    for (int i = 0; i < T.n_warps; i++)
        if (unsigned got = T.warps[i].arrived) {
            snprintf(what, sizeof what,
                     "deadlock: %d of %d threads wait at a block barrier while warp %d has only lanes %08x "
                     "in a warp "
                     "collective (op %u)",
                     T.at_barrier, T.n_threads, i, got, T.warps[i].op);
            fail(what);
        }
    snprintf(what, sizeof what, "deadlock: %d of %d threads wait at a block barrier", T.at_barrier,
             T.n_threads);
    fail(what);
}
// No fiber can run: the block goes no further before its launch begins, or never.
inline void halt() {
    if (!T.early || !T.waited) report_deadlock();
    Fiber* me = T.current;
    switch_to(&me->context, T.host_context);
}
inline void wait() {
    const int lane = T.current->lane;
    const unsigned r = T.warp->ready &= ~(1u << lane);
    // the next lane of the warp is the next fiber: what pick() would say, and nearly always so
    const bool plain = T.random == 0 && lane < 31 && r >> (lane + 1) & 1;
    Fiber* next = plain ? T.current + 1 : pick();
    if (__builtin_expect(next != nullptr, 1))
        resume(next);
    else
        halt();
}

void fiber_main() {
    for (;;) {
        kernel->entry(arguments);
        Fiber* me = T.current;
        Warp& w = *T.warp;
        w.alive &= ~(1u << me->lane);
        w.ready &= ~(1u << me->lane);
        T.alive--;
        if (w.arrived) fail("exited while the rest of its warp waits in a collective");
        if (T.at_barrier) fail("exited while other threads wait at a block barrier");
        if (!T.alive) {
            switch_to(&me->context, T.host_context);
            continue;
        }
        if (Fiber* next = pick())
            resume(next);
        else
            halt();
    }
}

void prepare(Bench& b, int t) {
#ifdef FN_SIM_UCONTEXT
    ucontext_t& c = b.contexts[t];
    getcontext(&c);
    c.uc_stack.ss_sp = b.stacks + kStackBytes * (size_t)t;
    c.uc_stack.ss_size = kStackBytes - 4096;
    c.uc_link = nullptr;
    makecontext(&c, fiber_main, 0);
    b.fibers[t].context = &c;
#else
    // tops are shifted against each other, so that the hot ends of the stacks do not share cache sets
    unsigned char* top = b.stacks + kStackBytes * (size_t)(t + 1) - (size_t)(t * 192 % 4096);
    void** sp = reinterpret_cast<void**>(reinterpret_cast<size_t>(top) & ~(size_t)63);
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(fiber_main);
    sp -= 6;
    memset(sp, 0, 48);
    b.fibers[t].context = sp;
#endif
}

void run_ready(Bench& b) {
    Fiber* first = T.random ? pick() : b.fibers;
    T.current = first;
    T.warp = b.warps + first->warp;
    T.inside = true;
    switch_to(&T.host_context, first->context);
    T.inside = false;
    if (T.failed) b.made = 0;
}

// The block has ended.  waits: every thread must have called fn_wait_prior, once.
void end_block(Bench& b, bool waits) {
    const Dim& at = T.block;
    const unsigned bytes = kernel->shared_bytes;
    if (!T.failed && bytes)
        for (size_t i = 0; i < kSharedGuard; i++)
            if (b.shared[bytes + i] != 0xff) {
                snprintf(b.text, sizeof b.text,
                         "kernel %s block (%u,%u,%u): wrote %zu bytes past its %u bytes of shared memory",
                         kernel->name, at.x, at.y, at.z, i + 1, bytes);
                T.failed = true;
                break;
            }
    if (!T.failed && waits && T.waited != T.n_threads) {
        snprintf(b.text, sizeof b.text,
                 "kernel %s block (%u,%u,%u): fn_wait_prior was called %d times by %d threads", kernel->name,
                 at.x, at.y, at.z, T.waited, T.n_threads);
        T.failed = true;
    }
    if (T.failed) b.made = 0;
}

// early: up to fn_wait_prior.
void run_block(Bench& b, Dim at, bool early) {
    const int n = (int)kernel->block;
    T.block = at;
    T.early = early;
    T.waited = 0;
    T.fibers = b.fibers;
    T.warps = b.warps;
    T.shared = b.shared;
    T.n_threads = T.alive = n;
    T.n_warps = n >> 5;
    T.at_barrier = 0;
    T.failed = false;
    async_forget();
    const unsigned bytes = kernel->shared_bytes;
    if (bytes) memset(b.shared, 0xff, bytes + kSharedGuard);
    for (int i = 0; i < T.n_warps; i++) {
        b.warps[i].arrived = b.warps[i].parked = 0;
        b.warps[i].alive = b.warps[i].ready = 0xffffffffu;
    }
    for (int t = b.made; t < n; t++) {
        b.fibers[t].tid = t;
        b.fibers[t].lane = t & 31;
        b.fibers[t].warp = t >> 5;
        prepare(b, t);
    }
    if (n > b.made) b.made = n;
    T.current = b.fibers;
    T.warp = b.warps;
    run_ready(b);
}

Dim block_at(u64 at, Dim grid) {
    return Dim{(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y)};
}
u64 block_random(u64 seed, u64 at) { return seed ? mix(seed ^ mix(at + 1)) | 1 : 0; }

// The rounding mode of kernels while it lives: no flush to zero, whatever the host process has set.
struct Rounding {
#if defined(__x86_64__)
    const unsigned mode = _mm_getcsr();
    Rounding() { _mm_setcsr(0x1f80); }
    ~Rounding() { _mm_setcsr(mode); }
#endif
};

// What the host thread's blocks run on and from, while it lives.
struct Seat {
    Bench* const bench_before = bench;
    Seat(Bench* b, const Kernel& k, void** args) {
        bench = b;
        kernel = &k;
        arguments = args;
    }
    ~Seat() { bench = bench_before; }
};

// ---- faults inside kernels ----
struct sigaction previous[65];

void on_fault(int sig, siginfo_t* info, void* context) {
    if (T.inside) {
        T.inside = false;
        char what[300];
        if (sig == SIGFPE) {
            snprintf(what, sizeof what, "integer division by zero");
        } else {
            char where[200];
            describe_address((u64)(size_t)info->si_addr, where, sizeof where);
            snprintf(what, sizeof what, "illegal address %p: %s", info->si_addr, where);
        }
        fail(what);  // SA_NODEFER: the signal is not blocked, so leaving the handler this way is sound
    }
    const struct sigaction& old = previous[sig];
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(sig, info, context);
    } else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN) {
        signal(sig, SIG_DFL);
        raise(sig);
    } else {
        old.sa_handler(sig);
    }
}
void install_fault_handlers() {
    for (int sig : {SIGSEGV, SIGBUS, SIGFPE}) {
        struct sigaction now;
        sigaction(sig, nullptr, &now);
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) continue;
        previous[sig] = now;
        struct sigaction ours;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigemptyset(&ours.sa_mask);
        sigaction(sig, &ours, nullptr);
    }
}

}  // namespace

// ---- called from kernel text ----
void block_barrier() {
    if (T.alive != T.n_threads) fail("block barrier after a thread of the block has exited");
    if (++T.at_barrier == T.n_threads) {
        T.at_barrier = 0;
        for (int i = 0; i < T.n_warps; i++) T.warps[i].ready = 0xffffffffu;
        return;
    }
    wait();
}
bool warp_arrive(unsigned op) {
    Warp& w = *T.warp;
    if (!w.arrived) {
        if (w.alive != 0xffffffffu) fail("warp collective after a lane of the warp has exited");
        w.op = op;
    } else if (w.op != op) {
        fail("its warp is in another collective (divergent control flow)");
    }
    w.arrived |= 1u << T.current->lane;
    if (w.arrived == 0xffffffffu) return true;
    wait();
    return false;
}
void warp_release() {
    T.warp->arrived = 0;
    T.warp->ready = 0xffffffffu;
}
void warp_barrier() {
    if (warp_arrive(OP_SYNC)) warp_release();
}
void wait_prior() {
    T.waited++;
    if (__builtin_expect(!T.early, 1)) return;
    if (async_pending()) fail("copies under way at fn_wait_prior are not modelled");
    T.warp->parked |= 1u << T.current->lane;
    wait();
}
void misaligned(const void* address, size_t size_bytes) {
    char what[100];
    snprintf(what, sizeof what, "misaligned access of %zu bytes at %p", size_bytes, address);
    fail(what);
}

// ---- blocks ahead of their launch ----
// A block that has run up to fn_wait_prior, on a bench of its own.  Fibers stay on their host thread: compilers
// keep addresses of thread-local data over a switch.
struct Parked {
    const Kernel& kernel;
    const Dim grid;
    std::vector<u64> values;
    std::vector<void*> pointers;
    u64 at = 0;
    const size_t thread = this_thread();
    Bench* bench = nullptr;
    Running state;

    Parked(const Kernel& k, Dim grid, const std::vector<u64>& args)
        : kernel(k), grid(grid), values(args), pointers(args.size()) {
        for (size_t i = 0; i < values.size(); i++) pointers[i] = &values[i];
        if (spare_benches.empty()) {
            bench = new Bench;
        } else {
            bench = spare_benches.back();
            spare_benches.pop_back();
        }
    }
    ~Parked() {
        bench->made = 0;  // fibers that were left where they stood
        spare_benches.push_back(bench);
    }
};

std::shared_ptr<Parked> run_early(const Kernel& k, Dim grid, const std::vector<u64>& args, u64 seed, char* text,
                                  size_t text_bytes) {
    install_fault_handlers();
    auto p = std::make_shared<Parked>(k, grid, args);
    p->at = mix(seed) % ((u64)grid.x * grid.y * grid.z);
    Rounding rounding;
    Seat seat(p->bench, k, p->pointers.data());
    T.grid = grid;
    T.random = block_random(seed, p->at);
    run_block(*p->bench, block_at(p->at, grid), true);
    if (!T.failed && !T.alive) end_block(*p->bench, true);
    if (T.failed) {
        snprintf(text, text_bytes, "%s", p->bench->text);
        return nullptr;
    }
    p->state = T;
    return p;
}

static bool run_rest(Parked& p, char* text, size_t text_bytes) {
    Rounding rounding;
    Seat seat(p.bench, p.kernel, p.pointers.data());
    T = p.state;
    T.early = false;
    for (int i = 0; i < T.n_warps; i++) {
        T.warps[i].ready |= T.warps[i].parked;
        T.warps[i].parked = 0;
    }
    run_ready(*p.bench);
    end_block(*p.bench, true);
    if (T.failed) snprintf(text, text_bytes, "%s", p.bench->text);
    return !T.failed;
}

// ---- launch ----
bool launch(const Kernel& k, Dim grid, void** args, u64 seed, unsigned n_workers, bool programmatic,
            Parked* parked, char* text, size_t text_bytes) {
    install_fault_handlers();
    const u64 n_blocks = (u64)grid.x * grid.y * grid.z;
    // shuffled block order: a walk with an odd-ish stride that has no factor in common with the count
    u64 start = 0, stride = 1;
    if (seed && n_blocks > 1) {
        start = mix(seed) % n_blocks;
        stride = 1 + mix(seed + 1) % (n_blocks - 1);
        for (u64 a = stride, c = n_blocks;;) {
            while (c) {
                u64 r = a % c;
                a = c;
                c = r;
            }
            if (a == 1) break;
            a = ++stride;
            c = n_blocks;
        }
    }
    if (parked && parked->thread != this_thread()) parked = nullptr;  // it has written nothing: as if it had not run
    if (parked && !run_rest(*parked, text, text_bytes)) return false;
    std::atomic<u64> next{0};
    std::atomic<bool> bad{false};
    std::mutex mutex;
    auto work = [&] {
        if (!bench) bench = new Bench;
        kernel = &k;
        arguments = args;
        T.grid = grid;
        Rounding rounding;
        for (u64 i; !bad && (i = next++) < n_blocks;) {
            const u64 at = seed ? (start + (unsigned __int128)i * stride % n_blocks) % n_blocks : i;
            if (parked && at == parked->at) continue;
            T.random = block_random(seed, at);
            run_block(*bench, block_at(at, grid), false);
            end_block(*bench, programmatic);
            if (T.failed) {
                std::lock_guard<std::mutex> hold(mutex);
                if (!bad) snprintf(text, text_bytes, "%s", bench->text);
                bad = true;
            }
        }
    };
    if (n_workers > 1 && n_blocks > 1)
        run_on_workers(n_workers, work);
    else
        work();
    return !bad;
}

}  // namespace fnsim
