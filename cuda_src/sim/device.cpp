// device.cpp: initialisation, device facts, contexts, and the table behind cuGetProcAddress.  Settings are
// taken by fnsim_set; handles, the entry lock and the counters live here.
#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>

#include "runtime.h"

#define FN_EXPORT extern "C" __attribute__((visibility("default")))

namespace fnsim {

Settings settings;
World world;

namespace {

std::recursive_mutex lock;
EntryPoint*& entry_points() {
    static EntryPoint* first = nullptr;
    return first;
}
u64 n_handles, n_calls;
constexpr long long kContextBytes = 8 << 20;
thread_local std::vector<u64> stack;  // current contexts of this host thread

Context* find_context(u64 id) {
    auto i = world.contexts.find(id);
    if (i != world.contexts.end()) return i->second.get();
    finding(INVALID_CONTEXT, "context %#llx was destroyed or never made", id);
    return nullptr;
}
bool is_device(int d) { return d >= 0 && (u64)d < settings.n_devices; }

// calls that a context with a sticky error still answers
bool usable_when_broken(const char* name) {
    static const std::set<std::string> names = {
        "cuCtxDestroy",    "cuCtxPopCurrent", "cuCtxPushCurrent",          "cuCtxSetCurrent",
        "cuCtxGetCurrent", "cuCtxGetDevice",  "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxGetState"};
    return names.count(name) != 0;
}

Result make_context(u64* out, int device, bool primary) {
    if (Result r = charge(device, kContextBytes)) return r;
    auto c = std::make_unique<Context>();
    c->id = new_handle(CONTEXT);
    c->device = device;
    c->primary = primary;
    c->legacy.context = c.get();
    *out = c->id;
    world.contexts[c->id] = std::move(c);
    return OK;
}

template <class T>
void erase_of(std::map<u64, std::unique_ptr<T>>& in, Context* c) {
    for (auto i = in.begin(); i != in.end();) i = i->second->context == c ? in.erase(i) : std::next(i);
}
Result destroy_context(u64 id) {
    Context* c = find_context(id);
    if (!c) return INVALID_CONTEXT;
    if (!c->error) drain_context(*c);
    for (auto i = world.captures.begin(); i != world.captures.end();)
        i = c->streams.count(i->second->origin) ? world.captures.erase(i) : std::next(i);
    erase_of(world.events, c);
    for (auto& i : world.execs)
        if (i.second->context == c) charge(c->device, -i.second->bytes);
    erase_of(world.execs, c);
    for (auto i = world.functions.begin(); i != world.functions.end();)
        i = i->second->module->context == c ? world.functions.erase(i) : std::next(i);
    for (auto& i : world.modules)
        if (i.second->context == c) charge(c->device, -kModuleBytes);
    erase_of(world.modules, c);
    const Result r = free_context_memory(id);
    charge(c->device, -kContextBytes);
    world.contexts.erase(id);
    return r;
}

}  // namespace

u64 new_handle(Tag tag) { return (u64)tag << 44 | ++n_handles << 4; }

Context* current_context() {
    if (stack.empty()) return nullptr;
    auto i = world.contexts.find(stack.back());
    return i == world.contexts.end() ? nullptr : i->second.get();
}

EntryPoint::EntryPoint(const char* name, int version, State state, void* address)
    : name(name), version(version), state(state), address(address), calls(0), next(entry_points()) {
    entry_points() = this;
}
Result enter(EntryPoint& e) {
    lock.lock();
    e.calls++;
    n_calls++;
    if (e.state != ALWAYS && !world.ready) return NOT_INITIALIZED;
    if (e.state != CURRENT) return OK;
    if (stack.empty()) return INVALID_CONTEXT;
    Context* c = find_context(stack.back());
    if (!c) return 709;
    if (c->error && !usable_when_broken(e.name)) return c->error;
    return OK;
}
void leave(EntryPoint&, Result) { lock.unlock(); }

// ---- devices ----
ENTRY(cuInit, ALWAYS, (unsigned flags)) {
    if (flags) return INVALID_VALUE;
    set_mma_generation((unsigned)settings.generation);
    world.ready = true;
    return OK;
}
ENTRY(cuDriverGetVersion, ALWAYS, (int* out)) {
    *out = 13000;
    return OK;
}
ENTRY(cuDeviceGetCount, INITIALIZED, (int* out)) {
    *out = (int)settings.n_devices;
    return OK;
}
ENTRY(cuDeviceGet, INITIALIZED, (int* out, int ordinal)) {
    if (!is_device(ordinal)) return INVALID_DEVICE;
    *out = ordinal;
    return OK;
}
ENTRY(cuDeviceGetName, INITIALIZED, (char* out, int n, int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    snprintf(out, (size_t)n, "flashnext simulator");
    return OK;
}
ENTRY(cuDeviceGetUuid, INITIALIZED, (unsigned char* out, int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    memcpy(out, "flashnext-sim", 13);
    out[13] = out[14] = 0;
    out[15] = (unsigned char)device;
    return OK;
}
ENTRY(cuDeviceTotalMem, INITIALIZED, (size_t* out, int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    *out = settings.memory_bytes;
    return OK;
}
ENTRY(cuDeviceGetPCIBusId, INITIALIZED, (char* out, int n, int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    snprintf(out, (size_t)n, "0000:%02X:00.0", device + 1);
    return OK;
}
ENTRY(cuDeviceCanAccessPeer, INITIALIZED, (int* out, int device, int peer)) {
    if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
    *out = device != peer;
    return OK;
}
ENTRY(cuDeviceGetAttribute, INITIALIZED, (int* out, int attribute, int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    static const std::map<int, int> facts = {
        // CUdevice_attribute
        {1, 1024},  // threads a block
        {2, 1024},        {3, 1024},   {4, 64},        {5, 0x7fffffff},
        {6, 65535},       {7, 65535},  {8, 49152},      // static shared memory a block
        {9, 65536},                                     // constant memory
        {10, 32},                                       // warp
        {11, 0x7fffffff}, {12, 65536},                  // registers a block
        {13, 1980000},    {14, 512},   {17, 0},         // no run time limit
        {18, 0},                                        // not integrated
        {19, 1},                                        // can map host memory
        {20, 0},                                        // compute mode: default
        {31, 1},                                        // concurrent kernels
        {33, 1},                                        // PCI bus id: device + 1, below
        {36, 2619000},    {37, 6144},  {38, 50 << 20},  // L2
        {39, 2048},                                     // threads an SM
        {40, 3},                                        // copy engines
        {41, 1},                                        // unified addressing
        {78, 1},                                        // stream priorities
        {81, 233472},     {82, 65536},                  // shared memory and registers an SM
        {83, 0},          {84, 0},                      // managed memory, multi-GPU board
        {88, 0},                                        // no pageable access
        {91, 1},                                        // host pointers of registered memory
        {95, 1},          {96, 1},     {97, (int)kOptInSharedBytes},  // shared memory a block that asks
        {106, 32},                                      // blocks an SM
        {111, 1024},                                    // reserved shared memory a block
        {115, 0},
    };
    switch (attribute) {
        case 16: *out = (int)settings.n_sms; return OK;
        case 33: *out = device + 1; return OK;
        case 75: *out = (int)(settings.generation / 10); return OK;
        case 76: *out = (int)(settings.generation % 10); return OK;
        default: break;
    }
    auto i = facts.find(attribute);
    *out = i == facts.end() ? 0 : i->second;
    return OK;
}

// ---- contexts ----
static Result create_and_push(u64* out, int device) {
    if (!out) return INVALID_VALUE;
    if (!is_device(device)) return INVALID_DEVICE;
    if (Result r = make_context(out, device, false)) return r;
    stack.push_back(*out);
    return OK;
}
ENTRY(cuCtxCreate, INITIALIZED, (u64 * out, unsigned, int device)) { return create_and_push(out, device); }
ENTRY_AS(cuCtxCreate_v4, "cuCtxCreate", 12050, INITIALIZED, (u64 * out, const void*, unsigned, int device)) {
    return create_and_push(out, device);
}
ENTRY(cuCtxDestroy, INITIALIZED, (u64 id)) {
    Context* c = find_context(id);
    if (!c) return INVALID_CONTEXT;
    if (c->primary) return finding(INVALID_CONTEXT, "cuCtxDestroy of a primary context");
    if (!stack.empty() && stack.back() == id) stack.pop_back();
    return destroy_context(id);
}
ENTRY(cuCtxPushCurrent, INITIALIZED, (u64 id)) {
    if (!find_context(id)) return INVALID_CONTEXT;
    stack.push_back(id);
    return OK;
}
ENTRY(cuCtxPopCurrent, INITIALIZED, (u64 * out)) {
    if (stack.empty()) return INVALID_CONTEXT;
    if (out) *out = stack.back();
    stack.pop_back();
    return OK;
}
ENTRY(cuCtxSetCurrent, INITIALIZED, (u64 id)) {
    if (id && !find_context(id)) return INVALID_CONTEXT;
    if (!stack.empty()) stack.pop_back();
    if (id) stack.push_back(id);
    return OK;
}
ENTRY(cuCtxGetCurrent, INITIALIZED, (u64 * out)) {
    *out = stack.empty() ? 0 : stack.back();
    return OK;
}
ENTRY(cuCtxGetDevice, INITIALIZED, (int* out)) {
    if (stack.empty() || !find_context(stack.back())) return INVALID_CONTEXT;
    *out = find_context(stack.back())->device;
    return OK;
}
ENTRY_AS(cuCtxGetDevice_v2, "cuCtxGetDevice", 13000, INITIALIZED, (int* out, u64 id)) {
    if (!id && !stack.empty()) id = stack.back();
    Context* c = find_context(id);
    if (!c) return INVALID_CONTEXT;
    *out = c->device;
    return OK;
}
ENTRY(cuCtxEnablePeerAccess, CURRENT, (u64 peer, unsigned flags)) {
    Context *c = current_context(), *p = find_context(peer);
    if (!p) return INVALID_CONTEXT;
    if (flags) return INVALID_VALUE;
    if (p->device == c->device)
        return finding(INVALID_DEVICE, "peer access of device %d to itself", c->device);
    for (u64 have : c->peers)
        if (have == peer) return PEER_ALREADY;
    c->peers.push_back(peer);
    return OK;
}
ENTRY(cuCtxDisablePeerAccess, CURRENT, (u64 peer)) {
    Context* c = current_context();
    for (size_t i = 0; i < c->peers.size(); i++)
        if (c->peers[i] == peer) {
            c->peers.erase(c->peers.begin() + (long)i);
            return OK;
        }
    return PEER_NOT_ENABLED;
}
ENTRY(cuDevicePrimaryCtxRetain, INITIALIZED, (u64 * out, int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    if (!world.primary[device])
        if (Result r = make_context(&world.primary[device], device, true)) return r;
    world.primary_uses[device]++;
    *out = world.primary[device];
    return OK;
}
ENTRY(cuDevicePrimaryCtxRelease, INITIALIZED, (int device)) {
    if (!is_device(device)) return INVALID_DEVICE;
    if (!world.primary_uses[device])
        return finding(INVALID_CONTEXT, "primary context of device %d released too often", device);
    if (--world.primary_uses[device]) return OK;
    const u64 id = world.primary[device];
    world.primary[device] = 0;
    return destroy_context(id);
}
ENTRY(cuDevicePrimaryCtxGetState, INITIALIZED, (int device, unsigned* flags, int* active)) {
    if (!is_device(device)) return INVALID_DEVICE;
    *flags = 0;
    *active = world.primary[device] != 0;
    return OK;
}

ENTRY(cuGetErrorName, ALWAYS, (int code, const char** out)) {
    *out = nullptr;
    return error_words(code, out, nullptr) ? OK : INVALID_VALUE;
}
ENTRY(cuGetErrorString, ALWAYS, (int code, const char** out)) {
    *out = nullptr;
    return error_words(code, nullptr, out) ? OK : INVALID_VALUE;
}

}  // namespace fnsim

using namespace fnsim;

FN_EXPORT Result cuGetProcAddress_v2(const char* name, void** out, int version, u64, int* status) {
    if (!strcmp(name, "cuGetProcAddress")) {  // the binding knows the second form alone
        *out = (void*)&cuGetProcAddress_v2;
        if (status) *status = 0;
        return OK;
    }
    const EntryPoint* best = nullptr;
    for (const EntryPoint* e = entry_points(); e; e = e->next)
        if (!strcmp(e->name, name) && e->version <= version && (!best || e->version > best->version))
            best = e;
    *out = best ? best->address : nullptr;
    if (status) *status = best ? 0 : 1;
    return best ? OK : NOT_FOUND;
}
FN_EXPORT Result cuGetProcAddress(const char* name, void** out, int version, u64 flags) {
    return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

// Settings by name.  0: taken; 1: unknown name or value out of range; 2: what is open forbids it.
FN_EXPORT int fnsim_set(const char* name, u64 value) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    const std::string key = name;
    if (key == "seed") {
        settings.seed = value;
        world.draws = world.seeded_launches = 0;
    } else if (key == "workers" && value >= 1 && value <= 64) {
        settings.n_workers = value;
    } else if (key == "check_rights") {
        settings.check_rights = value;
    } else if (key == "skip_kernels" && value <= 1) {
        settings.skip_kernels = value;
    } else if (key == "sms" && value) {
        settings.n_sms = value;
    } else if (key == "generation" && (value == 80 || value == 90)) {
        settings.generation = value;
        set_mma_generation((unsigned)value);
    } else if (key == "memory_bytes" && value) {
        for (int d = 0; d < 4; d++)
            if (device_used(d) > value) return 2;
        settings.memory_bytes = value;
    } else if (key == "devices" && value >= 1 && value <= 4) {
        for (auto& i : world.contexts)
            if ((u64)i.second->device >= value) return 2;
        settings.n_devices = value;
    } else {
        return 1;
    }
    return 0;
}
FN_EXPORT u64 fnsim_get(const char* name) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    const std::string key = name;
    if (key == "seed") return settings.seed;
    if (key == "workers") return settings.n_workers;
    if (key == "check_rights") return settings.check_rights;
    if (key == "skip_kernels") return settings.skip_kernels;
    if (key == "memory_bytes") return settings.memory_bytes;
    if (key == "sms") return settings.n_sms;
    if (key == "devices") return settings.n_devices;
    if (key == "generation") return settings.generation;
    if (key == "calls") return n_calls;
    if (key == "launches") return world.launches;
    if (key == "bytes_copied") return world.bytes_copied;
    if (key == "bytes_filled") return world.bytes_filled;
    if (key == "contexts") return world.contexts.size();
    if (key == "handles") {  // live, without contexts; functions go with their modules
        u64 n = world.events.size() + world.modules.size() + world.graphs.size() + world.execs.size() +
                world.captures.size();
        for (auto& i : world.contexts) n += i.second->streams.size();
        return n;
    }
    if (key == "used_bytes") {
        u64 sum = 0;
        for (int d = 0; d < 4; d++) sum += device_used(d);
        return sum;
    }
    return ~(u64)0;
}
// The i-th entry point's name and call count; 0 past the end.
FN_EXPORT int fnsim_calls(u64 i, const char** name, u64* calls) {
    const EntryPoint* e = entry_points();
    while (e && i--) e = e->next;
    if (!e) return 0;
    *name = e->name;
    *calls = e->calls;
    return 1;
}
