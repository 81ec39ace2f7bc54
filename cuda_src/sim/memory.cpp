// memory.cpp: device, pinned and registered memory.  Each allocation has pages of its own: a wide gap without
// access before and after it, 0xff (NaN) inside, a pattern from its end to the end of its page that is checked at
// free.  Freed ranges stay reserved without access for a while, so a kernel or copy that touches them is
// named.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "runtime.h"

namespace fnsim {

namespace {

constexpr u64 kPage = 4096, kMiB = 1 << 20;
// Address space on both sides of an allocation: a wrong 16-bit index is an illegal address, not another's byte.
constexpr u64 kGap = 16 * kMiB;
constexpr unsigned char kGuard = 0xa5;
constexpr size_t kRemembered = 4096;  // freed ranges kept without access
constexpr u64 kPoisonLimit = (u64)1 << 30;  // larger allocations stay zero pages: poison would cost many mappings
constexpr u64 kPoisonPiece = 4 * kMiB;

std::map<u64, Allocation> live;   // by base
std::map<u64, Allocation> freed;  // by base
std::deque<u64> freed_order;
u64 used[8], serials;

u64 up(u64 x, u64 to) { return (x + to - 1) / to * to; }

// What a driver takes for n bytes: whole 2 MiB pages for large ones, small ones share pages.
u64 charge_of(u64 n) { return n >= kMiB ? up(n, 2 * kMiB) : up(n, 512); }

const char* kind_name(const Allocation& a) {
    return a.kind == Allocation::DEVICE ? "device" : a.kind == Allocation::PINNED ? "pinned" : "registered";
}

// Puts 0xff at whole pages: copies on write of one file's, so what is never written costs neither time nor memory.
bool poison(u64 base, u64 size) {
    static int file = -1;
    if (file < 0) {
        const int made = memfd_create("fnsim.poison", MFD_CLOEXEC);
        const std::vector<unsigned char> ones(kPoisonPiece, 0xff);
        if (made < 0) return false;
        if (write(made, ones.data(), kPoisonPiece) != (ssize_t)kPoisonPiece) {
            close(made);
            return false;
        }
        file = made;
    }
    for (u64 at = 0; at < size; at += kPoisonPiece) {
        const u64 n = size - at < kPoisonPiece ? size - at : kPoisonPiece;
        if (mmap((void*)(size_t)(base + at), n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, file,
                 0) == MAP_FAILED)
            return false;
    }
    return true;
}

Result allocate(u64* out, u64 n, Allocation::Kind kind, unsigned flags) {
    Context* c = current_context();
    if (!out || !n) return finding(INVALID_VALUE, "allocation of 0 bytes");
    const u64 charged = kind == Allocation::DEVICE ? charge_of(n) : 0;
    if (used[c->device] + charged > settings.memory_bytes)
        return finding(OUT_OF_MEMORY, "device %d: %llu bytes asked, %llu of %llu free", c->device, n,
                       settings.memory_bytes - used[c->device], settings.memory_bytes);
    const u64 body = up(n, kPage), whole = body + 2 * kGap;
    void* at = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return finding(OUT_OF_MEMORY, "host refused %llu bytes of address space", whole);
    const u64 base = (u64)(size_t)at + kGap;
    if (n <= kPoisonLimit ? !poison(base, body) : mprotect((void*)(size_t)base, body, PROT_READ | PROT_WRITE)) {
        munmap(at, whole);
        return finding(OUT_OF_MEMORY, "host refused %llu bytes", body);
    }
    memset((void*)(size_t)(base + n), kGuard, body - n);
    used[c->device] += charged;
    live[base] =
        Allocation{kind, base, n, charged, c->id, ++serials, c->device, flags, (u64)(size_t)at, whole};
    *out = base;
    return OK;
}

// Bytes past the end that were written; 0 when the guard is whole.
u64 guard_damage(const Allocation& a) {
    if (a.kind == Allocation::REGISTERED) return 0;
    const unsigned char* p = (const unsigned char*)(size_t)(a.base + a.size);
    u64 last = 0;
    for (u64 i = 0; i < up(a.size, kPage) - a.size; i++)
        if (p[i] != kGuard) last = i + 1;
    return last;
}

void remember(const Allocation& a) {
    mmap((void*)(size_t)a.map_base, a.map_size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    freed[a.base] = a;
    freed_order.push_back(a.base);
    while (freed_order.size() > kRemembered) {
        auto old = freed.find(freed_order.front());
        freed_order.pop_front();
        munmap((void*)(size_t)old->second.map_base, old->second.map_size);
        freed.erase(old);
    }
}

const Allocation* find_in(const std::map<u64, Allocation>& in, u64 address, u64 slack) {
    auto i = in.upper_bound(address);
    if (i == in.begin()) return nullptr;
    --i;
    return address < i->second.base + i->second.size + slack ? &i->second : nullptr;
}

}  // namespace

Allocation* find_allocation(u64 address) { return const_cast<Allocation*>(find_in(live, address, 0)); }

void describe_address(u64 address, char* text, size_t text_bytes) {
    if (const Allocation* a = find_in(live, address, 0)) {
        snprintf(text, text_bytes, "byte %llu of live %s allocation %llu", address - a->base, kind_name(*a),
                 a->serial);
    } else if (const Allocation* a = find_in(freed, address, 0)) {
        snprintf(text, text_bytes, "use after free: byte %llu of freed %s allocation %llu of %llu bytes",
                 address - a->base, kind_name(*a), a->serial, a->size);
    } else if (const Allocation* a = find_in(live, address, kGap)) {
        snprintf(text, text_bytes, "%llu bytes past the end of %s allocation %llu of %llu bytes",
                 address - a->base - a->size, kind_name(*a), a->serial, a->size);
    } else {
        auto i = live.upper_bound(address);
        if (i != live.end() && i->second.base - address <= kGap)
            snprintf(text, text_bytes, "%llu bytes before %s allocation %llu", i->second.base - address,
                     kind_name(i->second), i->second.serial);
        else
            snprintf(text, text_bytes, "in no allocation");
    }
}

Result check_range(u64 address, u64 size, const char* what) {
    const Allocation* a = find_in(live, address, 0);
    if (a && address + size <= a->base + a->size) return OK;
    if (!size && a) return OK;
    char where[200];
    describe_address(a ? a->base + a->size : address, where, sizeof where);
    return finding(INVALID_VALUE, "%s: %llu bytes at %#llx: %s", what, size, address, where);
}

Result check_any(u64 address, u64 size, const char* what) {
    const Allocation* near =
        find_in(live, address, kPage);  // memory of ours, or the page without access behind it
    const bool ours = near && (near->kind != Allocation::REGISTERED || address < near->base + near->size);
    return ours || find_in(freed, address, kPage) ? check_range(address, size, what) : OK;
}
bool is_pageable(u64 address) { return !find_in(live, address, 0); }
u64 device_used(int device) { return used[device]; }
Result charge(int device, long long bytes) {
    if (bytes > 0 && used[device] + (u64)bytes > settings.memory_bytes)
        return finding(OUT_OF_MEMORY, "device %d: %lld bytes asked, %llu free", device, bytes,
                       settings.memory_bytes - used[device]);
    used[device] += (u64)bytes;
    return OK;
}

Result free_allocation(u64 base, bool in_teardown) {
    auto i = live.find(base);
    if (i == live.end()) {
        char where[200];
        describe_address(base, where, sizeof where);
        return finding(INVALID_VALUE, "%s of %#llx: %s", freed.count(base) ? "double free" : "free", base,
                       where);
    }
    const Allocation a = i->second;
    if (!in_teardown) {
        const std::string user = captured_by(a.base, a.size);
        if (!user.empty())
            return finding(INVALID_VALUE, "free of %s allocation %llu (%llu bytes): %s captured it",
                           kind_name(a), a.serial, a.size, user.c_str());
    }
    const u64 damage = guard_damage(a);
    used[a.device] -= a.charged;
    live.erase(i);
    if (a.kind != Allocation::REGISTERED) remember(a);
    if (damage)
        return finding(ILLEGAL_ADDRESS,
                       "guard of %s allocation %llu (%llu bytes) was written, up to %llu bytes past its end",
                       kind_name(a), a.serial, a.size, damage);
    return OK;
}

Result free_context_memory(u64 context) {
    Result worst = OK;
    std::vector<u64> bases;
    for (auto& i : live)
        if (i.second.context == context) bases.push_back(i.first);
    for (u64 base : bases)
        if (Result r = free_allocation(base, true)) worst = r;
    return worst;
}

// ---- entry points ----
ENTRY(cuMemAlloc, CURRENT, (u64 * out, size_t n)) {
    if (Result r = refuse_while_capturing("cuMemAlloc")) return r;
    return allocate(out, n, Allocation::DEVICE, 0);
}
ENTRY(cuMemFree, CURRENT, (u64 base)) {
    if (!base) return OK;
    if (Result r = refuse_while_capturing("cuMemFree")) return r;
    Allocation* a = find_allocation(base);
    if (a && a->kind != Allocation::DEVICE)
        return finding(INVALID_VALUE, "cuMemFree of %s memory", kind_name(*a));
    if (a && world.contexts.count(a->context))
        if (Result r = drain_context(*world.contexts[a->context])) return r;
    return free_allocation(base, false);
}
ENTRY(cuMemGetInfo, CURRENT, (size_t* free_bytes, size_t* total_bytes)) {
    const u64 in_use = device_used(current_context()->device);
    *free_bytes = settings.memory_bytes - in_use;
    *total_bytes = settings.memory_bytes;
    return OK;
}
ENTRY(cuMemHostAlloc, CURRENT, (void** out, size_t n, unsigned flags)) {
    if (Result r = refuse_while_capturing("cuMemHostAlloc")) return r;
    u64 base;
    if (Result r = allocate(&base, n, Allocation::PINNED, flags)) return r;
    *out = (void*)(size_t)base;
    return OK;
}
ENTRY(cuMemFreeHost, CURRENT, (void* p)) {
    if (Result r = refuse_while_capturing("cuMemFreeHost")) return r;
    Allocation* a = find_allocation((u64)(size_t)p);
    if (a && a->kind != Allocation::PINNED)
        return finding(INVALID_VALUE, "cuMemFreeHost of %s memory", kind_name(*a));
    if (a && world.contexts.count(a->context))
        if (Result r = drain_context(*world.contexts[a->context])) return r;
    return free_allocation((u64)(size_t)p, false);
}
ENTRY(cuMemHostGetDevicePointer, CURRENT, (u64 * out, void* p, unsigned)) {
    Allocation* a = find_allocation((u64)(size_t)p);
    if (!a || a->kind == Allocation::DEVICE) return finding(INVALID_VALUE, "%p is not pinned host memory", p);
    *out = (u64)(size_t)p;
    return OK;
}
ENTRY(cuMemHostRegister, CURRENT, (void* p, size_t n, unsigned flags)) {
    const u64 base = (u64)(size_t)p;
    if (!p || !n) return INVALID_VALUE;
    auto i = live.lower_bound(base);
    if (find_in(live, base, 0) || (i != live.end() && i->first < base + n)) return HOST_ALREADY_REGISTERED;
    Context* c = current_context();
    live[base] = Allocation{Allocation::REGISTERED, base, n, 0, c->id, ++serials, c->device, flags, base, n};
    return OK;
}
ENTRY(cuMemHostUnregister, CURRENT, (void* p)) {
    auto i = live.find((u64)(size_t)p);
    if (i == live.end() || i->second.kind != Allocation::REGISTERED) return HOST_NOT_REGISTERED;
    if (world.contexts.count(i->second.context))
        if (Result r = drain_context(*world.contexts[i->second.context])) return r;
    return free_allocation((u64)(size_t)p, false);
}

namespace {
// attribute numbers of CUpointer_attribute
Result pointer_attribute(void* out, int attribute, u64 address) {
    const Allocation* a = find_allocation(address);
    if (!a) return INVALID_VALUE;
    switch (attribute) {
        case 1: *(u64*)out = a->context; return OK;                                    // context
        case 2: *(unsigned*)out = a->kind == Allocation::DEVICE ? 2u : 1u; return OK;  // memory type
        case 3: *(u64*)out = address; return OK;                                       // device pointer
        case 4:                                                                        // host pointer
            if (a->kind == Allocation::DEVICE) return INVALID_VALUE;
            *(u64*)out = address;
            return OK;
        case 7: *(u64*)out = a->serial; return OK;    // buffer id
        case 8: *(unsigned*)out = 0; return OK;       // managed
        case 9: *(int*)out = a->device; return OK;    // device ordinal
        case 11: *(u64*)out = a->base; return OK;     // range start
        case 12: *(size_t*)out = a->size; return OK;  // range size
        case 13: *(unsigned*)out = 1; return OK;      // mapped
        default: return INVALID_VALUE;
    }
}
}  // namespace
ENTRY(cuPointerGetAttribute, INITIALIZED, (void* out, int attribute, u64 address)) {
    return pointer_attribute(out, attribute, address);
}
ENTRY(cuPointerGetAttributes, INITIALIZED, (unsigned n, int* attributes, void** out, u64 address)) {
    for (unsigned i = 0; i < n; i++)
        if (pointer_attribute(out[i], attributes[i], address))
            memset(out[i], 0, attributes[i] == 2 || attributes[i] == 9 ? 4 : 8);
    return OK;
}

}  // namespace fnsim
