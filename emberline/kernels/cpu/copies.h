// Copies that a driver queues: one call for all of them, in which the caller does without the interpreter's lock.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int copy_function(uint64_t target, uint64_t source, size_t n_bytes, void *stream); // cuMemcpyDtoHAsync, say

// Queues copies; runs are [n] of target, source and bytes. Returns the first error code that is not 0, or 0.
int em_copy_runs(copy_function *copy, const int64_t (*runs)[3], int64_t n, void *stream) {
    for (int64_t i = 0; i < n; i++) {
        int code = copy((uint64_t)runs[i][0], (uint64_t)runs[i][1], (size_t)runs[i][2], stream);
        if (code) return code;
    }
    return 0;
}
