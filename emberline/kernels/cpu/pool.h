// A thread pool without barriers. A job is divided into tasks that any thread may take, including the caller, which
// continues as soon as all tasks are done. No thread waits for one that has no task, so a preempted core delays one task
// and not the whole step, as a barrier would on small machines where the HTTP server shares the cores.
// Threads may call concurrently: one job at a time has the workers, a caller that finds them taken runs its job alone.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MAX_THREADS 64
#define MAX_TASKS 65535 // of a job: a ticket has 16 bits for them
#define SPIN_NS 50000 // how long a worker spins for the next job before it sleeps

typedef void (*task_fn)(void *arg, int64_t task);

static struct {
    task_fn fn;
    void *arg;
    int64_t first;           // number of the job's first task
    _Atomic uint64_t ticket; // job number << 32 | n_tasks << 16 | next task
    _Atomic uint32_t done;
    atomic_flag taken; // by the caller whose job runs
    _Atomic int sleeping;
    _Atomic int threads; // including the caller
    int workers;         // started; those beyond `threads` are parked
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_cond_t unpark;
} pool = {.threads = 1,
          .taken = ATOMIC_FLAG_INIT,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .unpark = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static inline uint32_t n_tasks_of(uint64_t ticket) { return ticket >> 16 & 0xffff; }
static inline uint32_t next_task_of(uint64_t ticket) { return ticket & 0xffff; }

// Runs tasks until none is left. fn, arg and first are safe to read while a task is held: the caller waits for it.
static void run_tasks(void) {
    uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while (next_task_of(ticket) < n_tasks_of(ticket)) {
        if (!atomic_compare_exchange_weak_explicit(&pool.ticket, &ticket, ticket + 1, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        pool.fn(pool.arg, pool.first + next_task_of(ticket));
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
        ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    }
}

static void sleep_until_work(uint64_t seen) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.ticket) >> 32 == seen >> 32) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static inline int n_threads(void) { return atomic_load_explicit(&pool.threads, memory_order_relaxed); }

// A worker beyond the number of threads waits here, where no job wakes it.
static void park(int number) {
    pthread_mutex_lock(&pool.lock);
    while (number >= n_threads()) pthread_cond_wait(&pool.unpark, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void *worker_main(void *number_from_1) {
    const int number = (int)(intptr_t)number_from_1;
    for (;;) {
        if (number >= n_threads()) park(number);
        uint64_t seen = atomic_load_explicit(&pool.ticket, memory_order_acquire);
        if (next_task_of(seen) < n_tasks_of(seen)) {
            run_tasks();
            continue;
        }
        int64_t begin = now_ns();
        for (int i = 0; atomic_load_explicit(&pool.ticket, memory_order_acquire) >> 32 == seen >> 32; i++) {
            relax();
            if (i % 64 == 63 && now_ns() - begin > SPIN_NS) {
                sleep_until_work(seen);
                break;
            }
        }
    }
    return NULL;
}

// Calls fn(arg, first) .. fn(arg, first + n_tasks - 1), MAX_TASKS at most, on all available threads.
static void run_job(task_fn fn, void *arg, int64_t first, int64_t n_tasks) {
    if (n_threads() == 1 || n_tasks == 1 || atomic_flag_test_and_set_explicit(&pool.taken, memory_order_acquire)) {
        for (int64_t i = 0; i < n_tasks; i++) fn(arg, first + i);
        return;
    }
    pool.fn = fn;
    pool.arg = arg;
    pool.first = first;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&pool.ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool.ticket, job << 32 | (uint64_t)n_tasks << 16);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    run_tasks();
    int64_t begin = 0;
    for (int i = 1; atomic_load_explicit(&pool.done, memory_order_acquire) < n_tasks; i++) {
        relax();
        if (i % 64) continue;
        if (!begin) begin = now_ns();
        else if (now_ns() - begin > SPIN_NS) sched_yield(); // the thread with the last task may need this core
    }
    atomic_flag_clear_explicit(&pool.taken, memory_order_release);
}

// Calls fn(arg, 0) .. fn(arg, n_tasks - 1) on all available threads.
static void parallel_for(task_fn fn, void *arg, int64_t n_tasks) {
    for (int64_t first = 0; first < n_tasks; first += MAX_TASKS) {
        const int64_t n_left = n_tasks - first;
        run_job(fn, arg, first, n_left < MAX_TASKS ? n_left : MAX_TASKS);
    }
}

// Units of work per task when `n` units are divided.
static int64_t task_size(int64_t n) {
    int64_t size = n / (8 * n_threads()); // small enough to balance a preempted core, large enough to be cheap
    if (size < 1) size = 1;
    while ((n + size - 1) / size > MAX_TASKS) size *= 2;
    return size;
}

// A worker that is no longer wanted may still take tasks of the job that runs, or of the next one.
static void set_threads(int n) {
    n = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
    pthread_mutex_lock(&pool.lock);
    for (; pool.workers < n - 1; pool.workers++) { // one that starts before `threads` is set waits for the lock in park
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker_main, (void *)(intptr_t)(pool.workers + 1))) {
            n = pool.workers + 1;
            break;
        }
        pthread_detach(thread);
    }
    atomic_store(&pool.threads, n);
    pthread_cond_broadcast(&pool.unpark);
    pthread_mutex_unlock(&pool.lock);
}
