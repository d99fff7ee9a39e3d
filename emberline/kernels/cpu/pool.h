// Threads that help. A job is cut into pieces that any thread may take; the caller takes pieces too and goes on as soon
// as all are done. Nobody waits for a thread that holds no piece, so a core lost for a while to another process costs
// one piece, not the whole step: on small machines, where the front door shares the cores, barriers would.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MAX_THREADS 64
#define MAX_PIECES 65535
#define PATIENCE_NS 50000 // a helper spins this long for the next job before it sleeps

typedef void (*piece_fn)(void *arg, int64_t piece);

static struct {
    piece_fn fn;
    void *arg;
    _Atomic uint64_t ticket; // job number << 32 | pieces << 16 | next piece
    _Atomic uint32_t done;
    _Atomic int sleeping;
    int threads; // the caller included
    int helpers; // started
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {.threads = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

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

static inline uint32_t pieces_of(uint64_t ticket) { return ticket >> 16 & 0xffff; }
static inline uint32_t next_of(uint64_t ticket) { return ticket & 0xffff; }

// Takes pieces until none is left. Holding a piece is what makes fn and arg safe to read: the caller waits for it.
static void take_pieces(void) {
    uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while (next_of(ticket) < pieces_of(ticket)) {
        if (!atomic_compare_exchange_weak_explicit(&pool.ticket, &ticket, ticket + 1, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        pool.fn(pool.arg, next_of(ticket));
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

static void *help(void *unused) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&pool.ticket, memory_order_acquire);
        if (next_of(seen) < pieces_of(seen)) {
            take_pieces();
            continue;
        }
        int64_t begin = now_ns();
        for (int i = 0; atomic_load_explicit(&pool.ticket, memory_order_acquire) >> 32 == seen >> 32; i++) {
            relax();
            if (i % 64 == 63 && now_ns() - begin > PATIENCE_NS) {
                sleep_until_work(seen);
                break;
            }
        }
    }
    return unused;
}

// Calls fn(arg, 0) .. fn(arg, pieces - 1), on as many threads as come. One caller at a time.
static void run(piece_fn fn, void *arg, int64_t pieces) {
    if (pool.threads == 1 || pieces == 1) {
        for (int64_t i = 0; i < pieces; i++) fn(arg, i);
        return;
    }
    pool.fn = fn;
    pool.arg = arg;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&pool.ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool.ticket, job << 32 | (uint64_t)pieces << 16);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_pieces();
    int64_t begin = 0;
    for (int i = 1; atomic_load_explicit(&pool.done, memory_order_acquire) < pieces; i++) {
        relax();
        if (i % 64) continue;
        if (!begin) begin = now_ns();
        else if (now_ns() - begin > PATIENCE_NS) sched_yield(); // whoever holds the last piece may want this core
    }
}

// How many pieces to cut `n` units of work into, and how many units a piece then has.
static int64_t piece_size(int64_t n) {
    int64_t size = n / (8 * pool.threads); // small enough that a stolen core is evened out, few enough to be cheap
    if (size < 1) size = 1;
    while ((n + size - 1) / size > MAX_PIECES) size *= 2;
    return size;
}

static void set_threads(int n) {
    pool.threads = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
    for (; pool.helpers < pool.threads - 1; pool.helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) {
            pool.threads = pool.helpers + 1;
            return;
        }
        pthread_detach(thread);
    }
}
