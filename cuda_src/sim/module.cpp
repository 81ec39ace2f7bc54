// module.cpp: kernels by name, modules, functions, launches.  An image is the text FLASHNEXT-SIM, a zero
// byte, the family's name, a zero byte, the digest of the family's sources, a zero byte: accepted only when
// the digest is that of the sources this library was built from, so a stale image cannot run new code
// unnoticed.
#include <cstdio>

#include "runtime.h"

namespace fnsim {

// Written by the build: every family with the digest of its sources; digest "" and the compiler's words when
// it failed.
struct Built {
    const char *family, *digest, *words;
};
extern const Built built[];  // ends with a null family

namespace {

constexpr char kMagic[] = "FLASHNEXT-SIM";

std::map<std::string, const Kernel*>& kernels() {
    static std::map<std::string, const Kernel*> table;
    return table;
}
Module* find_module(u64 handle) {
    auto i = world.modules.find(handle);
    if (i != world.modules.end()) return i->second.get();
    finding(INVALID_HANDLE, "module %#llx was unloaded or never loaded", handle);
    return nullptr;
}
Function* find_function(u64 handle) {
    auto i = world.functions.find(handle);
    if (i != world.functions.end()) return i->second.get();
    finding(INVALID_HANDLE, "function %#llx belongs to no loaded module", handle);
    return nullptr;
}

}  // namespace

Kernel::Kernel(const char* family, const char* name, Entry entry, const char* kinds, const char* rights,
               unsigned block, unsigned blocks_per_sm, unsigned shared_bytes, bool fence)
    : family(family),
      name(name),
      entry(entry),
      kinds(kinds),
      rights(rights),
      block(block),
      blocks_per_sm(blocks_per_sm),
      shared_bytes(shared_bytes),
      fence(fence) {
    kernels()[name] = this;
}
const Kernel* find_kernel(const std::string& name) {
    auto i = kernels().find(name);
    return i == kernels().end() ? nullptr : i->second;
}
unsigned argument_bytes(const Kernel& k, size_t i) { return k.kinds[i] == 'p' || k.kinds[i] == 'q' ? 8 : 4; }

ENTRY(cuModuleLoadData, CURRENT, (u64 * out, const void* image)) {
    if (Result r = refuse_while_capturing("cuModuleLoadData")) return r;
    if (!image || memcmp(image, kMagic, sizeof kMagic))
        return finding(
            INVALID_IMAGE,
            "the image is not one for the simulator (it runs its own build of the kernel sources)");
    const char* family = static_cast<const char*>(image) + sizeof kMagic;
    const char* digest = family + strlen(family) + 1;
    const Built* b = built;
    while (b->family && strcmp(b->family, family)) b++;
    if (!b->family) return finding(INVALID_IMAGE, "the simulator was built without kernel family %s", family);
    if (!*b->digest)
        return finding(INVALID_IMAGE, "kernel family %s did not compile: %.700s", family, b->words);
    if (strncmp(digest, b->digest, 64))
        return finding(INVALID_IMAGE,
                       "image of family %s has source digest %.64s, the simulator was built from %.64s",
                       family, digest, b->digest);
    Context* c = current_context();
    if (Result r = charge(c->device, kModuleBytes)) return r;
    auto m = std::make_unique<Module>();
    m->id = new_handle(MODULE);
    m->context = c;
    m->family = family;
    *out = m->id;
    world.modules[m->id] = std::move(m);
    return OK;
}
ENTRY(cuModuleUnload, CURRENT, (u64 handle)) {
    Module* m = find_module(handle);
    if (!m) return INVALID_HANDLE;
    for (auto& x : world.execs)
        for (const Node& n : x.second->plan->nodes)
            for (auto& f : m->functions)
                if (n.work.kind == Work::KERNEL && n.work.function == f.second)
                    return finding(INVALID_VALUE,
                                   "module %s unloaded while graph executable %#llx holds its kernel %s",
                                   m->family.c_str(), x.first, n.work.kernel->name);
    if (Result r = drain_context(*m->context)) return r;
    for (auto& f : m->functions) world.functions.erase(f.second);
    charge(m->context->device, -kModuleBytes);
    world.modules.erase(handle);
    return OK;
}
ENTRY(cuModuleGetFunction, CURRENT, (u64 * out, u64 module, const char* name)) {
    Module* m = find_module(module);
    if (!m) return INVALID_HANDLE;
    auto have = m->functions.find(name);
    if (have != m->functions.end()) {
        *out = have->second;
        return OK;
    }
    const Kernel* k = find_kernel(name);
    if (!k || m->family != k->family)
        return finding(NOT_FOUND, "no kernel named %s in family %s of this build", name, m->family.c_str());
    auto f = std::make_unique<Function>();
    f->id = new_handle(FUNCTION);
    f->module = m;
    f->kernel = k;
    f->most_dynamic = k->dynamic_bytes() ? 49152 : 49152 - k->shared_bytes;
    *out = m->functions[name] = f->id;
    world.functions[f->id] = std::move(f);
    return OK;
}
ENTRY(cuFuncGetAttribute, CURRENT, (int* out, int attribute, u64 function)) {
    Function* f = find_function(function);
    if (!f) return INVALID_HANDLE;
    switch (attribute) {  // CUfunction_attribute
        case 0: *out = (int)f->kernel->block; return OK;
        case 1: *out = (int)(f->kernel->shared_bytes - f->kernel->dynamic_bytes()); return OK;
        case 5:
        case 6: *out = (int)settings.generation; return OK;
        case 8: *out = (int)f->most_dynamic; return OK;
        case 2:
        case 3:
        case 4:
        case 7:
        case 9: *out = 0; return OK;
        default: return INVALID_VALUE;
    }
}
ENTRY(cuFuncSetAttribute, CURRENT, (u64 function, int attribute, int value)) {
    Function* f = find_function(function);
    if (!f) return INVALID_HANDLE;
    if (attribute == 9 && value >= -1 && value <= 100) return OK;  // preferred carve-out: a hint
    if (attribute != 8) return finding(INVALID_VALUE, "function attribute %d cannot be set", attribute);
    const int most = (int)(kOptInSharedBytes - (f->kernel->shared_bytes - f->kernel->dynamic_bytes()));
    if (value < 0 || value > most)
        return finding(INVALID_VALUE, "kernel %s: %d bytes of dynamic shared memory, a block has %d left",
                       f->kernel->name, value, most);
    f->most_dynamic = (unsigned)value;
    return OK;
}
ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor, CURRENT,
      (int* out, u64 function, int block, size_t shared)) {
    Function* f = find_function(function);
    if (!f || block < 1) return f ? INVALID_VALUE : INVALID_HANDLE;
    const u64 bytes = f->kernel->shared_bytes - f->kernel->dynamic_bytes() + shared + 1024;
    u64 n = 2048 / (u64)block;
    if (n > 32) n = 32;
    if (n > 233472 / bytes) n = 233472 / bytes;
    *out = (int)n;
    return OK;
}
static Result give(u64 function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, u64 stream, void** params, void** extra, bool programmatic) {
    Function* f = find_function(function);
    Stream* s = f ? find_stream(stream) : nullptr;
    if (!s) return INVALID_HANDLE;
    const Kernel& k = *f->kernel;
    if (f->module->context != s->context)
        return finding(INVALID_HANDLE, "kernel %s and stream %#llx belong to different contexts", k.name,
                       stream);
    if (!gx || !gy || !gz || gx > 0x7fffffff || gy > 65535 || gz > 65535)
        return finding(INVALID_VALUE, "kernel %s: grid (%u,%u,%u)", k.name, gx, gy, gz);
    if (bx != k.block || by != 1 || bz != 1 || shared != k.dynamic_bytes())
        return finding(INVALID_VALUE,
                       "kernel %s: block (%u,%u,%u) with %u dynamic bytes, declared (%u,1,1) with %u", k.name,
                       bx, by, bz, shared, k.block, k.dynamic_bytes());
    if (shared > f->most_dynamic)
        return finding(INVALID_VALUE,
                       "kernel %s: %u dynamic bytes, and cuFuncSetAttribute allows it no more than %u", k.name,
                       shared, f->most_dynamic);
    const size_t n = strlen(k.kinds);
    if (extra || (n && !params))
        return finding(INVALID_VALUE, "kernel %s: arguments are taken by kernelParams only", k.name);
    Work w;
    w.kind = Work::KERNEL;
    w.function = function;
    w.kernel = &k;
    w.grid = Dim{gx, gy, gz};
    w.programmatic = programmatic;
    w.args.resize(n);
    for (size_t i = 0; i < n; i++) memcpy(&w.args[i], params[i], argument_bytes(k, i));
    return submit(*s, std::move(w));
}
ENTRY(cuLaunchKernel, CURRENT,
      (u64 function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
       unsigned shared, u64 stream, void** params, void** extra)) {
    return give(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra, false);
}
struct LaunchAttribute {  // CUlaunchAttribute
    int id, pad;
    union {
        int flag;
        u64 bytes[8];
    } value;
};
struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], shared_bytes;
    u64 stream;
    LaunchAttribute* attributes;
    unsigned n_attributes;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "as in cuda.h");
ENTRY(cuLaunchKernelEx, CURRENT, (const LaunchConfig* c, u64 function, void** params, void** extra)) {
    if (!c || (c->n_attributes && !c->attributes)) return INVALID_VALUE;
    bool programmatic = false;
    for (unsigned i = 0; i < c->n_attributes; i++) {
        const LaunchAttribute& a = c->attributes[i];
        if (a.id == 0) continue;
        if (a.id != 6) return finding(NOT_SUPPORTED, "launch attribute %d", a.id);  // 6: programmatic serialization
        programmatic = a.value.flag != 0;
    }
    if (programmatic && settings.generation < 90)
        return finding(NOT_SUPPORTED, "programmatic launch on compute capability %llu.%llu",
                       settings.generation / 10, settings.generation % 10);
    return give(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2],
                c->shared_bytes, c->stream, params, extra, programmatic);
}

}  // namespace fnsim

extern "C" {
__attribute__((visibility("default"))) int fnsim_has_kernel(const char* name) {
    return fnsim::find_kernel(name) != nullptr;
}
}
