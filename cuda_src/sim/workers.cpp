// workers.cpp: helper threads for blocks of one launch.  Made once; made again in a forked child.
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace fnsim {

namespace {

struct Pool {
    std::mutex mutex;
    std::condition_variable wake, done;
    const std::function<void()>* job = nullptr;
    u64 round = 0;
    unsigned wanted = 0, left = 0, made = 0;

    void serve() {
        for (u64 seen = 0;;) {
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [&] { return wanted > 0 && round > seen; });
            seen = round;
            wanted--;
            const std::function<void()>* mine = job;
            lock.unlock();
            (*mine)();
            lock.lock();
            if (!--left) done.notify_all();
        }
    }
    void run(unsigned n, const std::function<void()>& f) {
        {
            std::unique_lock<std::mutex> lock(mutex);
            for (; made < n - 1; made++) std::thread([this] { serve(); }).detach();
            job = &f;
            round++;
            wanted = left = n - 1;
        }
        wake.notify_all();
        f();
        std::unique_lock<std::mutex> lock(mutex);
        done.wait(lock, [&] { return left == 0; });
    }
};

}  // namespace

void run_on_workers(unsigned n, const std::function<void()>& job) {
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    if (owner != getpid()) {  // threads do not survive a fork; the old pool is left alone
        pool = new Pool;
        owner = getpid();
    }
    pool->run(n, job);
}

}  // namespace fnsim
