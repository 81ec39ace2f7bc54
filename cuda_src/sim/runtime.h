// runtime.h: what the simulator's own sources share.  One process-wide lock (held by every entry point), so
// nothing here is locked again; kernels run on the calling thread, on request with helpers.
#pragma once
#include "shim.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace fnsim {

typedef int Result;                                // CUresult
constexpr unsigned kOptInSharedBytes = 227 << 10;  // most shared memory a block may have
constexpr size_t kEarlyLaunches = 3;               // most launches that are ahead of a running kernel
constexpr long long kModuleBytes = 64 << 10;       // what a loaded module takes of its device
constexpr long long kExecBytes = 64 << 10;         // what an executable takes, and in these steps
constexpr long long kNodeBytes = 512;              // for each of its nodes

enum : Result {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    UNSUPPORTED_LIMIT = 215,
    PEER_ACCESS_UNSUPPORTED = 217,
    ILLEGAL_STATE = 401,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ALREADY = 704,
    PEER_NOT_ENABLED = 705,
    HOST_ALREADY_REGISTERED = 712,
    HOST_NOT_REGISTERED = 713,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    GRAPH_UPDATE_FAILURE = 910,
};

struct Settings {
    u64 memory_bytes = (u64)8 << 30;
    u64 seed = 0;
    u64 n_sms = 132, n_devices = 1, generation = 90, n_workers = 1, check_rights = 0;
    u64 skip_kernels = 0;  // launches are checked, queued and counted, and their bodies left out
};
extern Settings settings FN_SIM_HIDDEN;

