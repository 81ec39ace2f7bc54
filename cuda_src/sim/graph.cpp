// graph.cpp: captures, graphs and their executables.  A graph is the list of work a capture recorded; an executable is
// a copy of it.  Replay runs the nodes in an order that respects the edges, shuffled by the seed.
#include <algorithm>
#include <cstdio>

#include "runtime.h"

namespace fnsim {

namespace {

template <class T>
T* find(std::map<u64, std::unique_ptr<T>>& in, u64 handle, const char* what) {
    auto i = in.find(handle);
    if (i != in.end()) return i->second.get();
    finding(INVALID_HANDLE, "%s %#llx is closed or was never opened", what, handle);
    return nullptr;
}
Node* find_node(u64 id) {
    for (auto& i : world.graphs)
        for (Node& n : i.second->plan->nodes)
            if (n.id == id) return &n;
    return nullptr;
}
int node_type(const Work& w) {  // CUgraphNodeType
    switch (w.kind) {
        case Work::KERNEL: return 0;
        case Work::COPY: return 1;
        case Work::FILL: return 2;
        case Work::GRAPH: return 4;
        case Work::WAIT: return 6;
        case Work::RECORD: return 7;
    }
    return 5;
}

struct KernelNodeParams {  // CUDA_KERNEL_NODE_PARAMS
    u64 function;
    unsigned grid[3], block[3], shared_bytes;
    void** params;
    void** extra;
    u64 kernel, context;
};

std::shared_ptr<Plan> copy_plan(const Plan& p) { return std::make_shared<Plan>(p); }

Result set_params(Work& w, const KernelNodeParams& p) {
    if (w.kind != Work::KERNEL) return finding(INVALID_VALUE, "the node is no kernel");
    if (p.function && p.function != w.function)
        return finding(INVALID_VALUE, "the node keeps its kernel %s", w.kernel->name);
    const unsigned dynamic = w.kernel->dynamic_bytes();
    if (p.block[0] != w.kernel->block || p.block[1] != 1 || p.block[2] != 1 || p.shared_bytes != dynamic ||
        !p.params)
        return finding(INVALID_VALUE, "kernel %s: block must stay (%u,1,1) with %u bytes of dynamic shared memory",
                       w.kernel->name, w.kernel->block, dynamic);
    w.grid = Dim{p.grid[0], p.grid[1], p.grid[2]};
    for (size_t i = 0; i < w.args.size(); i++) {
        w.args[i] = 0;
        memcpy(&w.args[i], p.params[i], argument_bytes(*w.kernel, i));
    }
    return OK;
}

Result instantiate(u64* out, u64 graph) {
    Graph* g = find(world.graphs, graph, "graph");
    if (!g) return INVALID_HANDLE;
    auto x = std::make_unique<Exec>();
    x->context = current_context();
    const long long nodes = kNodeBytes * (long long)g->plan->nodes.size();
    x->bytes = kExecBytes * (1 + nodes / kExecBytes);
    if (Result r = charge(x->context->device, x->bytes)) return r;
    x->id = new_handle(EXEC);
    x->plan = copy_plan(*g->plan);
    *out = x->id;
    world.execs[x->id] = std::move(x);
    return OK;
}

}  // namespace

Result run_plan(Context& c, Plan& p) {
    const size_t n = p.nodes.size();
    if (!settings.seed) {  // recorded order respects the edges
        for (Node& node : p.nodes)
            if (Result r = execute(c, node.work)) return r;
        return OK;
    }
    std::vector<size_t> missing(n);
    std::vector<std::vector<size_t>> next(n);
    std::vector<size_t> ready, follower(n, n);  // by a programmatic edge
    for (size_t i = 0; i < n; i++) {
        p.nodes[i].work.parked.reset();
        if (p.nodes[i].early) follower[p.nodes[i].after[0]] = i;
        missing[i] = p.nodes[i].after.size();
        for (size_t j : p.nodes[i].after) next[j].push_back(i);
        if (!missing[i]) ready.push_back(i);
    }
    while (!ready.empty()) {
        const size_t k = mix(settings.seed * 3 + ++world.draws) % ready.size(), i = ready[k];
        ready[k] = ready.back();
        ready.pop_back();
        std::vector<Work*> chain;
        for (size_t j = follower[i]; j < n && chain.size() < kEarlyLaunches; j = follower[j]) {
            chain.push_back(&p.nodes[j].work);
            if (p.nodes[j].work.kernel->fence) break;
        }
        if (Result r = start_early(c, chain)) return r;
        if (Result r = execute(c, p.nodes[i].work)) return r;
        for (size_t j : next[i])
            if (!--missing[j]) ready.push_back(j);
    }
    return OK;
}

std::string captured_by(u64 base, u64 size) {
    auto inside = [&](u64 a) { return a >= base && a < base + size; };
    char text[200];
    for (auto& i : world.execs)
        for (size_t n = 0; n < i.second->plan->nodes.size(); n++) {
            const Work& w = i.second->plan->nodes[n].work;
            bool hit = (w.kind == Work::COPY && (inside(w.to) || inside(w.from))) ||
                       (w.kind == Work::FILL && inside(w.to));
            for (size_t a = 0; w.kind == Work::KERNEL && a < w.args.size(); a++)
                hit |= w.kernel->kinds[a] == 'p' && inside(w.args[a]);
            if (!hit) continue;
            snprintf(text, sizeof text, "node %zu (%s) of live graph executable %#llx", n,
                     w.kind == Work::KERNEL ? w.kernel->name : "copy or fill", i.first);
            return text;
        }
    return "";
}

ENTRY(cuGraphCreate, CURRENT, (u64 * out, unsigned flags)) {
    if (!out || flags) return INVALID_VALUE;
    auto g = std::make_unique<Graph>();
    g->id = new_handle(GRAPH);
    g->plan = std::make_shared<Plan>();
    *out = g->id;
    world.graphs[g->id] = std::move(g);
    return OK;
}
ENTRY(cuGraphDestroy, INITIALIZED, (u64 graph)) {
    if (!find(world.graphs, graph, "graph")) return INVALID_HANDLE;
    world.graphs.erase(graph);
    return OK;
}
ENTRY(cuGraphGetNodes, CURRENT, (u64 graph, u64* nodes, size_t* n)) {
    Graph* g = find(world.graphs, graph, "graph");
    if (!g) return INVALID_HANDLE;
    const std::vector<Node>& have = g->plan->nodes;
    if (nodes)
        for (size_t i = 0; i < *n; i++) nodes[i] = i < have.size() ? have[i].id : 0;
    *n = nodes ? std::min(*n, have.size()) : have.size();
    return OK;
}
// edge data (8 bytes an edge) is zero for plain dependencies; CUgraphEdgeData: from_port, to_port, type
constexpr u64 kProgrammaticEdge = 1 | 1 << 16;  // from the kernel's programmatic port, of type programmatic
ENTRY(cuGraphGetEdges, CURRENT, (u64 graph, u64* from, u64* to, u64* data, size_t* n)) {
    Graph* g = find(world.graphs, graph, "graph");
    if (!g) return INVALID_HANDLE;
    size_t count = 0;
    for (const Node& node : g->plan->nodes)
        for (size_t i : node.after) {
            if (from && to && count < *n) {
                from[count] = g->plan->nodes[i].id;
                to[count] = node.id;
                if (data) data[count] = node.early ? kProgrammaticEdge : 0;
            }
            count++;
        }
    *n = from && to ? std::min(*n, count) : count;
    return OK;
}
ENTRY(cuGraphNodeGetType, CURRENT, (u64 node, int* out)) {
    Node* n = find_node(node);
    if (!n) return INVALID_VALUE;
    *out = node_type(n->work);
    return OK;
}
ENTRY(cuGraphKernelNodeGetParams, CURRENT, (u64 node, KernelNodeParams* out)) {
    Node* n = find_node(node);
    if (!n || n->work.kind != Work::KERNEL) return INVALID_VALUE;
    const Work& w = n->work;
    n->pointers.clear();  // the array lives as long as the node
    for (const u64& a : w.args) n->pointers.push_back((void*)&a);
    *out = KernelNodeParams{w.function,
                            {w.grid.x, w.grid.y, w.grid.z},
                            {w.kernel->block, 1, 1},
                            w.kernel->dynamic_bytes(),
                            n->pointers.data(),
                            nullptr,
                            0,
                            0};
    return OK;
}
ENTRY(cuGraphInstantiate, CURRENT, (u64 * out, u64 graph, u64)) { return instantiate(out, graph); }
ENTRY(cuGraphInstantiateWithFlags, CURRENT, (u64 * out, u64 graph, u64)) { return instantiate(out, graph); }
struct InstantiateParams {
    u64 flags, upload_stream, error_node;
    int result;
};
ENTRY(cuGraphInstantiateWithParams, CURRENT, (u64 * out, u64 graph, InstantiateParams* p)) {
    p->result = 0;
    p->error_node = 0;
    return instantiate(out, graph);
}
ENTRY(cuGraphUpload, CURRENT, (u64 exec, u64 stream)) {
    if (!find(world.execs, exec, "graph executable") || !find_stream(stream)) return INVALID_HANDLE;
    return OK;
}
ENTRY(cuGraphLaunch, CURRENT, (u64 exec, u64 stream)) {
    Exec* x = find(world.execs, exec, "graph executable");
    Stream* s = find_stream(stream);
    if (!x || !s) return INVALID_HANDLE;
    if (s->capture) {
        s->capture->valid = false;
        return finding(CAPTURE_UNSUPPORTED, "cuGraphLaunch into capturing stream %#llx", stream);
    }
    Work w;
    w.kind = Work::GRAPH;
    w.plan = x->plan;  // an update or a node change makes a new plan: launches handed in keep theirs
    return submit(*s, std::move(w));
}
ENTRY(cuGraphExecKernelNodeSetParams, CURRENT, (u64 exec, u64 node, const KernelNodeParams* p)) {
    Exec* x = find(world.execs, exec, "graph executable");
    if (!x) return INVALID_HANDLE;
    // launches handed in keep the arguments they were handed in with
    std::shared_ptr<Plan> plan = x->plan.use_count() > 1 ? copy_plan(*x->plan) : x->plan;
    for (Node& n : plan->nodes)
        if (n.id == node) {
            if (Result r = set_params(n.work, *p)) return r;
            x->plan = plan;
            return OK;
        }
    return finding(INVALID_VALUE, "node %#llx is not in the graph that executable %#llx was made from", node,
                   exec);
}
struct UpdateResult {
    int result;
    u64 node, from;
};
ENTRY(cuGraphExecUpdate, CURRENT, (u64 exec, u64 graph, UpdateResult* out)) {
    Exec* x = find(world.execs, exec, "graph executable");
    Graph* g = find(world.graphs, graph, "graph");
    if (!x || !g) return INVALID_HANDLE;
    const std::vector<Node>&a = x->plan->nodes, &b = g->plan->nodes;
    *out = UpdateResult{0, 0, 0};
    int why = a.size() == b.size() ? 0 : 2;  // CUgraphExecUpdateResult: 2 topology, 3 node type, 4 function
    for (size_t i = 0; !why && i < a.size(); i++) {
        if (a[i].after != b[i].after || a[i].early != b[i].early)
            why = 2;
        else if (a[i].work.kind != b[i].work.kind)
            why = 3;
        else if (a[i].work.function != b[i].work.function)
            why = 4;
        if (why) out->node = b[i].id;
    }
    if (why) {
        out->result = why;
        return finding(GRAPH_UPDATE_FAILURE, "graph %#llx differs from executable %#llx in %s", graph, exec,
                       why == 2   ? "topology"
                       : why == 3 ? "a node's type"
                                  : "a node's kernel");
    }
    std::shared_ptr<Plan> plan = copy_plan(*g->plan);
    for (size_t i = 0; i < b.size(); i++)
        plan->nodes[i].id = a[i].id;  // the executable keeps the names of its first graph
    x->plan = plan;
    return OK;
}
ENTRY(cuGraphExecDestroy, INITIALIZED, (u64 exec)) {
    Exec* x = find(world.execs, exec, "graph executable");
    if (!x) return INVALID_HANDLE;
    charge(x->context->device, -x->bytes);
    world.execs.erase(exec);
    return OK;
}
ENTRY(cuGraphDebugDotPrint, CURRENT, (u64 graph, const char* path, unsigned)) {
    Graph* g = find(world.graphs, graph, "graph");
    if (!g) return INVALID_HANDLE;
    FILE* f = fopen(path, "w");
    if (!f) return finding(304, "cannot write %s", path);
    fprintf(f, "digraph dot {\n");
    for (size_t i = 0; i < g->plan->nodes.size(); i++) {
        const Work& w = g->plan->nodes[i].work;
        const char* label = w.kind == Work::KERNEL ? w.kernel->name
                            : w.kind == Work::COPY ? "MEMCPY"
                                                   : "MEMSET";
        fprintf(f, "\"node_%zu\" [shape=\"box\", label=\"%zu\\n%s\"];\n", i, i, label);
    }
    for (size_t i = 0; i < g->plan->nodes.size(); i++)
        for (size_t j : g->plan->nodes[i].after) fprintf(f, "\"node_%zu\" -> \"node_%zu\";\n", j, i);
    fprintf(f, "}\n");
    fclose(f);
    return OK;
}

// ---- capture ----
ENTRY(cuStreamBeginCapture, CURRENT, (u64 stream, int mode)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    if (mode < 0 || mode > 2) return INVALID_VALUE;
    if (s == &s->context->legacy) return finding(CAPTURE_UNSUPPORTED, "the legacy stream cannot capture");
    if (s->capture) return finding(ILLEGAL_STATE, "stream %#llx is capturing already", stream);
    auto c = std::make_shared<Capture>();
    c->id = new_handle(GRAPH);
    c->origin = stream;
    c->mode = mode;
    c->thread = this_thread();
    world.captures[c->id] = c;
    s->capture = c;
    s->frontier.clear();
    return OK;
}
ENTRY(cuStreamEndCapture, CURRENT, (u64 stream, u64* out)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    *out = 0;
    if (!s->capture) return finding(ILLEGAL_STATE, "stream %#llx is not capturing", stream);
    std::shared_ptr<Capture> c = s->capture;
    if (c->origin != stream) {
        c->valid = false;
        return finding(CAPTURE_UNMATCHED, "capture of stream %#llx ended on stream %#llx", c->origin, stream);
    }
    if (c->mode != 2 && c->thread != this_thread())
        return finding(CAPTURE_WRONG_THREAD, "capture ended by another thread");
    std::vector<char> reached(c->plan->nodes.size(), 0);
    for (size_t n : s->frontier) reached[n] = 1;
    for (size_t n = reached.size(); n--;)
        if (reached[n])
            for (size_t m : c->plan->nodes[n].after) reached[m] = 1;
    u64 unjoined = 0;
    for (auto& i : world.contexts)
        for (auto& t : i.second->streams)
            if (t.second.capture == c) {
                for (size_t n : t.second.frontier)
                    if (!reached[n]) unjoined = t.first;
                t.second.capture.reset();
                t.second.frontier.clear();
            }
    world.captures.erase(c->id);
    if (!c->valid) return CAPTURE_INVALIDATED;
    if (unjoined)
        return finding(CAPTURE_UNJOINED, "stream %#llx joined the capture and was not joined back", unjoined);
    auto g = std::make_unique<Graph>();
    g->id = new_handle(GRAPH);
    g->plan = c->plan;
    *out = g->id;
    world.graphs[g->id] = std::move(g);
    return OK;
}
static int capture_status(const Stream& s) { return !s.capture ? 0 : s.capture->valid ? 1 : 2; }
ENTRY(cuStreamIsCapturing, CURRENT, (u64 stream, int* out)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    *out = capture_status(*s);
    return OK;
}
ENTRY(cuStreamGetCaptureInfo, CURRENT,
      (u64 stream, int* status, u64* id, u64* graph, const u64** nodes, const void** edges, size_t* n)) {
    Stream* s = find_stream(stream);
    if (!s) return INVALID_HANDLE;
    static std::vector<u64> ids;
    ids.clear();
    *status = capture_status(*s);
    if (s->capture)
        for (size_t i : s->frontier) ids.push_back(s->capture->plan->nodes[i].id);
    if (id) *id = s->capture ? s->capture->id : 0;
    if (graph) *graph = 0;  // the graph under construction has no handle here
    if (nodes) *nodes = ids.data();
    if (edges) *edges = nullptr;
    if (n) *n = ids.size();
    return OK;
}

}  // namespace fnsim
