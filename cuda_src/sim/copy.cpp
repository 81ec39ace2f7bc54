// copy.cpp: copies and fills.  A pageable source is read at the call, a pinned one when the copy runs; a
// pageable destination is written before the call returns; ranges are checked at the call and again when the
// copy runs.
#include "runtime.h"

namespace fnsim {

Result copy_now(u64 to, u64 from, u64 size, const char* what) {
    if (!size) return OK;
    for (u64 side : {to, from})
        if (Result r = check_any(side, size, what)) return r;
    memmove((void*)(size_t)to, (const void*)(size_t)from, size);
    world.bytes_copied += size;
    return OK;
}

void fill_now(const Work& w) {
    if (w.width == 1)
        memset((void*)(size_t)w.to, (int)w.value, w.size);
    else
        for (u64 i = 0; i < w.size; i += 4) memcpy((void*)(size_t)(w.to + i), &w.value, 4);
    world.bytes_filled += w.size;
}

static Result check_copy(u64 to, u64 from, size_t n, const char* what) {
    for (u64 side : {to, from}) {
        if (!side) return finding(INVALID_VALUE, "%s: null address", what);
        if (Result r = check_any(side, n, what)) return r;
    }
    return OK;
}
static Result must_be_device(u64 at, size_t n, const char* what) {
    if (!n) return OK;
    return check_range(at, n, what);
}
static Result copy_sync(u64 to, u64 from, size_t n, const char* what) {
    if (Result r = refuse_while_capturing(what)) return r;
    if (Result r = check_copy(to, from, n, what)) return r;
    Work w;
    w.kind = Work::COPY;
    w.to = to;
    w.from = from;
    w.size = n;
    const Result r = submit(current_context()->legacy, std::move(w));
    return r;
}
// A pageable source is read now; a pageable destination is written before the call returns, as drivers do.
static Result copy_async(u64 to, u64 from, size_t n, u64 stream, const char* what) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    if (Result r = check_copy(to, from, n, what)) return r;
    Work w;
    w.kind = Work::COPY;
    w.to = to;
    w.from = from;
    w.size = n;
    if (!s->capture && is_pageable(from)) {
        const unsigned char* p = (const unsigned char*)(size_t)from;
        w.image = std::make_shared<std::vector<unsigned char>>(p, p + n);
    }
    const bool finish = !s->capture && is_pageable(to);
    if (Result r = submit(*s, std::move(w))) return r;
    return finish ? drain(*s) : OK;
}
ENTRY(cuMemcpyHtoD, CURRENT, (u64 to, const void* from, size_t n)) {
    if (Result r = must_be_device(to, n, "cuMemcpyHtoD")) return r;
    return copy_sync(to, (u64)(size_t)from, n, "cuMemcpyHtoD");
}
ENTRY(cuMemcpyDtoH, CURRENT, (void* to, u64 from, size_t n)) {
    if (Result r = must_be_device(from, n, "cuMemcpyDtoH")) return r;
    return copy_sync((u64)(size_t)to, from, n, "cuMemcpyDtoH");
}
ENTRY(cuMemcpyDtoD, CURRENT, (u64 to, u64 from, size_t n)) {
    if (Result r = must_be_device(to, n, "cuMemcpyDtoD")) return r;
    if (Result r = must_be_device(from, n, "cuMemcpyDtoD")) return r;
    return copy_sync(to, from, n, "cuMemcpyDtoD");
}
ENTRY(cuMemcpy, CURRENT, (u64 to, u64 from, size_t n)) { return copy_sync(to, from, n, "cuMemcpy"); }
ENTRY(cuMemcpyHtoDAsync, CURRENT, (u64 to, const void* from, size_t n, u64 stream)) {
    if (Result r = must_be_device(to, n, "cuMemcpyHtoDAsync")) return r;
    return copy_async(to, (u64)(size_t)from, n, stream, "cuMemcpyHtoDAsync");
}
ENTRY(cuMemcpyDtoHAsync, CURRENT, (void* to, u64 from, size_t n, u64 stream)) {
    if (Result r = must_be_device(from, n, "cuMemcpyDtoHAsync")) return r;
    return copy_async((u64)(size_t)to, from, n, stream, "cuMemcpyDtoHAsync");
}
ENTRY(cuMemcpyDtoDAsync, CURRENT, (u64 to, u64 from, size_t n, u64 stream)) {
    if (Result r = must_be_device(to, n, "cuMemcpyDtoDAsync")) return r;
    if (Result r = must_be_device(from, n, "cuMemcpyDtoDAsync")) return r;
    return copy_async(to, from, n, stream, "cuMemcpyDtoDAsync");
}
ENTRY(cuMemcpyAsync, CURRENT, (u64 to, u64 from, size_t n, u64 stream)) {
    return copy_async(to, from, n, stream, "cuMemcpyAsync");
}
ENTRY(cuMemcpyPeerAsync, CURRENT,
      (u64 to, u64 to_context, u64 from, u64 from_context, size_t n, u64 stream)) {
    if (!world.contexts.count(to_context) || !world.contexts.count(from_context)) return INVALID_CONTEXT;
    if (Result r = must_be_device(to, n, "cuMemcpyPeerAsync")) return r;
    if (Result r = must_be_device(from, n, "cuMemcpyPeerAsync")) return r;
    return copy_async(to, from, n, stream, "cuMemcpyPeerAsync");
}

static Result fill(u64 to, unsigned value, unsigned width, size_t n, Stream* s, const char* what) {
    if (!s) return INVALID_HANDLE;
    if (to % width)
        return finding(INVALID_VALUE, "%s: address %#llx is not a multiple of %u", what, to, width);
    if (!n) return OK;
    if (Result r = check_range(to, n * width, what)) return r;
    Work w;
    w.kind = Work::FILL;
    w.to = to;
    w.value = value;
    w.width = width;
    w.size = n * width;
    return submit(*s, std::move(w));
}
ENTRY(cuMemsetD8, CURRENT, (u64 to, unsigned char value, size_t n)) {
    if (Result r = refuse_while_capturing("cuMemsetD8")) return r;
    return fill(to, value, 1, n, find_stream(0), "cuMemsetD8");
}
ENTRY(cuMemsetD32, CURRENT, (u64 to, unsigned value, size_t n)) {
    if (Result r = refuse_while_capturing("cuMemsetD32")) return r;
    return fill(to, value, 4, n, find_stream(0), "cuMemsetD32");
}
ENTRY(cuMemsetD8Async, CURRENT, (u64 to, unsigned char value, size_t n, u64 stream)) {
    return fill(to, value, 1, n, find_stream(stream), "cuMemsetD8Async");
}
ENTRY(cuMemsetD32Async, CURRENT, (u64 to, unsigned value, size_t n, u64 stream)) {
    return fill(to, value, 4, n, find_stream(stream), "cuMemsetD32Async");
}

}  // namespace fnsim
