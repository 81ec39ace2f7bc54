// stream.cpp: streams and events.  Work is queued and runs only when something must be done: a
// synchronise runs what it needs, a query runs one item.  So work that nothing orders really does run late,
// and a missing event wait changes bytes.  Seed 0 runs the least; other seeds also run shuffled ready work of
// other streams.
#include <chrono>
#include <cstdio>
#include <thread>

#include "runtime.h"

namespace fnsim {

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

Stream* find_stream(u64 handle) {
    Context* c = current_context();
    if (handle <= 2) return &c->legacy;
    auto own = c->streams.find(handle);
    if (own != c->streams.end()) return &own->second;
    for (auto& i : world.contexts) {
        auto s = i.second->streams.find(handle);
        if (s != i.second->streams.end()) return &s->second;
    }
    finding(INVALID_HANDLE, "stream %#llx is closed or was never opened", handle);
    return nullptr;
}
static Stream* any_stream(u64 handle) {
    for (auto& i : world.contexts) {
        auto s = i.second->streams.find(handle);
        if (s != i.second->streams.end()) return &s->second;
    }
    return nullptr;
}
static Event* find_event(u64 handle) {
    auto i = world.events.find(handle);
    if (i != world.events.end()) return i->second.get();
    finding(INVALID_HANDLE, "event %#llx is closed or was never opened", handle);
    return nullptr;
}

// The context is unusable from here on; what was queued never runs.
Result fail_context(Context& c, Result code) {
    c.error = code;
    auto drop = [](Stream& s) {
        for (Work& w : s.queue)
            if (w.kind == Work::RECORD) w.mark->done = true;
        s.queue.clear();
    };
    for (auto& i : c.streams) drop(i.second);
    drop(c.legacy);
    return code;
}

static u64 argument_hash(u64 from, u64 to) {
    u64 h = 0x243f6a8885a308d3ull;
    for (u64 at = from; at < to; at += 8) {
        u64 w = 0;
        memcpy(&w, (const void*)(size_t)at, to - at < 8 ? to - at : 8);
        h = (h ^ w) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 29;
    }
    return h;
}

// The bytes an "r" argument may stand for: up to the next pointer argument or the end of its allocation.
static u64 argument_end(const Work& w, u64 address, const Allocation& a) {
    u64 end = a.base + a.size;
    for (size_t i = 0; i < w.args.size(); i++)
        if (w.kernel->kinds[i] == 'p' && w.args[i] > address && w.args[i] < end) end = w.args[i];
    return end;
}

static Result kernel_failed(Context& c, const char* text) {
    const Result code = strstr(text, "illegal address")     ? ILLEGAL_ADDRESS
                        : strstr(text, "misaligned access") ? MISALIGNED_ADDRESS
                                                            : LAUNCH_FAILED;
    finding(code, "%s", text);
    return fail_context(c, code);
}

// Programmatic launches that follow one another behind a kernel that is about to run: by seed a block of each
// runs up to fn_wait_prior now.  So an early read of what any of the kernels before writes gets old bytes.  Behind a
// fence nothing starts before the fence itself has waited.
Result start_early(Context& c, const std::vector<Work*>& chain) {
    if (settings.skip_kernels) return OK;
    for (Work* w : chain) {
        if (w->parked || mix(settings.seed ^ ++world.draws * 0x2dull) & 1) continue;
        char text[512];
        w->parked = run_early(*w->kernel, w->grid, w->args, mix(settings.seed + world.draws) | 1, text, sizeof text);
        if (!w->parked) return kernel_failed(c, text);
    }
    return OK;
}

static Result run_kernel(Context& c, Work& w) {
    const std::shared_ptr<Parked> parked = std::move(w.parked);
    if (settings.skip_kernels) {
        world.launches++;
        return OK;
    }
    void* pointers[64];
    const size_t n = w.args.size();
    for (size_t i = 0; i < n; i++) pointers[i] = &w.args[i];
    struct Watch {
        size_t i;
        u64 from, to, hash;
    };
    std::vector<Watch> watched;
    if (settings.check_rights)
        for (size_t i = 0; i < n; i++)
            if (w.kernel->rights[i] == 'r') {
                Allocation* a = find_allocation(w.args[i]);
                if (!a) continue;
                bool written = false;  // the same address given for an output too: nothing can be said
                for (size_t j = 0; j < n; j++)
                    written |= j != i && w.args[j] == w.args[i] && w.kernel->rights[j] != 'r';
                if (written) continue;
                const u64 to = argument_end(w, w.args[i], *a);
                watched.push_back({i, w.args[i], to, argument_hash(w.args[i], to)});
            }
    char text[512];
    world.launches++;
    const u64 seed = settings.seed ? mix(settings.seed ^ mix(++world.seeded_launches)) | 1 : 0;
    if (!launch(*w.kernel, w.grid, pointers, seed, (unsigned)settings.n_workers, w.programmatic, parked.get(), text,
                sizeof text))
        return kernel_failed(c, text);
    for (const Watch& x : watched)
        if (argument_hash(x.from, x.to) != x.hash) {
            finding(LAUNCH_FAILED, "kernel %s wrote bytes of argument %zu, which it declares as read only",
                    w.kernel->name, x.i);
            return fail_context(c, LAUNCH_FAILED);
        }
    return OK;
}

Result execute(Context& c, Work& w) {
    if (c.error) return c.error;
    Result r = OK;
    switch (w.kind) {
        case Work::KERNEL: return run_kernel(c, w);
        case Work::COPY:
            r = copy_now(w.to, w.image ? (u64)(size_t)w.image->data() : w.from, w.size, "copy");
            return r ? fail_context(c, ILLEGAL_ADDRESS) : OK;  // checked at submission: freed since
        case Work::FILL:
            if (check_range(w.to, w.size, "fill")) return fail_context(c, ILLEGAL_ADDRESS);
            fill_now(w);
            return OK;
        case Work::RECORD:
            w.mark->done = true;
            w.mark->when_ms = now_ms();
            return OK;
        case Work::WAIT: return OK;
        case Work::GRAPH: return run_plan(c, *w.plan);
    }
    return OK;
}

static bool head_ready(const Stream& s) {
    return !s.queue.empty() && (s.queue.front().kind != Work::WAIT || s.queue.front().mark->done);
}
static Result run_head(Stream& s) {
    Work w = std::move(s.queue.front());
    s.queue.pop_front();
    if (settings.seed && w.kind == Work::KERNEL) {
        std::vector<Work*> chain;
        for (Work& next : s.queue) {
            if (next.kind != Work::KERNEL || !next.programmatic || chain.size() == kEarlyLaunches) break;
            chain.push_back(&next);
            if (next.kernel->fence) break;
        }
        if (Result r = start_early(*s.context, chain)) return r;
    }
    return execute(*s.context, w);
}

// One ready item: with seed 0 from what `wanted` needs, else from any stream.
void advance(Stream* wanted) {
    if (settings.seed) {
        std::vector<Stream*> ready;
        for (auto& i : world.contexts)
            for (auto& s : i.second->streams)
                if (head_ready(s.second)) ready.push_back(&s.second);
        if (ready.empty()) return;
        run_head(*ready[mix(settings.seed + ++world.draws * 0x51ull) % ready.size()]);
        return;
    }
    for (int depth = 0; wanted && depth < 1000; depth++) {
        if (wanted->queue.empty()) return;
        if (head_ready(*wanted)) {
            run_head(*wanted);
            return;
        }
        wanted = any_stream(wanted->queue.front().mark->stream);
    }
}

static Result until(Stream& s, const Mark* mark) {
    while (mark ? !mark->done : !s.queue.empty()) {
        if (s.queue.empty()) break;
        if (settings.seed && mix(settings.seed ^ ++world.draws) % 3) {
            advance(nullptr);
            if (s.context->error) return s.context->error;
            continue;
        }
        if (!head_ready(s)) {
            Mark& other = *s.queue.front().mark;
            if (Result r = drain_mark(other)) return r;
            other.done = true;
            continue;
        }
        if (Result r = run_head(s)) return r;
    }
    return s.context->error;
}
Result drain(Stream& s) { return until(s, nullptr); }
Result drain_mark(Mark& m) {
    Stream* s = m.done ? nullptr : any_stream(m.stream);
    return s ? until(*s, &m) : OK;
}
Result drain_context(Context& c) {
    for (auto& i : c.streams)
        if (Result r = drain(i.second)) return r;
    return c.error;
}

// ---- capture rules ----
size_t this_thread() { return std::hash<std::thread::id>()(std::this_thread::get_id()); }

void invalidate_captures() {
    for (auto& i : world.captures) i.second->valid = false;
}
// Calls that a capture forbids: any capture in global mode, a thread-local one in its own thread.
Result refuse_while_capturing(const char* what) {
    for (auto& i : world.captures) {
        const Capture& c = *i.second;
        if (c.mode == 0 || (c.mode == 1 && c.thread == this_thread())) {
            invalidate_captures();
            return finding(CAPTURE_UNSUPPORTED, "%s while stream %#llx is capturing", what, c.origin);
        }
    }
    return OK;
}

// Queues work, adds it to the stream's capture, or (legacy stream) runs it after all blocking streams.
Result submit(Stream& s, Work&& w) {
    if (s.context->error) return s.context->error;
    if (s.capture) {
        if (!s.capture->valid) return CAPTURE_INVALIDATED;
        std::vector<Node>& nodes = s.capture->plan->nodes;
        const bool early =
            w.programmatic && s.frontier.size() == 1 && nodes[s.frontier[0]].work.kind == Work::KERNEL;
        nodes.push_back(Node{new_handle(NODE), std::move(w), s.frontier, {}, early});
        s.frontier = {nodes.size() - 1};
        return OK;
    }
    if (&s == &s.context->legacy) {
        for (auto& i : s.context->streams) {
            if (!i.second.blocking) continue;
            if (i.second.capture) {
                i.second.capture->valid = false;
                return finding(CAPTURE_IMPLICIT,
                               "legacy stream used while blocking stream %#llx is capturing", i.first);
            }
            if (Result r = drain(i.second)) return r;
        }
        return execute(*s.context, w);
    }
    s.queue.push_back(std::move(w));
    return OK;
}

// ---- streams ----
static Result create_stream(u64* out, unsigned flags, int priority) {
    if (!out || flags > 1) return INVALID_VALUE;
    Context* c = current_context();
    const u64 id = new_handle(STREAM);
    Stream& s = c->streams[id];
    s.id = id;
    s.context = c;
    s.blocking = !(flags & 1);
    s.priority = priority;
    *out = id;
    return OK;
}
ENTRY(cuStreamCreate, CURRENT, (u64 * out, unsigned flags)) { return create_stream(out, flags, 0); }
ENTRY(cuStreamCreateWithPriority, CURRENT, (u64 * out, unsigned flags, int priority)) {
    return create_stream(out, flags, priority);
}
ENTRY(cuStreamGetPriority, CURRENT, (u64 stream, int* out)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    *out = s->priority;
    return OK;
}
ENTRY(cuStreamDestroy, CURRENT, (u64 stream)) {
    Stream* s = stream > 2 ? find_stream(stream) : nullptr;
    if (!s) return INVALID_HANDLE;
    if (s->capture) {
        s->capture->valid = false;
        if (s->capture->origin == stream) world.captures.erase(s->capture->id);
        s->capture.reset();
    }
    if (Result r = drain(*s)) return r;  // work handed in before still runs
    s->context->streams.erase(stream);
    return OK;
}
static Result refuse_captured(Stream& s, const char* what) {
    if (s.capture) {
        s.capture->valid = false;
        return finding(CAPTURE_UNSUPPORTED, "%s of stream %#llx while it is capturing", what, s.id);
    }
    return refuse_while_capturing(what);
}
ENTRY(cuStreamSynchronize, CURRENT, (u64 stream)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    if (Result r = refuse_captured(*s, "cuStreamSynchronize")) return r;
    return drain(*s);
}
ENTRY(cuStreamQuery, CURRENT, (u64 stream)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    if (Result r = refuse_captured(*s, "cuStreamQuery")) return r;
    advance(s);
    if (s->context->error) return s->context->error;
    return s->queue.empty() ? OK : NOT_READY;
}
ENTRY(cuCtxSynchronize, CURRENT, ()) {
    Context* c = current_context();
    for (auto& i : c->streams)
        if (i.second.capture) {
            i.second.capture->valid = false;
            return finding(CAPTURE_UNSUPPORTED, "cuCtxSynchronize while stream %#llx is capturing", i.first);
        }
    if (Result r = refuse_while_capturing("cuCtxSynchronize")) return r;
    return drain_context(*c);
}

static void join(std::vector<size_t>& into, const std::vector<size_t>& more) {
    for (size_t n : more) {
        bool have = false;
        for (size_t m : into) have |= m == n;
        if (!have) into.push_back(n);
    }
}
ENTRY(cuStreamWaitEvent, CURRENT, (u64 stream, u64 event, unsigned flags)) {
    Stream* s = find_stream(stream);
    Event* e = find_event(event);
    if (!s || !e) return INVALID_HANDLE;
    if (flags) return finding(NOT_SUPPORTED, "cuStreamWaitEvent flags %u", flags);
    if (e->captured) {
        std::shared_ptr<Capture> c = e->capture.lock();
        if (!c || !world.captures.count(c->id))
            return finding(CAPTURED_EVENT, "event %#llx was recorded in a capture that has ended", event);
        if (!c->valid) return CAPTURE_INVALIDATED;
        if (s == &s->context->legacy) {
            c->valid = false;
            return finding(CAPTURE_IMPLICIT, "legacy stream made to wait for captured event %#llx", event);
        }
        if (!s->capture) {
            s->capture = c;
            s->frontier = e->nodes;
        } else if (s->capture == c) {
            join(s->frontier, e->nodes);
        } else {
            s->capture->valid = c->valid = false;
            return finding(CAPTURE_MERGE, "event %#llx belongs to another capture than stream %#llx", event,
                           stream);
        }
        return OK;
    }
    if (!e->mark) return OK;  // never recorded: no effect
    if (s->capture) {
        s->capture->valid = false;
        return finding(CAPTURE_ISOLATION,
                       "capturing stream %#llx made to wait for event %#llx, which was recorded outside",
                       stream, event);
    }
    Work w;
    w.kind = Work::WAIT;
    w.mark = e->mark;
    if (s == &s->context->legacy) return drain_mark(*e->mark);
    return submit(*s, std::move(w));
}

// ---- events ----
ENTRY(cuEventCreate, CURRENT, (u64 * out, unsigned flags)) {
    if (!out || flags > 7) return INVALID_VALUE;
    auto e = std::make_unique<Event>();
    e->id = new_handle(EVENT);
    e->context = current_context();
    e->timing = !(flags & 2);
    *out = e->id;
    world.events[e->id] = std::move(e);
    return OK;
}
ENTRY(cuEventDestroy, CURRENT, (u64 event)) {
    if (!find_event(event)) return INVALID_HANDLE;
    world.events.erase(event);
    return OK;
}
ENTRY(cuEventRecord, CURRENT, (u64 event, u64 stream)) {
    Event* e = find_event(event);
    Stream* s = find_stream(stream);
    if (!e || !s) return INVALID_HANDLE;
    if (s->context != e->context)
        return finding(INVALID_HANDLE, "event %#llx and stream %#llx belong to different contexts", event,
                       stream);
    if (s->capture) {
        if (!s->capture->valid) return CAPTURE_INVALIDATED;
        e->captured = true;
        e->capture = s->capture;
        e->nodes = s->frontier;
        return OK;
    }
    e->captured = false;
    e->mark = std::make_shared<Mark>();
    e->mark->stream = s->id;
    Work w;
    w.kind = Work::RECORD;
    w.mark = e->mark;
    return submit(*s, std::move(w));
}
ENTRY(cuEventSynchronize, CURRENT, (u64 event)) {
    Event* e = find_event(event);
    if (!e) return INVALID_HANDLE;
    if (e->captured) return finding(CAPTURED_EVENT, "cuEventSynchronize of captured event %#llx", event);
    if (Result r = refuse_while_capturing("cuEventSynchronize")) return r;
    return e->mark ? drain_mark(*e->mark) : OK;
}
ENTRY(cuEventQuery, CURRENT, (u64 event)) {
    Event* e = find_event(event);
    if (!e) return INVALID_HANDLE;
    if (e->captured) return finding(CAPTURED_EVENT, "cuEventQuery of captured event %#llx", event);
    if (Result r = refuse_while_capturing("cuEventQuery")) return r;
    if (!e->mark || e->mark->done) return OK;
    advance(any_stream(e->mark->stream));
    if (e->context->error) return e->context->error;
    return e->mark->done ? OK : NOT_READY;
}
ENTRY(cuEventElapsedTime, CURRENT, (float* out, u64 start, u64 end)) {
    Event *a = find_event(start), *b = find_event(end);
    if (!a || !b) return INVALID_HANDLE;
    if (!a->timing || !b->timing || !a->mark || !b->mark)
        return finding(INVALID_HANDLE, "elapsed time of an event that was not recorded or keeps no time");
    if (!a->mark->done || !b->mark->done) return NOT_READY;
    *out = (float)(b->mark->when_ms - a->mark->when_ms);
    return OK;
}

}  // namespace fnsim