inline u64 mix(u64 x) {  // splitmix64
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// errors.cpp
FN_SIM_HIDDEN Result finding(Result code, const char* format, ...) __attribute__((format(printf, 2, 3)));
FN_SIM_HIDDEN bool error_words(Result code, const char** name, const char** text);

// executor.cpp, mma.cpp, workers.cpp
struct Parked;
// programmatic: every thread must call fn_wait_prior.  parked: a block of it that has run up to there, or null.
FN_SIM_HIDDEN bool launch(const Kernel& k, Dim grid, void** args, u64 seed, unsigned n_workers, bool programmatic,
                          Parked* parked, char* text, size_t text_bytes);
// A block, by seed, of a programmatic launch up to fn_wait_prior, before what comes before it is done.  Null:
// it failed.
FN_SIM_HIDDEN std::shared_ptr<Parked> run_early(const Kernel& k, Dim grid, const std::vector<u64>& args, u64 seed,
                                                char* text, size_t text_bytes);
FN_SIM_HIDDEN void set_mma_generation(unsigned generation);
FN_SIM_HIDDEN void run_on_workers(unsigned n, const std::function<void()>& job);

// module.cpp
FN_SIM_HIDDEN const Kernel* find_kernel(const std::string& name);
FN_SIM_HIDDEN unsigned argument_bytes(const Kernel& k, size_t i);

// ---- handles: a tag and a serial number that is never used again, so a closed handle is always refused ----
enum Tag : u64 {
    CONTEXT = 1,
    STREAM,
    EVENT,
    MODULE,
    FUNCTION,
    GRAPH,
    NODE,
    EXEC
};
FN_SIM_HIDDEN u64 new_handle(Tag tag);

struct Context;
struct Capture;

// One recording of an event, or the end of a stream's past work.
struct Mark {
    bool done = false;
    double when_ms = 0;
    u64 stream = 0;
};

// One piece of work: a stream item or a graph node.
struct Work {
    enum Kind {
        KERNEL,
        COPY,
        FILL,
        RECORD,
        WAIT,
        GRAPH
    } kind = KERNEL;
    // kernel
    u64 function = 0;
    const Kernel* kernel = nullptr;
    Dim grid = {0, 0, 0};
    std::vector<u64> args;
    bool programmatic = false;
    std::shared_ptr<Parked> parked;
    // copy (bytes travel in `image` when the source was pageable) and fill
    u64 to = 0, from = 0, size = 0;
    std::shared_ptr<std::vector<unsigned char>> image;
    unsigned value = 0, width = 1;
    // record, wait, graph
    std::shared_ptr<Mark> mark;
    std::shared_ptr<struct Plan> plan;
};
struct Node {
    u64 id;
    Work work;
    std::vector<size_t> after;
    std::vector<void*> pointers;
    bool early = false;  // its one edge is programmatic, from a kernel
};
struct Plan {
    std::vector<Node> nodes;
};  // a graph's content; `after` are indices of earlier nodes

struct Stream {
    u64 id = 0;
    Context* context = nullptr;
    bool blocking = true;
    int priority = 0;
    std::deque<Work> queue;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> frontier;
};
struct Event {
    u64 id = 0;
    Context* context = nullptr;
    bool timing = true;
    std::shared_ptr<Mark> mark;
    std::weak_ptr<Capture> capture;
    bool captured = false;
    std::vector<size_t> nodes;
};
struct Capture {
    u64 id = 0, origin = 0;
    int mode = 0;
    size_t thread = 0;
    bool valid = true;
    std::shared_ptr<Plan> plan = std::make_shared<Plan>();
};
struct Exec {
    u64 id = 0;
    Context* context = nullptr;
    long long bytes = 0;  // charged to its device
    std::shared_ptr<Plan> plan;
};
struct Graph {
    u64 id = 0;
    std::shared_ptr<Plan> plan;
};
struct Module {
    u64 id = 0;
    Context* context = nullptr;
    std::string family;
    std::map<std::string, u64> functions;
};
struct Function {
    u64 id = 0;
    Module* module = nullptr;
    const Kernel* kernel = nullptr;
    unsigned most_dynamic = 0;  // bytes of dynamic shared memory that a launch may ask for
};
struct Context {
    u64 id = 0;
    int device = 0;
    bool primary = false;
    Result error = OK;
    std::map<u64, Stream> streams;
    Stream legacy;
    std::vector<u64> peers;
};

struct World {
    bool ready = false;
    std::map<u64, std::unique_ptr<Context>> contexts;
    std::map<u64, std::unique_ptr<Event>> events;
    std::map<u64, std::unique_ptr<Module>> modules;
    std::unordered_map<u64, std::unique_ptr<Function>> functions;
    std::map<u64, std::unique_ptr<Graph>> graphs;
    std::map<u64, std::unique_ptr<Exec>> execs;
    std::map<u64, std::shared_ptr<Capture>> captures;
    u64 primary[8] = {}, primary_uses[8] = {};
    u64 bytes_copied = 0, bytes_filled = 0, launches = 0;
    // Order decisions and launches since the seed was set: a seed repeats whatever ran before it.
    u64 draws = 0, seeded_launches = 0;
};
extern World world FN_SIM_HIDDEN;
FN_SIM_HIDDEN Context* current_context();

// ---- memory.cpp ----
struct Allocation {
    enum Kind {
        DEVICE,
        PINNED,
        REGISTERED
    } kind;
    u64 base, size, charged, context, serial;
    int device;
    unsigned flags;
    u64 map_base, map_size;
};
FN_SIM_HIDDEN Allocation* find_allocation(u64 address);
FN_SIM_HIDDEN Result check_range(u64 address, u64 size, const char* what);  // OK, or a finding
FN_SIM_HIDDEN void describe_address(u64 address, char* text, size_t text_bytes);
FN_SIM_HIDDEN Result free_allocation(u64 base, bool in_teardown);
FN_SIM_HIDDEN Result free_context_memory(u64 context);
FN_SIM_HIDDEN Result check_any(u64 address, u64 size,
                               const char* what);  // the same, or host memory of others
FN_SIM_HIDDEN bool is_pageable(u64 address);
FN_SIM_HIDDEN u64 device_used(int device);
FN_SIM_HIDDEN Result charge(int device, long long bytes);
FN_SIM_HIDDEN std::string captured_by(u64 base, u64 size);  // graph.cpp: which live executable uses the range

// ---- stream.cpp ----
FN_SIM_HIDDEN Stream* find_stream(u64 handle);  // 0, 1, 2: the current context's legacy stream
FN_SIM_HIDDEN Result submit(Stream& s, Work&& work);
FN_SIM_HIDDEN Result execute(Context& c, Work& w);
FN_SIM_HIDDEN Result start_early(Context& c, const std::vector<Work*>& chain);  // launches behind the next one
FN_SIM_HIDDEN Result drain(Stream& s);
FN_SIM_HIDDEN Result drain_context(Context& c);
FN_SIM_HIDDEN Result drain_mark(Mark& m);
FN_SIM_HIDDEN void advance(Stream* wanted);
FN_SIM_HIDDEN Result refuse_while_capturing(const char* what);
FN_SIM_HIDDEN Result fail_context(Context& c, Result code);
FN_SIM_HIDDEN double now_ms();
FN_SIM_HIDDEN Result copy_now(u64 to, u64 from, u64 size, const char* what);  // copy.cpp
FN_SIM_HIDDEN void fill_now(const Work& w);                                   // copy.cpp
FN_SIM_HIDDEN Result run_plan(Context& c, Plan& p);                           // graph.cpp
FN_SIM_HIDDEN void invalidate_captures();
FN_SIM_HIDDEN size_t this_thread();

// ---- entry points ----
// ENTRY(name, version, state, params) { body }: registers the body under the name that cuGetProcAddress is
// asked for. version: the least API version that gets it (the greatest fitting one wins).  state: what must
// hold before.
enum State {
    ALWAYS,
    INITIALIZED,
    CURRENT
};  // CURRENT: a context is current and has no sticky error
struct EntryPoint {
    const char* name;
    int version;
    State state;
    void* address;
    u64 calls;
    EntryPoint* next;
    EntryPoint(const char* name, int version, State state, void* address) FN_SIM_HIDDEN;
};
FN_SIM_HIDDEN Result enter(EntryPoint& e);
FN_SIM_HIDDEN void leave(EntryPoint& e, Result r);
template <auto F>
struct Guard;
template <class... A, Result (*F)(A...)>
struct Guard<F> {
    static EntryPoint* point;
    static Result call(A... a) {
        Result r = enter(*point);
        if (r == OK) r = F(a...);
        leave(*point, r);
        return r;
    }
};
template <class... A, Result (*F)(A...)>
EntryPoint* Guard<F>::point;

#define ENTRY_AS(tag, name, version, state, params)                                        \
    static Result body_##tag params;                                                       \
    static EntryPoint entry_##tag(name, version, state, (void*)&Guard<&body_##tag>::call); \
    static const bool linked_##tag = (Guard<&body_##tag>::point = &entry_##tag, true);     \
    static Result body_##tag params
#define ENTRY(name, state, params) ENTRY_AS(name, #name, 0, state, params)

}  // namespace fnsim
