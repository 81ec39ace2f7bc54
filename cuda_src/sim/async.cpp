// async.cpp: copies that complete at their wait.  Owns what each fiber of the running block has issued and
// not yet waited for.  Called from kernel text (async.h); the executor forgets what a block left behind.
//
// What must stay true: with seed 0 every copy happens at its wait, the latest moment; with another seed some
// happen when they are issued, the earliest.
#include "async.h"
#include "runtime.h"

namespace fnsim {
namespace {

struct Copy {
    void* to;
    const void* from;
    unsigned size_bytes, group;
};
struct Queue {
    std::vector<Copy> copies;  // in order of issue
    unsigned group = 0;        // the one that copies go to
};
thread_local std::vector<Queue> queues;
thread_local u64 n_issued;

Queue& mine() {
    const size_t tid = (size_t)T.current->tid;
    if (queues.size() <= tid) queues.resize(tid + 1);
    return queues[tid];
}

}  // namespace

void async_copy(void* to, const void* from, unsigned size_bytes) {
    if (T.random && (mix(T.random ^ ++n_issued) & 1))
        memcpy(to, from, size_bytes);
    else
        mine().copies.push_back({to, from, size_bytes, mine().group});
}
void async_commit() { mine().group++; }
void async_wait(unsigned n_newest) {
    Queue& q = mine();
    size_t n = 0;
    while (n < q.copies.size() && q.copies[n].group + n_newest < q.group) {
        memcpy(q.copies[n].to, q.copies[n].from, q.copies[n].size_bytes);
        n++;
    }
    q.copies.erase(q.copies.begin(), q.copies.begin() + (long)n);
}
bool async_pending() { return !queues.empty() || n_issued; }
void async_forget() {
    if (!queues.empty()) queues.clear();
    n_issued = 0;
}

}  // namespace fnsim
